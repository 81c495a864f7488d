"""POST /v1/responses: OpenAI's newer API, on the same chats. Nothing is stored."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field

from cog_triton.errors import shown
from cog_triton.faces.openai.answers import Answering, NumberedChunks, dumps, new_id, typed_event
from cog_triton.faces.openai.bodies import STREAMED, BodyRoute, off_loop
from cog_triton.faces.openai.errors import ApiError, invalid
from cog_triton.faces.openai.fields import (
    Body,
    Bounded,
    ChatBody,
    Effort,
    Function,
    JsonSchema,
    OutputTokens,
    Temperature,
    check_fields,
)
from cog_triton.faces.openai.parsing import CallStart, Reasoning, Text
from cog_triton.faces.openai.served import FromApp, RequestId
from cog_triton.faces.openai.tokens import chat_log_probs
from cog_triton.faces.openai.turns import Reader, chat_turn
from cog_triton.generation import Chunk
from cog_triton.text.tokenizer import Tokenizer

router = APIRouter(route_class=BodyRoute)


class FlatNamedTool(Body):
    type: Literal["function"]
    name: str


class FlatTool(Function, FlatNamedTool):
    """Its type is checked before its name."""


class FlatAllowedTools(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FlatNamedTool], Field(min_length=1), Bounded]


class ReasoningOptions(Body):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class TextFormat(JsonSchema):
    type: Literal["text", "json_object", "json_schema"]


class TextOptions(Body):
    format: TextFormat | None = None


class Part(Body):
    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(Body):
    """One item of the input; its fields depend on its type, which a message need not have."""

    type: str | None = None
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | Annotated[list[Part], Bounded] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | Annotated[list[Part], Bounded] | None = None


class ResponsesBody(Body):
    """The body of /v1/responses."""

    model: str
    input: str | Annotated[list[InputItem], Bounded]
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: OutputTokens | None = None
    temperature: Temperature | None = None
    reasoning: ReasoningOptions | None = None
    top_p: float | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    include: list[str] | None = None
    text: TextOptions | None = None
    tools: Annotated[list[FlatTool], Bounded] | None = None
    tool_choice: (
        Literal["none", "auto", "required"]
        | Annotated[FlatNamedTool | FlatAllowedTools, Field(discriminator="type")]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    # Beyond OpenAI's:
    seed: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: str | list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def names(self) -> dict[str, str]:
        return {"prompt": "input", "max_tokens": "max_output_tokens", "guide": "text.format"}


# Fields that ask for what is not done here, with the values that ask for nothing.
REFUSED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("conversation", "prompt", "max_tool_calls"), ()),
    **dict.fromkeys(("store", "background"), (False,)),
    "previous_response_id": ("",),
    "truncation": ("disabled",),
}
_CACHE = {"prompt_cache_key", "prompt_cache_retention"}
IGNORED = frozenset({"service_tier", "safety_identifier", "stream_options", *_CACHE})
LOG_PROBS = "message.output_text.logprobs"
INCLUDED = (LOG_PROBS, "reasoning.encrypted_content")
"""Values of ``include``; thoughts are not encrypted, their text comes in any case."""
_SAME = (
    *("model", "temperature", "top_p", "top_logprobs", "parallel_tool_calls", "user", "seed"),
    *("top_k", "min_p", "stop", "chat_template_kwargs"),
)
_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")


@router.post("/v1/responses", responses=STREAMED)
async def responses(body: ResponsesBody, served: FromApp, request_id: RequestId) -> Answering:
    headers, stream = check_fields(body, REFUSED, IGNORED), bool(body.stream)
    turn = await off_loop(lambda: chat_turn(chat_body(body), served))
    fields = response_fields(body, served.now())
    writer = ResponseWriter(fields, turn.reader(), served.backend.tokenizer)
    return Answering(served, writer, [turn.request], request_id, headers, stream=stream)


def chat_body(body: ResponsesBody) -> ChatBody:
    """Return the chat that a body asks for, or raise ApiError."""
    included, choice = body.include or [], body.tool_choice
    for name in included:
        if name not in INCLUDED:
            raise invalid(f"include: {shown(name)} is not supported", "include")
    if not (messages := chat_messages(body)):
        raise invalid("input must not be empty", "input")
    chat: dict[str, Any] = {name: getattr(body, name) for name in _SAME}
    chat["messages"] = messages
    chat["max_completion_tokens"] = body.max_output_tokens
    chat["logprobs"] = LOG_PROBS in included or bool(body.top_logprobs)
    chat["reasoning_effort"] = body.reasoning.effort if body.reasoning else None
    chat["tools"] = [_nested(tool) for tool in body.tools or []]
    chat["tool_choice"] = choice
    if isinstance(choice, FlatNamedTool):
        chat["tool_choice"] = _nested(choice)
    elif isinstance(choice, FlatAllowedTools):
        allowed = {"mode": choice.mode, "tools": [_nested(tool) for tool in choice.tools]}
        chat["tool_choice"] = {"type": "allowed_tools", "allowed_tools": allowed}
    if body.text and (format := body.text.format):
        chat["response_format"] = {"type": format.type}
        if format.type == "json_schema" and format.schema_ is None:
            raise invalid("text.format must have a schema", "text")
        if format.type == "json_schema":
            chat["response_format"]["json_schema"] = {"schema": format.schema_}
    return ChatBody.model_validate(chat)


def _nested(tool: FlatTool | FlatNamedTool) -> dict[str, Any]:
    function = tool.model_dump(include=set(Function.model_fields))
    return {"type": "function", "function": function}


def chat_messages(body: ResponsesBody) -> list[dict[str, Any]]:
    """Return the messages of a chat: instructions, and the items of the input.

    Thoughts, a message and calls that follow one another are one message of the assistant.
    """
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for place, item in enumerate(body.input):
        message, last = _message(item, f"input[{place}]"), messages[-1] if messages else {}
        # Both are of one answer if nothing in the second stands before what the first has.
        both = last.get("role") == message["role"] == "assistant"
        empty = "tool_calls" not in last and not last.get("content")
        if not both or not (message.get("tool_calls") or (empty and message["content"])):
            messages.append(message)
            continue
        calls = [*last.get("tool_calls", ()), *message.get("tool_calls", ())]
        last |= {name: value for name, value in message.items() if value}
        last |= {"tool_calls": calls} if calls else {}
    return messages


def _message(item: InputItem, place: str) -> dict[str, Any]:
    kind = item.type or ("message" if item.role else "")
    if kind == "message" and item.role:
        return {"role": item.role, "content": _text(item.content, place)}
    if kind == "function_call" and item.name and item.call_id:
        function = {"name": item.name, "arguments": item.arguments or "{}"}
        call = {"id": item.call_id, "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind == "function_call_output" and (name := item.call_id):
        return {"role": "tool", "tool_call_id": name, "content": _text(item.output, place)}
    if kind == "reasoning":
        thought = _text(item.content, place)
        return {"role": "assistant", "content": "", "reasoning_content": thought}
    if kind in ("message", "function_call", "function_call_output"):
        raise invalid(f"{place} lacks a field that its type must have", "input")
    hint = ": nothing is stored here" if kind == "item_reference" else ""
    raise invalid(f"{place} of type {shown(kind)} is not supported{hint}", "input")


def _text(content: str | list[Part] | None, place: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type not in _PARTS:
            raise invalid(f"{place}: a part of type {shown(part.type)} is not supported", "input")
    return "\n".join(part.text or part.refusal or "" for part in content)


def response_fields(body: ResponsesBody, created: int) -> dict[str, Any]:
    """Return the fields of a response: those that change, and those that were asked for."""
    format = {"type": "text"}
    if body.text and body.text.format:
        format = body.text.format.model_dump(by_alias=True, exclude_none=True)
    choice = "auto" if body.tool_choice is None else body.tool_choice
    unset = ("error", "incomplete_details", "max_tool_calls", "previous_response_id", "usage")
    same = ("model", "instructions", "max_output_tokens", "user")
    fields: dict[str, Any] = {
        "id": new_id("resp_"),
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "output": [],
        "service_tier": "default",
        "truncation": "disabled",
        **dict.fromkeys(("background", "store"), False),
        **dict.fromkeys(unset),
        **{name: getattr(body, name) for name in same},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": (body.reasoning or ReasoningOptions()).model_dump(),
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": format},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [tool.model_dump() for tool in body.tools or []],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "metadata": body.metadata or {},
    }
    try:
        dumps(fields)
    except TypeError as error:  # half of a surrogate pair, or a number of more than 64 bits
        raise invalid(f"the request has what cannot be given back: {error}") from None
    return fields


# By an item's type: the prefix of its id, and the name of its text in events and in its content.
KINDS = {
    "message": ("msg_", "output_text"),
    "reasoning": ("rs_", "reasoning_text"),
    "function_call": ("fc_", "function_call_arguments"),
}


class ResponseWriter:
    """Writes a response in its fields, or events in their published order; see ``answers.Writer``."""

    def __init__(self, fields: dict[str, Any], reader: Reader, tokenizer: Tokenizer) -> None:
        self._response, self._reader, self._tokenizer = fields, reader, tokenizer
        self._item: dict[str, Any] = {}  # the one that is being made
        self._text_type = ""  # of it
        self._texts: list[str] = []
        self._item_log_probs: list[Any] = []
        self._log_probs: list[Any] = []  # of tokens whose text has not come yet
        self._input_tokens = self._events = 0

    async def events(self, chunks: NumberedChunks) -> AsyncGenerator[bytes, None]:
        async for _, chunk in chunks:
            data = b""
            if not self._events:
                data = self._whole("created") + self._whole("in_progress")
            if data := data + b"".join(map(self._numbered, self._read(chunk))):
                yield data
        yield self._whole(self._response["status"])

    async def body(self, chunks: NumberedChunks) -> dict[str, Any]:
        async for _, chunk in chunks:
            for _ in self._read(chunk):
                pass
        return self._response

    def failed(self, error: ApiError) -> bytes:
        data = b"".join(map(self._numbered, self._end("incomplete")))
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        self._response |= {"incomplete_details": None, "usage": None, "status": "failed"}
        self._response["error"] = {"code": code, "message": error.message}
        event = {"code": error.code, "message": error.message, "param": error.param}
        return data + self._numbered({"type": "error", **event}) + self._whole("failed")

    def _read(self, chunk: Chunk) -> Iterator[dict[str, Any]]:
        self._input_tokens = chunk.input_tokens or self._input_tokens
        self._log_probs += chat_log_probs(self._tokenizer, chunk.log_probs)
        for event in self._reader.read(chunk):
            if isinstance(event, CallStart):
                call = {"call_id": event.id, "name": event.name, "arguments": ""}
                yield from self._begin("function_call", **call)
                continue
            if isinstance(event, Text) and not self._is("message"):
                yield from self._begin("message", role="assistant", content=[])
            elif isinstance(event, Reasoning) and not self._is("reasoning"):
                yield from self._begin("reasoning", summary=[], encrypted_content=None, content=[])
            more = {}
            if self._is("message"):
                more, self._log_probs = {"logprobs": self._log_probs}, []
                self._item_log_probs += more["logprobs"]
            self._texts.append(event.text)
            yield self._event(f"{self._text_type}.delta", delta=event.text, **more)
        if self._item and not self._is("message"):
            self._log_probs = []  # those of thoughts and calls are not of the output's text
        if chunk.finish_reason is not None:
            status = "incomplete" if chunk.finish_reason == "length" else "completed"
            yield from self._end(status)
            self._response |= {"status": status, "usage": self._usage(chunk)}
            if status == "incomplete":
                self._response["incomplete_details"] = {"reason": "max_output_tokens"}

    def _is(self, kind: str) -> bool:
        return self._item.get("type") == kind

    def _begin(self, kind: str, **fields: Any) -> Iterator[dict[str, Any]]:
        yield from self._end("completed")
        self._texts, self._item_log_probs = [], []
        prefix, self._text_type = KINDS[kind]
        self._item = {"id": new_id(prefix), "type": kind, "status": "in_progress", **fields}
        yield self._item_event("added")
        if kind != "function_call":
            yield self._event("content_part.added", part=self._part())

    def _end(self, status: str) -> Iterator[dict[str, Any]]:
        if not self._item:
            return
        text, done = "".join(self._texts), f"{self._text_type}.done"
        if self._is("function_call"):
            yield self._event(done, arguments=text, name=self._item["name"])
            self._item["arguments"] = text
        else:
            part = self._part()
            more = {"logprobs": self._item_log_probs} if self._is("message") else {}
            yield self._event(done, text=text, **more)
            yield self._event("content_part.done", part=part)
            self._item["content"] = [part]
        self._item["status"] = status
        yield self._item_event("done")
        self._response["output"].append(self._item)
        self._item = {}

    def _part(self) -> dict[str, Any]:
        more = {"annotations": [], "logprobs": self._item_log_probs} if self._is("message") else {}
        return {"type": self._text_type, "text": "".join(self._texts), **more}

    def _event(self, kind: str, /, **values: Any) -> dict[str, Any]:
        """Return an event about the text of the item."""
        place = {} if self._is("function_call") else {"content_index": 0}
        head = {"item_id": self._item["id"], "output_index": len(self._response["output"])}
        return {"type": f"response.{kind}", **head, **place, **values}

    def _item_event(self, name: str) -> dict[str, Any]:
        index, kind = len(self._response["output"]), f"response.output_item.{name}"
        return {"type": kind, "output_index": index, "item": self._item}

    def _numbered(self, event: dict[str, Any]) -> bytes:
        numbered = {"type": event["type"], "sequence_number": self._events, **event}
        self._events += 1
        return typed_event(numbered)

    def _whole(self, name: str) -> bytes:
        return self._numbered({"type": f"response.{name}", "response": self._response})

    def _usage(self, chunk: Chunk) -> dict[str, Any]:
        """Return the engine's counts of tokens; only those of thoughts are the tokenizer's."""
        items = [item for item in self._response["output"] if item["type"] == "reasoning"]
        text = "".join(item["content"][0]["text"] for item in items)
        thought = len(self._tokenizer(text, add_special_tokens=False).input_ids) if text else 0
        return {
            "input_tokens": self._input_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": chunk.output_tokens,
            "output_tokens_details": {"reasoning_tokens": min(thought, chunk.output_tokens)},
            "total_tokens": self._input_tokens + chunk.output_tokens,
        }
