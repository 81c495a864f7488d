"""Inputs that are JSON in a text, of users' faces that have no other type for them."""

from __future__ import annotations

import json
from typing import Any

from cog_triton.errors import InvalidParameter
from cog_triton.limits import check_json


def parse_list(name: str, text: str) -> list[dict[str, Any]]:
    """An input that is a JSON list of objects.

    Raises:
        InvalidParameter: it is something else.
    """
    values = _parsed(name, text)
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise InvalidParameter(f"{name} must be a JSON list of objects")
    return values


def parse_object(name: str, text: str) -> dict[str, Any]:
    """An input that is a JSON object.

    Raises:
        InvalidParameter: it is something else.
    """
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
