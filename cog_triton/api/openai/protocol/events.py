"""Server-sent events, and ids of objects."""

import secrets
from typing import Any

import orjson

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # asks a proxy to pass each event on at once
}
DONE = b"data: [DONE]\n\n"  # the end of a stream of choices
dumps = orjson.dumps


def event(value: Any) -> bytes:
    return b"data: " + dumps(value) + b"\n\n"


def typed_event(kind: str, /, **values: Any) -> bytes:
    """Return an event under the name that is its type, as newer APIs have them."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), dumps({"type": kind, **values}))


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)
