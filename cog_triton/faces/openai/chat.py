"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter

from cog_triton.faces.openai.answers import Answering
from cog_triton.faces.openai.bodies import BodyRoute, off_loop
from cog_triton.faces.openai.choices import answering, head_of
from cog_triton.faces.openai.dependencies import FromApp, RequestId
from cog_triton.faces.openai.fields import ChatBody
from cog_triton.faces.openai.log_probs import chat_log_probs, prompt_entries, wanted
from cog_triton.faces.openai.openapi import STREAMED
from cog_triton.faces.openai.sampling import with_seed
from cog_triton.faces.openai.tokens import with_ids
from cog_triton.faces.openai.tools.events import (
    CallStart,
    Event,
    Reasoning,
    Text,
)
from cog_triton.faces.openai.turns import Turn, chat_turn
from cog_triton.faces.openai.wire import Head, dumps, stop_reason
from cog_triton.generation import Chunk
from cog_triton.text.tokenizer import Tokenizer
from cog_triton.wire import TokenLogProb

router = APIRouter(route_class=BodyRoute)
_MARK = "\x00text\x00"


@router.post("/v1/chat/completions", responses=STREAMED)
async def chat_completions(body: ChatBody, served: FromApp, request_id: RequestId) -> Answering:
    """Answers messages, in one body or as events."""
    turn = await off_loop(chat_turn, body, served)
    head = head_of(body, served, "chatcmpl-", "chat.completion", "chat.completion.chunk")
    (request,) = await with_ids([turn.request], body, served)
    choices = [
        ChatChoice(number, head, served.backend.tokenizer, turn, body, request.prompt_ids)
        for number in range(body.choices)
    ]
    requests = [replace(request, **with_seed(request, n)) for n in range(body.choices)]
    return answering(body, served, head, requests, choices, request_id)


def echoed(body: ChatBody) -> str:
    """The text of the assistant's that the answer follows."""
    last = body.messages[-1]
    if not body.echo or last.role != "assistant":
        return ""
    content = last.content or last.refusal or ""
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text") or part.get("refusal") or "" for part in content)


class ChatChoice:
    """One answer: see ``choices.Choice``."""

    def __init__(
        self,
        index: int,
        head: Head,
        tokenizer: Tokenizer,
        turn: Turn,
        body: ChatBody,
        prompt_ids: Sequence[int],
    ) -> None:
        self._index = index
        self._head = head
        self._tokenizer = tokenizer
        self._reader = turn.reader()
        self._named = turn.named
        self._asked = body
        self._prompt_ids = prompt_ids
        self._prompt_tokens: list[TokenLogProb] = []
        self._echo = echoed(body)
        self._around = head.around(self._choice({"content": _MARK}), _MARK)
        self._message = Message()
        if self._echo:
            self._message.add(Text(self._echo))

    def begin(self) -> bytes:
        """See ``Choice``."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        role = self._head.event([self._choice(delta)], **self._prompt_token_ids())
        if not self._echo:
            return role
        return role + self._head.event([self._choice({"content": self._echo})])

    def events(self, chunk: Chunk) -> bytes:
        """See ``Choice``."""
        if self._reader.plain and not chunk.log_probs and not self._asked.return_token_ids:
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
        self._message.log_probs += self._log_probs(chunk)
        self._message.ids += chunk.ids
        self._prompt_tokens += chunk.prompt_log_probs
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
            **self._token_ids(self._message.ids),
        }

    def prompt(self) -> dict[str, Any]:
        """See ``Choice``."""
        fields = self._prompt_token_ids()
        if (top := self._asked.prompt_logprobs) is not None:
            fields["prompt_logprobs"] = prompt_entries(self._tokenizer, self._prompt_tokens, top)
        return fields

    def _prompt_token_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": self._prompt_ids} if self._asked.return_token_ids else {}

    def _token_ids(self, ids: Sequence[int]) -> dict[str, Any]:
        return {"token_ids": ids} if self._asked.return_token_ids else {}

    def _log_probs(self, chunk: Chunk) -> list[dict[str, Any]]:
        tokens = wanted(chunk.log_probs, self._asked.wanted_log_probs)
        return chat_log_probs(self._tokenizer, tokens)

    def _parsed_events(self, chunk: Chunk) -> list[bytes]:
        deltas = [_delta(event) for event in self._reader.read(chunk)]
        log_probs = _log_probs(self._log_probs(chunk))
        ids = self._token_ids(chunk.ids) if chunk.ids else {}
        if (log_probs or ids) and not deltas:
            deltas = [{"content": ""}]
        # With the first of them: each token is told of once.
        choices = [self._choice(delta) for delta in deltas]
        if choices:
            choices[0] |= {"logprobs": log_probs, **ids}
        return [self._head.event([choice]) for choice in choices]

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
        self.ids: list[int] = []
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
