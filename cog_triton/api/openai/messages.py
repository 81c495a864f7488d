"""POST /v1/messages: Anthropic's API, on the same chats.

What Anthropic's API accepts and this server cannot do is passed over and named in a Warning header:
an error would end the session of an agent, which sends the same conversation again with each request.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, get_args

from fastapi import APIRouter
from pydantic import Discriminator, Field, Tag

from cog_triton.api.openai import contents, exchange, turns
from cog_triton.api.openai.blocks import Block
from cog_triton.api.openai.errors import MESSAGES_PATH, TABLES, ApiError, invalid
from cog_triton.api.openai.fields import (
    Asking,
    Body,
    Bounded,
    ChatBody,
    Effort,
    Name,
    Texts,
)
from cog_triton.api.openai.served import FromApp, Served
from cog_triton.generation import Chunk

router = APIRouter(route_class=exchange.BodyRoute)
MESSAGE, BLOCKS = TABLES["message"], TABLES["message_blocks"]
# Claude Code's first system block. It changes between requests, says nothing to the model, and would keep
# the engine from sharing the prefix of the prompts of a session.
BILLING_LINE = "x-anthropic-billing-header:"
THINKING_TYPES = ("enabled", "disabled", "adaptive")
ANTHROPIC_MODELS = "claude-"  # begins the names of Anthropic's models


class ContentBlock(Body):
    """A block of a content; its fields depend on its type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | dict[str, Any] | Annotated[list["ContentBlock"], Bounded] | None = None
    source: str | dict[str, Any] | None = None
    title: str | None = None


class MessageTurn(Body):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[ContentBlock], Bounded]


class CustomTool(Body):
    """A tool that the client runs, described by its schema."""

    type: Literal["custom"] | None = None
    name: Name
    description: str | None = None
    input_schema: dict[str, Any]


class AnthropicTool(Body):
    """A tool that Anthropic's servers run, or whose schema only its models know; its type has a date."""

    type: str
    name: str | None = None


def _tool_kind(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "custom" if kind in (None, "custom") or not isinstance(kind, str) else "anthropic"


AnyTool = Annotated[
    Annotated[CustomTool, Tag("custom")] | Annotated[AnthropicTool, Tag("anthropic")],
    Discriminator(_tool_kind),
]


class CustomToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    type: str
    budget_tokens: int | None = None


class OutputFormat(Body):
    type: str
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class OutputConfig(Body):
    format: OutputFormat | None = None
    effort: str | None = None


class ContextManagement(Body):
    edits: list[Any] | None = None


class CountBody(Body):
    model: str
    messages: Annotated[list[MessageTurn], Field(min_length=1), Bounded]
    system: str | Annotated[list[ContentBlock], Bounded] | None = None
    tools: Annotated[list[AnyTool], Bounded] | None = None
    tool_choice: CustomToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # as the beta of structured outputs has it
    context_management: ContextManagement | None = None
    # Beyond Anthropic's:
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesBody(CountBody, Asking):
    max_tokens: int
    stop_sequences: Texts | None = None


@router.post("/v1/messages", responses=exchange.STREAMED)
async def messages(body: MessagesBody, served: FromApp) -> exchange.Answering:
    named = body.model
    _use_served_model(body, served)
    turn = await exchange.off_loop(lambda: turns.chat_turn(chat_body(body, served), served))
    return exchange.Answering(served, body, MessageWriter(named, turn), [turn.request])


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountBody, served: FromApp) -> dict[str, int]:
    """Count the tokens of messages as the model sees them."""
    _use_served_model(body, served)
    prompt = await exchange.off_loop(lambda: turns.chat_prompt(chat_body(body, served), served))
    return {"input_tokens": len(await turns.token_ids(served, prompt, special=False))}


def _use_served_model(body: CountBody, served: Served) -> None:
    """Let the served model answer for Anthropic's models, or raise ApiError for an unknown name.

    Claude Code asks for several of them by itself: for titles, for summaries and for its helpers.
    """
    if body.model.startswith(ANTHROPIC_MODELS) and body.model not in served.names:
        _leave_out(body, f"model {body.model}")
        body.model = served.models[0]
    served.adapter(body.model)


