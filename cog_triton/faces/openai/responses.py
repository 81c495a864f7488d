"""The forms of /v1/responses, OpenAI's newer API, on the same chats; store.py has its routes."""

import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from cog_triton.errors import shown
from cog_triton.faces.openai import exchange, fields, turns
from cog_triton.faces.openai.errors import TABLES, ApiError, invalid
from cog_triton.faces.openai.parsing import Block, Parser
from cog_triton.generation import Chunk
from cog_triton.text.tokenizer import Tokenizer


class FlatNamedTool(fields.Body):
    type: Literal["function"]
    name: str


class FlatTool(fields.Function, FlatNamedTool):
    """Its type is checked before its name."""


class FlatAllowedTools(fields.Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FlatNamedTool], Field(min_length=1), fields.Bounded]


class ReasoningOptions(fields.Body):
    effort: fields.Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class TextFormat(fields.JsonSchema):
    type: Literal["text", "json_object", "json_schema"]


class TextOptions(fields.Body):
    format: TextFormat | None = None


class Part(fields.Body):
    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(fields.Body):
    """One item of the input; its fields depend on its type, which a message need not have."""

    type: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | Annotated[list[Part], fields.Bounded] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | Annotated[list[Part], fields.Bounded] | None = None


class ResponsesBody(fields.Asking):
    input: str | Annotated[list[InputItem], fields.Bounded]
    instructions: str | None = None
    max_output_tokens: fields.OutputTokens | None = None
    reasoning: ReasoningOptions | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    include: list[str] | None = None
    text: TextOptions | None = None
    tools: Annotated[list[FlatTool], fields.Bounded] | None = None
    tool_choice: (
        Literal["none", "auto", "required"]
        | Annotated[FlatNamedTool | FlatAllowedTools, Field(discriminator="type")]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    # Beyond OpenAI's:
    stop: str | list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


LOG_PROBS = "message.output_text.logprobs"
# Values of ``include``; thoughts are not encrypted, their text comes in any case.
INCLUDED = (LOG_PROBS, "reasoning.encrypted_content")
_SAME = {"top_logprobs", "parallel_tool_calls", "user", "stop", "chat_template_kwargs"}
_ECHOED = {"model", "instructions", "max_output_tokens", "user", "previous_response_id"}
_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")


def chat_body(body: ResponsesBody) -> fields.ChatBody:
    """Return the chat that a body asks for, or raise ApiError."""
    included, choice = body.include or [], body.tool_choice
    if unknown := [name for name in included if name not in INCLUDED]:
        raise invalid(f"include: {shown(unknown[0])} is not supported", "include")
    if not (messages := chat_messages(body)):
        raise invalid("input must not be empty", "input")
    chat = body.model_dump(include={*fields.Asking.model_fields, *_SAME}) | {"messages": messages}
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
        if format.type == "json_schema" and format.schema_ is None:
            raise invalid("text.format must have a schema", "text")
        chat["response_format"] = {"type": format.type, "json_schema": {"schema": format.schema_}}
    return fields.ChatBody.model_validate(chat)


def _nested(tool: FlatTool | FlatNamedTool) -> dict[str, Any]:
    return turns.function(**tool.model_dump(include=set(fields.Function.model_fields)))


def chat_messages(body: ResponsesBody) -> list[dict[str, Any]]:
    """Return the messages of a chat. Thoughts, a text and calls that follow one another are one."""
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
    output = kind == "function_call_output"
    text = turns.joined_text(item.output if output else item.content, _PARTS, place, "input")
    if kind == "message" and item.role:
        return {"role": item.role, "content": text}
    if kind == "function_call" and item.name and item.call_id:
        call = turns.function(name=item.name, arguments=item.arguments or "{}")
        return {"role": "assistant", "content": "", "tool_calls": [{"id": item.call_id, **call}]}
    if output and item.call_id:
        return {"role": "tool", "tool_call_id": item.call_id, "content": text}
    if kind == "reasoning":
        return {"role": "assistant", "content": "", "reasoning_content": text}
    if kind in ("message", "function_call", "function_call_output"):
        raise invalid(f"{place} lacks a field that its type must have", "input")
    raise invalid(f"{place} of type {shown(kind)} is not supported", "input")


def input_items(body: ResponsesBody) -> list[dict[str, Any]]:
    """Return the items of a body's input, with ids, and their contents as lists."""
    given: Any = body.input
    if isinstance(given, str):
        given = [InputItem(role="user", content=given)]
    items = []
    for item in (item.model_dump(exclude_none=True) for item in given):
        kind = item.get("type", "message")
        prefix = {"message": "msg_", "reasoning": "rs_"}.get(kind, "fc_")
        item = {"id": exchange.new_id(prefix), "type": kind, "status": "completed", **item}
        if isinstance(item.get("content"), str):
            text = "output_text" if item.get("role") == "assistant" else "input_text"
            item["content"] = [{"type": text, "text": item["content"]}]
        items.append(item)
    return items


def response_fields(body: ResponsesBody, created: int) -> dict[str, Any]:
    """Return the fields of a response: those that change, and those that were asked for."""
    format = (body.text and body.text.format) or TextFormat(type="text")
    choice = body.tool_choice or "auto"
    response = {
        **TABLES["response"],
        **body.model_dump(include=_ECHOED),
        "id": exchange.new_id("resp_"),
        "created_at": created,
        "background": bool(body.background),
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": (body.reasoning or ReasoningOptions()).model_dump(),
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": format.model_dump(by_alias=True, exclude_none=True)},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [tool.model_dump() for tool in body.tools or []],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "metadata": body.metadata or {},
    }
    try:
        exchange.dumps(response)
    except TypeError as error:  # half of a surrogate pair, or a number of more than 64 bits
        raise invalid(f"the request has what cannot be given back: {error}") from None
    return response


class ResponseWriter:
    def __init__(
        self,
        response: dict[str, Any],
        parser: Parser,
        tokenizer: Tokenizer,
        letters: Callable[[], str] = lambda: secrets.token_hex(12),  # of ids
    ) -> None:
        self._response, self._parser, self._tokenizer = response, parser, tokenizer
        self._letters, self._runs = letters, False
        self._block: Block | None = None  # the one that is being written
        self._item: dict[str, Any] = {}  # of the block
        self._part: dict[str, Any] = {}  # its text
        self._place: dict[str, Any] = {}  # of the text, in events
        self._log_probs: list[Any] = []  # of tokens whose text has not come yet
        self._input_tokens = self._count = 0

    def queued(self) -> Iterator[bytes]:
        self._response["status"] = "queued"
        yield self._event("created", response=self._response)
        yield self._event("queued", response=self._response)

    def events(self, _: int, chunk: Chunk, /) -> Iterator[bytes]:
        if not self._count:
            yield self._event("created", response=self._response)
        if not self._runs:
            self._runs, self._response["status"] = True, "in_progress"
            yield self._event("in_progress", response=self._response)
        self._input_tokens = chunk.input_tokens or self._input_tokens
        self._log_probs += exchange.chat_log_probs(self._tokenizer, chunk.log_probs)
        for block, text in self._parser.read(chunk):
            if block is not self._block:
                yield from self._end("completed")
                yield from self._begin(block)
            if not text:  # a call's beginning
                continue
            more = {}
            if block.kind == "text":
                more, self._log_probs = {"logprobs": self._log_probs}, []
                self._part["logprobs"] += more["logprobs"]
            yield self._event(f"{self._part['type']}.delta", **self._place, delta=text, **more)
        if self._block and self._block.kind != "text":
            self._log_probs = []  # those of thoughts and calls are not of the output's text
        if chunk.finish_reason is not None:
            status = "incomplete" if chunk.finish_reason == "length" else "completed"
            yield from self._end(status)
            self._response |= {"status": status, "usage": self._usage(chunk)}
            if status == "incomplete":
                self._response["incomplete_details"] = {"reason": "max_output_tokens"}
            yield self._event(status, response=self._response)

    def failed(self, error: ApiError) -> Iterator[bytes]:
        yield from self._end("incomplete")
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        self._response |= {"incomplete_details": None, "usage": None, "status": "failed"}
        self._response["error"] = {"code": code, "message": error.message}
        told = {"code": error.code, "message": error.message, "param": error.param}
        yield exchange.typed_event("error", sequence_number=self._count, **told)
        self._count += 1
        yield self._event("failed", response=self._response)

    def cancelled(self) -> Iterator[bytes]:
        yield from self._end("incomplete")
        self._response["status"] = "cancelled"
        yield self._event("incomplete", response=self._response)  # the end that clients know

    def whole(self, answers: Sequence[Sequence[Chunk]]) -> dict[str, Any]:
        chunks = answers[0]
        if not any(chunk.log_probs for chunk in chunks):  # else each is with its text
            chunks = [exchange.joined(chunks)]
        for chunk in chunks:
            list(self.events(0, chunk))
        return self._response

    def _begin(self, block: Block) -> Iterator[bytes]:
        shape, index = TABLES["items"][block.kind], len(self._response["output"])
        self._block, self._part = block, {"type": shape["text_type"], "text": ""}
        name = shape["prefix"] + self._letters()
        self._item = {"id": name, "status": "in_progress", **shape["item"]}
        self._place = {"item_id": name, "output_index": index}
        if block.kind == "call":
            self._item |= {"call_id": block.id, "name": block.name}
        yield self._event("output_item.added", output_index=index, item=self._item)
        if block.kind != "call":
            self._place["content_index"] = 0
            self._part |= {"annotations": [], "logprobs": []} if block.kind == "text" else {}
            yield self._event("content_part.added", **self._place, part=self._part)

    def _end(self, status: str) -> Iterator[bytes]:
        if (block := self._block) is None:
            return
        self._block, text, done = None, block.text, f"{self._part['type']}.done"
        if block.kind == "call":
            self._item["arguments"] = text
            yield self._event(done, **self._place, arguments=text, name=block.name)
        else:
            self._part["text"] = text
            more = {"logprobs": self._part["logprobs"]} if block.kind == "text" else {}
            yield self._event(done, **self._place, text=text, **more)
            yield self._event("content_part.done", **self._place, part=self._part)
            self._item["content"] = [self._part]
        self._item["status"] = status
        index = self._place["output_index"]
        yield self._event("output_item.done", output_index=index, item=self._item)
        self._response["output"].append(self._item)

    def _event(self, name: str, /, **values: Any) -> bytes:
        self._count += 1
        return exchange.typed_event(f"response.{name}", sequence_number=self._count - 1, **values)

    def _usage(self, chunk: Chunk) -> dict[str, Any]:
        """Return the engine's counts of tokens; only those of thoughts are the tokenizer's."""
        text = self._parser.text("thoughts")
        thought = len(self._tokenizer(text, add_special_tokens=False).input_ids) if text else 0
        return {
            "input_tokens": self._input_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": chunk.output_tokens,
            "output_tokens_details": {"reasoning_tokens": min(thought, chunk.output_tokens)},
            "total_tokens": self._input_tokens + chunk.output_tokens,
        }
