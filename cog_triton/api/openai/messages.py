"""POST /v1/messages: Anthropic's API, on the same chats."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import APIRouter

from cog_triton.api.openai import exchange
from cog_triton.api.openai.chats import from_messages
from cog_triton.api.openai.chats.prompt import chat_prompt
from cog_triton.api.openai.chats.token_ids import token_ids
from cog_triton.api.openai.chats.turn import Turn, chat_turn
from cog_triton.api.openai.errors import MESSAGES_PATH, TABLES, ApiError
from cog_triton.api.openai.schemas.messages import CountBody, MessagesBody
from cog_triton.api.openai.served import FromApp
from cog_triton.api.openai.tool_calls.blocks import Block
from cog_triton.generation import Chunk

router = APIRouter(route_class=exchange.BodyRoute)
MESSAGE, BLOCKS = TABLES["message"], TABLES["message_blocks"]


@router.post("/v1/messages", responses=exchange.STREAMED)
async def messages(body: MessagesBody, served: FromApp) -> exchange.Answering:
    named = body.model
    from_messages.use_served_model(body, served)
    turn = await exchange.off_loop(lambda: chat_turn(from_messages.chat_body(body, served), served))
    return exchange.Answering(served, body, MessageWriter(named, turn), [turn.request])


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountBody, served: FromApp) -> dict[str, int]:
    """Count the tokens of messages as the model sees them."""
    from_messages.use_served_model(body, served)
    prompt = await exchange.off_loop(
        lambda: chat_prompt(from_messages.chat_body(body, served), served)
    )
    return {"input_tokens": len(await token_ids(served, prompt, special=False))}


class MessageWriter:
    def __init__(self, model: str, turn: Turn) -> None:
        self._parser, self._enforced = turn.parser("toolu_"), turn.use.enforced
        self._block: Block | None = None  # the one that is being written
        self._content: list[dict[str, Any]] = []
        own = {"id": exchange.new_id("msg_"), "model": model, "content": self._content}
        self._message: dict[str, Any] = {**MESSAGE, **own}
        self._usage = self._message["usage"] = {**MESSAGE["usage"]}
        self._begun = False

    def events(self, _: int, chunk: Chunk, /) -> Iterator[bytes]:
        self._usage["input_tokens"] = chunk.input_tokens or self._usage["input_tokens"]
        self._usage["output_tokens"] = chunk.output_tokens
        if not self._begun:
            self._begun = True
            yield exchange.typed_event("message_start", message=self._message)
            yield exchange.typed_event("ping")
        for block, text in self._parser.read(chunk):
            shape = BLOCKS[block.kind]
            if block is not self._block:
                yield from self._end()
                self._block, names = block, {"id": block.id, "name": block.name}
                begun = shape["begins"] | (names if block.kind == "call" else {})
                yield self._about_block("content_block_start", content_block=begun)
            if text:
                delta = {"type": shape["delta"], shape["field"]: text}
                yield self._about_block("content_block_delta", delta=delta)
        if chunk.finish_reason is not None:
            yield from self._end()
            stop = {"stop_reason": self._reason(chunk), "stop_sequence": chunk.stop_sequence}
            self._message |= stop
            yield exchange.typed_event("message_delta", delta=stop, usage=self._usage)
            yield exchange.typed_event("message_stop")

    def failed(self, error: ApiError) -> Iterator[bytes]:
        yield exchange.typed_event("error", error=error.body(MESSAGES_PATH)["error"])

    def whole(self, answers: Sequence[Sequence[Chunk]]) -> dict[str, Any]:
        list(self.events(0, exchange.joined(answers[0])))
        return self._message

    def _about_block(self, name: str, **values: Any) -> bytes:
        return exchange.typed_event(name, index=len(self._content), **values)

    def _end(self) -> Iterator[bytes]:
        if (block := self._block) is None:
            return
        if block.kind == "thoughts":
            delta = {"type": "signature_delta", "signature": signature(block.text)}
            yield self._about_block("content_block_delta", delta=delta)
        yield self._about_block("content_block_stop")
        whole = {**BLOCKS[block.kind]["begins"]}
        if block.broken:
            whole = {"type": "text", "text": block.written}
        elif block.kind == "call":
            whole |= {"id": block.id, "name": block.name, "input": call_input(block.text)}
        else:
            whole[whole["type"]] = block.text
        if block.kind == "thoughts":
            whole["signature"] = signature(block.text)
        self._content.append(whole)

    def _reason(self, chunk: Chunk) -> str:
        if chunk.finish_reason == "length":
            return "max_tokens"
        if self._parser.ends_with_calls or (self._enforced and not self._parser.broken_text()):
            return "tool_use"
        return "end_turn" if chunk.stop_sequence is None else "stop_sequence"


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
