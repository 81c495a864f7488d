"""A body of /v1/responses to that of a chat."""

from __future__ import annotations

from typing import Any

from cog_triton.errors import shown
from cog_triton.faces.openai.errors import invalid
from cog_triton.faces.openai.fields import (
    AllowedToolNames,
    ChatBody,
    Function,
    JsonSchema,
    Message,
    NamedFunction,
    ResponseFormat,
    Tool,
)
from cog_triton.faces.openai.fields import AllowedTools as ChatAllowedTools
from cog_triton.faces.openai.fields import NamedTool as ChatNamedTool
from cog_triton.faces.openai.responses.fields import (
    INCLUDED,
    LOG_PROBS,
    AllowedTools,
    FunctionTool,
    Item,
    NamedTool,
    Part,
    ResponsesBody,
    TextFormat,
)

_SAME = (
    "model",
    "temperature",
    "top_p",
    "top_logprobs",
    "parallel_tool_calls",
    "user",
    "seed",
    "top_k",
    "min_p",
    "stop",
    "chat_template_kwargs",
)
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def chat_body(body: ResponsesBody) -> ChatBody:
    """The chat that a body asks for.

    Raises:
        ApiError: it asks for what cannot be had.
    """
    for name in body.include or []:
        if name not in INCLUDED:
            raise invalid(f"include: {shown(name)} is not supported", "include")
    messages = chat_messages(body)
    if not messages:
        raise invalid("input must not be empty", "input")
    format = body.text.format if body.text else None
    return ChatBody(
        messages=[Message.model_validate(message) for message in messages],
        max_completion_tokens=body.max_output_tokens,
        logprobs=asks_log_probs(body),
        response_format=_format(format) if format else None,
        tools=[_tool(tool) for tool in body.tools or []],
        tool_choice=_choice(body.tool_choice),
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        **{name: getattr(body, name) for name in _SAME},
    )


def _choice(choice: Any) -> Any:
    if isinstance(choice, AllowedTools):
        names = AllowedToolNames(mode=choice.mode, tools=[_choice(tool) for tool in choice.tools])
        return ChatAllowedTools(type="allowed_tools", allowed_tools=names)
    if isinstance(choice, NamedTool):
        return ChatNamedTool(type="function", function=NamedFunction(name=choice.name))
    return choice


def asks_log_probs(body: ResponsesBody) -> bool:
    """Whether the output is to have log probabilities."""
    return LOG_PROBS in (body.include or []) or bool(body.top_logprobs)


def chat_messages(body: ResponsesBody) -> list[dict[str, Any]]:
    """The messages of a chat: instructions, and the items of the input.

    Thoughts, a message and calls that follow one another are one message of the assistant.
    """
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    own = None  # the assistant's message that is being put together
    for place, item in enumerate(body.input):
        message = _message(item, f"input[{place}]")
        if message["role"] != "assistant" or own is None or not _joins(own, message):
            messages.append(message)
            own = message if message["role"] == "assistant" else None
            continue
        own["tool_calls"] = [*own.get("tool_calls", []), *message.pop("tool_calls", [])]
        own |= {name: value for name, value in message.items() if value}
        if not own["tool_calls"]:
            del own["tool_calls"]
    return messages


def _joins(before: dict[str, Any], message: dict[str, Any]) -> bool:
    """Whether both are of one answer: nothing in the second stands before what the first has."""
    if message.get("tool_calls"):
        return True
    return "tool_calls" not in before and not before["content"] and bool(message["content"])


def _message(item: Item, place: str) -> dict[str, Any]:
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
        if part.type not in (*_TEXTS, "refusal"):
            raise invalid(f"{place}: a part of type {shown(part.type)} is not supported", "input")
    return "\n".join(part.text or part.refusal or "" for part in content)


def _format(format: TextFormat) -> ResponseFormat:
    if format.type != "json_schema":
        return ResponseFormat(type=format.type)
    if format.schema_ is None:
        raise invalid("text.format must have a schema", "text")
    return ResponseFormat(type=format.type, json_schema=JsonSchema(schema=format.schema_))


def _tool(tool: FunctionTool) -> Tool:
    function = Function(
        name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
    )
    return Tool(type="function", function=function)
