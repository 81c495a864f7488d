"""Triton over gRPC: all requests of a client on one long stream of the ensemble that returns token ids.

    stream() of N requests ──▶ one call of ModelStreamInfer ──▶ Triton
    N Arrivals ◀── Demultiplexer ◀── messages, each with frames of several requests ◀──┘

- The stream is opened for the first request, and stays for as long as any request runs. Then it is
  half-closed: a Triton that is told to stop waits for open calls until its exit timeout, even for idle
  ones, and then aborts (2.51; measured on 2026-11-29: 9.5 s with an idle stream, 4.4 s without).
- A request is cancelled by a stop on the same stream: a second request, to the engine's model, with the
  same id (``TritonClient._stop``). Triton itself can only cancel a whole stream, and what it has of an
  ensemble's requests then stays in the ensemble permanently (2.51).
- A request goes on a call of its own if it is traced, because Triton reads the span from a call's headers,
  or if it is large, so that others do not wait behind it. Its frames may come on any call all the same.
- When a call ends, its requests that have not ended fail. With several of them nobody knows which one
  caused it, so the error is blameless, and ``resume.py`` tries all of them again.
- After a GOAWAY the stream is half-closed and goes on to its end. New requests open another one, on another
  connection.
"""

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

from google.protobuf.message import Message as ProtobufMessage

from cog_triton import errors
from cog_triton.client.arrivals import Arrivals
from cog_triton.client.connection import (
    Call,
    CallEnd,
    Connection,
    ConnectionUnusable,
    UnreadableMessage,
)
from cog_triton.client.connections import CLOSED, Connections, unreachable
from cog_triton.client.demultiplexer import GAP_SECONDS, Demultiplexer
from cog_triton.client.messages import flat_outputs, infer_request, is_final, parse
from cog_triton.client.responses import Inputs, TensorOutputs, lost_after
from cog_triton.client.stream import TritonClient
from cog_triton.protocol.frames import Frame, FrameAddress
from cog_triton.protocol.names import (
    FRAMES_FOR,
    IDS_ENSEMBLE,
    NO_PARAMETERS,
    TRACEPARENT,
    Parameters,
)
from cog_triton.protocol.triton_messages import service_pb2

INFER = "ModelStreamInfer"
# What a server takes of a message before it has read any.
LARGE_BYTES = 65_535
UNFINISHED = "Triton closed the stream before the last response"

Reply = TypeVar("Reply", bound=ProtobufMessage)


@dataclass(slots=True)
class _Sent:
    """A request that has been sent."""

    arrivals: Arrivals[Any]
    call: Call
    # Whether no other request is on the call.
    is_alone: bool


