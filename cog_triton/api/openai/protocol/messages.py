"""The writer of Anthropic's /v1/messages."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

from cog_triton.api.openai.chats.turn import Turn
from cog_triton.api.openai.errors import MESSAGES_PATH, ApiError
from cog_triton.api.openai.protocol.events import new_id, typed_event
from cog_triton.api.openai.protocol.writer import joined
from cog_triton.api.openai.tool_calls.blocks import Block
from cog_triton.generation import Chunk


class MessageWriter:
    """Fills a message, and writes each of its changes as an event."""

    def __init__(self, model: str, turn: Turn) -> None:
        self._parser = turn.parser("toolu_")
        self._is_enforced = turn.use.enforced
        self._block: Block | None = None  # the block that is being written
        self._content: list[dict[str, Any]] = []
        self._usage = {
            "input_tokens": 0,
            "output_tokens": 0,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        }
        self._message: dict[str, Any] = {
            "type": "message",
            "role": "assistant",
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage,
            "id": new_id("msg_"),
            "model": model,
            "content": self._content,
        }
        self._begun = False

    def events(self, _: int, chunk: Chunk, /) -> Iterator[bytes]:
        self._usage["input_tokens"] = chunk.input_tokens or self._usage["input_tokens"]
        self._usage["output_tokens"] = chunk.output_tokens
        if not self._begun:
            self._begun = True
            yield typed_event("message_start", message=self._message)
            yield typed_event("ping")
        for block, text in self._parser.read(chunk):
            if block is not self._block:
                yield from self._end_block()
                self._block = block
                yield self._about_block("content_block_start", content_block=_empty(block))
            if text:
                yield self._about_block("content_block_delta", delta=_delta(block, text))
        if chunk.finish_reason is not None:
            yield from self._end_block()
            stop = {"stop_reason": self._reason(chunk), "stop_sequence": chunk.stop_sequence}
            self._message |= stop
            yield typed_event("message_delta", delta=stop, usage=self._usage)
            yield typed_event("message_stop")

    def failed(self, error: ApiError) -> Iterator[bytes]:
        yield typed_event("error", error=error.body(MESSAGES_PATH)["error"])

    def whole(self, answers: Sequence[Sequence[Chunk]]) -> dict[str, Any]:
        for _ in self.events(0, joined(answers[0])):
            pass
        return self._message

    def _about_block(self, name: str, **values: Any) -> bytes:
        return typed_event(name, index=len(self._content), **values)

    def _end_block(self) -> Iterator[bytes]:
        block = self._block
        if block is None:
            return
        if block.kind == "thoughts":
            delta = {"type": "signature_delta", "signature": signature(block.text)}
            yield self._about_block("content_block_delta", delta=delta)
        yield self._about_block("content_block_stop")
        self._content.append(_whole(block))

    def _reason(self, chunk: Chunk) -> str:
        if chunk.finish_reason == "length":
            return "max_tokens"
        if self._parser.ends_with_calls:
            return "tool_use"
        if self._is_enforced and not self._parser.broken_text():
            return "tool_use"
        return "end_turn" if chunk.stop_sequence is None else "stop_sequence"


def _empty(block: Block) -> dict[str, Any]:
    """Return a block as its stream begins."""
    match block.kind:
        case "text":
            return {"type": "text", "text": ""}
        case "thoughts":
            return {"type": "thinking", "thinking": "", "signature": ""}
        case "call":
            return {"type": "tool_use", "input": {}, "id": block.id, "name": block.name}


def _delta(block: Block, text: str) -> dict[str, Any]:
    match block.kind:
        case "text":
            return {"type": "text_delta", "text": text}
        case "thoughts":
            return {"type": "thinking_delta", "thinking": text}
        case "call":
            return {"type": "input_json_delta", "partial_json": text}


def _whole(block: Block) -> dict[str, Any]:
    """Return a block that has ended."""
    if block.broken:
        return {"type": "text", "text": block.written}
    match block.kind:
        case "text":
            return _empty(block) | {"text": block.text}
        case "thoughts":
            return _empty(block) | {"thinking": block.text, "signature": signature(block.text)}
        case "call":
            return _empty(block) | {"input": call_input(block.text)}


def signature(thoughts: str) -> str:
    """Return a signature of thoughts; clients send no thoughts back that have none."""
    return hashlib.blake2b(thoughts.encode(errors="replace"), digest_size=16).hexdigest()


def call_input(text: str) -> dict[str, Any]:
    """Return the arguments of a call; none where they were cut off."""
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
