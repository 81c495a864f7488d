"""The ``limit`` of a list's page."""

import re
from collections.abc import Mapping

from cog_triton.faces.openai.errors import invalid

_NUMBER = re.compile(r"0*([0-9]{1,9})")  # of ASCII digits; int() takes those of other scripts


def page_limit(query: Mapping[str, str], default: int, most: int) -> int:
    """Return how many objects a query asks for, or raise OpenAI's 400."""
    text = query.get("limit")
    if text is None:
        return default
    number = _NUMBER.fullmatch(text)
    limit = int(number[1]) if number else 0
    if not 1 <= limit <= most:
        raise invalid(f"limit must be a number between 1 and {most}", "limit", "invalid_value")
    return limit
