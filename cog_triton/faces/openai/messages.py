"""POST /v1/messages: Anthropic's API, on the same chats."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter
from pydantic import Field

from cog_triton.errors import shown
from cog_triton.faces.openai.answers import Answering, NumberedChunks, new_id, typed_event
from cog_triton.faces.openai.bodies import STREAMED, BodyRoute, off_loop
from cog_triton.faces.openai.errors import ApiError, invalid, message_error
from cog_triton.faces.openai.fields import Body, Bounded, ChatBody, Name, Temperature, check_fields
from cog_triton.faces.openai.parsing import Arguments, CallStart, Reasoning, Text
from cog_triton.faces.openai.served import FromApp, RequestId
from cog_triton.faces.openai.tokens import token_ids
from cog_triton.faces.openai.turns import THINKING_SWITCH, Turn, chat_prompt, chat_turn
from cog_triton.generation import Chunk

router = APIRouter(route_class=BodyRoute)


class Block(Body):
    """A block of a content; its fields depend on its type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | Annotated[list[Block], Bounded] | None = None
    is_error: bool | None = None


class MessageTurn(Body):
    role: Literal["user", "assistant"]
    content: str | Annotated[list[Block], Bounded]


class CustomTool(Body):
    type: Literal["custom"] | None = None
    name: Name
    description: str | None = None
    input_schema: dict[str, Any]


class CustomToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    format: OutputFormat | None = None


class CountBody(Body):
    """The body of /v1/messages/count_tokens."""

    model: str
    messages: Annotated[list[MessageTurn], Field(min_length=1), Bounded]
    system: str | Annotated[list[Block], Bounded] | None = None
    tools: Annotated[list[CustomTool], Bounded] | None = None
    tool_choice: CustomToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    # Beyond Anthropic's:
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesBody(CountBody):
    """The body of /v1/messages."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: float | None = None
    top_k: int | None = None
    # Beyond Anthropic's:
    seed: int | None = None
    min_p: float | None = None


# Fields that ask for what is not done here, with the values that ask for nothing.
REFUSED: dict[str, tuple[Any, ...]] = {"container": (), "mcp_servers": ([],)}
IGNORED = frozenset(
    {"metadata", "service_tier", "cache_control", "inference_geo", "speed", "diagnostics"}
    | {"context_management"}
)
SAME = ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens")


@router.post("/v1/messages", responses=STREAMED)
async def messages(body: MessagesBody, served: FromApp, request_id: RequestId) -> Answering:
    served.adapter(body.model)
    headers = check_fields(body, REFUSED, IGNORED)
    turn = await off_loop(lambda: chat_turn(chat_body(body), served))
    writer, stream = MessageWriter(body.model, turn), bool(body.stream)
    return Answering(served, writer, [turn.request], request_id, headers, stream=stream)


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountBody, served: FromApp) -> dict[str, int]:
    """Count the tokens of messages as the model sees them."""
    served.adapter(body.model)
    prompt = await off_loop(lambda: chat_prompt(chat_body(body), served))
    return {"input_tokens": len(await token_ids(served, prompt, special=False))}


def chat_body(body: CountBody) -> ChatBody:
    """Return the chat that a body asks for.

    Raises:
        ApiError: it asks for what cannot be had.
    """
    messages = chat_messages(body)
    continued = body.messages[-1].role == "assistant"
    if continued and (messages[-1].get("tool_calls") or not messages[-1]["content"].strip()):
        raise invalid(
            "messages: the last one has no text that an answer could continue", "messages"
        )
    chat: dict[str, Any] = {"model": body.model, "messages": messages}
    chat["continue_final_message"] = continued
    chat["chat_template_kwargs"] = body.chat_template_kwargs or {}
    if body.thinking:
        switch = {THINKING_SWITCH: body.thinking.type != "disabled"}
        chat["chat_template_kwargs"] = switch | chat["chat_template_kwargs"]
    chat["tools"] = []
    for tool in body.tools or []:
        names = {"name": tool.name, "description": tool.description}
        function = {**names, "parameters": tool.input_schema}
        chat["tools"].append({"type": "function", "function": function})
    if choice := body.tool_choice:
        named = {"type": "function", "function": {"name": choice.name or ""}}
        chat["tool_choice"] = {"any": "required", "tool": named}.get(choice.type, choice.type)
        chat["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if body.output_config and (format := body.output_config.format):
        schema = {"schema": format.schema_}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(body, MessagesBody):
        chat |= {name: getattr(body, name) for name in SAME}
        chat["stop"] = body.stop_sequences
    return ChatBody.model_validate(chat)


def chat_messages(body: CountBody) -> list[dict[str, Any]]:
    """Return the messages of a chat: the system's text, and those of the turns, which may make several."""
    messages: list[dict[str, Any]] = []
    if system := _text(body.system, "system"):
        messages.append({"role": "system", "content": system})
    for number, turn in enumerate(body.messages):
        place, content = f"messages[{number}].content", turn.content
        if isinstance(content, str):
            messages.append({"role": turn.role, "content": content})
        elif turn.role == "assistant":
            messages.append(_assistant_message(content, place))
        else:
            messages += _user_messages(content, place)
    return messages


