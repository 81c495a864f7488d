"""The parameters of a query for a page of a list, and the page."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import orjson

from cog_triton.api.openai.errors import ApiError, invalid
from cog_triton.errors import shown

_NUMBER = re.compile(r"0*([0-9]{1,9})")  # of ASCII digits; int() takes those of other scripts
_ORDERS = ("asc", "desc")
RowT = TypeVar("RowT")


def page_order(query: Mapping[str, str]) -> str:
    """Return the order that a query asks for, or raise OpenAI's 400; the newest objects come first."""
    order = query.get("order", "desc")
    if order not in _ORDERS:
        raise invalid("order must be asc or desc", "order", "invalid_value")
    return order


def unknown_cursor(after: str) -> ApiError:
    """Return the refusal of an ``after`` that names no object of the list."""
    return invalid(
        f"after: there is no object {shown(after)} in this list", "after", "invalid_value"
    )


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


def object_page(rows: Sequence[RowT], limit: int, view: Callable[[RowT], dict[str, Any]]) -> bytes:
    """Return a page of a list in OpenAI's form; a row beyond the limit says that there are more."""
    data = [view(row) for row in rows[:limit]]
    page: dict[str, Any] = {"object": "list", "data": data}
    if data:
        page["first_id"] = data[0]["id"]
        page["last_id"] = data[-1]["id"]
    page["has_more"] = len(rows) > limit
    return orjson.dumps(page)
