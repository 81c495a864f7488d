"""The schemas of errors and streams in /openapi.json."""

from __future__ import annotations

from typing import Any

from cog_triton.faces.openai.errors import INVALID

_TEXT = {"type": "string"}
_TEXT_OR_NULL = {"anyOf": [_TEXT, {"type": "null"}]}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties]}


def _errors(description: str, schema: dict[str, Any]) -> dict[int | str, dict[str, Any]]:
    told = {"description": description, "content": {"application/json": {"schema": schema}}}
    return {"4XX": told, "5XX": told}


ERRORS = _errors(
    f"An error of OpenAI's form; its type is {INVALID} where the request is at fault",
    _object(
        error=_object(message=_TEXT, type=_TEXT, param=_TEXT_OR_NULL, code=_TEXT_OR_NULL),
    ),
)
MESSAGE_ERRORS = _errors(
    "An error of Anthropic's form",
    _object(type={"const": "error"}, error=_object(type=_TEXT, message=_TEXT), request_id=_TEXT),
)
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer: one object, or server-sent events if the request says stream",
        "content": {
            "application/json": {"schema": {"type": "object"}},
            "text/event-stream": {"schema": _object(data=_TEXT)},  # of each event
        },
    }
}
