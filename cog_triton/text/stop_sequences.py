"""Ends a streamed text at the first stop sequence in it, however it is cut into pieces.

The first match is the one that is *complete* first, the longest if several are complete at the same
character: with the stops "abcd" and "bc", "abcd" ends at "a".
"""

import re
from collections.abc import Sequence

from cog_triton.errors import InvalidParameter
from cog_triton.request.limits import STOP_TEXT_CHARACTERS

_PIECE = re.compile(r"(?:\\[\\,]|[^,])+")
_ESCAPE = re.compile(r"\\([\\,])")


def parse_stop_sequences(text: str | None, name: str = "stop_sequences") -> tuple[str, ...]:
    r"""Split a comma-separated list of stop sequences, or of other texts.

    Empty entries are dropped; whitespace belongs to its entry. ``\,`` stands for a comma that does
    not separate, ``\\`` for a backslash; any other backslash is just one. A list longer than the longest
    stop sequences make it is an InvalidParameter.
    """
    if text is not None and len(text) > STOP_TEXT_CHARACTERS:
        most = f"at most {STOP_TEXT_CHARACTERS} characters"
        raise InvalidParameter(f"{name} must be a list of {most}, not {len(text)}")
    return tuple(_ESCAPE.sub(r"\1", piece) for piece in _PIECE.findall(text or ""))


class StopSequences:
    """Passes a text through up to its first stop sequence, then ``matched``, compared by code points."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted(filter(None, stops), key=len, reverse=True)
        self._first_characters = {stop[0] for stop in self._stops}
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Return the text that can be delivered now, without an end that may begin a stop."""
        if self.matched is not None:
            return ""
        if not self._held and self._first_characters.isdisjoint(text):
            return text
        text, self._held = self._held + text, ""
        if complete := {stop: text.index(stop) + len(stop) for stop in self._stops if stop in text}:
            self.matched = min(complete, key=complete.__getitem__)
            return text[: complete[self.matched] - len(self.matched)]
        for start in range(max(0, len(text) - len(self._stops[0]) + 1), len(text)):
            end = text[start:]
            if end[0] in self._first_characters and any(s.startswith(end) for s in self._stops):
                self._held = end
                return text[:start]
        return text

    def flush(self) -> str:
        """Return what was held back, at the end of the text; nothing after a match."""
        held, self._held = self._held, ""
        return held
