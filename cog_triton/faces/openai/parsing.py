"""Events of a model's text, and the parser of its thoughts.

However a text is cut into pieces, the events are the same but for their cuts. Knows no I/O.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Reasoning:
    text: str


@dataclass(frozen=True)
class CallStart:
    """The beginning of a call; calls of one answer are counted from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class Arguments:
    """The next piece of a call's arguments, which join to one JSON value."""

    index: int
    text: str


Event = Text | Reasoning | CallStart | Arguments


class Parser:
    """Reads a text in pieces; by itself, all of it is text."""

    def __init__(self) -> None:
        self._held = ""
        # Takes what is certain from the held text; returns None where that needs more of the text.
        self._state: Callable[[], list[Event] | None] = self._plain

    def feed(self, text: str) -> list[Event]:
        """Return the events that are certain with this piece."""
        self._held += text
        events: list[Event] = []
        while self._held and (more := self._state()) is not None:
            events += more
        return events

    def flush(self) -> list[Event]:
        """Return the rest, at the end of the text."""
        return self._plain() if self._held else []

    def _plain(self) -> list[Event]:
        text, self._held = self._held, ""
        return [Text(text)]


class ReasoningParser(Parser):
    """Separates the thoughts at the beginning of a text, ``<think>…</think>``, from the answer."""

    OPENING, CLOSING = "<think>", "</think>"

    def __init__(self, prompt: str, answer: Parser) -> None:
        """
        Args:
            prompt: may have opened the thoughts.
            answer: reads the text behind them.
        """
        super().__init__()
        self._parser = answer
        self._after_space = self._thought
        self._state = self._before
        if prompt.rstrip().endswith(self.OPENING):
            self._state = self._space

    def flush(self) -> list[Event]:
        held, self._held = self._held, ""
        if self._state == self._thought:
            return [Reasoning(held)] if held else []
        return [*self._parser.feed(held), *self._parser.flush()]

    def _before(self) -> list[Event] | None:
        start = self._held.lstrip()
        if len(start) < len(self.OPENING) and self.OPENING.startswith(start):
            return None
        self._state = self._answer
        if start.startswith(self.OPENING):
            self._held, self._state = start[len(self.OPENING) :], self._space
        return []

    def _space(self) -> list[Event]:
        """Skip the white space before the thoughts, and that before the answer."""
        self._held = self._held.lstrip()
        if self._held:
            self._state = self._after_space
        return []

    def _thought(self) -> list[Event] | None:
        thought, closing, answer = self._held.partition(self.CLOSING)
        if closing:
            self._held, self._state, self._after_space = answer, self._space, self._answer
            cut = len(thought.rstrip())
        else:
            cut = len(thought[: len(thought) - held_length(thought, self.CLOSING)].rstrip())
            self._held = thought[cut:]
        if cut:
            return [Reasoning(thought[:cut])]
        return [] if closing else None

    def _answer(self) -> list[Event]:
        text, self._held = self._held, ""
        return self._parser.feed(text)


def held_length(text: str, mark: str) -> int:
    """Return how many characters at the end of a text may be the beginning of a mark."""
    longest = min(len(text), len(mark))
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)
