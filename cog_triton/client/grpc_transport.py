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

from cog_triton import errors
from cog_triton.client.messages import flat_outputs, frames_of, infer_request, is_final, parse, read
from cog_triton.client.stream import (
    CLOSED,
    Arrivals,
    Inputs,
    TensorOutputs,
    TritonClient,
    lost_after,
)
from cog_triton.protocol.frames import Frame, FrameAddress
from cog_triton.protocol.names import (
    FRAMES_FOR,
    IDS_ENSEMBLE,
    NO_PARAMETERS,
    TRACEPARENT,
    Parameters,
)

CONNECT_SECONDS = 10.0
INFER = "ModelStreamInfer"
# A request's tokens may come on two calls at about the same time, in any order. What has not come after
# this time is lost.
GAP_SECONDS = 1.0

_PREFIX = struct.Struct(">BL")  # of a message: whether it is compressed, its length
_FRAME = struct.Struct(">HBBBL")  # a frame's length in 16 and 8 bits, kind, flags, stream
_DATA, _GOAWAY = 0, 7  # kinds of frames
_STREAM_ID = 2**31 - 1  # the bits of a stream's number, beside a reserved one
_WINDOW_UPDATE = b"\0\0\4\x08\0\0\0\0\0"  # a frame for all streams, before the increment
_MOST_TOGETHER = 8  # requests on a call, all of which end if it breaks
_LAST_STREAM = H2Connection.HIGHEST_ALLOWED_STREAM_ID
_FIRST_WINDOW, _LARGEST_WINDOW = 65_535, 2**31 - 1
_SETTINGS = {SettingCodes.ENABLE_PUSH: 0, SettingCodes.INITIAL_WINDOW_SIZE: _LARGEST_WINDOW}
# Calls at once on a connection whose server has not sent its settings yet. RFC 9113 asks servers to allow
# as many.
_FIRST_MOST_CALLS = 100

Reply = TypeVar("Reply", bound=ProtobufMessage)


class Stream(Arrivals[Any]):
    """The answer to a request: messages, or the parts of it in any messages."""

    request_id = ""  # of a shared one
    number = 0  # of a shared one: of its frames
    closed = False

    def __init__(self, call: "_Call") -> None:
        super().__init__()
        self.call = call
        self.place = 0  # the number of ids that have come without a gap
        self.early: dict[int, Frame] = {}  # frames behind a gap, by the number of ids before each
        self.gap_began: float | None = None  # the loop's time

    @property
    def whole(self) -> bool:
        return self.complete or self.ended

    @property
    def has_early_end(self) -> bool:
        return any(frame.final for frame in self.early.values())

    def add_frame(self, frame: Frame) -> None:
        """Add one; those of two calls may come in any order."""
        self.early[frame.start] = frame
        while (ready := self.early.pop(self.place, None)) is not None:
            self.place = ready.end
            self.gap_began = None
            self.add(ready)
            if ready.final:
                self.end()
        if self.early and self.gap_began is None:
            self.gap_began = self._loop.time()


class _Call:
    """A stream of HTTP/2's: requests, of which a part may be unsent, and what comes for them."""

    number = 0  # until it has begun
    status: str | None = None  # gRPC's, unless it is OK

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.unsent: bytes | memoryview = b""
        self._received = bytearray()

    @property
    def abandoned(self) -> bool:
        """Whether nobody reads any of its requests."""
        return all(stream.closed for stream in self.streams)

    @property
    def whole(self) -> bool:
        return all(stream.whole for stream in self.streams)

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

    def fail(self, problem: str, *, blameless: bool = False) -> None:
        """End its requests with an error. With several of them, nobody knows which one caused it."""
        for stream in self.streams:
            error = errors.TritonUnavailable(problem)
            error.blameless = blameless or len(self.streams) > 1
            stream.end(error)

    def finish(self) -> None:
        """End its requests after Triton has: not those whose last part has overtaken others elsewhere."""
        for stream in self.streams:
            if not stream.has_early_end:
                text = "Triton closed the stream before the last response"
                stream.end(errors.TritonUnavailable(text))


