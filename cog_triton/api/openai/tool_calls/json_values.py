"""JSON texts to values, as models write JSON."""

import json
import math
import re
from typing import Any

from cog_triton.api.openai.tool_calls.json_copier import mended_json

_BETWEEN_VALUES = re.compile(r"[\s,;]*")


def _finite(text: str) -> float:
    """Return a number; a ValueError says that JSON has none that is as large."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a number of JSON")
    return number


# Takes control characters in strings, and refuses NaN and what is too large to be a number.
_DECODER = json.JSONDecoder(strict=False, parse_constant=_finite, parse_float=_finite)


def decode_json(text: str) -> Any:
    """Return the value of a JSON text, or raise ValueError or RecursionError."""
    return _DECODER.decode(text)


def json_value_or_none(text: str) -> Any:
    """Return the value of a JSON text; None if it is not JSON."""
    try:
        return decode_json(text)
    except (ValueError, RecursionError):
        return None


def json_values(text: str) -> list[Any] | None:
    """Return the JSON values of a text, those of lists one by one."""
    values: list[Any] = []
    place = 0
    while True:
        separator = _BETWEEN_VALUES.match(text, place)
        place = separator.end() if separator else place
        if place == len(text):
            return values
        try:
            value, place = _DECODER.raw_decode(text, place)
        except (ValueError, RecursionError):
            mended = mended_json(text[place:])
            if mended is None:
                return None
            try:
                value = _DECODER.decode(mended)
            except (ValueError, RecursionError):
                return None
            place = len(text)
        values += value if isinstance(value, list) else [value]
