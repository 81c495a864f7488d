"""POST /v1/messages: Anthropic's API, on the same chats."""

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter
from pydantic import Field

from cog_triton.faces.openai import exchange, turns
from cog_triton.faces.openai.errors import MESSAGES_PATH, TABLES, ApiError, invalid
from cog_triton.faces.openai.fields import Asking, Body, Bounded, ChatBody, Name
from cog_triton.faces.openai.parsing import Block
from cog_triton.faces.openai.served import FromApp
from cog_triton.generation import Chunk

router = APIRouter(route_class=exchange.BodyRoute)
MESSAGE, BLOCKS = TABLES["message"], TABLES["message_blocks"]


class ContentBlock(Body):
    """A block of a content; its fields depend on its type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | Annotated[list["ContentBlock"], Bounded] | None = None


class MessageTurn(Body):
    role: Literal["user", "assistant"]
    content: str | Annotated[list[ContentBlock], Bounded]


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


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    format: OutputFormat | None = None


class CountBody(Body):
    model: str
    messages: Annotated[list[MessageTurn], Field(min_length=1), Bounded]
    system: str | Annotated[list[ContentBlock], Bounded] | None = None
    tools: Annotated[list[CustomTool], Bounded] | None = None
    tool_choice: CustomToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    # Beyond Anthropic's:
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesBody(CountBody, Asking):
    max_tokens: int
    stop_sequences: list[str] | None = None


@router.post("/v1/messages", responses=exchange.STREAMED)
async def messages(body: MessagesBody, served: FromApp) -> exchange.Answering:
    served.adapter(body.model)
    turn = await exchange.off_loop(lambda: turns.chat_turn(chat_body(body), served))
    return exchange.Answering(served, body, MessageWriter(body.model, turn), [turn.request])


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountBody, served: FromApp) -> dict[str, int]:
    """Count the tokens of messages as the model sees them."""
    served.adapter(body.model)
    prompt = await exchange.off_loop(lambda: turns.chat_prompt(chat_body(body), served))
    return {"input_tokens": len(await turns.token_ids(served, prompt, special=False))}


def chat_body(body: CountBody) -> ChatBody:
    """Return the chat that a body asks for, or raise ApiError."""
    messages, switches = chat_messages(body), body.chat_template_kwargs or {}
    continued = body.messages[-1].role == "assistant"
    if continued and (messages[-1].get("tool_calls") or not messages[-1]["content"].strip()):
        text = "messages: the last one has no text that an answer could continue"
        raise invalid(text, "messages")
    if body.thinking:
        switches = {turns.THINKING_SWITCH: body.thinking.type != "disabled"} | switches
    chat = body.model_dump(include={*Asking.model_fields, "max_tokens"})
    chat |= {"messages": messages, "continue_final_message": continued}
    chat["chat_template_kwargs"] = switches
    chat["tools"] = [
        turns.function(name=tool.name, description=tool.description, parameters=tool.input_schema)
        for tool in body.tools or []
    ]
    if choice := body.tool_choice:
        own = {"any": "required", "tool": turns.function(name=choice.name or "")}
        chat["tool_choice"] = own.get(choice.type, choice.type)
        chat["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if body.output_config and (format := body.output_config.format):
        chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": format.schema_}}
    if isinstance(body, MessagesBody):
        chat["stop"] = body.stop_sequences
    return ChatBody.model_validate(chat)


def chat_messages(body: CountBody) -> list[dict[str, Any]]:
    """Return the messages of a chat: the system's text, and those of the turns, which may make several."""
    messages: list[dict[str, Any]] = []
    if system := turns.joined_text(body.system, ["text"], "system"):
        messages.append({"role": "system", "content": system})
    for number, turn in enumerate(body.messages):
        if isinstance(turn.content, str):
            messages.append({"role": turn.role, "content": turn.content})
        else:
            messages += _messages(turn.role, turn.content, f"messages[{number}].content")
    return messages