def _user_messages(blocks: Sequence[Block], place: str) -> list[dict[str, Any]]:
    messages = []
    for block in blocks:
        if block.type == "tool_result":
            if not block.tool_use_id:
                raise invalid(f"{place}: a tool_result must have a tool_use_id")
            text = _text(block.content, f"{place}: tool_result")
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
    texts = [block for block in blocks if block.type != "tool_result"]
    if texts or not messages:
        messages.append({"role": "user", "content": _text(texts, place)})
    return messages


def _assistant_message(blocks: Sequence[Block], place: str) -> dict[str, Any]:
    passed = ("tool_use", "thinking", "redacted_thinking")
    text = _text([block for block in blocks if block.type not in passed], place)
    message: dict[str, Any] = {"role": "assistant", "content": text}
    thoughts = [block.thinking or "" for block in blocks if block.type == "thinking"]
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    calls = []
    for block in blocks:
        if block.type == "tool_use":
            function = {"name": block.name or "", "arguments": json.dumps(block.input or {})}
            calls.append({"id": block.id or "", "type": "function", "function": function})
    return {**message, "tool_calls": calls} if calls else message


def _text(content: str | Sequence[Block] | None, place: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for block in content:
        if block.type != "text":
            raise invalid(f"{place}: a block of type {shown(block.type)} is not supported")
    return "\n".join(block.text or "" for block in content)


CALL: dict[str, Any] = {"type": "tool_use", "input": {}}
# By the type of an event: its block, the type of the block's deltas, and their field.
BLOCKS: dict[type, tuple[dict[str, Any], str, str]] = {
    Text: ({"type": "text", "text": ""}, "text_delta", "text"),
    Reasoning: (
        {"type": "thinking", "thinking": "", "signature": ""},
        "thinking_delta",
        "thinking",
    ),
    CallStart: (CALL, "input_json_delta", "partial_json"),
    Arguments: (CALL, "input_json_delta", "partial_json"),
}


class MessageWriter:
    """See ``answers.Writer``."""

    def __init__(self, model: str, turn: Turn) -> None:
        self._reader, self._enforced = turn.reader("toolu_"), turn.enforced
        self._blocks: list[dict[str, Any]] = []
        self._texts: list[str] = []  # of the last block
        self._stop: dict[str, str | None] = {"stop_reason": None, "stop_sequence": None}
        self._usage = {"input_tokens": 0, "output_tokens": 0}
        self._usage |= {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        self._head = {"id": new_id("msg_"), "type": "message", "role": "assistant", "model": model}

    async def events(self, chunks: NumberedChunks) -> AsyncGenerator[bytes, None]:
        begun = False
        async for _, chunk in chunks:
            self._count(chunk)
            data = b""
            if not begun:
                begun = True
                data = typed_event({"type": "message_start", "message": self._message()})
                data += typed_event({"type": "ping"})
            if data := data + b"".join(map(typed_event, self._read(chunk))):
                yield data
        delta = {"type": "message_delta", "delta": self._stop, "usage": self._usage}
        yield typed_event(delta) + typed_event({"type": "message_stop"})

    async def body(self, chunks: NumberedChunks) -> dict[str, Any]:
        async for _, chunk in chunks:
            self._count(chunk)
            for _ in self._read(chunk):
                pass
        return self._message()

    def failed(self, error: ApiError) -> bytes:
        return typed_event(message_error(error))

    def _message(self) -> dict[str, Any]:
        return {**self._head, "content": self._blocks, **self._stop, "usage": self._usage}

    def _count(self, chunk: Chunk) -> None:
        self._usage["input_tokens"] = chunk.input_tokens or self._usage["input_tokens"]
        self._usage["output_tokens"] = chunk.output_tokens

    def _read(self, chunk: Chunk) -> Iterator[dict[str, Any]]:
        for event in self._reader.read(chunk):
            block, delta, field = BLOCKS[type(event)]
            if isinstance(event, CallStart):
                yield from self._begin({**block, "id": event.id, "name": event.name})
                continue
            if not self._blocks or self._blocks[-1]["type"] != block["type"]:
                yield from self._begin({**block})
            self._texts.append(event.text)
            yield {
                "type": "content_block_delta",
                "index": len(self._blocks) - 1,
                "delta": {"type": delta, field: event.text},
            }
        if chunk.finish_reason is not None:
            reason = "end_turn" if chunk.stop_sequence is None else "stop_sequence"
            if self._reader.called or self._enforced:
                reason = "tool_use"
            if chunk.finish_reason == "length":
                reason = "max_tokens"
            self._stop = {"stop_reason": reason, "stop_sequence": chunk.stop_sequence}
            yield from self._end()

    def _begin(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._end()
        place = len(self._blocks)
        yield {"type": "content_block_start", "index": place, "content_block": block}
        self._blocks.append(block)

    def _end(self) -> Iterator[dict[str, Any]]:
        """End the last block."""
        if self._blocks:
            text, self._texts = "".join(self._texts), []
            block = self._blocks[-1]
            if block["type"] == "tool_use":
                block["input"] = call_input(text)
            else:
                block[block["type"]] = text
            yield {"type": "content_block_stop", "index": len(self._blocks) - 1}


def call_input(text: str) -> dict[str, Any]:
    """Return the arguments of a call; none where they were cut off."""
    try:
        value = orjson.loads(text)  # it reads only what it can write
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
