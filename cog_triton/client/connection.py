"""One HTTP/2 connection to a gRPC server: messages of calls in, messages of calls out.

This module knows bytes, frames of HTTP/2, flow control, and what ends a call. It knows nothing of Triton.

    Call.write(bytes) ──▶ unsent ──▶ h2 ──▶ transport
    on_message(bytes) ◀── Call  ◀── DATA frames, read here ◀──┐
    on_end(CallEnd)   ◀── Call  ◀── events ◀── h2 ◀───────────┴── transport

It stands on h2 rather than on gRPC's own client for asyncio (grpc.aio), which takes a step of a thread, a
wake-up of the event loop and a future for each message. Measured on 2026-11-29 with
``python -m tools.benchmark.grpc_clients`` on two shared cores, one long stream each, no pause between
tokens, medians of three turns: of this client's tokens per core-second of the whole stack, grpc.aio makes
0.73 (64 streams) and 0.70 (256) with the simulated engine, and 0.75 and 0.65 with the stand-in for
TensorRT-LLM's C++ backend, whose responses have one token each. Its client takes 14 and 15 µs a token
where this one takes 8 and 6, and 53 and 58 µs where this one takes 23 and 27.
"""

import asyncio
import contextlib
import struct
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast
from urllib.parse import unquote

from h2 import events
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.exceptions import H2Error, ProtocolError
from h2.settings import SettingCodes, Settings

# Whether the message is compressed, and its length.
_MESSAGE_PREFIX = struct.Struct(">BL")
# Length in 16 and 8 bits, kind, flags, number of the stream.
_FRAME_HEADER = struct.Struct(">HBBBL")
# A header, and the increment.
_WINDOW_UPDATE = struct.Struct(">HBBBLL")
_DATA = 0
_GOAWAY = 7
_WINDOW_UPDATE_KIND = 8
# The bits of a stream's number; one more is reserved.
_STREAM_ID = 2**31 - 1
_LAST_STREAM = H2Connection.HIGHEST_ALLOWED_STREAM_ID
_FIRST_WINDOW = 65_535
_LARGEST_WINDOW = 2**31 - 1
# Calls at once on a connection whose server has not sent its settings yet. RFC 9113 asks servers to allow
# as many.
_FIRST_MOST_CALLS = 100


class ConnectionUnusable(Exception):
    """The connection takes no more calls; its text says why."""


class UnreadableMessage(Exception):
    """Raised by a reader of messages: the connection cannot go on."""


@dataclass(frozen=True)
class CallEnd:
    """Why a call has ended.

    Attributes:
        problem: what went wrong; None if the server ended the call with the status OK.
        blameless: the connection failed, or the server had not read the call: it may be made again.
    """

    problem: str | None = None
    blameless: bool = False


