"""JSON as the journal keeps it."""

from typing import Any

import orjson

from cog_triton.api.openai.errors import ApiError, invalid
from cog_triton.api.openai.storage.limits import StorageLimits

STORAGE_LIMIT_EXCEEDED = "storage_limit_exceeded"  # OpenAI has no such code


def stored(value: Any) -> bytes:
    """Return a value that has parts of a request, or raise 400 for what could not be read again.

    That is a number of more than 64 bits, half of a surrogate pair, and what is nested too deeply.
    """
    try:
        return orjson.dumps(value)
    except TypeError as error:
        raise invalid(f"the request has a value that cannot be stored: {error}") from None


def no_room(limits: StorageLimits, file_bytes: int = 0) -> ApiError:
    """Return the refusal of a write that would give a key more than it may store.

    Args:
        file_bytes: the size of the file, if it is an upload.
    """
    limit = limits.key_bytes
    if file_bytes > limit:
        text = f"the file has {file_bytes} bytes; an API key may store at most {limit}"
        return ApiError(413, text, param="file", code=STORAGE_LIMIT_EXCEEDED)
    rows = f" or {limits.share.rows} rows" if limits.share else ""
    text = (
        f"this API key has reached its storage limit of {limit} bytes{rows}; "
        "delete files or responses"
    )
    return ApiError(429, text, "insufficient_quota", code=STORAGE_LIMIT_EXCEEDED)
