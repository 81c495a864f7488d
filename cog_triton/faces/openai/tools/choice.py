"""``tool_choice``: what the output has to be where it says that a tool is called."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from cog_triton.faces.openai.errors import invalid
from cog_triton.faces.openai.fields import AllowedTools, ChatBody, NamedTool, Tool
from cog_triton.faces.openai.tools.calls import Format
from cog_triton.request.guide import Guide, GuideKind


def offered_tools(body: ChatBody) -> list[Tool]:
    """The tools that the model is told of.

    Raises:
        ApiError: a tool may be called, and there is none of that name, or none at all.
    """
    tools, choice = body.tools or [], body.tool_choice
    if choice in (None, "auto") or (choice == "none" and not tools):
        return tools
    if choice == "none":
        return []
    if not tools:
        raise invalid("tool_choice is only allowed when tools are given", "tool_choice")
    names = {tool.function.name for tool in tools}
    for name in named_tools(choice):
        if name not in names:
            raise invalid(f"tool_choice names no tool: {name}", "tool_choice")
    if isinstance(choice, AllowedTools):
        return [tool for tool in tools if tool.function.name in named_tools(choice)]
    return tools


def named_tools(choice: Any) -> list[str]:
    """The tools that a choice names."""
    if isinstance(choice, AllowedTools):
        return [tool.function.name for tool in choice.allowed_tools.tools]
    return [choice.function.name] if isinstance(choice, NamedTool) else []


def is_enforced(body: ChatBody) -> bool:
    """Whether the answer has to be a call."""
    choice = body.tool_choice
    if isinstance(choice, AllowedTools):
        return choice.allowed_tools.mode == "required"
    return choice == "required" or isinstance(choice, NamedTool)


def call_guide(body: ChatBody, known: Format) -> Guide:
    """The JSON schema of the calls that the answer has to be: a list of them, or one of a named tool.

    Raises:
        ApiError: the schema of a tool's parameters is nested too deep.
    """
    tools, definitions = offered_tools(body), dict[str, Any]()
    if names := named_tools(body.tool_choice):
        tools = [tool for tool in tools if tool.function.name in names]
    try:
        calls = _any([_call(tool, known.arguments, definitions) for tool in tools])
        if not isinstance(body.tool_choice, NamedTool):
            calls = {"type": "array", "items": calls, "minItems": 1}
            if body.parallel_tool_calls is False:
                calls["maxItems"] = 1
        schema = json.dumps({**calls, "$defs": definitions} if definitions else calls)
    except RecursionError:
        raise invalid("tools: the parameters' schema is nested too deep", "tools") from None
    return Guide(GuideKind.JSON_SCHEMA, schema)


def _call(tool: Tool, arguments: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of one tool's call; one whose parts refer to each other moves to ``definitions``."""
    parameters = tool.function.parameters or {"type": "object", "properties": {}}
    name = f"tool{len(definitions)}"
    moved = rebased(parameters, f"#/$defs/{name}")
    if moved != parameters:
        definitions[name], parameters = moved, {"$ref": f"#/$defs/{name}"}
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, arguments: parameters},
        "required": ["name", arguments],
        "additionalProperties": False,
    }


def rebased(schema: Any, root: str) -> Any:
    """A schema whose references to parts of itself begin at ``root``, where it now is."""
    if isinstance(schema, list):
        return [rebased(part, root) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: root + part[1:]
        if key == "$ref" and isinstance(part, str) and part[:2] in ("#", "#/")
        else rebased(part, root)
        for key, part in schema.items()
    }


def _any(schemas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return schemas[0] if len(schemas) == 1 else {"anyOf": list(schemas)}
