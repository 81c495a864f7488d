"""A message of Anthropic's API, whole or as typed events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import orjson

from cog_triton.faces.openai.answers import NumberedChunks, new_id, typed_event
from cog_triton.faces.openai.errors import ApiError, message_error
from cog_triton.faces.openai.tools.events import CallStart, Event, Reasoning, Text
from cog_triton.faces.openai.turns import Reader
from cog_triton.generation import Chunk

# Of a block: the field that has its text, the type of its deltas, and their field.
_TEXTS = {
    "text": ("text", "text_delta", "text"),
    "thinking": ("thinking", "thinking_delta", "thinking"),
    "tool_use": ("input", "input_json_delta", "partial_json"),
}


class MessageWriter:
    """See ``answers.Writer``; its response has one answer."""

    def __init__(self, model: str, reader: Reader, *, enforced: bool) -> None:
        """At the beginning.

        Args:
            enforced: whether the answer has to be a call.
        """
        self._head = {
            "id": new_id("msg_"),
            "type": "message",
            "role": "assistant",
            "model": model,
        }
        self._reader = reader
        self._enforced = enforced
        self._blocks: list[dict[str, Any]] = []
        self._texts: list[str] = []  # of the block that is being made
        self._stop: dict[str, str | None] = {"stop_reason": None, "stop_sequence": None}
        self._tokens = (0, 0)  # of input and output

    async def events(self, chunks: NumberedChunks) -> AsyncGenerator[bytes, None]:
        """See ``Writer``."""
        begun = False
        async for _, chunk in chunks:
            data = b""
            if not begun:
                begun = True
                self._count(chunk)
                data = typed_event({"type": "message_start", "message": self._message()})
                data += typed_event({"type": "ping"})
            if data := data + b"".join(map(typed_event, self._take(chunk))):
                yield data
        delta = {"type": "message_delta", "delta": self._stop, "usage": self._usage()}
        yield typed_event(delta) + typed_event({"type": "message_stop"})

    async def body(self, chunks: NumberedChunks) -> dict[str, Any]:
        """See ``Writer``."""
        async for _, chunk in chunks:
            self._take(chunk)
        return self._message()

    def failed(self, error: ApiError) -> bytes:
        """See ``Writer``."""
        return typed_event(message_error(error))

    def _message(self) -> dict[str, Any]:
        return {**self._head, "content": self._blocks, **self._stop, "usage": self._usage()}

    def _take(self, chunk: Chunk) -> list[dict[str, Any]]:
        """What is said of a chunk."""
        self._count(chunk)
        said = [told for event in self._reader.read(chunk) for told in self._told(event)]
        if chunk.finish_reason is None:
            return said
        self._stop = {
            "stop_reason": self._stop_reason(chunk),
            "stop_sequence": chunk.stop_sequence,
        }
        return [*said, *self._close()]

    def _count(self, chunk: Chunk) -> None:
        self._tokens = (chunk.input_tokens or self._tokens[0], chunk.output_tokens)

    def _stop_reason(self, chunk: Chunk) -> str:
        if chunk.finish_reason == "length":
            return "max_tokens"
        if self._reader.called or self._enforced:
            return "tool_use"
        return "end_turn" if chunk.stop_sequence is None else "stop_sequence"

    def _told(self, event: Event) -> list[dict[str, Any]]:
        if isinstance(event, CallStart):
            call = {"type": "tool_use", "id": event.id, "name": event.name, "input": {}}
            return self._begin(call)
        said = []
        if isinstance(event, Text) and self._kind() != "text":
            said = self._begin({"type": "text", "text": ""})
        if isinstance(event, Reasoning) and self._kind() != "thinking":
            said = self._begin({"type": "thinking", "thinking": "", "signature": ""})
        self._texts.append(event.text)
        _, kind, name = _TEXTS[self._kind()]
        delta = {"type": kind, name: event.text}
        place = len(self._blocks) - 1
        return [*said, {"type": "content_block_delta", "index": place, "delta": delta}]

    def _kind(self) -> str:
        """That of the block that is being made."""
        return str(self._blocks[-1]["type"]) if self._blocks else ""

    def _begin(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        said = self._close()
        start = {
            "type": "content_block_start",
            "index": len(self._blocks),
            "content_block": dict(block),
        }
        self._blocks.append(block)
        return [*said, start]

    def _close(self) -> list[dict[str, Any]]:
        """Ends the block that is being made."""
        if not self._blocks:
            return []
        block, text = self._blocks[-1], "".join(self._texts)
        self._texts = []
        block[_TEXTS[self._kind()][0]] = _input(text) if self._kind() == "tool_use" else text
        return [{"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def _usage(self) -> dict[str, int]:
        given, made = self._tokens
        return {
            "input_tokens": given,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": made,
        }


def _input(text: str) -> dict[str, Any]:
    """The arguments of a call; none where they were cut off."""
    try:
        value = orjson.loads(text)  # what it reads can be written again
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
