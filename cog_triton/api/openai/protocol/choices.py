"""Responses that are lists of choices: what chats and completions share."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from cog_triton.api.openai.errors import ApiError
from cog_triton.api.openai.protocol.events import DONE, event, new_id
from cog_triton.api.openai.protocol.log_probs import token_text
from cog_triton.api.openai.protocol.writer import joined
from cog_triton.api.openai.schemas.chat import ChatBody
from cog_triton.api.openai.schemas.completions import CompletionBody
from cog_triton.api.openai.served import Served
from cog_triton.generation import Chunk
from cog_triton.protocol.log_probs import TokenLogProb
from cog_triton.request.request import Request

Piece = dict[str, Any]  # an element of an event's ``choices``


class Choice(Protocol):
    """One answer, in pieces or whole."""

    def begin(self) -> dict[str, Any]:
        """Return the fields of an event before the first piece; none for no event."""

    def pieces(self, chunk: Chunk) -> Sequence[Piece]:
        """Return the pieces that a next chunk makes."""

    def whole(self, chunk: Chunk) -> Piece:
        """Return the element of a whole response's ``choices``."""

    def about_prompt(self, tokens: Sequence[TokenLogProb] = ()) -> dict[str, Any]:
        """Return fields about the prompt."""


class PromptAndEnd:
    """The fields about its prompt and its end that each choice has."""

    def __init__(
        self, index: int, request: Request, body: ChatBody | CompletionBody, served: Served
    ) -> None:
        self.request = request
        self._index = index
        self._tokenizer = served.backend.tokenizer
        self._alternatives = body.wanted_log_probs
        self._returns_ids = bool(body.return_token_ids)
        self._prompt_alternatives = body.prompt_logprobs

    def about_prompt(self, tokens: Sequence[TokenLogProb] = ()) -> dict[str, Any]:
        """Return fields about the prompt, with vLLM's ``prompt_logprobs``: entries by token ids."""
        fields: dict[str, Any] = {}
        if self._returns_ids:
            fields["prompt_token_ids"] = self.request.prompt_ids
        if tokens and self._prompt_alternatives is not None:
            # The first token follows nothing.
            fields["prompt_logprobs"] = [None, *map(self._entry, tokens[1:])]
        return fields

    def _entry(self, token: TokenLogProb) -> dict[str, dict[str, Any]]:
        """Return a token of the prompt and its alternatives; a rank is only known of the likeliest."""
        ranks = {other: rank for rank, (other, _) in enumerate(token.top, 1)}
        values = {token.id: token.log_prob, **dict(token.top[: self._prompt_alternatives])}
        entry = {}
        for id, value in values.items():
            text = token_text(self._tokenizer, id)
            entry[str(id)] = {"logprob": value, "rank": ranks.get(id), "decoded_token": text}
        return entry

    def _ended(self, chunk: Chunk) -> Piece:
        """Return the reason of the end, with vLLM's field for one of ``stop_token_ids``."""
        ended: Piece = {"finish_reason": chunk.finish_reason}
        if chunk.stop_token is not None:
            ended["stop_reason"] = chunk.stop_token
        return ended


class ChoiceWriter:
    """The writer of a response that is a list of choices."""

    id_prefix = ""
    object_of_events = ""
    object_of_whole = ""

    def __init__(
        self, body: ChatBody | CompletionBody, created: int, choices: Sequence[Choice]
    ) -> None:
        self._head = {
            "id": new_id(self.id_prefix),
            "object": self.object_of_events,
            "created": created,
            "model": body.model,
            "system_fingerprint": None,
        }
        options = body.stream_options
        self._includes_usage = bool(options and options.include_usage)
        self._counts_so_far = bool(options and options.continuous_usage_stats)
        self._choices = choices
        self._answers_per_prompt = body.n or 1
        # Tokens by the numbers of prompts, and of answers.
        self._prompt_tokens: dict[int, int] = {}
        self._output_tokens: dict[int, int] = {}
        self._ended = 0

    def events(self, number: int, chunk: Chunk, /) -> Iterator[bytes]:
        choice = self._choices[number]
        is_first = number not in self._output_tokens
        self._count(number, chunk)
        if is_first:
            beginning = choice.begin()
            if beginning:
                yield self._event(beginning, number, 0)
        for piece in choice.pieces(chunk):
            yield self._event({"choices": [piece]}, number, chunk.output_tokens)
        if chunk.finish_reason is not None:
            self._ended += 1
        if self._ended == len(self._choices):
            if self._includes_usage:
                yield event({**self._head, "choices": [], "usage": self._usage()})
            yield DONE

    def failed(self, error: ApiError) -> Iterable[bytes]:
        return event(error.body()), DONE

    def whole(self, answers: Sequence[Sequence[Chunk]]) -> dict[str, Any]:
        chunks = [joined(came) for came in answers]
        for number, chunk in enumerate(chunks):
            self._count(number, chunk)
        choices = [choice.whole(chunk) for choice, chunk in zip(self._choices, chunks, strict=True)]
        return {
            **self._head,
            "object": self.object_of_whole,
            "choices": choices,
            "usage": self._usage(),
        }

    def _event(self, fields: dict[str, Any], number: int, output_tokens: int) -> bytes:
        """Return an event; if it is to have usage, that of its answer so far, or null."""
        value = {**self._head, **fields}
        if self._includes_usage:
            prompt_tokens = self._prompt_tokens.get(number // self._answers_per_prompt, 0)
            value["usage"] = usage(prompt_tokens, output_tokens) if self._counts_so_far else None
        return event(value)

    def _count(self, number: int, chunk: Chunk) -> None:
        self._output_tokens[number] = chunk.output_tokens
        if chunk.input_tokens is not None:
            self._prompt_tokens[number // self._answers_per_prompt] = chunk.input_tokens

    def _usage(self) -> dict[str, int]:
        return usage(sum(self._prompt_tokens.values()), sum(self._output_tokens.values()))


def usage(prompt: int, output: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
