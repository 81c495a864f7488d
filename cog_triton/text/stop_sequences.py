"""Ends a streamed text at the first stop sequence in it.

Which match is first must not depend on how the text is cut into pieces. It is the match that is
*complete* first, the longest one if several are complete at the same character: what an observer
sees who reads the text a character at a time and stops as soon as it ends with a stop sequence.
A match that begins earlier but ends later loses: with the stops "abcd" and "bc", "abcd" ends
at "a".

The search is a plain one: an end of the text that may begin a stop sequence is held back, and each
piece is searched together with what was held back before it. No more than the longest stop sequence
is ever looked at again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from cog_triton.errors import InvalidParameter
from cog_triton.request.limits import STOP_TEXT_CHARACTERS

_PIECE = re.compile(r"(?:\\[\\,]|[^,])+")
_ESCAPE = re.compile(r"\\([\\,])")


def parse_stop_sequences(text: str | None, name: str = "stop_sequences") -> tuple[str, ...]:
    r"""Split a comma-separated list of stop sequences, or of other texts.

    Empty entries are dropped; whitespace belongs to its entry. ``\,`` stands for a comma that does
    not separate, ``\\`` for a backslash; any other backslash is just one.

    Raises:
        InvalidParameter: the list is longer than one of the most and longest stop sequences can be.
    """
    if text is not None and len(text) > STOP_TEXT_CHARACTERS:
        raise InvalidParameter(
            f"{name} must be a list of at most {STOP_TEXT_CHARACTERS} characters, not {len(text)}"
        )
    return tuple(_ESCAPE.sub(r"\1", piece) for piece in _PIECE.findall(text or ""))


class StopSequences:
    """Passes a text through, up to the first stop sequence in it and without that one.

    Stops are compared character by character (code points: no normalization, no case folding).
    Empty ones are ignored; without any, all text passes at once.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted(filter(None, stops), key=len, reverse=True)
        self._by_first_character: dict[str, list[str]] = {}
        for stop in self._stops:
            self._by_first_character.setdefault(stop[0], []).append(stop)
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop sequence that ended the text, None as long as none has."""
        return self._matched

    def feed(self, text: str) -> str:
        """Return what can be delivered now; nothing at all once a stop sequence has matched.

        Held back is the longest end of the text that may still turn out to begin a stop sequence.
        """
        if self._matched is not None:
            return ""
        if not self._held and self._by_first_character.keys().isdisjoint(text):
            return text
        text = self._held + text
        self._matched = _first_match(text, self._stops)
        if self._matched is not None:
            self._held = ""
            return text[: text.index(self._matched)]
        start = self._held_start(text)
        self._held = text[start:]
        return text[:start]

    def flush(self) -> str:
        """Return what was held back, at the end of the text; nothing after a match."""
        held, self._held = self._held, ""
        return held

    def _held_start(self, text: str) -> int:
        """Where the longest end of the text starts that begins a stop sequence."""
        longest = len(self._stops[0])
        for start in range(max(0, len(text) - longest + 1), len(text)):
            stops = self._by_first_character.get(text[start])
            if stops and _begins_any(stops, text[start:]):
                return start
        return len(text)


def _first_match(text: str, stops: Sequence[str]) -> str | None:
    """The stop sequence that is complete first; of several at one character, the first in ``stops``."""
    matches = [stop for stop in stops if stop in text]
    return min(matches, key=lambda stop: text.index(stop) + len(stop), default=None)


def _begins_any(stops: Sequence[str], end: str) -> bool:
    return any(stop.startswith(end) for stop in stops)
