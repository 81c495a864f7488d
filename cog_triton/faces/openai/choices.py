"""Responses that are a list of choices: those of chats and of text completions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import replace
from typing import Any

from cog_triton.faces.openai.answers import Answering, NumberedChunks, dumps, event, new_id
from cog_triton.faces.openai.errors import ApiError
from cog_triton.faces.openai.fields import Sampling
from cog_triton.faces.openai.sampling import check_fields, repeated
from cog_triton.faces.openai.served import Served
from cog_triton.generation import Chunk
from cog_triton.request.request import Request
from cog_triton.text.tokenizer import Tokenizer
from cog_triton.wire import TokenLogProb

DONE = b"data: [DONE]\n\n"
_MARK = "\x00text\x00"
Piece = dict[str, Any]
"""An element of an event's ``choices``."""


class Choice(ABC):
    """One answer. A chunk that has only text is one piece of it if it is ``plain``."""

    def __init__(self, index: int, tokenizer: Tokenizer, body: Sampling) -> None:
        self._index, self._tokenizer, self._body = index, tokenizer, body
        self._prompt_tokens: list[TokenLogProb] = []
        more = body.return_token_ids or body.continuous_usage or body.prompt_logprobs is not None
        self.plain = not more

    def has_only_text(self, chunk: Chunk) -> bool:
        return self.plain and not chunk.log_probs and chunk.finish_reason is None

    @abstractmethod
    def text_piece(self, text: str) -> Piece: ...

    @abstractmethod
    def begin(self) -> list[Piece]:
        """Return the pieces before those of the first chunk."""

    @abstractmethod
    def pieces(self, chunk: Chunk) -> list[Piece]: ...

    @abstractmethod
    def whole(self, pieces: Sequence[Piece]) -> Piece:
        """Join all pieces."""

    def prompt(self) -> dict[str, Any]:
        """Return fields about the prompt, beside ``choices``."""
        return {}

    def prompt_log_probs(self) -> dict[str, Any]:
        """Return vLLM's ``prompt_logprobs``: each token's entry and those of the likeliest, by their ids.

        The first token follows nothing. A rank is only known of the likeliest.
        """
        if (top := self._body.prompt_logprobs) is None:
            return {}
        entries: list[dict[str, Any] | None] = []
        for token in self._prompt_tokens:
            ranks = {other: rank for rank, (other, _) in enumerate(token.top, 1)}
            entry = {}
            for id, value in {token.id: token.log_prob, **dict(token.top[:top])}.items():
                text = token_text(self._tokenizer, id)
                entry[str(id)] = {"logprob": value, "rank": ranks.get(id), "decoded_token": text}
            entries.append(entry)
        return {"prompt_logprobs": [None, *entries[1:]]}


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
        # ``object`` of a whole response, and of an event.
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
        begun = False
        async for number, chunk in chunks:
            self._count_prompt(number, chunk)
            data = b"" if begun else self._begin()
            begun = True
            self._outputs[number] = chunk.output_tokens
            choice = self._choices[number]
            if not choice.has_only_text(chunk):
                for piece in choice.pieces(chunk):
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
            self._count_prompt(number, chunk)
            self._outputs[number] = chunk.output_tokens
            choice = self._choices[number]
            if not choice.has_only_text(chunk):
                pieces[number] += choice.pieces(chunk)
            elif chunk.text:
                pieces[number].append(choice.text_piece(chunk.text))
        whole = [choice.whole(own) for choice, own in zip(self._choices, pieces, strict=True)]
        rest = {"choices": whole, "usage": self._total(), **self._choices[0].prompt()}
        return {**self._head, "object": self._kind, **rest}

    def failed(self, error: ApiError) -> bytes:
        return event(error.body()) + DONE

    def _begin(self) -> bytes:
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

    def _count_prompt(self, number: int, chunk: Chunk) -> None:
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
    prompts: Sequence[Request],
    request_id: str,
) -> Answering:
    """Return the response to a body, with the request for the first answer to each prompt."""
    headers = check_fields(body)
    requests = [one for prompt in prompts for one in repeated(prompt, body.choices)]
    return Answering(served, writer, requests, request_id, headers, stream=bool(body.stream))


def stop_reason(token: int | None) -> dict[str, int]:
    """Return vLLM's field for the token of ``stop_token_ids`` that ended an answer."""
    return {} if token is None else {"stop_reason": token}


def chat_log_probs(tokenizer: Tokenizer, tokens: Iterable[TokenLogProb]) -> list[dict[str, Any]]:
    """Return the entries of a chat completion's ``logprobs.content``."""

    def entry(token: int, log_prob: float) -> dict[str, Any]:
        text = token_text(tokenizer, token)
        return {"token": text, "logprob": log_prob, "bytes": list(text.encode())}

    return [
        {
            **entry(token.id, token.log_prob),
            "top_logprobs": [entry(other, value) for other, value in token.top],
        }
        for token in tokens
    ]


def wanted(tokens: Iterable[TokenLogProb], top: int | None) -> tuple[TokenLogProb, ...]:
    """Return the tokens with so many alternatives each; None for no tokens."""
    if top is None:
        return ()
    return tuple(replace(token, top=token.top[:top]) for token in tokens)


def text_log_probs(
    tokenizer: Tokenizer,
    tokens: Iterable[TokenLogProb],
    offset: int,
    *,
    prompt: str = "",
    skip_special_tokens: bool = True,
) -> dict[str, list[Any]]:
    """Return a text completion's ``logprobs``.

    Args:
        offset: characters of the text before these tokens.
        prompt: with which the text begins. Special tokens that it does not have take no characters.
        skip_special_tokens: those of the answer take none either.
    """
    hidden = frozenset(tokenizer.all_special_ids) if skip_special_tokens or prompt else ()
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    result: dict[str, list[Any]] = {name: [] for name in names}
    for token in tokens:
        text = token_text(tokenizer, token.id)
        top: dict[str, float] = {}
        for other, value in token.top:
            # Parts of characters all have one text, which stands for the likeliest.
            top.setdefault(token_text(tokenizer, other), value)
        top.setdefault(text, token.log_prob)
        for name, own in zip(names, (text, token.log_prob, top, offset), strict=True):
            result[name].append(own)
        shown = token.id not in hidden or prompt.startswith(text, offset)
        offset += len(text) if shown else 0
    return result


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Return one token's text, by itself; special ones have theirs."""
    return str(tokenizer.decode([token], skip_special_tokens=False))