def _messages(role: str, blocks: Sequence[ContentBlock], place: str) -> list[dict[str, Any]]:
    """Return the messages of a turn: the results of calls, and what else there is in it."""
    results, texts, thoughts, calls = [], [], [], []
    for block in blocks:
        match role, block.type:
            case "user", "tool_result":
                if not block.tool_use_id:
                    raise invalid(f"{place}: a tool_result must have a tool_use_id")
                text = turns.joined_text(block.content, ["text"], f"{place}: tool_result")
                results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
            case "assistant", "tool_use":
                arguments = json.dumps(block.input or {})
                call = turns.function(name=block.name or "", arguments=arguments)
                calls.append({"id": block.id or "", **call})
            case "assistant", "thinking":
                thoughts.append(block.thinking or "")
            case "assistant", "redacted_thinking":
                pass
            case _:
                texts.append(block)
    if results and not texts:
        return results
    message: dict[str, Any] = {"role": role, "content": turns.joined_text(texts, ["text"], place)}
    message |= {"reasoning_content": "".join(thoughts)} if thoughts else {}
    message |= {"tool_calls": calls} if calls else {}
    return [*results, message]


class MessageWriter:
    def __init__(self, model: str, turn: turns.Turn) -> None:
        self._parser, self._enforced = turn.parser("toolu_"), turn.use.enforced
        self._block: Block | None = None  # the one that is being written
        self._content: list[dict[str, Any]] = []
        own = {"id": exchange.new_id("msg_"), "model": model, "content": self._content}
        self._message: dict[str, Any] = {**MESSAGE, **own}
        self._usage = self._message["usage"] = {**MESSAGE["usage"]}
        self._begun = False

    def events(self, _: int, chunk: Chunk, /) -> Iterator[bytes]:
        self._usage["input_tokens"] = chunk.input_tokens or self._usage["input_tokens"]
        self._usage["output_tokens"] = chunk.output_tokens
        if not self._begun:
            self._begun = True
            yield exchange.typed_event("message_start", message=self._message)
            yield exchange.typed_event("ping")
        for block, text in self._parser.read(chunk):
            shape = BLOCKS[block.kind]
            if block is not self._block:
                yield from self._end()
                self._block, names = block, {"id": block.id, "name": block.name}
                begun = shape["begins"] | (names if block.kind == "call" else {})
                yield self._about_block("content_block_start", content_block=begun)
            if text:
                delta = {"type": shape["delta"], shape["field"]: text}
                yield self._about_block("content_block_delta", delta=delta)
        if chunk.finish_reason is not None:
            yield from self._end()
            stop = {"stop_reason": self._reason(chunk), "stop_sequence": chunk.stop_sequence}
            self._message |= stop
            yield exchange.typed_event("message_delta", delta=stop, usage=self._usage)
            yield exchange.typed_event("message_stop")

    def failed(self, error: ApiError) -> Iterator[bytes]:
        yield exchange.typed_event("error", error=error.body(MESSAGES_PATH)["error"])

    def whole(self, answers: Sequence[Sequence[Chunk]]) -> dict[str, Any]:
        list(self.events(0, exchange.joined(answers[0])))
        return self._message

    def _about_block(self, name: str, **values: Any) -> bytes:
        return exchange.typed_event(name, index=len(self._content), **values)

    def _end(self) -> Iterator[bytes]:
        if (block := self._block) is None:
            return
        yield self._about_block("content_block_stop")
        whole = {**BLOCKS[block.kind]["begins"]}
        if block.kind == "call":
            whole |= {"id": block.id, "name": block.name, "input": call_input(block.text)}
        else:
            whole[whole["type"]] = block.text
        self._content.append(whole)

    def _reason(self, chunk: Chunk) -> str:
        if chunk.finish_reason == "length":
            return "max_tokens"
        if self._parser.calls or self._enforced:
            return "tool_use"
        return "end_turn" if chunk.stop_sequence is None else "stop_sequence"


def call_input(text: str) -> dict[str, Any]:
    """Return the arguments of a call; none where they were cut off."""
    try:
        value = orjson.loads(text)  # it reads only what it can write
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
