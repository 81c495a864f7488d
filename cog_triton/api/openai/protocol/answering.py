"""The response that a writer makes of the answers to requests."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cog_triton.api.openai.errors import CLIENT_GONE
from cog_triton.api.openai.protocol import events
from cog_triton.api.openai.protocol.events import dumps
from cog_triton.api.openai.protocol.writer import Writer, event_stream, merged
from cog_triton.api.openai.schemas.base import AnswerBody
from cog_triton.api.openai.served import Served
from cog_triton.generation import Chunk
from cog_triton.request.request import Request

MAX_VALUES_ON_LOOP = 2000  # a response with more is written in a thread
_T = TypeVar("_T")


@dataclass(eq=False)
class Answering(Response):
    """The response that a writer makes of the answers to requests. If its client leaves, they end.

    Attributes:
        started: whether the status has been sent.
        ended: awaited before the end of the response is sent.
    """

    served: Served
    body_of_request: AnswerBody
    writer: Writer
    requests: Sequence[Request]
    started: bool = False
    ended: Callable[[], Awaitable[None]] | None = None
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
        elif not self.started:  # so that the log has a status; nobody reads it
            await Response(status_code=CLIENT_GONE)(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.served.answering():
            if self.body_of_request.stream:
                await self._send_events(send)
                return
            answers: list[list[Chunk]] = [[] for _ in self.requests]
            async with contextlib.aclosing(self._chunks()) as chunks:
                async for number, chunk in chunks:
                    answers[number].append(chunk)
            run = asyncio.to_thread if _values_of(answers) > MAX_VALUES_ON_LOOP else _at_once
            whole = await run(self.writer.whole, answers)
            if self.ended:
                await self.ended()
            content = await run(dumps, whole)
            headers = self.body_of_request.warning()
            await Response(content, 200, headers, "application/json")(scope, receive, send)

    async def _send_events(self, send: Send) -> None:
        async with contextlib.aclosing(self._chunks()) as chunks:
            stream = event_stream(self.writer, chunks, self.ended)
            async with contextlib.aclosing(stream) as pieces:
                async for data in pieces:
                    if not self.started:
                        await self._send_start(send)
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _send_start(self, send: Send) -> None:
        headers = Headers({**events.HEADERS, **self.body_of_request.warning()}).raw
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self.started = True

    def _chunks(self) -> AsyncGenerator[tuple[int, Chunk], None]:
        return merged(self.served.generate(self.requests))


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
