"""``tool_choice``: what the output has to be where it says that a tool is called."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

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
        ApiError: the schema of a tool's parameters is nested too deep.
    """
    tools, definitions = body.tools or [], dict[str, Any]()
    if isinstance(body.tool_choice, NamedTool):
        name = body.tool_choice.function.name
        tools = [tool for tool in tools if tool.function.name == name]
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
