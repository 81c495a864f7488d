"""Fields of a Request from inputs that are texts, as Cog has them. InvalidParameter says what is wrong."""

from __future__ import annotations

import json
from typing import Any

from cog_triton.errors import InvalidParameter
from cog_triton.request.guide import Guide, GuideKind
from cog_triton.request.limits import check_json
from cog_triton.wire import parse_biases


def parse_logit_bias(text: str | None) -> tuple[tuple[int, float], ...]:
    try:
        return tuple(parse_biases(text or "{}").items())
    except ValueError as error:
        raise InvalidParameter(str(error)) from None


def choose_guide(**inputs: str | None) -> Guide | None:
    """Return the guide that is given by its kind: json_schema, regex, grammar or choice."""
    given = {name: text for name, text in inputs.items() if text is not None}
    if len(given) > 1:
        raise InvalidParameter(f"{' and '.join(given)} exclude each other: give one of them")
    return next((Guide(GuideKind[name.upper()], text) for name, text in given.items()), None)


def parse_list(name: str, text: str) -> list[dict[str, Any]]:
    """Parse a JSON list of objects."""
    values = _parsed(name, text)
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise InvalidParameter(f"{name} must be a JSON list of objects")
    return values


def parse_object(name: str, text: str) -> dict[str, Any]:
    """Parse a JSON object."""
    value = _parsed(name, text)
    if not isinstance(value, dict):
        raise InvalidParameter(f"{name} must be a JSON object")
    return value


def _parsed(name: str, text: str) -> Any:
    check_json(name, text)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidParameter(f"{name} must be JSON: {error}") from None
