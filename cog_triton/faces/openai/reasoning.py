"""What a model thinks before it answers: ``<think>…</think>`` at the beginning of its text."""

from __future__ import annotations

from cog_triton.faces.openai.tools.events import (
    Event,
    Parser,
    Reasoning,
    Text,
    held_length,
    joined,
)

OPENING, CLOSING = "<think>", "</think>"


def thinks(template: str) -> bool:
    """Whether a model's chat template knows of its thoughts."""
    return CLOSING in template


class ReasoningParser:
    """Tells thoughts from the answer, which goes on to another parser. See ``Parser``."""

    def __init__(self, prompt: str, answer: Parser | None) -> None:
        """At the beginning of a text.

        Args:
            prompt: which may have begun the thoughts.
            answer: reads what comes behind them.
        """
        self._answer = answer
        self._held = ""
        self._inside = prompt.rstrip().endswith(OPENING)
        self._decided = self._inside
        self._begun = False  # whether there has been a thought
        self._trim = False  # whether the lines between thoughts and answer are being passed over

    def feed(self, text: str) -> list[Event]:
        """See ``Parser``."""
        if self._decided and not self._inside:
            return self._behind(text)
        self._held += text
        if not self._decided:
            start = self._held.lstrip()
            if OPENING.startswith(start) and start != OPENING:
                return []
            self._decided, self._inside = True, start.startswith(OPENING)
            text, self._held = self._held, ""
            return self.feed(start[len(OPENING) :] if self._inside else text)
        thought, closing, answer = self._held.partition(CLOSING)
        if closing:
            self._held, self._inside = "", False
            return [*self._thought(thought.rstrip()), *self._behind_first(answer)]
        kept = held_length(thought, CLOSING) or len(thought) - len(thought.rstrip())
        cut = len(thought[: len(thought) - kept].rstrip())
        self._held = thought[cut:]
        return self._thought(thought[:cut])

    def flush(self) -> list[Event]:
        """See ``Parser``."""
        held, self._held = self._held, ""
        if self._inside:
            return joined(self._thought(held))
        rest = self._behind(held)
        return joined([*rest, *(self._answer.flush() if self._answer else [])])

    def _thought(self, text: str) -> list[Event]:
        text = text if self._begun else text.lstrip()
        self._begun = self._begun or bool(text)
        return [Reasoning(text)] if text else []

    def _behind_first(self, text: str) -> list[Event]:
        self._trim = True
        return self._behind(text)

    def _behind(self, text: str) -> list[Event]:
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        if not text:
            return []
        return self._answer.feed(text) if self._answer else [Text(text)]
