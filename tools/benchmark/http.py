"""HTTP for load generators: while a request runs, only times and bytes; afterwards, what they mean.

A general client parses each read as it comes, which at 30,000 events a second takes a core of its own
and is measured as the server's latency. Here a read costs a time stamp and a look at its last bytes.
"""

from __future__ import annotations

import asyncio
import bisect
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import cast
from urllib.parse import urlsplit

from tools.server_sent_events import EventParser

# As the last bytes of a read these end the reply: no JSON and no event has such lines in it.
_LAST_CHUNK = b"\r\n0\r\n\r\n"
_END_OF_HEADERS = b"\r\n\r\n"

Piece = tuple[float, bytes]  # when it arrived (seconds of time.perf_counter), and what


@dataclass(frozen=True)
class Reply:
    """A reply after the fact: its status and the pieces of its body."""

    status: int
    body: list[Piece]

    @property
    def text(self) -> str:
        return b"".join(data for _, data in self.body).decode(errors="replace")


@dataclass(frozen=True)
class Event:
    """A server-sent event, and when its last byte arrived."""

    at: float
    name: str
    data: str


class Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[list[Piece]] | None = None

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def send(self, request: bytes) -> list[Piece]:
        """Sends a request and returns the whole reply as it came, headers and framing included.

        Raises:
            ConnectionError: it ended before the reply did.
        """
        assert self._transport is not None
        self._pieces: list[Piece] = []
        self._head = b""
        self._tail = b""
        self._chunked = False
        self._left: int | None = None
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._done

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name

    def data_received(self, data: bytes) -> None:
        self._pieces.append((time.perf_counter(), data))
        if self._chunked:
            self._tail = data[-7:] if len(data) >= 7 else (self._tail + data)[-7:]
            if self._tail == _LAST_CHUNK:
                self._finish()
        elif self._left is not None:
            self._left -= len(data)
            if self._left <= 0:
                self._finish()
        else:
            self._read_head(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is None or self._done.done():
            return
        if self._head and not self._chunked and self._left is None:
            self._finish()  # the end of the connection is the end of such a body
        else:
            self._done.set_exception(ConnectionError(f"connection lost: {exc or 'closed'}"))

    def _read_head(self, data: bytes) -> None:
        received = self._head + data
        self._head = received
        end = received.find(_END_OF_HEADERS)
        if end < 0:
            return
        head = received[:end].lower()
        body = received[end + len(_END_OF_HEADERS) :]
        if re.search(rb"\ntransfer-encoding:[^\r]*chunked", head):
            self._chunked = True
            self._tail = received[-7:]
            if self._tail == _LAST_CHUNK:
                self._finish()
        elif length := re.search(rb"\ncontent-length: *(\d+)", head):
            self._left = int(length.group(1)) - len(body)
            if self._left <= 0:
                self._finish()

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(self._pieces)


class Pool:
    """Connections to one server, as many as there are requests at once, used again and again."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no http or https URL")
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._secure = parts.scheme == "https"
        self._netloc = parts.netloc
        self._idle: list[Connection] = []

    def message(self, path: str, headers: dict[str, str], body: bytes) -> bytes:
        """A POST request as bytes."""
        lines = [
            f"POST {path} HTTP/1.1",
            f"Host: {self._netloc}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        return "\r\n".join([*lines, "", ""]).encode() + body

    async def send(self, request: bytes) -> list[Piece]:
        """The reply to a request, as ``Connection.send``.

        Raises:
            OSError: no connection, or one that ended too early.
        """
        connection = await self._take()
        try:
            pieces = await connection.send(request)
        except (
            BaseException
        ):  # a timeout's cancellation too: what is left of the reply would follow
            connection.close()
            raise
        self._idle.append(connection)
        return pieces

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    async def _take(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            Connection, self._host, self._port, ssl=self._secure or None
        )
        return connection


def parse_reply(pieces: list[Piece]) -> Reply:
    """Parse the bytes of a reply. Every piece of the body has the time of its last byte.

    Raises:
        ValueError: they are no HTTP.
    """
    raw = b"".join(data for _, data in pieces)
    end = raw.find(_END_OF_HEADERS)
    status = re.match(rb"HTTP/1\.[01] (\d{3})", raw)
    if end < 0 or status is None:
        raise ValueError(f"no HTTP reply: {raw[:100]!r}")
    arrived = _Arrivals(pieces)
    start = end + len(_END_OF_HEADERS)
    if re.search(rb"\ntransfer-encoding:[^\r]*chunked", raw[:end].lower()):
        body = list(_chunks(raw, start, arrived))
    else:
        body = [(arrived.at(len(raw)), raw[start:])]
    return Reply(int(status.group(1)), body)


def events(body: list[Piece]) -> Iterator[Event]:
    """The server-sent events in a body. An event may be spread over pieces, or share one."""
    parser = EventParser()
    for at, piece in body:
        for name, data in parser.feed(piece):
            yield Event(at, name, data.decode().strip())


class _Arrivals:
    """Arrival times of a reply's bytes, by offset."""

    def __init__(self, pieces: list[Piece]) -> None:
        self._times = [at for at, _ in pieces]
        self._ends = list(accumulate(len(data) for _, data in pieces))

    def at(self, end: int) -> float:
        """Return the time at which all bytes before ``end`` were there."""
        return self._times[bisect.bisect_left(self._ends, end)]


def _chunks(raw: bytes, start: int, arrived: _Arrivals) -> Iterator[Piece]:
    while (line_end := raw.find(b"\r\n", start)) >= 0:
        size = int(raw[start:line_end].split(b";")[0], 16)
        if size == 0:
            return
        begin = line_end + 2
        yield arrived.at(begin + size), raw[begin : begin + size]
        start = begin + size + 2
