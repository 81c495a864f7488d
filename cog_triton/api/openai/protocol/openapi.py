"""Responses of routes as /openapi.json describes them."""

from typing import Any

_TEXT = {"type": "string"}
_TEXT_OR_NULL = {"anyOf": [{"type": "string"}, {"type": "null"}]}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": properties}


def _json(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


_OPENAIS_ERROR = _json(
    "An error of OpenAI's form; its type is invalid_request_error where the request is at fault",
    _object(
        error=_object(message=_TEXT, type=_TEXT, param=_TEXT_OR_NULL, code=_TEXT_OR_NULL),
    ),
)
_ANTHROPICS_ERROR = _json(
    "An error of Anthropic's form",
    _object(
        type={"const": "error"},
        error=_object(type=_TEXT, message=_TEXT),
        request_id=_TEXT,
    ),
)
ERRORS: dict[int | str, dict[str, Any]] = {"4XX": _OPENAIS_ERROR, "5XX": _OPENAIS_ERROR}
MESSAGE_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": _ANTHROPICS_ERROR,
    "5XX": _ANTHROPICS_ERROR,
}
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer: one object, or server-sent events if the request says stream",
        "content": {
            "application/json": {"schema": {"type": "object"}},
            "text/event-stream": {"schema": _object(data=_TEXT)},  # an event
        },
    }
}
