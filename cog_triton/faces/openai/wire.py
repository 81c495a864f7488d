"""Bytes of events and bodies. For each token only its text is made into JSON; what is around it stays."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

import orjson

DONE = b"data: [DONE]\n\n"
dumps = orjson.dumps


def event(value: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + dumps(value) + b"\n\n"


def typed_event(value: dict[str, Any]) -> bytes:
    """A server-sent event under the name that is its type, as newer APIs have them."""
    return f"event: {value['type']}\n".encode() + event(value)


def new_id(prefix: str) -> str:
    """An id of a response or a call."""
    return prefix + secrets.token_hex(12)


@dataclass(frozen=True)
class Head:
    """What every event of a response begins with, in OpenAI's order.

    Attributes:
        kind: ``chat.completion``, say; ``chunk`` is that of its events.
        created: seconds since 1970.
        usage: whether there will be an event with the usage: the others have null there.
    """

    id: str
    kind: str
    chunk: str
    created: int
    model: str
    usage: bool = False

    def body(self, choices: list[Any], usage: dict[str, Any]) -> dict[str, Any]:
        """The whole response."""
        return {**self._fields(self.kind), "choices": choices, "usage": usage}

    def event(
        self, choices: list[Any], usage: dict[str, Any] | None = None, **fields: Any
    ) -> bytes:
        """One event."""
        value = {**self._fields(self.chunk), "choices": choices, **fields}
        return event({**value, "usage": usage} if self.usage else value)

    def around(self, choice: dict[str, Any], mark: str) -> tuple[bytes, bytes]:
        """What stands before and behind a text in an event.

        Args:
            choice: with ``mark`` in place of the text.
        """
        before, _, behind = self.event([choice]).partition(dumps(mark))
        return before, behind

    def _fields(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
        }


def stop_reason(token: int | None) -> dict[str, int]:
    """What vLLM says of a token of ``stop_token_ids`` that ended an answer; nothing without one."""
    return {} if token is None else {"stop_reason": token}


def usage(prompt: int, output: int) -> dict[str, Any]:
    """Counts of tokens, as both kinds of completions have them."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
    }
