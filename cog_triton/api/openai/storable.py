"""JSON as the journal keeps it."""

from typing import Any

import orjson

from cog_triton.api.openai.errors import ApiError, invalid
from cog_triton.api.openai.journal import Journal


def stored(value: Any) -> bytes:
    """Return a value that has parts of a request, or raise 400 for what could not be read again.

    That is a number of more than 64 bits, half of a surrogate pair, and what is nested too deeply.
    """
    try:
        return orjson.dumps(value)
    except TypeError as error:
        raise invalid(f"the request has a value that cannot be stored: {error}") from None


def no_room(journal: Journal, size: int = 0) -> ApiError:
    """Return the refusal of what would give a key more than its share; ``size`` is that of a file."""
    most = journal.most_bytes()
    code = "storage_limit_exceeded"
    if size > most:
        text = f"the file has {size} bytes; an API key may store at most {most}"
        return ApiError(413, text, param="file", code=code)
    rows = f" or {journal.share.rows} rows" if journal.share else ""
    text = (
        f"this API key has reached its storage limit of {most} bytes{rows}; "
        "delete files or responses"
    )
    return ApiError(429, text, "insufficient_quota", code=code)
