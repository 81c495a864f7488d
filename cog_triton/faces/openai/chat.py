"""POST /v1/chat/completions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastapi import APIRouter

from cog_triton.faces.openai.answers import Answering
from cog_triton.faces.openai.bodies import BodyRoute, off_loop
from cog_triton.faces.openai.choices import answering, head_of
from cog_triton.faces.openai.dependencies import FromApp, RequestId
from cog_triton.faces.openai.fields import ChatBody
from cog_triton.faces.openai.log_probs import chat_log_probs
from cog_triton.faces.openai.openapi import STREAMED
from cog_triton.faces.openai.sampling import with_seed
from cog_triton.faces.openai.tools.events import (
    CallStart,
    Event,
    Reasoning,
    Text,
)
from cog_triton.faces.openai.turns import Reader, chat_turn
from cog_triton.faces.openai.wire import Head, dumps, stop_reason
from cog_triton.generation import Chunk
from cog_triton.text.tokenizer import Tokenizer

router = APIRouter(route_class=BodyRoute)
_MARK = "\x00text\x00"


@router.post("/v1/chat/completions", responses=STREAMED)
async def chat_completions(body: ChatBody, served: FromApp, request_id: RequestId) -> Answering:
    """Answers messages, in one body or as events."""
    turn = await off_loop(chat_turn, body, served)
    head = head_of(body, served, "chatcmpl-", "chat.completion", "chat.completion.chunk")
    choices = [
        ChatChoice(number, head, served.backend.tokenizer, turn.reader(), named=turn.named)
        for number in range(body.choices)
    ]
    requests = [replace(turn.request, **with_seed(turn.request, n)) for n in range(body.choices)]
    return answering(body, served, head, requests, choices, request_id)


class ChatChoice:
    """One answer: see ``choices.Choice``."""

    def __init__(
        self, index: int, head: Head, tokenizer: Tokenizer, reader: Reader, *, named: bool
    ) -> None:
        self._index = index
        self._head = head
        self._tokenizer = tokenizer
        self._reader = reader
        self._named = named
        self._around = head.around(self._choice({"content": _MARK}), _MARK)
        self._message = Message()

    def begin(self) -> bytes:
        """See ``Choice``."""
        return self._head.event(
            [self._choice({"role": "assistant", "content": "", "refusal": None})]
        )

    def events(self, chunk: Chunk) -> bytes:
        """See ``Choice``."""
        if self._reader.plain and not chunk.log_probs:
            before, behind = self._around
            text = before + dumps(chunk.text) + behind if chunk.text else b""
        else:
            text = b"".join(self._parsed_events(chunk))
        if chunk.finish_reason is None:
            return text
        last = self._choice({}, None, self._finish_reason(chunk))
        return text + self._head.event([{**last, **stop_reason(chunk.stop_token)}])

    def add(self, chunk: Chunk) -> None:
        """See ``Choice``."""
        for event in self._reader.read(chunk):
            self._message.add(event)
        self._message.log_probs += chat_log_probs(self._tokenizer, chunk.log_probs)
        if chunk.finish_reason is not None:
            self._message.finish_reason = self._finish_reason(chunk)
            self._message.stop_token = chunk.stop_token

    def body(self) -> dict[str, Any]:
        """See ``Choice``."""
        return {
            "index": self._index,
            "message": self._message.body(),
            "logprobs": _log_probs(self._message.log_probs),
            "finish_reason": self._message.finish_reason,
            **stop_reason(self._message.stop_token),
        }

    def _parsed_events(self, chunk: Chunk) -> list[bytes]:
        deltas = [_delta(event) for event in self._reader.read(chunk)]
        log_probs = _log_probs(chat_log_probs(self._tokenizer, chunk.log_probs))
        if log_probs and not deltas:
            deltas = [{"content": ""}]
        # With the first of them: each token is told of once.
        return [
            self._head.event([self._choice(delta, None if number else log_probs)])
            for number, delta in enumerate(deltas)
        ]

    def _finish_reason(self, chunk: Chunk) -> str | None:
        # Of a call that was forced by its name, OpenAI says stop.
        if self._reader.called and chunk.finish_reason == "stop" and not self._named:
            return "tool_calls"
        return chunk.finish_reason

    def _choice(
        self, delta: dict[str, Any], log_probs: Any = None, finish_reason: str | None = None
    ) -> dict[str, Any]:
        return {
            "index": self._index,
            "delta": delta,
            "logprobs": log_probs,
            "finish_reason": finish_reason,
        }


class Message:
    """A whole message, as its events make it."""

    def __init__(self) -> None:
        self.log_probs: list[dict[str, Any]] = []
        self.finish_reason: str | None = None
        self.stop_token: int | None = None
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []

    def add(self, event: Event) -> None:
        """Takes in the next event."""
        if isinstance(event, Text):
            self._content.append(event.text)
        elif isinstance(event, Reasoning):
            self._reasoning.append(event.text)
        elif isinstance(event, CallStart):
            self._calls.append(_call(event))
        else:
            self._calls[event.index]["function"]["arguments"] += event.text

    def body(self) -> dict[str, Any]:
        """As JSON's object."""
        content = "".join(self._content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if self._calls and not content else content,
            "refusal": None,
            "annotations": [],
        }
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = self._calls
        return message


def _delta(event: Event) -> dict[str, Any]:
    if isinstance(event, Text):
        return {"content": event.text}
    if isinstance(event, Reasoning):
        return {"reasoning_content": event.text}
    if isinstance(event, CallStart):
        return {"tool_calls": [{"index": event.index, **_call(event)}]}
    return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}


def _call(start: CallStart) -> dict[str, Any]:
    function = {"name": start.name, "arguments": ""}
    return {"id": start.id, "type": "function", "function": function}


def _log_probs(content: list[dict[str, Any]]) -> dict[str, Any] | None:
    return {"content": content, "refusal": None} if content else None
