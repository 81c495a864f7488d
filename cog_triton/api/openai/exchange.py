"""A request's body in, off the event loop where it is large, and its response out, whole or in events."""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol, TypeVar

import orjson
from fastapi import Request as HttpRequest
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from cog_triton.api.openai.errors import (
    CLIENT_GONE,
    MESSAGES_PATH,
    TABLES,
    ApiError,
    api_error,
    invalid,
)
from cog_triton.api.openai.schemas.base import AnswerBody
from cog_triton.api.openai.served import Chunks, Served, current
from cog_triton.api.openai.validation import NEEDS_OBJECT, validated
from cog_triton.errors import CogTritonError, shown
from cog_triton.generation import Chunk
from cog_triton.protocol.log_probs import TokenLogProb
from cog_triton.request.request import Request
from cog_triton.text.tokenizer import Tokenizer
from cog_triton.web import bodies
from cog_triton.web.origin import is_json

logger = logging.getLogger(__name__)
LARGE_BODY = bodies.LARGE_BYTES
MOST_VALUES_ON_LOOP = 2000  # of a whole response that is made without a thread
TOKEN_TEXTS = 1 << 16  # that are kept
ERRORS, MESSAGE_ERRORS, STREAMED = TABLES["responses"]  # of routes, in /openapi.json
_T = TypeVar("_T")
dumps = orjson.dumps