class Connection(asyncio.Protocol):
    """One connection to Triton. To be used from its event loop.

    The rules, by which a request that fails or leaves harms no other:

    - A response with parts of several requests comes on the call of one of them. When that call is dropped
      or breaks, such parts may be lost. Nobody knows whose, so nobody is failed for it. Each request
      notices a gap by the count in its next part, and fails when that has stood for ``GAP_SECONDS``.
    - What cannot be read on a call ends that call; what breaks HTTP/2 itself ends the connection.
    - After a GOAWAY, the connection takes no more requests. Those that the server has taken go on, the
      others end at once, and may be sent on another connection.
    - Errors of a request that another one or the connection caused are marked as blameless.
    """

    def __init__(self, authority: str) -> None:
        self._head = {":method": "POST", ":scheme": "http", ":path": "", ":authority": authority}
        self._head |= {"te": "trailers", "content-type": "application/grpc"}
        # The headers that are sent are ours, and in order.
        config = H2Configuration(validate_outbound_headers=False, normalize_outbound_headers=False)
        self._h2 = H2Connection(config)
        self._calls: dict[int, _Call] = {}
        self._reader = uuid4().hex
        self._numbers = itertools.count()
        self._sharing: dict[int, Stream] = {}  # until they are closed
        self._next: _Call | None = None  # takes the requests of this turn of the loop
        self._rest = b""  # of a frame that has come in part
        self._taken = 0  # bytes received and not yet granted to the peer again
        self._most_calls = _FIRST_MOST_CALLS
        self._gap_timer: asyncio.TimerHandle | None = None
        self.usable = True  # for new requests
        self.closed = False

    @property
    def has_room(self) -> bool:
        """Whether it takes a request now."""
        calls = len(self._calls) + (1 if self._next is not None else 0)
        return self.usable and calls < self._most_calls

    def send(self, path: str, request: Any, trace: Any = None, *, shared: bool = False) -> Stream:
        """Send a request; responses to ``shared`` ones may have frames of each other's."""
        together = shared and not trace
        call = (self._next if together else None) or _Call()
        stream = Stream(call)
        stream.close = partial(self._close, stream)
        if shared:
            stream.request_id = request.id
            stream.number = next(self._numbers) % _LAST_STREAM + 1
            address = FrameAddress(self._reader, stream.number)
            request.parameters[FRAMES_FOR].string_param = address.parameter()
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
        if self._next is call:
            self._next = None
        headers = {**self._head, ":path": path}
        if trace:
            headers[TRACEPARENT] = trace
        try:
            if self._transport.is_closing():
                raise ProtocolError("the connection was lost")
            if not self.usable:
                raise ProtocolError("Triton closes the connection")
            number = self._h2.get_next_available_stream_id()
            self._h2.send_headers(number, headers.items())
        except H2Error as error:
            call.fail(f"Triton cannot be reached: {error}", blameless=True)
            return
        if number >= _LAST_STREAM:
            self.usable = False
        call.number = number
        self._calls[number] = call
        call.unsent = memoryview(call.unsent)
        self._send_body(call)
        self._flush()

    def close(self, reason: str) -> None:
        """End the connection and all its streams."""
        self.usable = False
        self.closed = True
        self._transport.abort()
        if self._gap_timer is not None:
            self._gap_timer.cancel()
        # A call that has ended may have a request whose parts were still to come on others.
        calls = {stream.call for stream in self._sharing.values()}
        calls.update(self._calls.values())
        if self._next is not None:
            calls.add(self._next)
            self._next = None
        for call in calls:
            call.fail(reason, blameless=True)
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
        """Handle the frames that have come, and keep one that has come in part.

        h2 takes 9 µs for a frame of data, so those without flags are read here.
        """
        data = self._rest + data
        at = 0
        try:
            while len(data) >= (begin := at + _FRAME.size):
                high, low, kind, flags, number = _FRAME.unpack_from(data, at)
                if len(data) < (end := begin + (high << 8 | low)):
                    break
                if kind == _DATA and not flags and (call := self._calls.get(number)) is not None:
                    self._take(call, data[begin:end])
                elif kind == _GOAWAY:
                    self._retire(data[begin:end])
                else:
                    for event in self._h2.receive_data(data[at:end]):
                        self._handle(event)
                at = end
        except ProtocolError as error:
            self.close(f"Triton's answer cannot be read: {error}")
        self._rest = data[at:]
        self._close_if_done()
        self._flush()

    def _take(self, call: _Call, data: bytes) -> None:
        try:
            for message in call.feed(data):
                self._receive(call, message)
        except (ProtocolError, errors.TritonMalformedEvent) as error:
            call.fail(f"Triton's answer cannot be read: {error}")
            self._drop(call)
        self._taken += len(data)
        if self._taken > _LARGEST_WINDOW // 2:
            self._transport.write(_WINDOW_UPDATE + self._taken.to_bytes(4, "big"))
            self._taken = 0

    def _retire(self, goaway: bytes) -> None:
        """Take no more requests, and end those that the server has not taken, as a GOAWAY frame says.

        h2 would refuse all frames that follow, so it does not get this one.
        """
        self.usable = False
        last_taken = int.from_bytes(goaway[:4], "big") & _STREAM_ID
        for number, call in list(self._calls.items()):
            if number > last_taken:
                del self._calls[number]
                call.fail("Triton closes the connection", blameless=True)

    def _close_if_done(self) -> None:
        if not self.usable and not self._calls and not self.closed:
            self._flush()
            self._transport.close()  # after what is still to be written

    def _handle(self, event: events.Event) -> None:
        # No call: one that was cancelled, or an event of the connection.
        call = self._calls.get(getattr(event, "stream_id", 0))
        if isinstance(event, events.DataReceived):
            if call is not None:  # its end, or padded
                self._take(call, event.data)
        elif isinstance(event, events.RemoteSettingsChanged):
            self._most_calls = self._h2.remote_settings.max_concurrent_streams
            self._send_bodies()
        elif isinstance(event, events.WindowUpdated):
            self._send_bodies()
        elif call is None:
            return
        elif isinstance(event, (events.ResponseReceived, events.TrailersReceived)):
            headers = dict(event.headers)
            status = headers.get(b"grpc-status", b"0").decode()
            if status != "0":
                text = unquote(headers.get(b"grpc-message", b"").decode(errors="replace"))
                call.status = text or f"gRPC's status {status}"
        elif isinstance(event, events.StreamEnded):
            if call.unsent:  # the server answers without having read all
                self._drop(call)
            else:
                del self._calls[call.number]
            if call.status is None:
                call.finish()
            else:
                call.fail(call.status)
        elif isinstance(event, events.StreamReset):
            del self._calls[call.number]
            refused = event.error_code == ErrorCodes.REFUSED_STREAM  # unread: it may be sent again
            text = f"Triton reset the stream: error {event.error_code!s}"
            call.fail(text, blameless=refused)

    def _send_bodies(self) -> None:
        for waiting in self._calls.values():
            self._send_body(waiting)

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
        answer = read(message)
        frames = frames_of(answer)
        for frame in frames:
            receiver = self._sharing.get(frame.sequence)
            if receiver is not None:
                receiver.add_frame(frame)
                if receiver.gap_began is not None and self._gap_timer is None:
                    self._watch_gaps()
        if not frames:  # an error, the end of one, or of an engine that sends no frames
            response = answer.infer_response
            for stream in [one for one in streams if one.request_id == response.id] or streams:
                stream.add(answer)
                if answer.error_message or is_final(response):
                    stream.end()

    def _watch_gaps(self) -> None:
        """Fail the requests whose gaps have stood for too long; look again while there are others."""
        loop = asyncio.get_running_loop()
        waiting = False
        for stream in self._sharing.values():
            if stream.gap_began is None or stream.ended:
                continue
            if loop.time() - stream.gap_began >= GAP_SECONDS:
                stream.gap_began = None
                stream.fail(errors.blameless(lost_after(stream.place)))
            else:
                waiting = True
        self._gap_timer = loop.call_later(GAP_SECONDS / 4, self._watch_gaps) if waiting else None

    def _close(self, stream: Stream) -> None:
        """Forget a stream that nobody reads; drop its call if nobody reads any of the call's."""
        self._sharing.pop(stream.number, None)
        stream.closed = True
        call = stream.call
        # Triton ends a call that is whole, and may still be at work on its last responses.
        if call.abandoned and not call.whole and call.number in self._calls:
            self._drop(call)
            self._close_if_done()
            self._flush()

    def _drop(self, call: _Call) -> None:
        """Reset a call: parts of other requests that are on their way on it are lost."""
        if self._calls.pop(call.number, None) is not None:
            self._h2.reset_stream(call.number, ErrorCodes.CANCEL)

    def _flush(self) -> None:
        if data := self._h2.data_to_send():
            # uvloop's transport raises when it has closed: the loss comes next.
            with contextlib.suppress(RuntimeError):
                self._transport.write(data)


