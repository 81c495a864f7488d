"""Fields of a Request from inputs that are texts, as Cog has them."""

from __future__ import annotations

import json
from typing import Any

from cog_triton.errors import InvalidParameter
from cog_triton.request.guide import Guide, GuideKind
from cog_triton.request.limits import check_json
from cog_triton.wire import parse_biases


def parse_logit_bias(text: str | None) -> tuple[tuple[int, float], ...]:
    """The input logit_bias: a JSON object of token ids and what is added to their logits.

    Raises:
        InvalidParameter: it is something else.
    """
    try:
        return tuple(parse_biases(text or "{}").items())
    except ValueError as error:
        raise InvalidParameter(str(error)) from None


def choose_guide(
    *,
    json_schema: str | None = None,
    regex: str | None = None,
    grammar: str | None = None,
    choice: str | None = None,
) -> Guide | None:
    """What the output has to be, of inputs that exclude each other; None if none is given.

    Raises:
        InvalidParameter: more than one is given.
    """
    given = {
        GuideKind.JSON_SCHEMA: json_schema,
        GuideKind.REGEX: regex,
        GuideKind.GRAMMAR: grammar,
        GuideKind.CHOICE: choice,
    }
    guides = [Guide(kind, text) for kind, text in given.items() if text is not None]
    if len(guides) > 1:
        kinds = " and ".join(guide.kind.value for guide in guides)
        raise InvalidParameter(f"{kinds} exclude each other: give one of them")
    return guides[0] if guides else None


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
