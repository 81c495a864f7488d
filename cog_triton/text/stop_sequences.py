"""Ends a streamed text at the first stop sequence in it.

Which match is first must not depend on how the text is cut into pieces. It is the match that is
*complete* first, the longest one if several are complete at the same character: what an observer
sees who reads the text a character at a time and stops as soon as it ends with a stop sequence.
A match that begins earlier but ends later loses: with the stops "abcd" and "bc", "abcd" ends
at "a".

The search is the Aho-Corasick automaton: after each character its state is the longest suffix of
the text that begins a stop sequence, which is also what has to be held back. The work is linear in
the text, whatever the pieces, and the number and length of the stops have no part in it.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence

_ROOT = 0
_PIECE = re.compile(r"(?:\\[\\,]|[^,])+")
_ESCAPE = re.compile(r"\\([\\,])")


def parse_stop_sequences(text: str | None) -> tuple[str, ...]:
    r"""Split a comma-separated list of stop sequences.

    Empty entries are dropped; whitespace belongs to its entry. ``\,`` stands for a comma that does
    not separate, ``\\`` for a backslash; any other backslash is just one.
    """
    return tuple(_ESCAPE.sub(r"\1", piece) for piece in _PIECE.findall(text or ""))


class StopSequences:
    """Passes a text through, up to the first stop sequence in it and without that one.

    Stops are compared character by character (code points: no normalization, no case folding).
    Empty ones are ignored; without any, all text passes at once.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._automaton = _Automaton([stop for stop in stops if stop])
        self._state = _ROOT
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
        if self._automaton.is_empty:
            return text
        before = self._state
        for position, character in enumerate(text, start=1):
            self._state = self._automaton.step(self._state, character)
            self._matched = self._automaton.match[self._state]
            if self._matched is not None:
                return self._release(before, text[:position], len(self._matched))
        return self._release(before, text, self._automaton.depth[self._state])

    def flush(self) -> str:
        """Return what was held back, at the end of the text; nothing after a match."""
        if self._matched is not None:
            return ""
        held = self._automaton.prefix(self._state)
        self._state = _ROOT
        return held

    def _release(self, before: int, text: str, held: int) -> str:
        """The text held in state ``before`` and ``text``, less the last ``held`` characters."""
        length = self._automaton.depth[before] + len(text) - held
        from_before = self._automaton.prefix(before, length)
        return from_before + text[: length - len(from_before)]


class _Automaton:
    """Aho-Corasick over non-empty words. Each state stands for one prefix of a word."""

    def __init__(self, words: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._word = [""]  # one that begins with the state's prefix
        self.depth = [0]
        self.match: list[str | None] = [None]  # the longest word that the state's prefix ends with
        for word in words:
            self._add(word)
        self._fallback = [_ROOT] * len(self.depth)
        self._link()

    @property
    def is_empty(self) -> bool:
        return len(self.depth) == 1

    def prefix(self, state: int, at_most: int | None = None) -> str:
        depth = self.depth[state]
        return self._word[state][: depth if at_most is None else min(depth, at_most)]

    def step(self, state: int, character: str) -> int:
        """The longest suffix of the state's prefix and the character that begins a word."""
        while character not in self._next[state]:
            if state == _ROOT:
                return _ROOT
            state = self._fallback[state]
        return self._next[state][character]

    def _add(self, word: str) -> None:
        state = _ROOT
        for depth, character in enumerate(word, start=1):
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._word.append(word)
                self.depth.append(depth)
                self.match.append(None)
            state = self._next[state][character]
        self.match[state] = word

    def _link(self) -> None:
        """Find for each state, the shallow ones first, its longest proper suffix with a state."""
        queue = deque(self._next[_ROOT].values())
        while queue:
            state = queue.popleft()
            for character, child in self._next[state].items():
                self._fallback[child] = self.step(self._fallback[state], character)
                if self.match[child] is None:
                    self.match[child] = self.match[self._fallback[child]]
                queue.append(child)