def chat_body(body: CountBody, served: Served | None = None) -> ChatBody:
    """Return the chat that a body asks for, or raise ApiError."""
    messages = chat_messages(body)
    continued = body.messages[-1].role == "assistant"
    if continued and (messages[-1].get("tool_calls") or not messages[-1]["content"].strip()):
        text = "messages: the last one has no text that an answer could continue"
        raise invalid(text, "messages")
    if body.context_management and body.context_management.edits:
        _leave_out(body, "context_management")
    chat = body.model_dump(include={*Asking.model_fields, "max_tokens"})
    chat |= {"messages": messages, "continue_final_message": continued}
    chat["chat_template_kwargs"] = _thinking_switches(body) | (body.chat_template_kwargs or {})
    chat["reasoning_effort"] = _effort(body, served)
    chat["tools"] = _functions(body)
    if chat["tools"] and served is not None and not turns.takes_tools(served):
        _leave_out(body, "tools, since the chat template does not support them")
        chat["tools"] = []
    choice = body.tool_choice
    if choice and _names_left_out_tool(body, choice):
        _leave_out(body, f"tool_choice {choice.name}")
    # A choice of tools that were all left out forces nothing.
    elif choice and (chat["tools"] or not body.tools):
        names = {"any": "required", "tool": turns.function(name=choice.name or "")}
        chat["tool_choice"] = names.get(choice.type, choice.type)
        chat["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    chat["response_format"] = _response_format(body)
    if isinstance(body, MessagesBody):
        chat["stop"] = body.stop_sequences
    return exchange.valid(ChatBody, chat)


def _thinking_switches(body: CountBody) -> dict[str, Any]:
    """Return what the chat template takes for the wish to think, or not to."""
    thinking = body.thinking
    if thinking is None:
        return {}
    if thinking.budget_tokens is not None:
        _leave_out(body, "thinking.budget_tokens")
    if thinking.type not in THINKING_TYPES:
        _leave_out(body, f"thinking of type {thinking.type}")
        return {}
    return {turns.THINKING_SWITCH: thinking.type != "disabled"}


def _effort(body: CountBody, served: Served | None) -> str | None:
    """Return the effort of reasoning, if the chat template takes one."""
    effort = body.output_config.effort if body.output_config else None
    if effort is None or served is None:
        return None
    template = turns.template_text(served.backend.tokenizer)
    if effort in get_args(Effort) and turns.effort_switches(effort, template):
        return effort
    _leave_out(body, "output_config.effort")
    return None


def _response_format(body: CountBody) -> dict[str, Any] | None:
    """Return the form of the answer, as a chat asks for it."""
    wanted = body.output_config.format if body.output_config else None
    wanted = wanted or body.output_format
    if wanted is None:
        return None
    if wanted.type != "json_schema" or wanted.schema_ is None:
        _leave_out(body, f"output format of type {wanted.type}")
        return None
    return {"type": "json_schema", "json_schema": {"schema": wanted.schema_}}


def _functions(body: CountBody) -> list[dict[str, Any]]:
    """Return the tools that the client runs, as functions."""
    functions = []
    for tool in body.tools or []:
        if isinstance(tool, CustomTool):
            functions.append(
                turns.function(
                    name=tool.name, description=tool.description, parameters=tool.input_schema
                )
            )
        else:
            _leave_out(body, f"tool {tool.type}")
    return functions


def _names_left_out_tool(body: CountBody, choice: CustomToolChoice) -> bool:
    """Return whether a choice forces a tool that only Anthropic can run."""
    hosted = [tool.name for tool in body.tools or [] if isinstance(tool, AnthropicTool)]
    return choice.type == "tool" and choice.name in hosted


def _leave_out(body: CountBody, what: str) -> None:
    if isinstance(body, MessagesBody):  # a count has no answer that would miss it
        body.leave_out(what)


def chat_messages(body: CountBody) -> list[dict[str, Any]]:
    """Return the messages of a chat: the system's text, and those of the turns, which may make several."""
    messages: list[dict[str, Any]] = []
    if system := _system_text(body):
        messages.append({"role": "system", "content": system})
    for number, turn in enumerate(_combined(body.messages)):
        messages += _messages(body, turn.role, _blocks(turn.content), f"messages[{number}].content")
    return messages


def _system_text(body: CountBody) -> str:
    if isinstance(body.system, str) or body.system is None:
        return body.system or ""
    lasting = [
        block for block in body.system if not (block.text or "").lstrip().startswith(BILLING_LINE)
    ]
    return turns.joined_text(lasting, ["text"], "system")


def _blocks(content: str | Sequence[ContentBlock]) -> list[ContentBlock]:
    if isinstance(content, str):
        return [ContentBlock(type="text", text=content)]
    return list(content)


def _combined(turns_: Sequence[MessageTurn]) -> list[MessageTurn]:
    """Make one turn of those of one role that follow one another, as Anthropic's API does."""
    combined: list[MessageTurn] = []
    for turn in turns_:
        if combined and combined[-1].role == turn.role:
            content = [*_blocks(combined[-1].content), *_blocks(turn.content)]
            combined[-1] = MessageTurn(role=turn.role, content=content)
        else:
            combined.append(turn)
    return combined


def _messages(
    body: CountBody, role: str, blocks: Sequence[ContentBlock], place: str
) -> list[dict[str, Any]]:
    """Return the messages of a turn: the results of calls, and what else there is in it."""
    results = []
    texts = []
    thoughts = []
    calls = []
    for block in blocks:
        match role, block.type:
            case "user", "tool_result":
                if not block.tool_use_id:
                    raise invalid(f"{place}: a tool_result must have a tool_use_id")
                text = _result_text(body, block)
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
                texts.append(_block_text(body, block))
    if results and not texts:
        return results
    message: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return [*results, message]


def _result_text(body: CountBody, block: ContentBlock) -> str:
    """Return the text of a tool's result, which may be a text, or blocks of any kind."""
    if isinstance(block.content, list):
        return "\n".join(_block_text(body, inner) for inner in block.content)
    if isinstance(block.content, dict):
        return json.dumps(block.content)
    return block.content or ""


def _block_text(body: CountBody, block: ContentBlock) -> str:
    """Return the text of a block; in place of one that has none, words that say so."""
    if block.type == "text":
        return block.text or ""
    if block.type == "document" and isinstance(block.source, dict):
        data = block.source.get("data")
        if block.source.get("type") == "text" and isinstance(data, str):
            return f"{block.title}\n{data}" if block.title else data
    if block.type == "search_result" and isinstance(block.content, list):
        return "\n".join([block.title or "", *(_block_text(body, part) for part in block.content)])
    _leave_out(body, f"content of type {block.type}")
    return contents.left_out_text(block.type)


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
        if block.kind == "thoughts":
            delta = {"type": "signature_delta", "signature": signature(block.text)}
            yield self._about_block("content_block_delta", delta=delta)
        yield self._about_block("content_block_stop")
        whole = {**BLOCKS[block.kind]["begins"]}
        if block.broken:
            whole = {"type": "text", "text": block.written}
        elif block.kind == "call":
            whole |= {"id": block.id, "name": block.name, "input": call_input(block.text)}
        else:
            whole[whole["type"]] = block.text
        if block.kind == "thoughts":
            whole["signature"] = signature(block.text)
        self._content.append(whole)

    def _reason(self, chunk: Chunk) -> str:
        if chunk.finish_reason == "length":
            return "max_tokens"
        if self._parser.ends_with_calls or (self._enforced and not self._parser.broken_text()):
            return "tool_use"
        return "end_turn" if chunk.stop_sequence is None else "stop_sequence"


def signature(thoughts: str) -> str:
    """Return a signature of thoughts; clients send no thoughts back that have none."""
    return hashlib.blake2b(thoughts.encode(errors="replace"), digest_size=16).hexdigest()


def call_input(text: str) -> dict[str, Any]:
    """Return the arguments of a call; none where they were cut off."""
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
