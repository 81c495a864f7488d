"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter

from cog_triton.faces.openai.answers import Answering
from cog_triton.faces.openai.bodies import STREAMED, BodyRoute, off_loop
from cog_triton.faces.openai.choices import (
    Choice,
    ChoiceWriter,
    Piece,
    answering,
    stop_reason,
    text_log_probs,
    wanted,
)
from cog_triton.faces.openai.errors import invalid
from cog_triton.faces.openai.fields import MOST_ANSWERS, CompletionBody
from cog_triton.faces.openai.sampling import log_probs, sampling
from cog_triton.faces.openai.served import FromApp, RequestId, Served
from cog_triton.faces.openai.tokens import with_ids
from cog_triton.generation import Chunk, FinishReason
from cog_triton.request.request import Request
from cog_triton.text.tokenizer import Tokenizer
from cog_triton.wire import TokenLogProb

router = APIRouter(route_class=BodyRoute)
DEFAULT_MAX_TOKENS = 16


@router.post("/v1/completions", responses=STREAMED)
async def completions(body: CompletionBody, served: FromApp, request_id: RequestId) -> Answering:
    """Completes prompts, in one body or as events."""
    requests = await off_loop(prompt_requests, body, served)
    requests = [await with_ids(request, body, served) for request in requests]
    choices = [
        TextChoice(number, served.backend.tokenizer, body, requests[number // body.choices])
        for number in range(len(requests) * body.choices)
    ]
    kinds = ("text_completion", "text_completion")
    writer = ChoiceWriter(body, served, "cmpl-", kinds, choices)
    return answering(body, served, writer, requests, request_id)


def prompt_requests(body: CompletionBody, served: Served) -> list[Request]:
    """Return the request for the first answer to each prompt."""
    prompts: Sequence[str | list[int]]
    if isinstance(body.prompt, str):
        prompts = [body.prompt]
    elif not body.prompt:
        raise invalid("prompt must not be an empty list", "prompt")
    else:
        # One prompt of ids, or several prompts.
        prompts = [body.prompt] if isinstance(body.prompt[0], int) else body.prompt
    if len(prompts) * body.choices > MOST_ANSWERS:
        raise invalid(f"prompt and n must ask for at most {MOST_ANSWERS} answers", "prompt")
    most = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    values = {
        "max_tokens": 1 if body.echo and body.max_tokens == 0 else most,
        **log_probs(body, echo=bool(body.echo)),
        "add_special_tokens": body.add_special_tokens,
        "adapter": served.adapter(body.model),
        **served.token_ids(),
        **sampling(body),
    }
    return [
        Request(prompt=prompt, **values)
        if isinstance(prompt, str)
        else Request(prompt="", prompt_ids=tuple(prompt), **values)
        for prompt in prompts
    ]


def echoed(body: CompletionBody, request: Request, tokenizer: Tokenizer) -> str:
    """Return the prompt as it stands before the answer."""
    if not body.echo:
        return ""
    return request.prompt or str(tokenizer.decode(list(request.prompt_ids)))


class TextChoice(Choice):
    """See ``Choice``."""

    def __init__(
        self, index: int, tokenizer: Tokenizer, body: CompletionBody, request: Request
    ) -> None:
        super().__init__(index, tokenizer, body)
        self._request, self._top = request, body.logprobs
        self._prompt = echoed(body, request, tokenizer)
        # Engines make one token at least.
        self._prompt_only = bool(body.echo) and body.max_tokens == 0
        # The prompt comes with them, in the first chunk.
        self._prompt_log_probs = bool(body.echo) and body.logprobs is not None
        self._offset = 0 if self._prompt_log_probs else len(self._prompt)
        self._begun = False
        self.plain = self.plain and not (self._prompt_only or self._prompt_log_probs)

    def text_piece(self, text: str) -> Piece:
        return {"text": text, "index": self._index, "logprobs": None, "finish_reason": None}

    def begin(self) -> list[Piece]:
        alone = self._prompt and not self._prompt_log_probs
        return [self.text_piece(self._prompt)] if alone else []

    def pieces(self, chunk: Chunk) -> list[Piece]:
        first, self._begun = not self._begun, True
        self._prompt_tokens += chunk.prompt_log_probs
        tokens = chunk.prompt_log_probs if self._prompt_log_probs else ()
        if self._prompt_only:
            reason: FinishReason | None = None if chunk.finish_reason is None else "length"
            chunk = replace(chunk, text="", ids=(), finish_reason=reason, stop_token=None)
        else:
            tokens = (*tokens, *chunk.log_probs)
        tokens = wanted(tokens, self._top)
        text = self._prompt + chunk.text if first and self._prompt_log_probs else chunk.text
        if not (text or tokens or chunk.finish_reason or self._body.return_token_ids):
            return []
        piece = {**self.text_piece(text), "finish_reason": chunk.finish_reason}
        if tokens:
            piece["logprobs"] = self._log_probs(tokens, first=first and self._prompt_log_probs)
        piece |= stop_reason(chunk.stop_token)
        if self._body.return_token_ids:
            piece["token_ids"] = chunk.ids
            piece |= {"prompt_token_ids": self._request.prompt_ids} if first else {}
        return [piece]

    def whole(self, pieces: Sequence[Piece]) -> Piece:
        text = "".join(piece["text"] for piece in pieces)
        whole = {**pieces[-1], "text": text}
        if log_probs := [piece["logprobs"] for piece in pieces if piece["logprobs"]]:
            whole["logprobs"] = {
                name: [value for own in log_probs for value in own[name]] for name in log_probs[0]
            }
        if self._body.return_token_ids:
            whole["token_ids"] = [id for piece in pieces for id in piece.get("token_ids", ())]
            whole["prompt_token_ids"] = self._request.prompt_ids
        return {**whole, **self.prompt_log_probs()}

    def _log_probs(self, tokens: Sequence[TokenLogProb], *, first: bool) -> dict[str, Any]:
        log_probs = text_log_probs(
            self._tokenizer,
            tokens,
            self._offset,
            prompt=self._prompt,
            skip_special_tokens=self._request.skip_special_tokens,
        )
        if first:  # the prompt's first token follows nothing
            log_probs["token_logprobs"][0] = log_probs["top_logprobs"][0] = None
        self._offset = log_probs["text_offset"][-1] + len(log_probs["tokens"][-1])
        return log_probs
