"""Chunks to a response: events as they come, or one body.

One task has all of a request: the end of its client cancels it, which ends the request in the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson
from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from cog_triton.errors import CogTritonError
from cog_triton.faces.openai.errors import (
    CLIENT_GONE,
    MESSAGES_PATH,
    ApiError,
    api_error,
    message_error,
)
from cog_triton.faces.openai.fields import FIELDS
from cog_triton.faces.openai.served import Chunks, Served, current
from cog_triton.generation import Chunk
from cog_triton.request.request import Request

logger = logging.getLogger(__name__)

NumberedChunks = AsyncIterator[tuple[int, Chunk]]
"""Each chunk with the number of its answer."""
EVENT_STREAM = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # a proxy's
}
dumps = orjson.dumps


class Writer(Protocol):
    """Makes the response of one API: the events of a stream, or the whole body."""

    def events(self, chunks: NumberedChunks) -> AsyncGenerator[bytes, None]: ...

    async def body(self, chunks: NumberedChunks) -> dict[str, Any]: ...

    def failed(self, error: ApiError) -> bytes:
        """Return the last events of a stream that fails."""


@dataclass(eq=False)
class Answering(Response):
    """The response that a writer makes of the answers to requests; it ends with its client."""

    served: Served
    writer: Writer
    requests: Sequence[Request]
    request_id: str
    given_headers: Mapping[str, str]
    stream: bool
    started: bool = False
    background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task, gone = asyncio.current_task(), False
        assert task is not None

        async def end_with_client() -> None:
            nonlocal gone
            while (await receive())["type"] != "http.disconnect":
                pass
            gone = True
            task.cancel()

        watching = asyncio.create_task(end_with_client())
        try:
            with self.served.answering():
                await self._answer(scope, receive, send)
        except asyncio.CancelledError:
            if not gone:
                raise
            if sys.version_info >= (3, 11):  # which counts them
                task.uncancel()
            if not self.started:  # for those who count responses; nobody reads it
                await Response(status_code=CLIENT_GONE)(scope, receive, send)
        finally:
            watching.cancel()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        sources = self.served.generate(self.requests, self.request_id)
        async with contextlib.aclosing(merged(sources)) as chunks:
            if self.stream:
                await self._send_events(chunks, send)
                return
            body = dumps(await self.writer.body(chunks))
        await Response(body, 200, self.given_headers, "application/json")(scope, receive, send)

    async def _send_events(self, chunks: NumberedChunks, send: Send) -> None:
        try:
            async with contextlib.aclosing(self.writer.events(chunks)) as events:
                async for data in events:
                    if not self.started:
                        self.started = True
                        headers = Headers({**EVENT_STREAM, **self.given_headers}).raw
                        start = {"type": "http.response.start", "status": 200, "headers": headers}
                        await send(start)
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        except Exception as error:
            if not self.started:
                raise  # as the error of a whole response
            data = self.writer.failed(client_error(error))
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def merged(sources: Sequence[Chunks]) -> AsyncGenerator[tuple[int, Chunk], None]:
    """Yield the chunks of several answers as they come."""
    if len(sources) == 1:
        async with contextlib.aclosing(sources[0]) as chunks:
            async for chunk in chunks:
                yield 0, chunk
        return
    queue: asyncio.Queue[tuple[int, Chunk | Exception | None]] = asyncio.Queue(len(sources))

    async def feed(number: int, source: Chunks) -> None:
        end = None
        try:
            async with contextlib.aclosing(source) as chunks:
                async for chunk in chunks:
                    await queue.put((number, chunk))
        except Exception as error:
            end = error
        await queue.put((number, end))

    tasks = [asyncio.create_task(feed(number, source)) for number, source in enumerate(sources)]
    try:
        for _ in sources:
            while (item := await queue.get())[1] is not None:
                if isinstance(item[1], Exception):
                    raise item[1]
                yield item[0], item[1]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def event(value: Any) -> bytes:
    return b"data: " + dumps(value) + b"\n\n"


def typed_event(value: dict[str, Any]) -> bytes:
    """Return an event under the name that is its type, as newer APIs have them."""
    return f"event: {value['type']}\n".encode() + event(value)


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)


def client_error(error: Exception) -> ApiError:
    """Return an error as the client reads it, and log one that nobody foresaw."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, CogTritonError):
        return api_error(error, FIELDS, current().names)
    logger.error("an answer failed", exc_info=error)
    return ApiError(500, "an internal error; the server's log has more", "server_error")


class ErrorResponse(Response):
    """An error, in the form of the API whose route was asked."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(status_code=error.status)
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error, body = self._error, self._error.body()
        if scope["path"].startswith(MESSAGES_PATH):
            body = message_error(error, scope["state"]["request_id"])
        await JSONResponse(body, error.status, error.headers)(scope, receive, send)
