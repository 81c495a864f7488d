"""Bodies of requests: counted, parsed and validated, off the event loop where they are large."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, ParamSpec, TypeVar

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from cog_triton.errors import InvalidParameter, shown
from cog_triton.faces.openai.errors import CLIENT_GONE, ApiError, invalid
from cog_triton.faces.openai.fields import Body
from cog_triton.faces.openai.served import Served, current
from cog_triton.request.limits import check_json

LARGE_BODY = 2**16  # bytes; less is prepared in a few milliseconds
_JSON_TYPE = re.compile(r"application/(\S+\+)?json\b", re.IGNORECASE)
_NEEDS_OBJECT = "the body must be a JSON object, sent with Content-Type: application/json"
# OpenAI's codes by pydantic's types of errors; {} is integer or decimal.
_CODES = {
    "missing": "missing_required_parameter",
    **dict.fromkeys(
        ("literal_error", "union_tag_invalid", "string_pattern_mismatch"), "invalid_value"
    ),
    **dict.fromkeys(("greater_than_equal", "greater_than"), "{}_below_min_value"),
    **dict.fromkeys(("less_than_equal", "less_than"), "{}_above_max_value"),
    "too_short": "empty_array",
    "too_long": "array_above_max_length",
    "string_too_short": "empty_string",
    "string_too_long": "string_above_max_length",
}
_P = ParamSpec("_P")
_T = TypeVar("_T")


class BodyRoute(APIRoute):
    """A route whose body is validated before FastAPI's own reader, which blocks the event loop."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        if self.body_field is None:
            return handler
        model: Any = self.body_field.field_info.annotation

        async def handle(request: Request) -> Response:
            try:
                raw = await request.body()
            except ClientDisconnect:
                return Response(status_code=CLIENT_GONE)  # for the log; nobody reads it
            check_headers(request.headers)
            current().large = len(raw) >= LARGE_BODY
            body = await off_loop(validated, raw, model, request.app.state.served)
            current().names = body.names()
            request._json = body  # which FastAPI reads, and pydantic takes as it is
            return await handler(request)

        return handle


async def off_loop(function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Call a function that prepares the current request, in a thread if its body is large."""
    if current().large:
        return await asyncio.to_thread(function, *args, **kwargs)
    return function(*args, **kwargs)


def check_headers(headers: Mapping[str, str]) -> None:
    """Refuse a body that is not sent as JSON: ApiError, 415, or 400 without a type."""
    coding = headers.get("content-encoding", "identity")
    if coding != "identity":
        text = f"the body must be sent without a Content-Encoding, not as {shown(coding)}"
        raise ApiError(415, text, code="unsupported_content_encoding")
    kind = headers.get("content-type", "")
    if not kind:
        raise invalid(_NEEDS_OBJECT)
    if not _JSON_TYPE.match(kind):
        text = f"the body must be sent with Content-Type: application/json, not {shown(kind)}"
        raise ApiError(415, text, code="unsupported_content_type")


def validated(raw: bytes, model: type[Body], served: Served) -> Body:
    """Parse and validate a body. Without a ``model``, it asks for the only one that is served."""
    value = parsed(raw)
    if not isinstance(value, dict):
        raise invalid(_NEEDS_OBJECT)
    if "model" in model.model_fields and value.get("model") is None:
        value["model"] = served.only_model()
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise body_error(error, value) from None


def parsed(raw: bytes) -> Any:
    """Parse JSON, refusing what has more values than a request may have before they are made."""
    if not raw:
        raise invalid("the body must be a JSON object, and it is empty")
    try:
        text = raw.decode(json.detect_encoding(raw))
        check_json("the body", text)
        return json.loads(text)
    except InvalidParameter as error:
        raise invalid(error.message) from None
    except (ValueError, RecursionError) as error:
        raise invalid(f"the body is no JSON: {error}") from None


def body_error(error: ValidationError, value: Any) -> ApiError:
    """Return the first of the most specific problems of a body, in the manner of OpenAI's errors."""
    found = error.errors(include_url=False)
    if not found[0]["loc"]:
        return invalid(f"the name of a field of the body: {found[0]['msg']}")
    # Of a field with several types, each that does not fit has a problem.
    place, problem = max(
        ((_place(problem, value), problem) for problem in found),
        key=lambda found: (not found[1]["type"].endswith("_type"), len(found[0])),
    )
    where = place[0] + "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in place[1:])
    given = problem["input"]
    number = "integer" if isinstance(given, int) else "decimal"
    code = _CODES.get(problem["type"], "invalid_type").format(number)
    if problem["type"] == "missing":
        text = f"you must provide {where}"
    elif problem["type"] == "too_long":
        text = f"{where} must have at most {problem['ctx']['max_length']} items"
    else:
        kinds: dict[type, str] = {dict: "an object", list: "a list"}
        kind = kinds.get(type(given)) or shown(given)
        text = f"{where}: {problem['msg']}, not {kind}"
    return invalid(text, where, code)


def _place(problem: Any, value: Any) -> list[Any]:
    """Return the path in the body; pydantic's has names of types in it, which the body has not."""
    place: list[Any] = []
    *path, last = problem["loc"]
    for step in path if problem["type"] == "missing" else (*path, last):
        try:
            value = value[step]
        except (TypeError, LookupError):
            continue
        place.append(step)
    return [*place, last] if problem["type"] == "missing" or not place else place


# The schemas of errors and streams in /openapi.json.
Responses = dict[int | str, dict[str, Any]]

_TEXT = {"type": "string"}
_TEXT_OR_NULL = {"anyOf": [_TEXT, {"type": "null"}]}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties]}


def _errors(description: str, **properties: Any) -> Responses:
    content = {"application/json": {"schema": _object(**properties)}}
    return {key: {"description": description, "content": content} for key in ("4XX", "5XX")}


ERRORS = _errors(
    "An error of OpenAI's form; its type is invalid_request_error where the request is at fault",
    error=_object(message=_TEXT, type=_TEXT, param=_TEXT_OR_NULL, code=_TEXT_OR_NULL),
)
MESSAGE_ERRORS = _errors(
    "An error of Anthropic's form",
    type={"const": "error"},
    error=_object(type=_TEXT, message=_TEXT),
    request_id=_TEXT,
)
STREAMED: Responses = {
    200: {
        "description": "The answer: one object, or server-sent events if the request says stream",
        "content": {
            "application/json": {"schema": {"type": "object"}},
            "text/event-stream": {"schema": _object(data=_TEXT)},  # of each event
        },
    }
}
