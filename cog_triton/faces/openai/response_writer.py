"""A response of /v1/responses, whole or as typed events in their published order."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from typing import Any

from cog_triton.faces.openai.answers import NumberedChunks, dumps, new_id, typed_event
from cog_triton.faces.openai.errors import ApiError, invalid
from cog_triton.faces.openai.parsing import Arguments, CallStart, Reasoning, Text
from cog_triton.faces.openai.tokens import chat_log_probs
from cog_triton.faces.openai.turns import Reader
from cog_triton.generation import Chunk
from cog_triton.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Kind:
    """A type of items.

    Attributes:
        prefix: of an item's id.
        text: name of its text in events, and type of the part of its content that has it.
        fields: those beside id, type, status and text.
    """

    type: str
    prefix: str
    text: str
    fields: dict[str, Any] = field(default_factory=dict)


MESSAGE = Kind("message", "msg_", "output_text", {"role": "assistant"})
REASONING = Kind("reasoning", "rs_", "reasoning_text", {"summary": [], "encrypted_content": None})
CALL = Kind("function_call", "fc_", "function_call_arguments")
KINDS = {Text: MESSAGE, Reasoning: REASONING, CallStart: CALL, Arguments: CALL}


class Item:
    """An item of the output that is being made; a call's text is its arguments."""

    def __init__(self, kind: Kind, index: int, start: CallStart | None) -> None:
        self.kind = kind
        self._index, self._id = index, new_id(kind.prefix)
        self._fields = {"call_id": start.id, "name": start.name} if start else kind.fields
        self._texts: list[str] = []
        self._log_probs: list[Any] = []

    def begin(self) -> Iterator[dict[str, Any]]:
        yield self._whole("added", "in_progress")
        if self.kind is not CALL:
            yield self._event("response.content_part.added", part=self._part())

    def delta(self, text: str, log_probs: list[Any]) -> dict[str, Any]:
        self._texts.append(text)
        self._log_probs += log_probs
        more = {"logprobs": log_probs} if self.kind is MESSAGE else {}
        return self._event(f"response.{self.kind.text}.delta", delta=text, **more)

    def end(self, status: str) -> Iterator[dict[str, Any]]:
        name = f"response.{self.kind.text}.done"
        if self.kind is CALL:
            yield self._event(name, arguments=self._text(), name=self._fields["name"])
        else:
            more = {"logprobs": self._log_probs} if self.kind is MESSAGE else {}
            yield self._event(name, text=self._text(), **more)
            yield self._event("response.content_part.done", part=self._part())
        yield self._whole("done", status)

    def body(self, status: str) -> dict[str, Any]:
        head = {"id": self._id, "type": self.kind.type, "status": status, **self._fields}
        if self.kind is CALL:
            return {**head, "arguments": self._text()}
        return {**head, "content": [] if status == "in_progress" else [self._part()]}

    def _text(self) -> str:
        return "".join(self._texts)

    def _part(self) -> dict[str, Any]:
        more = {"annotations": [], "logprobs": self._log_probs} if self.kind is MESSAGE else {}
        return {"type": self.kind.text, "text": self._text(), **more}

    def _whole(self, what: str, status: str) -> dict[str, Any]:
        kind = f"response.output_item.{what}"
        return {"type": kind, "output_index": self._index, "item": self.body(status)}

    def _event(self, kind: str, **values: Any) -> dict[str, Any]:
        place = {} if self.kind is CALL else {"content_index": 0}
        return {
            "type": kind,
            "item_id": self._id,
            "output_index": self._index,
            **place,
            **values,
        }


class ResponseWriter:
    """See ``answers.Writer``."""

    def __init__(self, fields: dict[str, Any], reader: Reader, tokenizer: Tokenizer) -> None:
        """
        Args:
            fields: of the response, which is written in them.

        Raises:
            ApiError: they cannot be written as JSON.
        """
        self._reader, self._tokenizer = reader, tokenizer
        self._response: dict[str, Any] = {"id": new_id("resp_"), **fields}
        try:
            dumps(self._response)
        except TypeError as error:  # half of a surrogate pair, or a number of more than 64 bits
            raise invalid(f"the request has what cannot be given back: {error}") from None
        self._item: Item | None = None
        self._log_probs: list[Any] = []  # of tokens whose text has not come yet
        self._input_tokens = 0
        self._events = 0

    async def events(self, chunks: NumberedChunks) -> AsyncGenerator[bytes, None]:
        async for _, chunk in chunks:
            data = b""
            if not self._events:
                data = self._whole("created") + self._whole("in_progress")
            if data := data + b"".join(map(self._numbered, self._read(chunk))):
                yield data
        yield self._whole(self._response["status"])

    async def body(self, chunks: NumberedChunks) -> dict[str, Any]:
        async for _, chunk in chunks:
            for _ in self._read(chunk):
                pass
        return self._response

    def failed(self, error: ApiError) -> bytes:
        data = b"".join(map(self._numbered, self._end("incomplete")))
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        self._response |= {
            "status": "failed",
            "error": {"code": code, "message": error.message},
            "incomplete_details": None,
            "usage": None,
        }
        told = {"code": error.code, "message": error.message, "param": error.param}
        return data + self._numbered({"type": "error", **told}) + self._whole("failed")

    def _read(self, chunk: Chunk) -> Iterator[dict[str, Any]]:
        self._input_tokens = chunk.input_tokens or self._input_tokens
        self._log_probs += chat_log_probs(self._tokenizer, chunk.log_probs)
        for event in self._reader.read(chunk):
            kind = KINDS[type(event)]
            start = event if isinstance(event, CallStart) else None
            if start or self._item is None or self._item.kind is not kind:
                yield from self._end("completed")
                self._item = Item(kind, len(self._response["output"]), start)
                yield from self._item.begin()
            if not isinstance(event, CallStart):
                log_probs, self._log_probs = self._log_probs, []
                yield self._item.delta(event.text, log_probs if kind is MESSAGE else [])
        if self._item and self._item.kind is not MESSAGE:
            self._log_probs = []  # those of thoughts and calls are not of the output's text
        if chunk.finish_reason is not None:
            status = "incomplete" if chunk.finish_reason == "length" else "completed"
            yield from self._end(status)
            self._response["status"] = status
            self._response["usage"] = self._usage(chunk)
            if status == "incomplete":
                self._response["incomplete_details"] = {"reason": "max_output_tokens"}

    def _end(self, status: str) -> Iterator[dict[str, Any]]:
        """End the last item."""
        if self._item:
            yield from self._item.end(status)
            self._response["output"].append(self._item.body(status))
            self._item = None

    def _numbered(self, event: dict[str, Any]) -> bytes:
        numbered = {"type": event["type"], "sequence_number": self._events, **event}
        self._events += 1
        return typed_event(numbered)

    def _whole(self, what: str) -> bytes:
        return self._numbered({"type": f"response.{what}", "response": self._response})

    def _usage(self, chunk: Chunk) -> dict[str, Any]:
        """Return counts of tokens: the engine's, but for those of thoughts, which are the tokenizer's."""
        items = [item for item in self._response["output"] if item["type"] == REASONING.type]
        text = "".join(item["content"][0]["text"] for item in items)
        thought = len(self._tokenizer(text, add_special_tokens=False).input_ids) if text else 0
        return {
            "input_tokens": self._input_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": chunk.output_tokens,
            "output_tokens_details": {"reasoning_tokens": min(thought, chunk.output_tokens)},
            "total_tokens": self._input_tokens + chunk.output_tokens,
        }
