"""JSON to a body, and pydantic's problems to errors in the manner of OpenAI's."""

from typing import Any, TypeVar

from pydantic import ValidationError

from cog_triton.api.openai.errors import ApiError, invalid
from cog_triton.api.openai.schemas.base import JsonObject
from cog_triton.api.openai.served import Served
from cog_triton.errors import shown
from cog_triton.web import bodies

NEEDS_OBJECT = "the body must be a JSON object, sent with Content-Type: application/json"
# OpenAI's codes of errors by pydantic's types; the others are invalid_type.
CODES = {
    "missing": "missing_required_parameter",
    "literal_error": "invalid_value",
    "union_tag_invalid": "invalid_value",
    "string_pattern_mismatch": "invalid_value",
    "greater_than_equal": "{kind}_below_min_value",
    "greater_than": "{kind}_below_min_value",
    "less_than_equal": "{kind}_above_max_value",
    "less_than": "{kind}_above_max_value",
    "too_short": "empty_array",
    "too_long": "array_above_max_length",
    "string_too_short": "empty_string",
    "string_too_long": "string_above_max_length",
}
_Body = TypeVar("_Body", bound=JsonObject)


def validated(raw: bytes, model: type[_Body], served: Served) -> _Body:
    """Parse and validate a body. Without a ``model``, it asks for the only one that is served."""
    value = parsed(raw) if raw else None
    if not isinstance(value, dict):
        raise invalid(NEEDS_OBJECT)
    if "model" in model.model_fields and value.get("model") is None:
        value["model"] = served.only_model()
    return valid(model, value)


def valid(model: type[_Body], value: Any) -> _Body:
    """Return a value as a body, or raise ApiError."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise body_error(error, value) from None


def parsed(raw: bytes) -> Any:
    """Parse JSON, refusing what has more values than a request may have before they are made."""
    try:
        return bodies.parse_json(raw)
    except bodies.BadBody as error:
        raise invalid(f"the body {error}") from None


def body_error(error: ValidationError, value: Any) -> ApiError:
    """Return the first of the most specific problems of a body, in the manner of OpenAI's errors."""
    problems = error.errors(include_url=False)
    if not problems[0]["loc"]:
        return invalid(f"the name of a field of the body: {problems[0]['msg']}")
    # A field with several types has a problem for each of them. The deepest one is that of the type which
    # was meant; of those, one about a value says more than one about its type.
    problem = max(
        problems,
        key=lambda problem: (not problem["type"].endswith("_type"), len(_place(problem, value))),
    )
    first, *rest = _place(problem, value)
    where = first + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in rest)
    wrong = problem["input"]
    kind = "integer" if isinstance(wrong, int) else "decimal"
    code = CODES.get(problem["type"], "invalid_type").format(kind=kind)
    if problem["type"] == "missing":
        return invalid(f"you must provide {where}", where, code)
    if problem["type"] == "too_long":
        limit = problem["ctx"]["max_length"]
        return invalid(f"{where} must have at most {limit} items", where, code)
    text = f"{where}: {problem['msg']}"
    return invalid(f"{text}, not {_described(wrong)}", where, code, log_message=text)


def _described(value: Any) -> str:
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    return shown(value)


def _place(problem: Any, value: Any) -> list[Any]:
    """Return the path in the body; pydantic's has names of types in it, which the body has not."""
    *path, last = problem["loc"]
    is_missing = problem["type"] == "missing"
    place: list[Any] = []
    for step in path if is_missing else (*path, last):
        try:
            value = value[step]
        except (TypeError, LookupError):
            continue
        place.append(step)
    if is_missing or not place:
        place.append(last)
    return place