class GrpcClient(TritonClient):
    """See ``TritonClient``. Requests share connections, which are made when they are needed.

    One is enough, unless what is between here and Triton limits the calls of a connection at one time, or
    asks to leave one (GOAWAY): what a connection does not take goes on another.
    """

    def __init__(self, address: str, *, response_timeout: float = math.inf) -> None:
        """Connect to nothing yet; the address is host:port of Triton's gRPC endpoint."""
        super().__init__(response_timeout)
        self._address = address
        self._connections: list[Connection] = []
        self._connecting = asyncio.Lock()
        self._disconnected = False

    async def send(
        self, method: str, request: Any, traceparent: Any = None, *, shared: bool = False
    ) -> Stream:
        """Send a request as ``Connection.send`` does, or raise TritonUnavailable."""
        path = f"/inference.GRPCInferenceService/{method}"
        async with self._connecting:
            if self._disconnected:
                raise errors.blameless(errors.TritonUnavailable(CLOSED))
            connection = await self._connection_with_room()
            return connection.send(path, request, traceparent, shared=shared)

    async def _connection_with_room(self) -> Connection:
        """Return a connection that takes a request, a new one if need be."""
        self._connections = [each for each in self._connections if not each.closed]
        for connection in self._connections:
            if connection.has_room:
                return connection
        host, _, port = self._address.rpartition(":")
        loop = asyncio.get_running_loop()
        connecting = loop.create_connection(
            partial(Connection, self._address), host.strip("[]"), int(port)
        )
        try:
            _, connection = await asyncio.wait_for(connecting, CONNECT_SECONDS)
        except (OSError, asyncio.TimeoutError) as error:
            problem = str(error) or f"no connection in {CONNECT_SECONDS:g} s"
            text = f"Triton cannot be reached: {problem}"
            raise errors.blameless(errors.TritonUnavailable(text)) from None
        self._connections.append(connection)
        return connection

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
        request = infer_request(model, request_id, inputs, (), parameters)
        shared = model == IDS_ENSEMBLE
        return await self.send(INFER, request, parameters.get(TRACEPARENT), shared=shared)

    def _parse(self, message: Any) -> Frame | TensorOutputs:
        if isinstance(message, Frame):
            return message
        response = parse(message)
        return TensorOutputs(flat_outputs(response), is_final(response))

    async def _disconnect(self) -> None:
        async with self._connecting:
            self._disconnected = True
            for connection in self._connections:
                connection.close(CLOSED)
