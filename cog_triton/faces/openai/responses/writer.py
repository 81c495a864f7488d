"""A response of /v1/responses, whole or as typed events in their published order."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from cog_triton.faces.openai.answers import NumberedChunks, dumps, new_id, typed_event
from cog_triton.faces.openai.choices import chat_log_probs
from cog_triton.faces.openai.errors import ApiError, invalid
from cog_triton.faces.openai.responses.fields import ResponsesBody
from cog_triton.faces.openai.responses.output import Output
from cog_triton.faces.openai.turns import Reader
from cog_triton.generation import Chunk
from cog_triton.text.tokenizer import Tokenizer

_STATUS = {"stop": "completed", "length": "incomplete"}
RATE_LIMIT = 429


class ResponseWriter:
    """See ``answers.Writer``; its response has one answer."""

    def __init__(
        self, body: ResponsesBody, reader: Reader, tokenizer: Tokenizer, created: int
    ) -> None:
        """At the beginning.

        Raises:
            ApiError: the body has what a response cannot say again.
        """
        self._reader = reader
        self._tokenizer = tokenizer
        self._fields = head_fields(body, created)
        try:
            dumps(self._fields)
        except TypeError as error:  # half of a surrogate pair, or a number of more than 64 bits
            raise invalid(f"the request has what cannot be given back: {error}") from None
        self._output = Output()
        self._status = "in_progress"
        self._error: dict[str, str] | None = None
        self._tokens = (0, 0)  # of input and output
        self._number = 0

    async def events(self, chunks: NumberedChunks) -> AsyncGenerator[bytes, None]:
        """See ``Writer``."""
        begun = False
        async for _, chunk in chunks:
            data = b""
            if not begun:
                begun = True
                data = self._of_response("created") + self._of_response("in_progress")
            if data := data + b"".join(map(self._event, self._take(chunk))):
                yield data
        yield self._of_response(self._status)

    async def body(self, chunks: NumberedChunks) -> dict[str, Any]:
        """See ``Writer``."""
        async for _, chunk in chunks:
            self._take(chunk)
        return self._response()

    def failed(self, error: ApiError) -> bytes:
        """See ``Writer``."""
        code = "rate_limit_exceeded" if error.status == RATE_LIMIT else "server_error"
        closed = b"".join(map(self._event, self._output.close("incomplete")))
        self._status, self._error = "failed", {"code": code, "message": error.message}
        told = {"code": error.code, "message": error.message, "param": error.param}
        return closed + self._event({"type": "error", **told}) + self._of_response("failed")

    def _response(self) -> dict[str, Any]:
        return {
            **self._fields,
            "status": self._status,
            "error": self._error,
            "incomplete_details": (
                {"reason": "max_output_tokens"} if self._status == "incomplete" else None
            ),
            "output": self._output.items(),
            "usage": None if self._status in ("in_progress", "failed") else self._usage(),
        }

    def _take(self, chunk: Chunk) -> list[dict[str, Any]]:
        """What is said of a chunk."""
        self._tokens = (chunk.input_tokens or self._tokens[0], chunk.output_tokens)
        log_probs = chat_log_probs(self._tokenizer, chunk.log_probs)
        said = self._output.take(self._reader.read(chunk), log_probs)
        if chunk.finish_reason is None:
            return said
        self._status = _STATUS[chunk.finish_reason]
        return [*said, *self._output.close(self._status)]

    def _event(self, value: dict[str, Any]) -> bytes:
        numbered = {"type": value["type"], "sequence_number": self._number, **value}
        self._number += 1
        return typed_event(numbered)

    def _of_response(self, what: str) -> bytes:
        return self._event({"type": f"response.{what}", "response": self._response()})

    def _usage(self) -> dict[str, Any]:
        """Counts of tokens: the engine's, but for those of thoughts, which are the tokenizer's."""
        given, made = self._tokens
        text = self._output.reasoning()
        thought = len(self._tokenizer(text, add_special_tokens=False).input_ids) if text else 0
        return {
            "input_tokens": given,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": made,
            "output_tokens_details": {"reasoning_tokens": min(thought, made)},
            "total_tokens": given + made,
        }


def head_fields(body: ResponsesBody, created: int) -> dict[str, Any]:
    """What every state of a response has: what it is, and what was asked for."""
    format = body.text.format if body.text else None
    choice = "auto" if body.tool_choice is None else body.tool_choice
    return {
        "id": new_id("resp_"),
        "object": "response",
        "created_at": created,
        "status": None,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "model": body.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": body.reasoning.model_dump()
        if body.reasoning
        else {"effort": None, "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {
            "format": format.model_dump(by_alias=True, exclude_none=True)
            if format
            else {"type": "text"}
        },
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [tool.model_dump() for tool in body.tools or []],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
        "metadata": body.metadata or {},
    }
