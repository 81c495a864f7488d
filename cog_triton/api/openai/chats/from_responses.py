"""/v1/responses to a chat."""

from collections.abc import Mapping
from typing import Any

import orjson

from cog_triton.api.openai.chats import contents, custom_tools, response_tools
from cog_triton.api.openai.chats.tool_use import function
from cog_triton.api.openai.errors import invalid
from cog_triton.api.openai.schemas.base import AnswerBody
from cog_triton.api.openai.schemas.chat import ChatBody
from cog_triton.api.openai.schemas.responses import (
    CALL_OUTPUTS,
    CALLS,
    AdditionalTools,
    FlatAllowedTools,
    FlatNamedTool,
    FlatTool,
    ForeignItem,
    HostedToolChoice,
    InputItem,
    NamespaceTool,
    Part,
    ResponsesBody,
)
from cog_triton.api.openai.validation import valid
from cog_triton.errors import shown

LOG_PROBS = "message.output_text.logprobs"
# Values of ``include``; thoughts are not encrypted, their text comes in any case.
INCLUDED = (LOG_PROBS, "reasoning.encrypted_content")
_SAME = {"top_logprobs", "parallel_tool_calls", "user", "stop", "chat_template_kwargs"}
_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")


def chat_body(body: ResponsesBody) -> ChatBody:
    """Return the chat that a body asks for, or raise ApiError."""
    included = body.include or []
    for name in included:
        if name not in INCLUDED:
            body.leave_out(f"include {name}")
    messages = chat_messages(body)
    if not messages:
        raise invalid("input must not be empty", "input")
    chat = body.model_dump(include={*AnswerBody.model_fields, *_SAME}) | {"messages": messages}
    chat["max_completion_tokens"] = body.max_output_tokens
    chat["logprobs"] = LOG_PROBS in included or bool(body.top_logprobs)
    chat["reasoning_effort"] = body.reasoning.effort if body.reasoning else None
    chat["tools"] = response_tools.functions(all_tools(body), body)
    chat["tool_choice"] = _tool_choice(body, offers_tools=bool(chat["tools"]))
    if body.truncation == "auto":  # a conversation that is too long is refused
        body.leave_out("truncation auto")
    format = body.text.format if body.text else None
    if format is not None:
        if format.type == "json_schema" and format.schema_ is None:
            raise invalid("text.format must have a schema", "text")
        chat["response_format"] = {"type": format.type, "json_schema": {"schema": format.schema_}}
    return valid(ChatBody, chat)


def all_tools(body: ResponsesBody) -> list[Any]:
    """Return the tools of a body, and those that its input adds."""
    tools = list(body.tools or [])
    if isinstance(body.input, list):
        for item in body.input:
            if isinstance(item, AdditionalTools):
                tools += item.tools or []
    return tools


def tool_places(body: ResponsesBody) -> dict[str, str]:
    """Return where the schemas of tools are in a body, by the names that a model knows."""
    places = {}
    for number, tool in enumerate(body.tools or []):
        if isinstance(tool, FlatTool):
            places[tool.name] = f"tools[{number}].parameters"
        elif isinstance(tool, NamespaceTool):
            for inner_number, inner in enumerate(tool.tools):
                if isinstance(inner, FlatTool):
                    name = response_tools.flat_name(inner.name, tool.name)
                    places[name] = f"tools[{number}].tools[{inner_number}].parameters"
    return places


def _tool_choice(body: ResponsesBody, *, offers_tools: bool) -> Any:
    choice = body.tool_choice
    if isinstance(choice, HostedToolChoice):
        body.leave_out(f"tool_choice {choice.type}")
        return None
    if choice == "required" and all_tools(body) and not offers_tools:
        body.leave_out("tool_choice required")  # all tools were left out
        return None
    if isinstance(choice, FlatNamedTool):
        return response_tools.chosen(choice)
    if isinstance(choice, FlatAllowedTools):
        tools = []
        for tool in choice.tools:
            if isinstance(tool, HostedToolChoice):
                body.leave_out(f"tool_choice {tool.type}")
            else:
                tools.append(response_tools.chosen(tool))
        if not tools:
            return "none"  # no tool that the client runs is allowed
        return {
            "type": "allowed_tools",
            "allowed_tools": {"mode": choice.mode, "tools": tools},
        }
    return choice


