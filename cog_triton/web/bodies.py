"""Bodies of requests: bounds on the raw bytes, then parsing, beside the event loop where they are large.

Every HTTP port reads its JSON here, and its forms in forms.py. Parsing holds the lock of Python's threads,
so a body that takes seconds to parse would stop every other request, whatever thread parses it. The bounds
keep that time short.
"""

import asyncio
import contextvars
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

import orjson

_T = TypeVar("_T")

# A body with fewer is parsed in a few milliseconds.
LARGE_BYTES = 2**16
# Of one JSON text: strings, names among them; objects and lists; values, by their commas; and levels of
# nesting. So much is parsed in less than 0.1 s.
JSON_STRINGS = 2**17
JSON_CONTAINERS = 2**16
JSON_VALUES = 2**20
JSON_DEPTH = 128
# So many at once; the global lock is free in between.
_SCANNED_BYTES = 2**18
_BRACKETS = b"{}[]"
_NO_BRACKETS = bytes(set(range(256)) - set(_BRACKETS))
_STEPS = {ord("{"): 1, ord("["): 1, ord("}"): -1, ord("]"): -1}

# One thread: large bodies are parsed in turn, so that together they take no more of the lock than one.
_PARSING = ThreadPoolExecutor(max_workers=1, thread_name_prefix="parse")


class BadBody(ValueError):
    """A body that cannot be read, or is over a bound; the text goes on from "the body …"."""


async def off_loop(size: int, function: Callable[..., _T], *args: Any) -> _T:
    """Call a function that parses a body of so many bytes: in a thread if these are many."""
    if size < LARGE_BYTES:
        return function(*args)
    context = contextvars.copy_context()
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_PARSING, partial(context.run, function, *args))


def parse_json(raw: bytes) -> Any:
    """Parse JSON within the bounds, or raise BadBody."""
    try:
        encoding = json.detect_encoding(raw)
        if encoding != "utf-8":
            raw = raw.decode(encoding).encode()
    except UnicodeError as error:
        raise BadBody(f"must be JSON: {error}") from None
    check_json(raw)
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadBody(f"must be JSON: {str(error)[:200]}") from None


def check_json(raw: bytes) -> None:
    """Refuse JSON in UTF-8 with more values or levels than the bounds allow; none of it is made."""
    counts = _JsonCounts()
    for first in range(0, len(raw), _SCANNED_BYTES):
        counts.add(raw[first : first + _SCANNED_BYTES])


class _JsonCounts:
    """Counts the values of a JSON text that comes in pieces."""

    def __init__(self) -> None:
        # A backslash at the end of the last piece, whose character is to come.
        self._escape = b""
        self._in_string = False
        self._quotes = 0
        self._containers = 0
        self._commas = 0
        self._depth = 0

    def add(self, piece: bytes) -> None:
        """Count a next piece, or raise BadBody at the first bound that is passed."""
        outside = self._outside_of_strings(self._escape + piece)
        self._containers += outside.count(b"{") + outside.count(b"[")
        _check_count("objects and lists", self._containers, JSON_CONTAINERS)
        self._commas += outside.count(b",")
        _check_count("values", self._commas, JSON_VALUES)
        brackets = outside.translate(None, _NO_BRACKETS)
        if brackets:
            depths = list(accumulate((_STEPS[byte] for byte in brackets), initial=self._depth))
            _check_count("levels of nesting", max(depths), JSON_DEPTH)
            if min(depths) < 0:
                raise BadBody("must be JSON: it has an unmatched closing bracket")
            self._depth = depths[-1]

    def _outside_of_strings(self, piece: bytes) -> bytes:
        """Count the strings of a piece; return the text between them.

        Splits at the quotes: every second part is in a string. Escaped quotes are removed before.
        """
        self._escape = b""
        if b"\\" in piece:
            backslashes = len(piece) - len(piece.rstrip(b"\\"))
            if backslashes % 2:
                piece = piece[:-1]
                self._escape = b"\\"
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        quotes = piece.count(b'"')
        self._quotes += quotes
        _check_count("strings", self._quotes // 2, JSON_STRINGS)
        first_outside = 1 if self._in_string else 0
        outside = b"".join(piece.split(b'"')[first_outside::2])
        if quotes % 2:
            self._in_string = not self._in_string
        return outside


def _check_count(what: str, count: int, limit: int) -> None:
    if count > limit:
        raise BadBody(f"must have at most {limit} {what}")
