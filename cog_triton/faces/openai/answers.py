"""Chunks to a response: as events while they come, or in one body.

One task has all of a request, so that the end of its client, which cancels that task, ends the request in
the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from cog_triton.errors import CogTritonError
from cog_triton.faces.openai.calls import current
from cog_triton.faces.openai.errors import (
    CLIENT_GONE,
    MESSAGES_PATH,
    ApiError,
    api_error,
    internal_error,
    message_error,
)
from cog_triton.faces.openai.fields import FIELDS
from cog_triton.faces.openai.served import Served
from cog_triton.faces.openai.wire import dumps
from cog_triton.generation import Chunk

logger = logging.getLogger(__name__)

Chunks = AsyncGenerator[Chunk, None]
EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy's
]


class Writer(Protocol):
    """What becomes of the chunks of a response's answers, in the form of one API."""

    def begin(self, chunk: Chunk) -> bytes:
        """The events before those of the first chunk, which is handed over to look at."""

    def events(self, number: int, chunk: Chunk) -> bytes:
        """The events of the next chunk of the answer of that number."""

    def end(self) -> bytes:
        """The events behind those of the last chunk."""

    def failed(self, error: ApiError) -> bytes:
        """The last events of a response that fails."""

    def add(self, number: int, chunk: Chunk) -> None:
        """Takes a chunk in; the other way of giving a response."""

    def body(self) -> dict[str, Any]:
        """The whole response, of the chunks taken in."""


@dataclass(frozen=True)
class Answer:
    """One response to be made.

    Attributes:
        start: begins the answers' chunks, in their order.
        headers: of the response.
    """

    served: Served
    writer: Writer
    start: Callable[[], Sequence[Chunks]]
    headers: Mapping[str, str] = field(default_factory=dict)

    async def whole(self) -> bytes:
        """The body of the whole response."""
        async with contextlib.aclosing(merged(self.start())) as chunks:
            async for number, chunk in chunks:
                self.writer.add(number, chunk)
        return dumps(self.writer.body())

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The events, from the first chunk on: before it, an error is one of the whole response."""
        begun = False
        try:
            async with contextlib.aclosing(merged(self.start())) as chunks:
                async for number, chunk in chunks:
                    beginning = b"" if begun else self.writer.begin(chunk)
                    begun = True
                    if events := beginning + self.writer.events(number, chunk):
                        yield events
        except Exception as error:
            if not begun:
                raise
            yield self.writer.failed(told(error))
            return
        yield self.writer.end()


class Answering(Response):
    """The response of an answer; it ends with its client."""

    def __init__(self, answer: Answer, *, stream: bool) -> None:
        self._answer = answer
        self._stream = stream
        self._started = False
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        served, answer = self._answer.served, self._answer
        try:
            with served.answering():
                async with ended_by_client(receive):
                    if self._stream:
                        await self._send_events(send)
                        return
                    headers = dict(answer.headers)
                    body = Response(await answer.whole(), 200, headers, "application/json")
                    await body(scope, receive, send)
        except ClientGone:
            if not self._started:  # for those who count responses; nobody reads it
                await Response(status_code=CLIENT_GONE)(scope, receive, send)

    async def _send_events(self, send: Send) -> None:
        given = [(k.lower().encode(), v.encode()) for k, v in self._answer.headers.items()]
        async with contextlib.aclosing(self._answer.events()) as events:
            async for data in events:
                if not self._started:
                    self._started = True
                    headers = [*EVENT_STREAM, *given]
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


@contextlib.asynccontextmanager
async def ended_by_client(receive: Receive) -> AsyncIterator[None]:
    """Cancels what runs in it when the client goes away, and passes over its end.

    Raises:
        ClientGone: it has gone.
    """
    task = asyncio.current_task()
    assert task is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watching = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if not gone:
            raise
        if sys.version_info >= (3, 11):  # which counts them
            task.uncancel()
        raise ClientGone from None
    finally:
        watching.cancel()


class ClientGone(Exception):
    """Nobody reads the response any more."""


async def merged(sources: Sequence[Chunks]) -> AsyncGenerator[tuple[int, Chunk], None]:
    """The chunks of several answers as they come, each with its answer's number."""
    if len(sources) == 1:
        async with contextlib.aclosing(sources[0]) as chunks:
            async for chunk in chunks:
                yield 0, chunk
        return
    queue: asyncio.Queue[tuple[int, Chunk | BaseException | None]] = asyncio.Queue(len(sources))
    tasks = [asyncio.create_task(_feed(queue, *numbered)) for numbered in enumerate(sources)]
    try:
        for _ in sources:
            while (item := await queue.get())[1] is not None:
                if isinstance(item[1], BaseException):
                    raise item[1]
                yield item[0], item[1]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _feed(
    queue: asyncio.Queue[tuple[int, Chunk | BaseException | None]], number: int, source: Chunks
) -> None:
    try:
        async with contextlib.aclosing(source) as chunks:
            async for chunk in chunks:
                await queue.put((number, chunk))
    except Exception as error:
        await queue.put((number, error))
        return
    await queue.put((number, None))


def told(error: Exception) -> ApiError:
    """What a client is told of an error; one that nobody foresaw is logged."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, CogTritonError):
        return api_error(error, FIELDS, current().names)
    logger.error("an answer failed", exc_info=error)
    return internal_error()


class ErrorResponse(Response):
    """The response that is an error, in the words of the API whose route was asked."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(status_code=error.status)
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._error
        of_messages = scope["path"].startswith(MESSAGES_PATH)
        request_id = scope["state"]["request_id"]
        body = message_error(error, request_id) if of_messages else error.body()
        await JSONResponse(body, error.status, error.headers)(scope, receive, send)


def error_response(error: ApiError) -> Response:
    """The response that is an error."""
    return ErrorResponse(error)
