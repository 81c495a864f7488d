"""Triton over gRPC: streams of the ensemble that returns token ids, on a connection of h2's.

gRPC's own client for asyncio takes a step of a thread, a wake-up of the event loop and a future for each
message of each stream. Tokens come as many small messages on many streams: here all that have arrived are
handed over in one step, and requests that are made together are sent on one stream.
"""

import asyncio
import contextlib
import itertools
import math
import struct
from collections.abc import AsyncGenerator, Iterator
from functools import partial
from typing import Any, TypeVar, cast
from urllib.parse import unquote
from uuid import uuid4

from google.protobuf.message import Message as ProtobufMessage
from h2 import events
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.exceptions import H2Error, ProtocolError
from h2.settings import SettingCodes, Settings
from tritonclient.grpc import service_pb2

from cog_triton import errors, wire
from cog_triton.client.messages import flat_outputs, infer_request, is_final, parse, parts_of, read
from cog_triton.client.stream import CLOSED, Arrivals, Inputs, Outputs, TritonClient, lost_after
from cog_triton.wire import NO_PARAMETERS, Parameters

CONNECT_SECONDS = 10.0
INFER = "ModelStreamInfer"

_PREFIX = struct.Struct(">BL")  # of a message: whether it is compressed, its length
_FRAME = struct.Struct(">HBHL")  # a frame's length in 24 bits, kind and flags (0 of data), stream
_WINDOW_UPDATE = b"\0\0\4\x08\0\0\0\0\0"  # a frame for all streams, before the increment
_MOST_TOGETHER = 8  # requests on a stream, all of which end if it breaks
_LAST_STREAM = H2Connection.HIGHEST_ALLOWED_STREAM_ID
_FIRST_WINDOW, _LARGEST_WINDOW = 65_535, 2**31 - 1
_SETTINGS = {SettingCodes.ENABLE_PUSH: 0, SettingCodes.INITIAL_WINDOW_SIZE: _LARGEST_WINDOW}

Reply = TypeVar("Reply", bound=ProtobufMessage)


class Stream(Arrivals[Any]):
    """The answer to a request: messages, or the parts of it in any messages."""

    request_id, number = "", 0  # of a shared one, as ``wire.CHANNEL`` says
    closed = False

    def __init__(self, call: "_Call") -> None:
        super().__init__()
        self.call, self.place, self.early = call, 0, dict[int, list[int]]()

    @property
    def whole(self) -> bool:
        return self.complete or self._end.done()

    def add_part(self, part: list[int]) -> None:
        """Add one that is as ``wire.COUNTED_IDS`` says; those of two calls may come in any order."""
        self.early[max(part[0], ~part[0]) - len(part) + 2] = part
        while (ready := self.early.pop(self.place, None)) is not None:
            self.place += len(ready) - 2
            self.add(ready)
            if ready[0] < 0:
                self.end()


