"""The JSON schema of calls that an answer has to have, or may have."""

import json
from collections.abc import Sequence
from typing import Any

from cog_triton.api.openai.chats.loose_schemas import loosened
from cog_triton.api.openai.chats.tool_use import ToolUse
from cog_triton.api.openai.schemas.tools import Tool
from cog_triton.api.openai.tool_calls.format import Format
from cog_triton.request.request import Guide, GuideKind


def call_guide(use: ToolUse, known: Format, *, parallel: bool) -> Guide:
    """Return the JSON schema of the calls: a list of them, or one call of a named tool."""
    definitions: dict[str, Any] = {}
    if use.named:
        schema = _call_schema(use.named, known.arguments, definitions)
    else:
        schema = _calls_schema(use.offered, known.arguments, definitions, parallel=parallel)
    return _schema_guide(schema, definitions)


def either_guide(use: ToolUse, known: Format, answer: Guide, *, parallel: bool) -> Guide:
    """Return the JSON schema of a list of calls, or else of the answer that a guide asks for."""
    definitions: dict[str, Any] = {}
    calls = _calls_schema(use.offered, known.arguments, definitions, parallel=parallel)
    answer_schema = {"type": "object"}
    if answer.kind is GuideKind.JSON_SCHEMA:
        try:
            answer_schema = json.loads(answer.text)
        except ValueError:
            return answer  # the engine says what is wrong with it
        if not isinstance(answer_schema, dict):
            return answer
    choices = [_moved(answer_schema, "answer", definitions), calls]
    return _schema_guide({"anyOf": choices}, definitions)


def _schema_guide(schema: dict[str, Any], definitions: dict[str, Any]) -> Guide:
    text = json.dumps({**schema, "$defs": definitions} if definitions else schema)
    return Guide(GuideKind.JSON_SCHEMA, text)


def _calls_schema(
    tools: Sequence[Tool], arguments: str, definitions: dict[str, Any], *, parallel: bool
) -> dict[str, Any]:
    calls = [_call_schema(tool, arguments, definitions) for tool in tools]
    schema = {
        "type": "array",
        "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
        "minItems": 1,
    }
    if not parallel:
        schema["maxItems"] = 1
    return schema


def _call_schema(tool: Tool, arguments: str, definitions: dict[str, Any]) -> dict[str, Any]:
    parameters = tool.function.parameters or {"type": "object", "properties": {}}
    if not tool.function.strict:
        parameters = loosened(parameters)
    parameters = _moved(parameters, f"tool{len(definitions)}", definitions)
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, arguments: parameters},
        "required": ["name", arguments],
        "additionalProperties": False,
    }


def _moved(schema: dict[str, Any], name: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that can be a part of another one.

    One whose parts refer to each other moves to ``definitions``, under a name.
    """

    def rebased(part: dict[str, Any]) -> dict[str, Any]:
        place = part.get("$ref")
        if isinstance(place, str) and place[:2] in ("#", "#/"):
            part["$ref"] = f"#/$defs/{name}{place[1:]}"
        return part

    moved = json.loads(json.dumps(schema), object_hook=rebased)
    if moved == schema:
        return schema
    definitions[name] = moved
    return {"$ref": f"#/$defs/{name}"}