class GrpcClient(TritonClient):
    """See ``TritonClient``. Calls share connections, see ``connections.py``."""

    def __init__(self, address: str, *, response_timeout: float = math.inf) -> None:
        """Connect to nothing yet; the address is host:port of Triton's gRPC endpoint."""
        super().__init__(response_timeout)
        self._connections = Connections(address)
        self._reader = uuid4().hex
        self._demultiplexer = Demultiplexer()
        # By sequence, until they are closed.
        self._sent: dict[int, _Sent] = {}
        self._stream: Call | None = None
        self._gap_timer: asyncio.TimerHandle | None = None

    # Calls of their own

    async def send(self, method: str, request: Any) -> Arrivals[bytes]:
        """Make a call with one request; return its messages. Raises TritonUnavailable."""
        arrivals: Arrivals[bytes] = Arrivals()

        def end(_: Call, reason: CallEnd) -> None:
            arrivals.end(_unavailable(reason, blameless=reason.blameless))

        connection = await self._connections.with_room()
        call = _open(connection, method, {}, arrivals.add, end)
        call.write(request.SerializeToString())
        call.half_close()

        def close() -> None:
            # Triton ends a call that is complete, and may still be at work on its last responses.
            if not arrivals.complete:
                call.cancel()

        arrivals.close = close
        return arrivals

    async def call(self, method: str, request: ProtobufMessage, reply: type[Reply]) -> Reply:
        """Return the reply to a request that is not one of inference, or raise TritonUnavailable."""
        with contextlib.closing(await self.send(method, request)) as arrivals:
            (message,) = await arrivals.take()
        return reply.FromString(message)

    async def responses(
        self, request: service_pb2.ModelInferRequest
    ) -> AsyncGenerator[list[service_pb2.ModelInferResponse], None]:
        """Send a request to any model, yield the responses that have arrived, or raise CogTritonError."""
        arrivals = await self.send(INFER, request)
        with self.receiving(request.id, arrivals):
            while not arrivals.complete:
                responses = [parse(message) for message in await arrivals.take()]
                arrivals.complete = is_final(responses[-1])
                yield responses

    # The long stream

    async def _send(
        self, model: str, request_id: str, inputs: Inputs, parameters: Parameters = NO_PARAMETERS
    ) -> Arrivals[Any]:
        sequence = self._demultiplexer.new_sequence()
        if model == IDS_ENSEMBLE:
            address = FrameAddress(self._reader, sequence)
            parameters = {**parameters, FRAMES_FOR: address.parameter()}
        message = infer_request(model, request_id, inputs, (), parameters).SerializeToString()
        traceparent = parameters.get(TRACEPARENT)
        is_alone = traceparent is not None or len(message) > LARGE_BYTES
        if is_alone:
            headers = {} if traceparent is None else {TRACEPARENT: str(traceparent)}
            call = self._open_stream(await self._connections.with_room(), headers)
        else:
            call = await self._shared_stream()
        # Only now: while it waited, errors of an earlier request with this id could be taken for its own.
        self._demultiplexer.expect(sequence, model, request_id)
        arrivals: Arrivals[Any] = Arrivals()
        arrivals.close = partial(self._close, sequence)
        self._sent[sequence] = _Sent(arrivals, call, is_alone)
        call.write(message)
        if is_alone:
            call.half_close()
        return arrivals

    async def _shared_stream(self) -> Call:
        """Return the stream; open it if there is none that takes requests."""
        if self._stream is None or not self._stream.can_write:
            connection = await self._connections.with_room()
            # Another request may have opened it meanwhile.
            if self._stream is None or not self._stream.can_write:
                self._stream = self._open_stream(connection, {})
        return self._stream

    def _open_stream(self, connection: Connection, headers: dict[str, str]) -> Call:
        return _open(connection, INFER, headers, self._receive, self._end_call)

    def _receive(self, message: bytes) -> None:
        try:
            deliveries = self._demultiplexer.receive(message, self._now())
        except errors.TritonMalformedEvent as error:
            raise UnreadableMessage(str(error)) from None
        for delivery in deliveries:
            arrivals = self._sent[delivery.sequence].arrivals
            if isinstance(delivery.item, errors.TritonMalformedEvent):
                arrivals.end(delivery.item)
            else:
                arrivals.add(delivery.item)
                if delivery.last:
                    arrivals.end()
        if self._demultiplexer.has_gaps and self._gap_timer is None:
            self._watch_gaps()

    def _watch_gaps(self) -> None:
        """Fail the requests whose gaps have stood for too long; look again while there are others."""
        for sequence, place in self._demultiplexer.overdue(self._now()).items():
            self._sent[sequence].arrivals.end(errors.blameless(lost_after(place)))
        self._gap_timer = None
        if self._demultiplexer.has_gaps:
            loop = asyncio.get_running_loop()
            self._gap_timer = loop.call_later(GAP_SECONDS / 4, self._watch_gaps)

    def _end_call(self, call: Call, reason: CallEnd) -> None:
        """Fail the requests of a call that has ended, but for those whose last frame has come early."""
        unfinished = {
            sequence: sent.arrivals
            for sequence, sent in self._sent.items()
            if sent.call is call and not sent.arrivals.ended
        }
        for sequence, arrivals in unfinished.items():
            if reason.problem is None and self._demultiplexer.has_early_end(sequence):
                continue
            blameless = reason.blameless or len(unfinished) > 1
            arrivals.end(_unavailable(reason, blameless=blameless))

    def _close(self, sequence: int) -> None:
        """Forget a request that nobody reads, and end its call if no other request is on it.

        A call of a single request that has not ended is cancelled. The stream is only half-closed.
        """
        self._demultiplexer.forget(sequence)
        sent = self._sent.pop(sequence, None)
        if sent is None:
            return
        if sent.is_alone:
            if not sent.arrivals.complete and not sent.arrivals.ended:
                sent.call.cancel()
        elif sent.call.can_write and all(
            other.call is not sent.call for other in self._sent.values()
        ):
            sent.call.half_close()

    def _parse(self, message: Any) -> Frame | TensorOutputs:
        if isinstance(message, Frame):
            return message
        response = parse(message)
        return TensorOutputs(flat_outputs(response), is_final(response))

    async def _disconnect(self) -> None:
        self._connections.close(CLOSED)
        if self._gap_timer is not None:
            self._gap_timer.cancel()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _unavailable(reason: CallEnd, *, blameless: bool) -> errors.TritonUnavailable:
    error = errors.TritonUnavailable(reason.problem or UNFINISHED)
    error.blameless = blameless
    return error


def _open(
    connection: Connection,
    method: str,
    headers: dict[str, str],
    on_message: Callable[[bytes], None],
    on_end: Callable[[Call, CallEnd], None],
) -> Call:
    """Begin a call, or raise TritonUnavailable."""
    path = f"/inference.GRPCInferenceService/{method}"
    try:
        return connection.open(path, headers, on_message, on_end)
    except ConnectionUnusable as error:
        raise unreachable(str(error)) from None
