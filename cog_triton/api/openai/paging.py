"""The parameters of a query for a page of a list, and the page."""

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
from starlette.responses import Response

from cog_triton.api.openai.errors import ApiError, invalid
from cog_triton.errors import shown

_NUMBER = re.compile(
    r"0*([0-9]{1,9})"
)  # ASCII digits only; int() also takes those of other scripts
_ORDERS = ("asc", "desc")
RowT = TypeVar("RowT")


@dataclass(frozen=True)
class PageQuery:
    """The part of a list that a client asks for.

    Attributes:
        limit: the maximum number of objects.
        after: the id of the object before the page, or None for the first page.
        oldest_first: whether the oldest objects come first. By default the newest do.
    """

    limit: int
    after: str | None
    oldest_first: bool

    @classmethod
    def read(cls, query: Mapping[str, str], *, default: int, maximum: int) -> "PageQuery":
        """Return what a query asks for, ``default`` objects if it does not say, or raise OpenAI's 400."""
        limit = page_limit(query, default, maximum)
        order = query.get("order", "desc")
        if order not in _ORDERS:
            raise invalid("order must be asc or desc", "order", "invalid_value")
        return cls(limit=limit, after=query.get("after") or None, oldest_first=order == "asc")


def unknown_cursor(after: str) -> ApiError:
    """Return the refusal of an ``after`` that names no object of the list."""
    return invalid(
        f"after: there is no object {shown(after)} in this list", "after", "invalid_value"
    )


def page_limit(query: Mapping[str, str], default: int, maximum: int) -> int:
    """Return how many objects a query asks for, or raise OpenAI's 400."""
    text = query.get("limit")
    if text is None:
        return default
    number = _NUMBER.fullmatch(text)
    limit = int(number[1]) if number else 0
    if not 1 <= limit <= maximum:
        raise invalid(f"limit must be a number between 1 and {maximum}", "limit", "invalid_value")
    return limit


async def page_response(
    rows: Sequence[RowT], limit: int, view: Callable[[RowT], dict[str, Any]]
) -> Response:
    """Return a page of a list, made off the event loop; a row beyond the limit says that there are more."""
    content = await asyncio.to_thread(_object_page, rows, limit, view)
    return Response(content, media_type="application/json")


def _object_page(rows: Sequence[RowT], limit: int, view: Callable[[RowT], dict[str, Any]]) -> bytes:
    data = [view(row) for row in rows[:limit]]
    page: dict[str, Any] = {"object": "list", "data": data}
    if data:
        page["first_id"] = data[0]["id"]
        page["last_id"] = data[-1]["id"]
    page["has_more"] = len(rows) > limit
    return orjson.dumps(page)