class BodyRoute(APIRoute):
    """A route whose body is validated before FastAPI's own reader, which blocks the event loop."""

    def get_route_handler(self) -> Callable[[HttpRequest], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        if self.body_field is None:
            return handler
        model: Any = self.body_field.field_info.annotation

        async def handle(request: HttpRequest) -> Response:
            try:
                raw = await request.body()
            except ClientDisconnect:
                return Response(status_code=CLIENT_GONE)  # for the log; nobody reads it
            if not (kind := request.headers.get("content-type")):
                raise invalid(NEEDS_OBJECT)
            if not is_json(kind):
                text = f"the body must have Content-Type: application/json, not {shown(kind)}"
                raise ApiError(415, text, code="unsupported_content_type")
            current().large = len(raw) >= LARGE_BODY
            served = request.app.state.served
            body = await bodies.off_loop(len(raw), validated, raw, model, served)
            current().names = body.names()
            request._json = body  # which FastAPI reads, and pydantic takes as it is
            return await handler(request)

        return handle


async def off_loop(function: Callable[..., _T], *args: Any) -> _T:
    """Call a function that prepares the current request, in a thread if its body is large."""
    return await asyncio.to_thread(function, *args) if current().large else function(*args)


class Writer(Protocol):
    """Makes the response of one API: the events of a stream, or the whole body."""

    def events(self, number: int, chunk: Chunk, /) -> Iterable[bytes]: ...  # of a next chunk
    def failed(self, error: ApiError) -> Iterable[bytes]: ...  # the last ones of a stream
    def whole(self, answers: Sequence[Sequence[Chunk]]) -> dict[str, Any]: ...


@dataclass(eq=False)
class Answering(Response):
    """The response that a writer makes of the answers to requests; its client's end ends these."""

    served: Served
    asked: AnswerBody
    writer: Writer
    requests: Sequence[Request]
    started: bool = False
    ended: Callable[[], Awaitable[None]] | None = None  # awaited before the end is sent
    background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def client_ends() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        gone = asyncio.create_task(client_ends())
        answer = asyncio.create_task(self._answer(scope, receive, send))
        try:
            await asyncio.wait((gone, answer), return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            answer.cancel()
            await asyncio.wait((answer,))
        if not answer.cancelled():
            answer.result()
        elif not self.started:  # for those who count responses; nobody reads it
            await Response(status_code=CLIENT_GONE)(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        answers: list[list[Chunk]] = [[] for _ in self.requests]

        async def keep(number: int, chunk: Chunk) -> None:
            answers[number].append(chunk)

        with self.served.answering():
            if self.asked.stream:
                await self._send_events(send)
                return
            await self._read(keep)
            run = asyncio.to_thread if _values_of(answers) > MOST_VALUES_ON_LOOP else _at_once
            whole = await run(self.writer.whole, answers)
            if self.ended:
                await self.ended()
            content, headers = await run(dumps, whole), self.asked.warning()
            await Response(content, 200, headers, "application/json")(scope, receive, send)

    async def _send_events(self, send: Send) -> None:
        starting = asyncio.Lock()  # of several answers, by one

        async def write(number: int, chunk: Chunk) -> None:
            if not (data := b"".join(self.writer.events(number, chunk))):
                return
            if self.ended and chunk.finish_reason is not None:
                await self.ended()
            if not self.started:
                headers = Headers({**TABLES["event_stream"], **self.asked.warning()}).raw
                start = {"type": "http.response.start", "status": 200, "headers": headers}
                async with starting:
                    if not self.started:
                        await send(start)
                        self.started = True
            await send({"type": "http.response.body", "body": data, "more_body": True})

        try:
            await self._read(write)
        except Exception as error:
            if not self.started:
                raise  # as the error of a whole response
            data = b"".join(self.writer.failed(client_error(error)))
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _read(self, take: Callable[[int, Chunk], Awaitable[None]]) -> None:
        """Give the chunks of all answers to ``take`` as they come; an error of one ends all."""

        async def read(number: int, source: Chunks) -> None:
            async with contextlib.aclosing(source) as chunks:
                async for chunk in chunks:
                    await take(number, chunk)

        sources = self.served.generate(self.requests)
        tasks = [asyncio.create_task(read(number, own)) for number, own in enumerate(sources)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


def _values_of(answers: Sequence[Sequence[Chunk]]) -> int:
    """Return about how many values a whole response has: of chunks, tokens and their alternatives."""
    count = 0
    for chunks in answers:
        count += len(chunks)
        for chunk in chunks:
            for tokens in (chunk.log_probs, chunk.prompt_log_probs):
                if tokens:
                    count += len(tokens) * (1 + len(tokens[-1].top))
    return count


async def _at_once(function: Callable[..., _T], *args: Any) -> _T:
    return function(*args)


def joined(chunks: Sequence[Chunk]) -> Chunk:
    """Return one chunk with all that came."""
    return replace(
        chunks[-1],
        text="".join(chunk.text for chunk in chunks),
        ids=tuple(id for chunk in chunks for id in chunk.ids),
        log_probs=tuple(token for chunk in chunks for token in chunk.log_probs),
        prompt_log_probs=chunks[0].prompt_log_probs,
    )


def event(value: Any) -> bytes:
    return b"data: " + dumps(value) + b"\n\n"


def typed_event(kind: str, /, **values: Any) -> bytes:
    """Return an event under the name that is its type, as newer APIs have them."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), dumps({"type": kind, **values}))


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)


def chat_log_probs(
    tokenizer: Tokenizer, tokens: Iterable[TokenLogProb], top: int | None = None
) -> list[dict[str, Any]]:
    """Return the entries of a chat's log probabilities, with so many alternatives; None for all."""

    def entry(token: int, log_prob: float) -> dict[str, Any]:
        text = token_text(tokenizer, token)
        return {"token": text, "logprob": log_prob, "bytes": list(text.encode())}

    return [
        entry(token.id, token.log_prob) | {"top_logprobs": [entry(*own) for own in token.top[:top]]}
        for token in tokens
    ]


@lru_cache(TOKEN_TEXTS)  # each costs dozens of microseconds, and a response may have a million
def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Return one token's text, by itself; special ones have theirs."""
    return str(tokenizer.decode([token], skip_special_tokens=False))


def client_error(error: Exception) -> ApiError:
    """Return an error as the client reads it; note it for the request's line of the log."""
    told = _client_error(error)
    current().reason = told.log_text()
    return told


def _client_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, CogTritonError):
        return api_error(error, current().names)
    logger.error("an answer failed", exc_info=error)
    return ApiError(500, "internal error; see the server's log", "server_error")


def error_response(error: ApiError) -> Response:
    """Return an error in the form of the API whose route is asked."""
    call = current()
    path = MESSAGES_PATH if call.anthropic else call.path
    return JSONResponse(error.body(path, call.id), error.status, error.headers)