class _Call:
    """A stream of HTTP/2's: requests, of which a part may be unsent, and what comes for them."""

    number = 0  # until it has begun
    status: str | None = None  # gRPC's, unless it is OK

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.unsent: bytes | memoryview = b""
        self._received = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Take in a part of the answer, yield the messages that it completes."""
        self._received += data
        while len(self._received) >= _PREFIX.size:
            compressed, length = _PREFIX.unpack_from(self._received)
            if compressed:
                raise ProtocolError("a compressed message")
            end = _PREFIX.size + length
            if len(self._received) < end:
                return
            yield bytes(self._received[_PREFIX.size : end])
            del self._received[:end]

    def end(self, problem: str | None) -> None:
        """End its requests; without a problem, not those whose last part overtook others elsewhere."""
        text = problem or "Triton closed the stream before the last response"
        for stream in self.streams:
            if problem or not any(part[0] < 0 for part in stream.early.values()):
                stream.end(errors.TritonUnavailable(text))


class Connection(asyncio.Protocol):
    """One connection to Triton. To be used from its event loop."""

    def __init__(self, authority: str) -> None:
        self._head = {":method": "POST", ":scheme": "http", ":path": "", ":authority": authority}
        self._head |= {"te": "trailers", "content-type": "application/grpc"}
        # The headers that are sent are ours, and in order.
        config = H2Configuration(validate_outbound_headers=False, normalize_outbound_headers=False)
        self._h2 = H2Connection(config)
        self._calls: dict[int, _Call] = {}
        self._reader, self._numbers = uuid4().hex, itertools.count()
        self._sharing: dict[int, Stream] = {}  # until they are closed
        self._channels = False  # whether the engine knows them
        self._next: _Call | None = None  # takes the requests of this turn of the loop
        self._rest = b""  # of a frame that has come in part
        self._taken = 0  # bytes received and not yet granted to the peer again
        self.usable = True

    def send(self, path: str, request: Any, trace: Any = None, *, shared: bool = False) -> Stream:
        """Send a request; responses to ``shared`` ones may have parts of each other's."""
        together = shared and not trace
        call = (self._next if together else None) or _Call()
        stream = Stream(call)
        stream.close = partial(self._close, stream)
        if shared:
            stream.request_id, stream.number = request.id, next(self._numbers) % _LAST_STREAM + 1
            request.parameters[wire.CHANNEL].string_param = f"{self._reader}/{stream.number}"
            self._sharing[stream.number] = stream
        message = request.SerializeToString()
        call.streams.append(stream)
        call.unsent += _PREFIX.pack(0, len(message)) + message
        if not together or len(call.streams) == _MOST_TOGETHER or len(message) > _FIRST_WINDOW:
            self._begin(call, path, trace)
        elif self._next is None:
            self._next = call
            asyncio.get_running_loop().call_soon(self._begin, call, path)
        return stream

    def _begin(self, call: _Call, path: str, trace: Any = None) -> None:
        if call.number or call.streams[0].whole:
            return  # it was full before the loop's turn ended, or the connection is lost
        self._next = None if self._next is call else self._next
        headers = {**self._head, ":path": path} | ({wire.TRACEPARENT: trace} if trace else {})
        try:
            if self._transport.is_closing():
                raise ProtocolError("the connection was lost")
            number = self._h2.get_next_available_stream_id()
            self._h2.send_headers(number, headers.items())
        except H2Error as error:
            call.end(f"Triton cannot be reached: {error}")
            return
        self.usable &= number < _LAST_STREAM
        call.number, self._calls[number], call.unsent = number, call, memoryview(call.unsent)
        self._send_body(call)
        self._flush()

    def close(self, reason: str) -> None:
        """End the connection and all its streams."""
        self.usable = False
        self._transport.abort()
        calls = {stream.call for stream in self._sharing.values()}
        for call in calls.union(self._calls.values(), filter(None, [self._next])):
            call.end(reason)
        self._calls.clear()

    # Called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's is of no class of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._h2.local_settings = Settings(initial_values=_SETTINGS)
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(_LARGEST_WINDOW - _FIRST_WINDOW)
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self.close(f"the connection was lost: {exc}" if exc else "Triton closed the connection")

    def data_received(self, data: bytes) -> None:
        """Handle what comes: data, of which a frame would take h2 9 µs; by h2 all other frames."""
        data, at = self._rest + data, 0
        try:
            while len(data) >= (begin := at + _FRAME.size):
                high, low, kind, number = _FRAME.unpack_from(data, at)
                if len(data) < (end := begin + (high << 8 | low)):
                    break
                if not kind and (call := self._calls.get(number)) is not None:
                    self._take(call, data[begin:end])
                else:
                    for event in self._h2.receive_data(data[at:end]):
                        self._handle(event)
                at = end
        except (ProtocolError, errors.TritonMalformedEvent) as error:
            self.close(f"Triton's answer cannot be read: {error}")
        self._rest = data[at:]
        self._flush()

    def _take(self, call: _Call, data: bytes) -> None:
        for message in call.feed(data):
            self._receive(call, message)
        self._taken += len(data)
        if self._taken > _LARGEST_WINDOW // 2:
            self._transport.write(_WINDOW_UPDATE + self._taken.to_bytes(4, "big"))
            self._taken = 0

    def _handle(self, event: events.Event) -> None:
        # No call: one that was cancelled, or an event of the connection.
        call = self._calls.get(getattr(event, "stream_id", 0))
        if isinstance(event, events.DataReceived):
            if call is not None:  # its end, or padded
                self._take(call, event.data)
        elif isinstance(event, (events.WindowUpdated, events.RemoteSettingsChanged)):
            for waiting in self._calls.values():
                self._send_body(waiting)
        elif isinstance(event, events.ConnectionTerminated):
            self.close("Triton closes the connection")
        elif call is None:
            return
        elif isinstance(event, (events.ResponseReceived, events.TrailersReceived)):
            headers = dict(event.headers)
            if (status := headers.get(b"grpc-status", b"0").decode()) != "0":
                text = unquote(headers.get(b"grpc-message", b"").decode(errors="replace"))
                call.status = text or f"gRPC's status {status}"
        elif isinstance(event, (events.StreamEnded, events.StreamReset)):
            del self._calls[call.number]
            if isinstance(event, events.StreamReset):
                self._lose(call)
                call.status = f"Triton reset the stream: error {event.error_code!s}"
            call.end(call.status)

    def _send_body(self, call: _Call) -> None:
        """Send as much of its requests as the peer takes now."""
        while call.unsent:
            window = self._h2.local_flow_control_window(call.number)
            size = min(window, self._h2.max_outbound_frame_size)
            if size <= 0:
                return
            part, call.unsent = call.unsent[:size], call.unsent[size:]
            self._h2.send_data(call.number, part, end_stream=not call.unsent)
        call.unsent = memoryview(b"")  # an empty rest would keep the whole, an adapter perhaps

    def _receive(self, call: _Call, message: bytes) -> None:
        streams = call.streams
        if not streams[0].number:
            streams[0].add(message)
            return
        for number, part in (parts := parts_of(answer := read(message))):
            self._channels = True
            if (receiver := self._sharing.get(number)) is not None:
                receiver.add_part(part)
        if not parts:  # an error, the end of one, or of an engine that knows no channels
            response = answer.infer_response
            for stream in [one for one in streams if one.request_id == response.id] or streams:
                stream.add(answer)
                if answer.error_message or is_final(response):
                    stream.end()

    def _lose(self, call: _Call) -> None:
        """Let others be tried again, whose tokens a call may have had that ends too early."""
        if self._channels and any(one.number and not one.whole for one in call.streams):
            for other in self._sharing.values():
                if other.call is not call:
                    other.fail(lost_after(other.place))

    def _close(self, stream: Stream) -> None:
        self._sharing.pop(stream.number, None)
        call, stream.closed = stream.call, True
        # Triton ends what is whole, and may still be at work on its own last responses.
        left = all(one.closed for one in call.streams) and not all(s.whole for s in call.streams)
        if left and self._calls.pop(call.number, None) is not None:
            self._lose(call)
            self._h2.reset_stream(call.number, ErrorCodes.CANCEL)
            self._flush()

    def _flush(self) -> None:
        if data := self._h2.data_to_send():
            # uvloop's transport raises when it has closed: the loss comes next.
            with contextlib.suppress(RuntimeError):
                self._transport.write(data)


