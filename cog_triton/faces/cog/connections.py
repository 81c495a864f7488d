"""The connections of the front: a client's, and one to Cog's server for each request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from cog_triton.faces.cog.rules import Passage
from cog_triton.web.limits import HEAD_END, head_bytes
from cog_triton.web.server import LimitedProtocol

_NOT_PASSED_ON = frozenset(
    b"connection content-length expect keep-alive proxy-connection te transfer-encoding".split()
)
_NOT_RELAYED = (b"connection", b"date")  # uvicorn writes its own


class Connection(LimitedProtocol):
    """A client's connection. One that only receives any more gets its answers, but for predictions.

    Such a client cannot be told from one that has gone.
    """

    source: asyncio.Transport | None = None
    """The response's."""
    _sends_no_more = False

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["connection"] = self  # type: ignore[typeddict-unknown-key]

    def write_chunk(self, data: bytes) -> None:
        """Write a piece of the response past uvicorn, which takes three times as long."""
        if not self.transport.is_closing():
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.source is not None:
            self.source.pause_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.source is not None:
            self.source.resume_reading()

    def eof_received(self) -> bool:  # type: ignore[override]
        self._sends_no_more = True
        cycle = self.cycle
        return cycle is not None and not cycle.response_complete and cycle.scope["method"] == "GET"

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._sends_no_more and self.cycle.response_complete:
            self.transport.close()


class Reply(asyncio.Protocol):
    """A response of Cog's server, in HTTP/1.0: it ends with its connection, and needs no parser."""

    transport: asyncio.Transport | None = None
    headers: list[Any]
    status = 0

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[bool] = loop.create_future()
        self._head: asyncio.Future[bool] = loop.create_future()
        self._sink: Callable[[bytes], object] | None = None
        self._unread = b""

    async def open(
        self, port: int, passage: Passage, headers: Iterable[tuple[bytes, bytes]]
    ) -> bool:
        """Send a request and read the head of its response; return whether there is one."""
        loop = asyncio.get_running_loop()
        self.transport, _ = await loop.create_connection(lambda: self, "127.0.0.1", port)
        sent = [pair for pair in headers if pair[0] not in _NOT_PASSED_ON]
        sent.append((b"content-length", b"%d" % len(passage.body)))
        target = passage.target.encode("latin-1")
        head = head_bytes(passage.method.encode(), target, b"1.0", sent)
        self.transport.write(head + passage.body)
        return await self._head

    def data_received(self, data: bytes) -> None:
        if self._sink is not None:
            self._sink(data)
            return
        self._unread += data
        if not self._head.done() and HEAD_END in self._unread:
            head, _, self._unread = self._unread.partition(HEAD_END)
            first, *lines = head.split(b"\r\n")
            self.status = int(first.split()[1])
            pairs = [line.split(b": ", 1) for line in lines]
            self.headers = [pair for pair in pairs if pair[0] not in _NOT_RELAYED]
            self._head.set_result(True)

    def connection_lost(self, _: Exception | None) -> None:
        for future in (self._head, self.ended):
            if not future.done():
                future.set_result(False)

    async def copy(self, sink: Callable[[bytes], object]) -> None:
        """Call ``sink`` with each piece of the body as it comes, until its end."""
        sink(self._unread)
        self._sink = sink
        await self.ended

    async def read(self) -> bytes:
        """Return the whole body."""
        body = bytearray()
        await self.copy(body.extend)
        return bytes(body)