class Call:
    """One call: messages to the server until it is half-closed, and from the server until its end."""

    def __init__(
        self,
        connection: "Connection",
        number: int,
        on_message: Callable[[bytes], None],
        on_end: Callable[["Call", CallEnd], None],
    ) -> None:
        # Of HTTP/2's stream.
        self.number = number
        self.ended = False
        self._connection = connection
        self._on_message = on_message
        self._on_end = on_end
        self._unsent: deque[memoryview] = deque()
        self._half_closing = False
        self._half_closed = False
        self._received = bytearray()
        # Of gRPC or HTTP, as a text; None if it is OK.
        self._status: str | None = None
        # Bytes received that the server may not send again yet.
        self._window_taken = 0

    @property
    def can_write(self) -> bool:
        return not (self.ended or self._half_closing)

    @property
    def is_sending(self) -> bool:
        """Whether something is still to be sent."""
        return bool(self._unsent) or self._half_closing != self._half_closed

    def write(self, message: bytes) -> None:
        """Send a message, with all others of this turn of the event loop, as far as the server takes it."""
        self._unsent.append(memoryview(_MESSAGE_PREFIX.pack(0, len(message)) + message))
        self._connection.send_soon()

    def half_close(self) -> None:
        """Tell the server, behind the last message, that none will follow."""
        self._half_closing = True
        self._connection.send_soon()

    def cancel(self) -> None:
        """Reset the call if it has not ended; nobody is told of its end."""
        self._connection.cancel(self)

    def send(self, h2: H2Connection) -> None:
        """Hand over to h2 as much as the server takes now."""
        while self._unsent:
            window = h2.local_flow_control_window(self.number)
            size = min(window, h2.max_outbound_frame_size)
            if size <= 0:
                return
            first = self._unsent.popleft()
            h2.send_data(self.number, first[:size])
            if len(first) > size:
                self._unsent.appendleft(first[size:])
        if self._half_closing and not self._half_closed:
            self._half_closed = True
            h2.end_stream(self.number)

    def feed(self, data: bytes) -> int:
        """Take in a part of the answer and deliver the messages that it completes.

        Returns the number of bytes by which to open the server's window again; 0 while they are few.
        """
        # After an HTTP error, the body is a page for people and has no messages.
        if self._status is None:
            for message in self._complete_messages(data):
                self._on_message(message)
        self._window_taken += len(data)
        if self._window_taken <= _LARGEST_WINDOW // 2:
            return 0
        granted = self._window_taken
        self._window_taken = 0
        return granted

    def read_headers(self, headers: dict[bytes, bytes]) -> None:
        """Read the status that headers or trailers have."""
        http_status = headers.get(b":status", b"200").decode()
        status = headers.get(b"grpc-status", b"0").decode()
        if http_status != "200":
            self._status = f"it answered with the HTTP status {http_status}"
        elif status != "0":
            text = unquote(headers.get(b"grpc-message", b"").decode(errors="replace"))
            self._status = text or f"gRPC's status {status}"

    def finish(self) -> None:
        """End as the server's status says."""
        self.end(CallEnd(self._status))

    def end(self, reason: CallEnd) -> None:
        """End, once."""
        if not self.ended:
            self.ended = True
            self._unsent.clear()
            self._on_end(self, reason)

    def forget(self) -> None:
        """End without telling anybody."""
        self.ended = True
        self._unsent.clear()

    def _complete_messages(self, data: bytes) -> Iterator[bytes]:
        """Yield the messages that are whole with this data, and keep the rest."""
        self._received += data
        while len(self._received) >= _MESSAGE_PREFIX.size:
            is_compressed, length = _MESSAGE_PREFIX.unpack_from(self._received)
            if is_compressed:
                raise ProtocolError("a compressed message")
            end = _MESSAGE_PREFIX.size + length
            if len(self._received) < end:
                return
            yield bytes(self._received[_MESSAGE_PREFIX.size : end])
            del self._received[:end]


