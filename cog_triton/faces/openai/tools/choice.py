"""``tool_choice``: what the output has to be where it says that a tool is called."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from cog_triton.errors import shown
from cog_triton.faces.openai.errors import invalid
from cog_triton.faces.openai.fields import ChatBody, NamedTool, Tool
from cog_triton.faces.openai.tools.formats import Format
from cog_triton.guide import Guide, GuideKind


def offered_tools(body: ChatBody) -> list[Tool]:
    """The tools that the model is told of.

    Raises:
        ApiError: a tool is to be called, and there is none of that name, or none at all.
    """
    tools, choice = body.tools or [], body.tool_choice
    if choice in (None, "auto") or (choice == "none" and not tools):
        return tools
    if choice == "none":
        return []
    if not tools:
        raise invalid("tool_choice is only allowed when tools are given", "tool_choice")
    if isinstance(choice, NamedTool):
        named = [tool for tool in tools if tool.function.name == choice.function.name]
        if not named:
            raise invalid(f"tool_choice names no tool: {choice.function.name}", "tool_choice")
    return tools


def is_enforced(body: ChatBody) -> bool:
    """Whether the answer has to be a call."""
    return body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool)


def call_guide(body: ChatBody, known: Format) -> Guide:
    """The JSON schema of the calls that the answer has to be: a list of them, or one of a named tool.

    Raises:
        ApiError: the definitions of the tools' schemas cannot stand together.
    """
    tools, definitions = body.tools or [], dict[str, Any]()
    if isinstance(body.tool_choice, NamedTool):
        name = body.tool_choice.function.name
        tools = [tool for tool in tools if tool.function.name == name]
    calls = _any([_call(tool, known.arguments, definitions) for tool in tools])
    if not isinstance(body.tool_choice, NamedTool):
        calls = {"type": "array", "items": calls, "minItems": 1}
        if body.parallel_tool_calls is False:
            calls["maxItems"] = 1
    return Guide(
        GuideKind.JSON_SCHEMA,
        json.dumps({**calls, "$defs": definitions} if definitions else calls),
    )


def _call(tool: Tool, arguments: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of one tool's call; what its parameters refer to moves to ``definitions``."""
    parameters = dict(tool.function.parameters or {"type": "object", "properties": {}})
    own = parameters.pop("$defs", {})
    if not isinstance(own, dict):
        raise invalid(f"tools: $defs of {tool.function.name} must be an object", "tools")
    for name, definition in own.items():
        if definitions.setdefault(name, definition) != definition:
            raise invalid(f"tools: $defs have two different {shown(name)}", "tools")
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, arguments: parameters},
        "required": ["name", arguments],
        "additionalProperties": False,
    }


def _any(schemas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return schemas[0] if len(schemas) == 1 else {"anyOf": list(schemas)}
