"""Responses that are a list of choices: those of chats and of text completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from cog_triton.faces.openai.answers import Answering, NumberedChunks, dumps, event, new_id
from cog_triton.faces.openai.errors import ApiError
from cog_triton.faces.openai.fields import Sampling
from cog_triton.faces.openai.sampling import check_fields
from cog_triton.faces.openai.served import Served
from cog_triton.generation import Chunk
from cog_triton.request.request import Request

DONE = b"data: [DONE]\n\n"
_MARK = "\x00text\x00"
Piece = dict[str, Any]
"""An element of an event's ``choices``."""


class Choice(Protocol):
    """One answer.

    Attributes:
        plain: a chunk that has only text is one piece.
    """

    plain: bool

    def text_piece(self, text: str) -> Piece:
        """Return the piece of a text and nothing else."""

    def begin(self) -> list[Piece]:
        """Return the pieces before those of the first chunk."""

    def pieces(self, chunk: Chunk) -> list[Piece]:
        """Return the pieces of a chunk."""

    def whole(self, pieces: Sequence[Piece]) -> Piece:
        """Return the whole choice of all of its pieces."""

    def prompt(self) -> dict[str, Any]:
        """Return fields about the prompt, beside ``choices``."""


class ChoiceWriter:
    """See ``Writer``."""

    def __init__(
        self,
        body: Sampling,
        served: Served,
        prefix: str,
        kinds: tuple[str, str],
        choices: Sequence[Choice],
    ) -> None:
        """
        Args:
            prefix: of the response's id.
            kinds: ``object`` of a whole response, and of an event.
        """
        self._kind, kind = kinds
        self._head = {
            "id": new_id(prefix),
            "object": kind,
            "created": served.now(),
            "model": body.model,
            "system_fingerprint": None,
        }
        self._body, self._choices = body, choices
        # Tokens of each prompt, and of each answer; to each prompt there are ``n`` answers.
        self._prompts: dict[int, int] = {}
        self._outputs: dict[int, int] = {}

    async def events(self, chunks: NumberedChunks) -> AsyncGenerator[bytes, None]:
        # For most tokens only the text is made into JSON; what is around it stays.
        around = [
            self._event([choice.text_piece(_MARK)]).split(dumps(_MARK)) for choice in self._choices
        ]
        plain = [choice.plain and not self._body.continuous_usage for choice in self._choices]
        begun = False
        async for number, chunk in chunks:
            data = b"" if begun else self._begin(number, chunk)
            begun = True
            self._count(number, chunk)
            if not plain[number] or chunk.log_probs or chunk.finish_reason is not None:
                for piece in self._choices[number].pieces(chunk):
                    data += self._event([piece], self._usage(number))
            elif chunk.text:
                before, behind = around[number]
                data += before + dumps(chunk.text) + behind
            if data:
                yield data
        yield (self._event([], self._total()) if self._body.include_usage else b"") + DONE

    async def body(self, chunks: NumberedChunks) -> dict[str, Any]:
        pieces = [choice.begin() for choice in self._choices]
        async for number, chunk in chunks:
            self._count(number, chunk)
            pieces[number] += self._choices[number].pieces(chunk)
        whole = [choice.whole(own) for choice, own in zip(self._choices, pieces, strict=True)]
        rest = {"choices": whole, "usage": self._total(), **self._choices[0].prompt()}
        return {**self._head, "object": self._kind, **rest}

    def failed(self, error: ApiError) -> bytes:
        return event(error.body()) + DONE

    def _begin(self, number: int, chunk: Chunk) -> bytes:
        if chunk.input_tokens is not None:
            self._prompts[number // self._body.choices] = chunk.input_tokens
        data = b""
        for place, choice in enumerate(self._choices):
            fields = choice.prompt()
            for piece in choice.begin():
                data += self._event([piece], self._usage(place), **fields)
                fields = {}
        return data

    def _event(
        self, choices: list[Piece], usage: dict[str, int] | None = None, **fields: Any
    ) -> bytes:
        value = {**self._head, "choices": choices, **fields}
        return event({**value, "usage": usage} if self._body.include_usage else value)

    def _count(self, number: int, chunk: Chunk) -> None:
        self._outputs[number] = chunk.output_tokens
        if chunk.input_tokens is not None:
            self._prompts[number // self._body.choices] = chunk.input_tokens

    def _usage(self, number: int) -> dict[str, int] | None:
        """Return the counts of one answer so far, if each event has them."""
        if not self._body.continuous_usage:
            return None
        prompt = self._prompts.get(number // self._body.choices, 0)
        return usage(prompt, self._outputs.get(number, 0))

    def _total(self) -> dict[str, int]:
        return usage(sum(self._prompts.values()), sum(self._outputs.values()))


def usage(prompt: int, output: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
    }


def answering(
    body: Sampling,
    served: Served,
    writer: ChoiceWriter,
    requests: Sequence[Request],
    request_id: str,
) -> Answering:
    """Return the response to a body.

    Args:
        requests: in the order of the choices: all to the first prompt, all to the second.

    Raises:
        ApiError: the body has a field that no engine honours.
    """
    headers = check_fields(body)
    return Answering(served, writer, requests, request_id, headers, stream=bool(body.stream))


def stop_reason(token: int | None) -> dict[str, int]:
    """Return vLLM's field for the token of ``stop_token_ids`` that ended an answer."""
    return {} if token is None else {"stop_reason": token}
