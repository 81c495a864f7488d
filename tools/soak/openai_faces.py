"""The OpenAI face, as a soak asks it: chats in events, and floods of chats in one JSON each."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from tools.server_sent_events import EventParser
from tools.soak.faces import CANCELED, CUT, RETRYABLE, AskError, Face, Piece
from tools.soak.plan import Case

CHAT_TEMPLATE = "{{ bos_token }}{{ messages[0]['content'] }}"
"""Makes of a chat the same tokens as the prompt by itself has, so that the answers are the same."""
FLOOD_TOKENS = 20  # of an answer that many ask for at once, at most
FLOOD_SECONDS = 10.0  # from the end of one flood to the next, at least
PATIENCE = 5.0  # seconds, after which the clients of a flood leave: it holds the places of others
AGAIN = (429, 503)  # statuses that say when to ask again


class OpenAi(Face):
    """POST /v1/chat/completions. Its server's chat template is ``CHAT_TEMPLATE``."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, model: str, *, several: bool = False
    ) -> None:
        """
        Args:
            several: whether processes share the face, of which one may be killed with its connections.
        """
        self._session = session
        self._url = f"{url}/v1/chat/completions"
        self._model = model
        if several:
            self.breaks = frozenset({CUT})

    @asynccontextmanager
    async def _post(
        self, body: dict[str, Any], request_id: str
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer to a request that is taken.

        Raises:
            AskError: it is not, or the connection is lost.
        """
        headers = {"X-Request-Id": request_id}
        try:
            async with self._session.post(self._url, json=body, headers=headers) as reply:
                if reply.status != 200:
                    raise refusal(reply.status, reply.headers, await reply.read())
                yield reply
        except (aiohttp.ClientError, OSError) as error:
            raise AskError(CUT, repr(error)) from error


class OpenAiChat(OpenAi):
    """Streamed."""

    name = "OpenAI SSE"

    async def ask(self, case: Case, request_id: str) -> AsyncGenerator[Piece, None]:
        parser = EventParser()
        body = chat_body(case, self._model)
        async with self._post(body, request_id) as reply:
            async for data in reply.content.iter_any():
                for _, event in parser.feed(data):
                    if event.strip() == b"[DONE]":
                        return
                    if piece := chat_piece(event):
                        yield piece
        raise AskError(CUT, "the stream ended without its last event")


class OpenAiFlood(OpenAi):
    """Answered as a whole: now and then by many requests at once, more than may run and wait."""

    name = "OpenAI JSON"

    def __init__(
        self, session: aiohttp.ClientSession, url: str, model: str, *, several: bool, flood: int
    ) -> None:
        """
        Args:
            flood: so many requests.
        """
        super().__init__(session, url, model, several=several)
        self._flood = flood
        self._next = 0.0

    async def ask(self, case: Case, request_id: str) -> AsyncGenerator[Piece, None]:
        if time.monotonic() < self._next or case.max_tokens > FLOOD_TOKENS:
            yield of_flood([await self._answer(case, request_id)])
            return
        self._next = math.inf
        names = [f"{request_id}-{number}" for number in range(self._flood)]
        asked = [asyncio.create_task(self._answer(case, name)) for name in names]
        try:
            if (await asyncio.wait(asked, timeout=PATIENCE))[1]:
                raise AskError(CANCELED, "the flood was left")
            yield of_flood([task.result() for task in asked])
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            self._next = time.monotonic() + FLOOD_SECONDS

    async def _answer(self, case: Case, request_id: str) -> Piece | AskError:
        body = {**chat_body(case, self._model), "stream": False}
        del body["stream_options"]
        try:
            async with self._post(body, request_id) as reply:
                answer = await reply.json()
        except AskError as error:
            return error
        text = answer["choices"][0]["message"]["content"]
        return Piece(text, int(answer["usage"]["completion_tokens"]))


def of_flood(answers: list[Piece | AskError]) -> Piece:
    """The answer of a flood, if what came is the same for all, and the others were asked to come again.

    Raises:
        AskError: it is not; or none was answered.
    """
    errors = [answer for answer in answers if isinstance(answer, AskError)]
    pieces = [answer for answer in answers if isinstance(answer, Piece)]
    worst = [error for error in errors if error.code not in (*RETRYABLE, CUT)]
    if worst or not pieces:
        raise (worst or errors)[0]
    if len(set(pieces)) > 1:
        raise AskError("answers differ", repr(set(pieces)))
    return pieces[0]


def refusal(status: int, headers: Any, body: bytes) -> AskError:
    """The error that a response is; one that says not when to come again is none that may be retried."""
    if status in AGAIN and not str(headers.get("Retry-After", "")).isdecimal():
        return AskError("no Retry-After", body[:300].decode(errors="replace"))
    return openai_error(body, status)


def chat_body(case: Case, model: str) -> dict[str, Any]:
    """The body of a chat that asks for a case."""
    inputs = {name: value for name, value in case.inputs.items() if name != "prompt"}
    messages = [{"role": "user", "content": case.prompt}]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    return {"model": model, "messages": messages, **options, **inputs}


def chat_piece(event: bytes) -> Piece | None:
    """Return the piece that an event of a chat adds to the answer, if any.

    Raises:
        AskError: it is an error.
    """
    data = json.loads(event)
    if "error" in data:
        raise openai_error(event, 200)
    if usage := data.get("usage"):
        return Piece("", int(usage["completion_tokens"]))
    text = data["choices"][0]["delta"].get("content") if data["choices"] else None
    return Piece(text) if text else None


def openai_error(body: bytes, status: int) -> AskError:
    """The error that a body or an event of OpenAI's API is."""
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return AskError(f"HTTP {status}", body[:300].decode(errors="replace"))
    code = {"rate_limit_exceeded": "E2106"}.get(error["code"], error["code"])
    return AskError(code or f"HTTP {status}", str(error["message"]))
