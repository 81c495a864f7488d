"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from fastapi import APIRouter

from cog_triton.faces.openai.answers import Answering
from cog_triton.faces.openai.bodies import STREAMED, BodyRoute, off_loop
from cog_triton.faces.openai.choices import (
    Choice,
    ChoiceWriter,
    Piece,
    answering,
    chat_log_probs,
    stop_reason,
    wanted,
)
from cog_triton.faces.openai.fields import ChatBody
from cog_triton.faces.openai.parsing import CallStart, Event, Reasoning, Text
from cog_triton.faces.openai.served import FromApp, RequestId
from cog_triton.faces.openai.tokens import with_ids
from cog_triton.faces.openai.turns import Turn, chat_turn
from cog_triton.generation import Chunk
from cog_triton.text.tokenizer import Tokenizer

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/chat/completions", responses=STREAMED)
async def chat_completions(body: ChatBody, served: FromApp, request_id: RequestId) -> Answering:
    """Answers messages, in one body or as events."""
    turn = await off_loop(chat_turn, body, served)
    request = await with_ids(turn.request, body, served)
    choices = [
        ChatChoice(number, served.backend.tokenizer, turn, body, request.prompt_ids)
        for number in range(body.choices)
    ]
    kinds = ("chat.completion", "chat.completion.chunk")
    writer = ChoiceWriter(body, served, "chatcmpl-", kinds, choices)
    return answering(body, served, writer, [request], request_id)


class ChatChoice(Choice):
    """See ``Choice``; a piece has a delta of the message."""

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        turn: Turn,
        body: ChatBody,
        prompt_ids: Sequence[int],
    ) -> None:
        super().__init__(index, tokenizer, body)
        self._wanted, self._echo = body.wanted_log_probs, echoed(body)
        self._reader, self._named = turn.reader(), turn.named
        self._prompt_ids = prompt_ids
        self.plain = self.plain and self._reader.plain

    def text_piece(self, text: str) -> Piece:
        return self._piece({"content": text})

    def begin(self) -> list[Piece]:
        role = self._piece({"role": "assistant", "content": "", "refusal": None})
        return [role, self.text_piece(self._echo)] if self._echo else [role]

    def pieces(self, chunk: Chunk) -> list[Piece]:
        self._prompt_tokens += chunk.prompt_log_probs
        deltas = [_delta(event) for event in self._reader.read(chunk)]
        tokens = wanted(chunk.log_probs, self._wanted)
        ids = {"token_ids": chunk.ids} if self._body.return_token_ids and chunk.ids else {}
        if (tokens or ids) and not deltas:
            deltas = [{"content": ""}]
        pieces = [self._piece(delta) for delta in deltas]
        if tokens:  # with the first piece: no token is in two
            content = chat_log_probs(self._tokenizer, tokens)
            pieces[0]["logprobs"] = {"content": content, "refusal": None}
        if ids:
            pieces[0] |= ids
        if (reason := chunk.finish_reason) is not None:
            # Of a call that was forced by its name, OpenAI says stop.
            called = self._reader.called and reason == "stop" and not self._named
            last = self._piece({}, "tool_calls" if called else reason)
            pieces.append({**last, **stop_reason(chunk.stop_token)})
        return pieces

    def whole(self, pieces: Sequence[Piece]) -> Piece:
        log_probs = [piece["logprobs"]["content"] for piece in pieces if piece["logprobs"]]
        last = {name: value for name, value in pieces[-1].items() if name != "delta"}
        if log_probs:
            last["logprobs"] = {"content": list(chain(*log_probs)), "refusal": None}
        if self._body.return_token_ids:
            last["token_ids"] = [id for piece in pieces for id in piece.get("token_ids", ())]
        message = message_of([piece["delta"] for piece in pieces])
        return {"index": last.pop("index"), "message": message, **last}

    def prompt(self) -> dict[str, Any]:
        ids = {"prompt_token_ids": self._prompt_ids} if self._body.return_token_ids else {}
        return {**ids, **self.prompt_log_probs()}

    def _piece(self, delta: dict[str, Any], finish_reason: str | None = None) -> Piece:
        return {
            "index": self._index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": finish_reason,
        }


def echoed(body: ChatBody) -> str:
    """Return the text of the assistant's that the answer follows, if it is asked for."""
    last = body.messages[-1]
    if not body.echo or last.role != "assistant":
        return ""
    content = last.content or last.refusal or ""
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text") or part.get("refusal") or "" for part in content)


def _delta(event: Event) -> dict[str, Any]:
    if isinstance(event, Text):
        return {"content": event.text}
    if isinstance(event, Reasoning):
        return {"reasoning_content": event.text}
    call: dict[str, Any] = {"index": event.index}
    if isinstance(event, CallStart):
        function = {"name": event.name, "arguments": ""}
        call |= {"id": event.id, "type": "function", "function": function}
    else:
        call["function"] = {"arguments": event.text}
    return {"tool_calls": [call]}


def message_of(deltas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that deltas join to."""
    content = "".join(delta.get("content") or "" for delta in deltas)
    reasoning = "".join(delta.get("reasoning_content") or "" for delta in deltas)
    calls: list[dict[str, Any]] = []
    for piece in (call for delta in deltas for call in delta.get("tool_calls", ())):
        if "id" in piece:
            function = dict(piece["function"])
            calls.append({"id": piece["id"], "type": "function", "function": function})
        else:
            calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if calls and not content else content,
        "refusal": None,
        "annotations": [],
    }
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message
