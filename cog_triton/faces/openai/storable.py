"""JSON as the journal keeps it."""

from typing import Any

import orjson

from cog_triton.faces.openai.errors import invalid


def stored(value: Any) -> bytes:
    """Return a value that has parts of a request, or raise 400 for what could not be read again.

    That is a number of more than 64 bits, half of a surrogate pair, and what is nested too deeply.
    """
    try:
        return orjson.dumps(value)
    except TypeError as error:
        raise invalid(f"the request has a value that cannot be stored: {error}") from None