class GrpcClient(TritonClient):
    """See ``TritonClient``. Requests share one connection, which is made when it is needed."""

    def __init__(self, address: str, *, response_timeout: float = math.inf) -> None:
        """Connect to nothing yet; the address is host:port of Triton's gRPC endpoint."""
        super().__init__(response_timeout)
        self._address = address
        self._connection: Connection | None = None
        self._connecting = asyncio.Lock()
        self._disconnected = False

    async def send(
        self, method: str, request: Any, traceparent: Any = None, *, shared: bool = False
    ) -> Stream:
        """Send a request as ``Connection.send`` does, or raise TritonUnavailable."""
        path = f"/inference.GRPCInferenceService/{method}"
        async with self._connecting:
            if self._disconnected:
                raise errors.TritonUnavailable(CLOSED)
            try:
                if self._connection is None or not self._connection.usable:
                    host, _, port = self._address.rpartition(":")
                    connecting = asyncio.get_running_loop().create_connection(
                        partial(Connection, self._address), host.strip("[]"), int(port)
                    )
                    self._connection = (await asyncio.wait_for(connecting, CONNECT_SECONDS))[1]
                return self._connection.send(path, request, traceparent, shared=shared)
            except (OSError, asyncio.TimeoutError) as error:
                problem = str(error) or f"no connection in {CONNECT_SECONDS:g} s"
                raise errors.TritonUnavailable(f"Triton cannot be reached: {problem}") from None

    async def call(self, method: str, request: ProtobufMessage, reply: type[Reply]) -> Reply:
        """Return the reply to a request that is not one of inference, or raise TritonUnavailable."""
        with contextlib.closing(await self.send(method, request)) as stream:
            (message,) = await stream.take()
        return reply.FromString(message)

    async def responses(
        self, request: service_pb2.ModelInferRequest
    ) -> AsyncGenerator[list[service_pb2.ModelInferResponse], None]:
        """Send a request to any model, yield the responses that have arrived, or raise CogTritonError."""
        stream = await self.send(INFER, request)
        with self.receiving(request.id, stream):
            while not stream.complete:
                responses = [parse(message) for message in await stream.take()]
                stream.complete = is_final(responses[-1])
                yield responses

    async def _send(
        self, model: str, request_id: str, inputs: Inputs, parameters: Parameters = NO_PARAMETERS
    ) -> Stream:
        outputs = wire.OUTPUTS if model == wire.IDS_ENSEMBLE else ()
        log_probs = [wire.LOG_PROBS] if "return_log_probs" in inputs else []
        request = infer_request(model, request_id, inputs, [*outputs, *log_probs], parameters)
        shared = wire.COUNTED_IDS in parameters and not log_probs
        return await self.send(INFER, request, parameters.get(wire.TRACEPARENT), shared=shared)

    def _parse(self, message: Any) -> tuple[Outputs, bool]:
        if isinstance(message, list):
            return {"output_ids": message}, message[0] < 0
        response = parse(message)
        return flat_outputs(response), is_final(response)

    async def _disconnect(self) -> None:
        async with self._connecting:
            self._disconnected = True
            if self._connection is not None:
                self._connection.close(CLOSED)