class Connection(asyncio.Protocol):
    """A connection and its calls. To be used from its event loop.

    - What ends one call leaves the others. What cannot be read ends the connection.
    - After a GOAWAY, the connection takes no more calls, and half-closes those that it has. Those that the
      server has taken go on to their end; the others end at once.
    """

    def __init__(self, authority: str) -> None:
        self._head = {":method": "POST", ":scheme": "http", ":path": "", ":authority": authority}
        self._head |= {"te": "trailers", "content-type": "application/grpc"}
        # The headers that are sent are ours, and in order.
        config = H2Configuration(validate_outbound_headers=False, normalize_outbound_headers=False)
        self._h2 = H2Connection(config)
        self._calls: dict[int, Call] = {}
        # The beginning of a frame that has come in part.
        self._rest = b""
        # Bytes received that the server may not send again yet.
        self._window_taken = 0
        self._most_calls = _FIRST_MOST_CALLS
        self._sending_soon = False
        # Whether it takes new calls.
        self.usable = True
        self.closed = False

    @property
    def takes_calls(self) -> bool:
        """Whether it takes calls, perhaps when another one has ended."""
        return self.usable and self._most_calls > 0

    @property
    def has_room(self) -> bool:
        """Whether it takes a call now."""
        return self.usable and len(self._calls) < self._most_calls

    def open(
        self,
        path: str,
        headers: dict[str, str],
        on_message: Callable[[bytes], None],
        on_end: Callable[["Call", CallEnd], None],
    ) -> Call:
        """Begin a call, or raise ConnectionUnusable."""
        if self._transport.is_closing():
            raise ConnectionUnusable("the connection was lost")
        if not self.usable:
            raise ConnectionUnusable("Triton closes the connection")
        try:
            number = self._h2.get_next_available_stream_id()
            self._h2.send_headers(number, {**self._head, ":path": path, **headers}.items())
        except H2Error as error:
            raise ConnectionUnusable(str(error)) from None
        if number >= _LAST_STREAM:
            self.usable = False
        call = Call(self, number, on_message, on_end)
        self._calls[number] = call
        self.send_soon()
        return call

    def cancel(self, call: Call) -> None:
        """Reset a call if it has not ended; nobody is told of its end."""
        call.forget()
        if self._calls.pop(call.number, None) is not None:
            self._h2.reset_stream(call.number, ErrorCodes.CANCEL)
            self.send_soon()
            self._close_if_done()

    def close(self, reason: str) -> None:
        """End the connection and all its calls."""
        self.usable = False
        self.closed = True
        self._transport.abort()
        calls = list(self._calls.values())
        self._calls.clear()
        for call in calls:
            call.end(CallEnd(reason, blameless=True))

    def send_soon(self) -> None:
        """Send what the calls have, at the end of this turn of the event loop."""
        if not self._sending_soon:
            self._sending_soon = True
            asyncio.get_running_loop().call_soon(self._send_now)

    def _send_now(self) -> None:
        self._sending_soon = False
        if self.closed:
            return
        try:
            for call in self._calls.values():
                call.send(self._h2)
        except H2Error as error:
            self.close(f"a message cannot be sent: {error}")
            return
        self._flush()

    # Called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport is of no class of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        settings = {SettingCodes.ENABLE_PUSH: 0, SettingCodes.INITIAL_WINDOW_SIZE: _LARGEST_WINDOW}
        self._h2.local_settings = Settings(initial_values=settings)
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
            while len(data) >= at + _FRAME_HEADER.size:
                begin = at + _FRAME_HEADER.size
                high, low, kind, flags, number = _FRAME_HEADER.unpack_from(data, at)
                end = begin + (high << 8 | low)
                if len(data) < end:
                    break
                call = self._calls.get(number)
                if kind == _DATA and not flags and call is not None:
                    self._take(call, data[begin:end])
                elif kind == _GOAWAY:
                    self._retire(data[begin:end])
                else:
                    for event in self._h2.receive_data(data[at:end]):
                        self._handle(event)
                at = end
        except (ProtocolError, UnreadableMessage) as error:
            self.close(f"Triton's answer cannot be read: {error}")
        self._rest = data[at:]
        if not self.closed:
            self._close_if_done()
            self._flush()

    def _take(self, call: Call, data: bytes) -> None:
        """Deliver data, and let the server send as much again, on the call and on the connection."""
        granted = call.feed(data)
        if granted:
            self._grant(call.number, granted)
        self._window_taken += len(data)
        if self._window_taken > _LARGEST_WINDOW // 2:
            self._grant(0, self._window_taken)
            self._window_taken = 0

    def _grant(self, number: int, increment: int) -> None:
        """Send a window update: h2, which does not see the data, could not."""
        frame = _WINDOW_UPDATE.pack(0, 4, _WINDOW_UPDATE_KIND, 0, number, increment)
        self._transport.write(frame)

    def _retire(self, goaway: bytes) -> None:
        """Take no more calls, and end those that the server has not taken, as a GOAWAY frame says.

        h2 would refuse all frames that follow, so it does not get this one.
        """
        self.usable = False
        last_taken = int.from_bytes(goaway[:4], "big") & _STREAM_ID
        for number, call in list(self._calls.items()):
            if number > last_taken:
                del self._calls[number]
                call.end(CallEnd("Triton closes the connection", blameless=True))
            elif call.can_write:
                call.half_close()

    def _close_if_done(self) -> None:
        if not self.usable and not self._calls and not self.closed:
            self._flush()
            # What is still to be written is written first.
            self._transport.close()

    def _handle(self, event: events.Event) -> None:
        # No call: one that was cancelled, or an event of the connection.
        call = self._calls.get(getattr(event, "stream_id", 0))
        if isinstance(event, events.DataReceived):
            if call is not None:
                # Data with flags: the last of a call, or padded.
                self._take(call, event.data)
        elif isinstance(event, events.RemoteSettingsChanged):
            self._most_calls = self._h2.remote_settings.max_concurrent_streams
            self.send_soon()
        elif isinstance(event, events.WindowUpdated):
            self.send_soon()
        elif call is None:
            return
        elif isinstance(event, (events.ResponseReceived, events.TrailersReceived)):
            call.read_headers(dict(event.headers))
        elif isinstance(event, events.StreamEnded):
            del self._calls[call.number]
            if call.can_write or call.is_sending:
                # The server answers without having read all.
                self._h2.reset_stream(call.number, ErrorCodes.CANCEL)
            call.finish()
        elif isinstance(event, events.StreamReset):
            del self._calls[call.number]
            is_unread = event.error_code == ErrorCodes.REFUSED_STREAM
            problem = f"Triton reset the stream: error {event.error_code!s}"
            call.end(CallEnd(problem, blameless=is_unread))

    def _flush(self) -> None:
        data = self._h2.data_to_send()
        if data:
            # uvloop's transport raises when it has closed: the loss comes next.
            with contextlib.suppress(RuntimeError):
                self._transport.write(data)
