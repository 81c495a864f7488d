"""POST /v1/responses: OpenAI's newer API, on the same chats. Nothing is stored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field

from cog_triton.errors import shown
from cog_triton.faces.openai.answers import Answering
from cog_triton.faces.openai.bodies import STREAMED, BodyRoute, off_loop
from cog_triton.faces.openai.errors import invalid
from cog_triton.faces.openai.fields import (
    Body,
    Bounded,
    ChatBody,
    Effort,
    Function,
    JsonSchema,
    NamedFunction,
    OutputTokens,
    Temperature,
)
from cog_triton.faces.openai.response_writer import ResponseWriter
from cog_triton.faces.openai.sampling import check_fields
from cog_triton.faces.openai.served import FromApp, RequestId
from cog_triton.faces.openai.turns import chat_turn

router = APIRouter(route_class=BodyRoute)


class OfFunction(Body):
    type: Literal["function"]


class FlatTool(Function, OfFunction):
    pass


class FlatNamedTool(NamedFunction, OfFunction):
    pass


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
    """A part of a content; its type is checked where it is read."""

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
    "store": (False,),
    "previous_response_id": ("",),
    "conversation": (),
    "background": (False,),
    "prompt": (),
    "truncation": ("disabled",),
    "max_tool_calls": (),
}
IGNORED = frozenset(
    {"service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
    | {"stream_options"}
)
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
    headers = check_fields(body, REFUSED, IGNORED)
    turn = await off_loop(lambda: chat_turn(chat_body(body), served))
    response = response_fields(body, served.now())
    writer = ResponseWriter(response, turn.reader(), served.backend.tokenizer)
    stream = bool(body.stream)
    return Answering(served, writer, [turn.request], request_id, headers, stream=stream)


def chat_body(body: ResponsesBody) -> ChatBody:
    """Return the chat that a body asks for.

    Raises:
        ApiError: it asks for what cannot be had.
    """
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
    function = set(Function.model_fields)
    chat["tools"] = [
        {"type": "function", "function": tool.model_dump(include=function)}
        for tool in body.tools or []
    ]
    chat["tool_choice"] = choice
    if isinstance(choice, FlatNamedTool):
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif isinstance(choice, FlatAllowedTools):
        tools = [{"type": "function", "function": {"name": tool.name}} for tool in choice.tools]
        allowed = {"mode": choice.mode, "tools": tools}
        chat["tool_choice"] = {"type": "allowed_tools", "allowed_tools": allowed}
    if body.text and (format := body.text.format):
        chat["response_format"] = {"type": format.type}
        if format.type == "json_schema":
            if format.schema_ is None:
                raise invalid("text.format must have a schema", "text")
            chat["response_format"]["json_schema"] = {"schema": format.schema_}
    return ChatBody.model_validate(chat)


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
        return {"role": item.role, "content": _text(item.content, f"{place}.content")}
    if kind == "function_call" and item.name and item.call_id:
        function = {"name": item.name, "arguments": item.arguments or "{}"}
        call = {"id": item.call_id, "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind == "function_call_output" and item.call_id:
        text = _text(item.output, f"{place}.output")
        return {"role": "tool", "tool_call_id": item.call_id, "content": text}
    if kind == "reasoning":
        thought = _text(item.content, f"{place}.content")
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
    return {
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "model": body.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": (body.reasoning or ReasoningOptions()).model_dump(),
        "service_tier": "default",
        "store": False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": format},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [tool.model_dump() for tool in body.tools or []],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
        "metadata": body.metadata or {},
    }
