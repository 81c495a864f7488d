"""Cog's server, as the front asks it: one connection for each request, in HTTP/1.0."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
import orjson

from cog_triton.api.cog.answer import Answer
from cog_triton.api.cog.inner_port import connect, random_source
from cog_triton.api.cog.passage import Passage
from cog_triton.api.cog.predictions import Predictions
from cog_triton.web import Refusal
from cog_triton.web.server import HEAD_END, Headers, head_bytes

STOPPED = "E2105 TritonUnavailable: the server is being stopped"
READ_AHEAD_BYTES = 1 << 16
_ASK_SECONDS = 4.0
_NOT_PASSED_ON = frozenset(
    b"connection content-length expect keep-alive proxy-connection te transfer-encoding".split()
)
# uvicorn writes its own.
_NOT_RELAYED = (b"connection", b"date")


@dataclass(frozen=True)
class Reply:
    """A response of Cog's server, whose body has not come yet."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: Answer

    @property
    def has_length(self) -> bool:
        """Whether the headers say how long the body is, as those of a stream do not."""
        return any(name == b"content-length" for name, _ in self.headers)


class CogServer:
    """Sends requests to Cog's server, and notes the predictions that they begin."""

    def __init__(self, predictions: Predictions, *, drain_seconds: float) -> None:
        """Connect to nothing yet; ``port`` is set once Cog's server listens."""
        # The address that connections come from.
        self.source = random_source()
        self.port = 0
        self._predictions = predictions
        self._drain_seconds = drain_seconds

    @contextlib.asynccontextmanager
    async def exchange(
        self, passage: Passage, headers: Headers = (), read_ahead: int = READ_AHEAD_BYTES
    ) -> AsyncIterator[Reply]:
        """Send a request, and yield the reply when its head has come, or raise Refusal.

        Leaving it ends the connection. A prediction that it began has ended for the front then.

        Args:
            read_ahead: bytes of the body that are read before anybody takes them.
        """
        answer = Answer(read_ahead, headers)
        status = 0
        transport: asyncio.Transport | None = None
        problem = ""
        if passage.starts is not None:
            problem = self._predictions.begin(
                passage.starts, answer.show, has_webhook=passage.has_webhook
            )
        try:
            if problem:
                raise Refusal(503, f"cannot create files for this prediction: {problem}")
            try:
                transport = await self._send(passage, headers, answer)
                status, reply_headers = await _read_head(answer)
            except asyncio.IncompleteReadError:
                raise Refusal(502, "Cog's server closed the connection without an answer") from None
            except OSError:
                text = "Cog's server is stopping and accepts no connections"
                raise Refusal(503, text, retry_after=self._restart_seconds()) from None
            except asyncio.CancelledError:
                # ``Predictions.cancel_relays``, as the server stops, or a client that has left.
                raise Refusal(503, STOPPED, retry_after=self._restart_seconds()) from None
            yield Reply(status, reply_headers, answer)
        finally:
            if transport is not None:
                transport.abort()
            if passage.starts is not None:
                self._predictions.end(passage.starts, status)

    async def ask(self, method: str, path: str) -> Any:
        """Return the JSON that Cog's server answers; None if it does not answer."""
        with contextlib.suppress(OSError, ValueError, Refusal), anyio.move_on_after(_ASK_SECONDS):
            async with self.exchange(Passage(method, path)) as reply:
                return orjson.loads(await reply.body.read())
        return None

    async def status(self) -> str | None:
        """Return its status in its own words, such as READY or BUSY; None if it does not answer."""
        answer = await self.ask("GET", "/health-check") or {}
        status: str | None = answer.get("status")
        return status

    async def _send(self, passage: Passage, headers: Headers, answer: Answer) -> asyncio.Transport:
        """Connect and write the request; the response goes to ``answer``. Raises OSError."""
        transport, _ = await asyncio.get_running_loop().create_connection(
            partial(asyncio.StreamReaderProtocol, answer),
            sock=await connect(self.source, self.port),
        )
        sent_headers = [pair for pair in headers if pair[0] not in _NOT_PASSED_ON]
        sent_headers.append((b"content-length", b"%d" % len(passage.body)))
        target = passage.target.encode("latin-1")
        # The response to a request in HTTP/1.0 ends with its connection.
        head = head_bytes(passage.method.encode(), target, b"1.0", sent_headers)
        transport.write(head + passage.body)
        return transport

    def _restart_seconds(self) -> int:
        return max(1, math.ceil(self._drain_seconds))


async def _read_head(answer: Answer) -> tuple[int, list[tuple[bytes, bytes]]]:
    """Read the status and the headers that are relayed, or raise IncompleteReadError."""
    head = await answer.readuntil(HEAD_END)
    status_line, *lines = head.removesuffix(HEAD_END).split(b"\r\n")
    status = int(status_line.split()[1])
    headers = []
    for line in lines:
        name, _, value = line.partition(b": ")
        if name not in _NOT_RELAYED:
            headers.append((name, value))
    return status, headers
