"""A body of /v1/messages to that of a chat."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from cog_triton.errors import shown
from cog_triton.faces.openai.errors import invalid
from cog_triton.faces.openai.fields import (
    ChatBody,
    Function,
    JsonSchema,
    Message,
    NamedFunction,
    NamedTool,
    ResponseFormat,
    Tool,
)
from cog_triton.faces.openai.messages.fields import (
    Block,
    Choice,
    CountBody,
    CustomTool,
    MessagesBody,
    Thinking,
    TurnMessage,
)
from cog_triton.faces.openai.prompts import THINKING_SWITCH

_CHOICES: dict[str, Any] = {"auto": "auto", "any": "required", "none": "none"}
_SAME = ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens")


def chat_body(body: CountBody) -> ChatBody:
    """The chat that a body asks for.

    Raises:
        ApiError: it asks for what cannot be had.
    """
    messages = chat_messages(body)
    continued = body.messages[-1].role == "assistant"
    if continued and (messages[-1].get("tool_calls") or not messages[-1]["content"].strip()):
        raise invalid(
            "messages: the last one has no text that an answer could continue", "messages"
        )
    choice, config = body.tool_choice, body.output_config
    sampling: dict[str, Any] = {}
    if isinstance(body, MessagesBody):
        sampling = {name: getattr(body, name) for name in _SAME}
        sampling["stop"] = body.stop_sequences
    return ChatBody(
        model=body.model,
        messages=[Message.model_validate(message) for message in messages],
        continue_final_message=continued,
        tools=[_tool(tool) for tool in body.tools or []],
        tool_choice=_choice(choice) if choice else None,
        parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
        response_format=_format(config.format.schema_) if config and config.format else None,
        chat_template_kwargs=_switches(body.thinking) | (body.chat_template_kwargs or {}),
        **sampling,
    )


def chat_messages(body: CountBody) -> list[dict[str, Any]]:
    """The messages of a chat: the system's text, and those of the turns, whose blocks may make several."""
    messages: list[dict[str, Any]] = []
    if system := _text(body.system, "system"):
        messages.append({"role": "system", "content": system})
    for place, message in enumerate(body.messages):
        turn = _assistants if message.role == "assistant" else _users
        messages += turn(message, f"messages[{place}].content")
    return messages


def _users(message: TurnMessage, place: str) -> list[dict[str, Any]]:
    """Results of tools, each in a message of its own, and then the text."""
    if isinstance(message.content, str):
        return [{"role": "user", "content": message.content}]
    results = [block for block in message.content if block.type == "tool_result"]
    rest = [block for block in message.content if block.type != "tool_result"]
    if not all(block.tool_use_id for block in results):
        raise invalid(f"{place}: a tool_result must have a tool_use_id")
    told = [
        {
            "role": "tool",
            "tool_call_id": block.tool_use_id,
            "content": _text(block.content, f"{place}: tool_result"),
        }
        for block in results
    ]
    return [*told, {"role": "user", "content": _text(rest, place)}] if rest or not told else told


def _assistants(message: TurnMessage, place: str) -> list[dict[str, Any]]:
    if isinstance(message.content, str):
        return [{"role": "assistant", "content": message.content}]
    calls = [_call(block) for block in message.content if block.type == "tool_use"]
    thoughts = [block.thinking or "" for block in message.content if block.type == "thinking"]
    passed = ("tool_use", "thinking", "redacted_thinking")
    text = _text([block for block in message.content if block.type not in passed], place)
    turn: dict[str, Any] = {"role": "assistant", "content": text}
    if thoughts:
        turn["reasoning_content"] = "".join(thoughts)
    return [{**turn, "tool_calls": calls} if calls else turn]


def _call(block: Block) -> dict[str, Any]:
    function = {"name": block.name or "", "arguments": json.dumps(block.input or {})}
    return {"id": block.id or "", "type": "function", "function": function}


def _text(content: str | Sequence[Block] | None, place: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for block in content:
        if block.type != "text":
            raise invalid(f"{place}: a block of type {shown(block.type)} is not supported")
    return "\n".join(block.text or "" for block in content)


def _tool(tool: CustomTool) -> Tool:
    function = Function(name=tool.name, description=tool.description, parameters=tool.input_schema)
    return Tool(type="function", function=function)


def _choice(choice: Choice) -> Any:
    if choice.type == "tool":
        return NamedTool(type="function", function=NamedFunction(name=choice.name or ""))
    return _CHOICES[choice.type]


def _format(schema: dict[str, Any]) -> ResponseFormat:
    return ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=schema))


def _switches(thinking: Thinking | None) -> dict[str, Any]:
    """Of the template: models that can do without thoughts are told so by it."""
    return {} if thinking is None else {THINKING_SWITCH: thinking.type != "disabled"}
