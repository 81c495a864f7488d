"""A connection to a gRPC server for streams of one request each, on the event loop itself, by h2.

gRPC's own client for asyncio takes a step of a thread, a wake-up of the event loop and a future for each
message of each stream. Tokens come as many small messages on many streams: here all that have arrived are
handed over in one step.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import unquote

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    RemoteSettingsChanged,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
    WindowUpdated,
)
from h2.exceptions import H2Error, ProtocolError
from h2.settings import SettingCodes, Settings

CONNECT_SECONDS = 10.0

_MESSAGE = struct.Struct(">BL")  # of gRPC: a flag of compression, the length
_FIRST_WINDOW = 65_535
_LARGEST_WINDOW = 2**31 - 1
_SETTINGS = {SettingCodes.ENABLE_PUSH: 0, SettingCodes.INITIAL_WINDOW_SIZE: _LARGEST_WINDOW}


@dataclass(eq=False)
class Stream:
    """A request and the messages of its response; ``status`` is gRPC's, unless it is OK."""

    connection: Connection
    number: int
    unsent: memoryview
    on_message: Callable[[bytes], object]
    end: Callable[[str | None], object]
    status: str | None = None
    _partial: bytearray = field(default_factory=bytearray)  # of a message
    _needed: int = 0  # its size

    def cancel(self) -> None:
        """Reset the stream and call back no more."""
        self.connection.cancel(self)

    def feed(self, data: bytes) -> None:
        """Take in a part of the response."""
        if self._partial:
            self._partial += data
            if len(self._partial) < self._needed:  # logits may have hundreds of megabytes
                return
            data = bytes(self._partial)
        at, size = 0, len(data)
        self._needed = _MESSAGE.size
        while size - at >= _MESSAGE.size:
            compressed, length = _MESSAGE.unpack_from(data, at)
            if compressed:
                raise ProtocolError("a compressed message")
            end = at + _MESSAGE.size + length
            if end > size:
                self._needed = end - at
                break
            self.on_message(data[at + _MESSAGE.size : end])
            at = end
        self._partial = bytearray(data[at:])


class Connection(asyncio.Protocol):
    """One connection, see ``connect``. To be used from its event loop."""

    def __init__(self, authority: str) -> None:
        self._authority = authority
        # The headers that are sent are ours, and in order.
        self._h2 = H2Connection(
            H2Configuration(validate_outbound_headers=False, normalize_outbound_headers=False)
        )
        self._streams: dict[int, Stream] = {}
        self._taken = 0  # bytes received and not yet granted to the peer again
        self.usable = True

    def open(
        self,
        path: str,
        message: bytes,
        on_message: Callable[[bytes], object],
        on_end: Callable[[str | None], object],
    ) -> Stream:
        """Send a request of one message.

        Args:
            on_message: called with each message of the response.
            on_end: called once after the last message, with None if the response ended without an error.

        Raises:
            OSError: the peer takes no more streams.
        """
        headers = [
            *((":method", "POST"), (":scheme", "http"), (":path", path)),
            *((":authority", self._authority), ("te", "trailers")),
            ("content-type", "application/grpc"),
        ]
        try:
            number = self._h2.get_next_available_stream_id()
            self._h2.send_headers(number, headers)
        except H2Error as error:
            raise OSError(str(error)) from None
        body = memoryview(_MESSAGE.pack(0, len(message)) + message)
        stream = self._streams[number] = Stream(self, number, body, on_message, on_end)
        self._send_body(stream)
        self._flush()
        return stream

    def cancel(self, stream: Stream) -> None:
        if self._streams.pop(stream.number, None) is not None:
            self._h2.reset_stream(stream.number, ErrorCodes.CANCEL)
            self._flush()

    def close(self, reason: str) -> None:
        """End the connection and all its streams."""
        if self.usable:
            self.usable = False
            self._transport.abort()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.end(reason)

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
        try:
            for event in self._h2.receive_data(data):
                self._handle(event)
        except ProtocolError as error:
            self.close(f"Triton's answer cannot be read: {error}")
            return
        self._flush()

    def _handle(self, event: Event) -> None:
        if isinstance(event, DataReceived):
            stream = self._streams.get(event.stream_id)
            if stream is not None:  # else it has been cancelled
                stream.feed(event.data)
            self._taken += event.flow_controlled_length
            if self._taken > _LARGEST_WINDOW // 2:
                self._h2.increment_flow_control_window(self._taken)
                self._taken = 0
        elif isinstance(event, (ResponseReceived, TrailersReceived)):
            headers, stream = dict(event.headers), self._streams.get(event.stream_id)
            status = headers.get(b"grpc-status", b"0").decode()
            if stream is not None and status != "0":
                message = unquote(headers.get(b"grpc-message", b"").decode(errors="replace"))
                stream.status = message or f"gRPC's status {status}"
        elif isinstance(event, (StreamEnded, StreamReset)):
            stream = self._streams.pop(event.stream_id, None)
            if stream is not None and isinstance(event, StreamReset):
                stream.end(f"Triton reset the stream: error {event.error_code!s}")
            elif stream is not None:
                stream.end(stream.status)
        elif isinstance(event, (WindowUpdated, RemoteSettingsChanged)):
            for stream in self._streams.values():
                self._send_body(stream)
        elif isinstance(event, ConnectionTerminated):
            self.close("Triton closes the connection")

    def _send_body(self, stream: Stream) -> None:
        """Send as much of a request as the peer takes now."""
        while stream.unsent:
            window = self._h2.local_flow_control_window(stream.number)
            size = min(window, self._h2.max_outbound_frame_size)
            if size <= 0:
                return
            part, stream.unsent = stream.unsent[:size], stream.unsent[size:]
            self._h2.send_data(stream.number, part, end_stream=not stream.unsent)
        stream.unsent = memoryview(b"")  # an empty rest would keep the whole, an adapter perhaps

    def _flush(self) -> None:
        if data := self._h2.data_to_send():
            self._transport.write(data)


async def connect(address: str) -> Connection:
    """Connect to host:port.

    Raises:
        OSError: it failed, or took too long.
    """
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    connecting = loop.create_connection(lambda: Connection(address), host.strip("[]"), int(port))
    try:
        _, connection = await asyncio.wait_for(connecting, CONNECT_SECONDS)
    except asyncio.TimeoutError:  # is an OSError from Python 3.11 on
        raise OSError(f"no connection in {CONNECT_SECONDS:g} s") from None
    return connection
