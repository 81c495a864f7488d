"""What a parser makes of a model's text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Text:
    """For the reader."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """What the model thought before it answered."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A call begins; its arguments follow.

    Attributes:
        index: counted from 0 in one answer.
    """

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class Arguments:
    """The next piece of a call's arguments, which join to one JSON value."""

    index: int
    text: str


Event = Text | Reasoning | CallStart | Arguments


class Parser(Protocol):
    """Reads a text in pieces. However it is cut, the events are the same but for their cuts."""

    def feed(self, text: str) -> list[Event]:
        """The events that are certain with this piece."""

    def flush(self) -> list[Event]:
        """The rest, at the end of the text."""


def joined(events: Iterable[Event]) -> list[Event]:
    """The events, with neighbours of one kind as one, and none that are empty."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        if (
            isinstance(event, Arguments)
            and isinstance(last, Arguments)
            and last.index == event.index
        ):
            result[-1] = Arguments(event.index, last.text + event.text)
        elif isinstance(event, Text) and isinstance(last, Text):
            result[-1] = Text(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            result[-1] = Reasoning(last.text + event.text)
        elif isinstance(event, CallStart) or event.text:
            result.append(event)
    return result


def held_length(text: str, marker: str) -> int:
    """How many characters at the end of a text may be the beginning of a marker."""
    longest = min(len(text), len(marker))
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)
