"""JSON to a body, and pydantic's problems to errors in the manner of OpenAI's."""

from typing import Any, TypeVar

from pydantic import ValidationError

from cog_triton.api.openai.errors import TABLES, ApiError, invalid
from cog_triton.api.openai.schemas.base import JsonObject
from cog_triton.api.openai.served import Served
from cog_triton.errors import shown
from cog_triton.web import bodies

NEEDS_OBJECT = "the body must be a JSON object, sent with Content-Type: application/json"
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
    code = TABLES["codes"].get(problem["type"], "invalid_type").format(number)
    if problem["type"] == "missing":
        return invalid(f"you must provide {where}", where, code)
    if problem["type"] == "too_long":
        most = problem["ctx"]["max_length"]
        return invalid(f"{where} must have at most {most} items", where, code)
    kinds: dict[type, str] = {dict: "an object", list: "a list"}
    kind = kinds.get(type(given)) or shown(given)
    text = f"{where}: {problem['msg']}"
    return invalid(f"{text}, not {kind}", where, code, log_message=text)


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