def chat_messages(body: ResponsesBody) -> list[dict[str, Any]]:
    """Return the messages of a chat; items of one answer, which follow one another, are one message."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for place, item in enumerate(body.input):
        if isinstance(item, AdditionalTools):
            continue
        if isinstance(item, ForeignItem):
            body.leave_out(f"input of type {item.type}")
            continue
        newest = place == len(body.input) - 1
        message = _message(item, f"input[{place}]", body, newest=newest)
        if messages and _are_of_one_answer(messages[-1], message):
            _join(messages[-1], message)
        else:
            messages.append(message)
    return messages


def _are_of_one_answer(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Return whether two messages are parts of one answer.

    An answer has its thoughts, its text and its calls in any order: some clients send the text behind the
    calls. Before the results of calls come, there can be nothing of another answer.
    """
    if first["role"] != "assistant" or second["role"] != "assistant":
        return False
    if first.get("tool_calls") or second.get("tool_calls"):
        return True
    return not first["content"]


def _join(answer: dict[str, Any], part: Mapping[str, Any]) -> None:
    """Add a part to an answer."""
    for name in ("content", "reasoning_content"):
        if part.get(name):
            answer[name] = f"{answer[name]}\n{part[name]}" if answer.get(name) else part[name]
    if part.get("tool_calls"):
        answer["tool_calls"] = [*answer.get("tool_calls", ()), *part["tool_calls"]]


def _message(item: InputItem, place: str, body: ResponsesBody, *, newest: bool) -> dict[str, Any]:
    """Return the message that an item is."""
    kind = item.type or ("message" if item.role else "")
    if kind == "message" and item.role:
        return {"role": item.role, "content": _message_text(item, place, body, newest=newest)}
    if kind == "reasoning":
        text = contents.joined_text(item.content or item.summary, _PARTS, place, "input")
        return {"role": "assistant", "content": "", "reasoning_content": text}
    if kind in CALLS and item.call_id and (kind == "local_shell_call" or item.name):
        return {"role": "assistant", "content": "", "tool_calls": [_call(item, kind)]}
    if kind in CALL_OUTPUTS and item.call_id:
        text = _output_text(item, body)
        return {"role": "tool", "tool_call_id": item.call_id, "content": text}
    if kind == "message" or kind in CALLS | CALL_OUTPUTS:
        raise invalid(f"{place} lacks a field that its type requires", "input")
    raise invalid(f"{place} of type {shown(kind)} is not supported", "input")


def _message_text(item: InputItem, place: str, body: ResponsesBody, *, newest: bool) -> str:
    """Return the text of a message; only the newest is refused for parts that have none."""
    if newest or not isinstance(item.content, list):
        return contents.joined_text(item.content, _PARTS, place, "input")
    for part in item.content:
        if part.type not in _PARTS and part.type not in contents.UNREADABLE:
            raise contents.refusal(part.type, place, "input")
    return "\n".join(_part_text(part, body) for part in item.content)


def _call(item: InputItem, kind: str) -> dict[str, Any]:
    if kind == "local_shell_call":
        name = "local_shell"
        arguments = orjson.dumps(item.action or {}).decode()
    elif kind == "custom_tool_call":
        name = response_tools.flat_name(item.name or "", item.namespace)
        arguments = custom_tools.arguments_of(item.input or "")
    else:
        name = response_tools.flat_name(item.name or "", item.namespace)
        arguments = item.arguments or "{}"
    return {"id": item.call_id, **function(name=name, arguments=arguments)}


def _output_text(item: InputItem, body: ResponsesBody) -> str:
    """Return the text of a call's output; in place of a part that has none, words that say so."""
    if not isinstance(item.output, list):
        return item.output or ""
    return "\n".join(_part_text(part, body) for part in item.output)


def _part_text(part: Part, body: ResponsesBody) -> str:
    if part.type in _PARTS:
        return part.text or part.refusal or ""
    return contents.left_out(part.type, body)
