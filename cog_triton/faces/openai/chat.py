"""POST /v1/chat/completions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastapi import APIRouter

from cog_triton.faces.openai.answers import Answering, answering
from cog_triton.faces.openai.dependencies import FromApp, RequestId
from cog_triton.faces.openai.errors import invalid
from cog_triton.faces.openai.fields import ChatBody, NamedTool
from cog_triton.faces.openai.log_probs import chat_log_probs
from cog_triton.faces.openai.prompts import chat_prompt, template_text
from cog_triton.faces.openai.reasoning import ReasoningParser, thinks
from cog_triton.faces.openai.sampling import longest_output, sampling, with_seed
from cog_triton.faces.openai.served import Served
from cog_triton.faces.openai.tools.choice import call_guide, is_enforced, offered_tools
from cog_triton.faces.openai.tools.events import (
    CallStart,
    Event,
    Parser,
    Reasoning,
    Text,
)
from cog_triton.faces.openai.tools.formats import CallParser, Format, format_of
from cog_triton.faces.openai.wire import Head, dumps, new_id
from cog_triton.generation import Chunk
from cog_triton.request import Request
from cog_triton.text.tokenizer import Tokenizer

router = APIRouter()
_MARK = "\x00text\x00"


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatBody, served: FromApp, request_id: RequestId) -> Answering:
    """Answers messages, in one body or as events."""
    template = template_text(served.backend.tokenizer)
    known = _tool_format(body, template)
    request = chat_request(body, served, known)
    head = Head(
        new_id("chatcmpl-"),
        "chat.completion",
        "chat.completion.chunk",
        served.now(),
        body.model,
        body.include_usage,
    )
    named = isinstance(body.tool_choice, NamedTool)
    choices = [
        ChatChoice(
            number,
            head,
            served.backend.tokenizer,
            _parser(body, request, known, template),
            named=named,
        )
        for number in range(body.choices)
    ]
    requests = [replace(request, **with_seed(request, n)) for n in range(body.choices)]
    return answering(body, served, head, requests, choices, request_id)


def chat_request(body: ChatBody, served: Served, known: Format | None) -> Request:
    """The request for the first answer.

    Raises:
        ApiError, UserError: the body asks for what cannot be had.
    """
    values = sampling(body)
    if known is not None and is_enforced(body):
        if values["guide"] is not None:
            raise invalid("tool_choice and another guide contradict", "tool_choice")
        values["guide"] = call_guide(body, known)
    prompt = chat_prompt(
        served.backend,
        body.messages,
        offered_tools(body),
        body.chat_template_kwargs,
        body.add_generation_prompt,
    )
    given = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return Request(
        prompt=prompt,
        add_special_tokens=False,
        adapter=served.adapter(body.model),
        max_tokens=longest_output(served) if given is None else given,
        log_probs=(body.top_logprobs or 0) if body.logprobs else None,
        **served.token_ids(),
        **values,
    )


def _tool_format(body: ChatBody, template: str) -> Format | None:
    """How the model writes calls, None if it is not offered tools.

    Raises:
        ApiError: it is offered some, and its template takes none.
    """
    if not offered_tools(body):
        return None
    if (known := format_of(template)) is None:
        raise invalid("tools: the chat template of this model takes none", "tools")
    return known


def _parser(body: ChatBody, request: Request, known: Format | None, template: str) -> Parser | None:
    """What reads an answer's text; None if all of it is content."""
    calls = CallParser(known, guided=is_enforced(body)) if known else None
    if thinks(template) and request.guide is None:
        return ReasoningParser(request.prompt, calls)
    return calls


class ChatChoice:
    """One answer: see ``answers.Choice``."""

    def __init__(
        self,
        index: int,
        head: Head,
        tokenizer: Tokenizer,
        parser: Parser | None,
        *,
        named: bool = False,
    ) -> None:
        """Nothing has come yet.

        Args:
            parser: reads the text; None if all of it is content.
            named: whether a call was forced by its name.
        """
        self._named = named
        self._index = index
        self._head = head
        self._tokenizer = tokenizer
        self._parser = parser
        self._around = head.around(self._choice({"content": _MARK}), _MARK)
        self._called = False
        self._message = WholeMessage()

    def begin(self) -> bytes:
        """See ``Choice``."""
        return self._head.event(
            [self._choice({"role": "assistant", "content": "", "refusal": None})]
        )

    def events(self, chunk: Chunk) -> bytes:
        """See ``Choice``."""
        if self._parser is None and not chunk.log_probs:
            before, behind = self._around
            text = before + dumps(chunk.text) + behind if chunk.text else b""
        else:
            text = b"".join(self._parsed_events(chunk))
        if chunk.finish_reason is None:
            return text
        return text + self._head.event([self._choice({}, None, self._finish_reason(chunk))])

    def add(self, chunk: Chunk) -> None:
        """See ``Choice``."""
        for event in self._parse(chunk):
            self._message.add(event)
        self._message.log_probs += chat_log_probs(self._tokenizer, chunk.log_probs)
        if chunk.finish_reason is not None:
            self._message.finish_reason = self._finish_reason(chunk)

    def body(self) -> dict[str, Any]:
        """See ``Choice``."""
        return {
            "index": self._index,
            "message": self._message.body(),
            "logprobs": _log_probs(self._message.log_probs),
            "finish_reason": self._message.finish_reason,
        }

    def _parsed_events(self, chunk: Chunk) -> list[bytes]:
        deltas = [_delta(event) for event in self._parse(chunk)]
        log_probs = _log_probs(chat_log_probs(self._tokenizer, chunk.log_probs))
        if log_probs and not deltas:
            deltas = [{"content": ""}]
        # With the first of them: each token is told of once.
        return [
            self._head.event([self._choice(delta, None if number else log_probs)])
            for number, delta in enumerate(deltas)
        ]

    def _parse(self, chunk: Chunk) -> list[Event]:
        if self._parser is None:
            return [Text(chunk.text)] if chunk.text else []
        events = self._parser.feed(chunk.text)
        if chunk.finish_reason is not None:
            events += self._parser.flush()
        self._called = self._called or any(isinstance(event, CallStart) for event in events)
        return events

    def _finish_reason(self, chunk: Chunk) -> str | None:
        # Of a call that was forced by its name, OpenAI says stop.
        if self._called and chunk.finish_reason == "stop" and not self._named:
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


class WholeMessage:
    """A whole message, as its events make it."""

    def __init__(self) -> None:
        self.log_probs: list[dict[str, Any]] = []
        self.finish_reason: str | None = None
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
