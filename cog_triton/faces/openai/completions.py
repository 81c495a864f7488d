"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter

from cog_triton.faces.openai.answers import Answering
from cog_triton.faces.openai.choices import answering, head_of
from cog_triton.faces.openai.dependencies import FromApp, RequestId
from cog_triton.faces.openai.errors import invalid
from cog_triton.faces.openai.fields import CompletionBody
from cog_triton.faces.openai.log_probs import text_log_probs
from cog_triton.faces.openai.openapi import STREAMED
from cog_triton.faces.openai.sampling import sampling, with_seed
from cog_triton.faces.openai.served import Served
from cog_triton.faces.openai.wire import Head, dumps, stop_reason
from cog_triton.generation import Chunk
from cog_triton.protocol import TokenLogProb
from cog_triton.request import Request
from cog_triton.text.tokenizer import Tokenizer

router = APIRouter()
DEFAULT_MAX_TOKENS = 16
MOST_ANSWERS = 1024
"""Of the prompts of one request together."""
_MARK = "\x00text\x00"


@router.post("/v1/completions", responses=STREAMED)
async def completions(body: CompletionBody, served: FromApp, request_id: RequestId) -> Answering:
    """Completes prompts, in one body or as events."""
    requests = completion_requests(body, served)
    head = head_of(body, served, "cmpl-", "text_completion", "text_completion")
    tokenizer = served.backend.tokenizer
    choices = [
        TextChoice(number, head, tokenizer, _shown(request, tokenizer) if body.echo else "")
        for number, request in enumerate(requests)
    ]
    return answering(body, served, head, requests, choices, request_id)


def completion_requests(body: CompletionBody, served: Served) -> list[Request]:
    """The requests for all answers: those to the first prompt, those to the second.

    Raises:
        ApiError, UserError: the body asks for what cannot be had.
    """
    if body.echo and body.logprobs is not None:
        raise invalid(
            "logprobs with echo asks for log probabilities of the prompt's tokens, which no engine here "
            "gives; leave out one of the two",
            "logprobs",
        )
    prompts = _prompts(body.prompt)
    if len(prompts) * body.choices > MOST_ANSWERS:
        raise invalid(f"prompt and n must ask for at most {MOST_ANSWERS} answers", "prompt")
    values = {
        "max_tokens": DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        "log_probs": body.logprobs,
        "adapter": served.adapter(body.model),
        **served.token_ids(),
        **sampling(body),
    }
    firsts = [
        Request(prompt=prompt, **values)
        if isinstance(prompt, str)
        else Request(prompt="", prompt_ids=tuple(prompt), **values)
        for prompt in prompts
    ]
    return [replace(one, **with_seed(one, n)) for one in firsts for n in range(body.choices)]


def _prompts(given: str | list[str] | list[int] | list[list[int]]) -> Sequence[str | list[int]]:
    if isinstance(given, str):
        return [given]
    if not given:
        raise invalid("prompt must not be an empty list", "prompt")
    return [given] if isinstance(given[0], int) else given


def _shown(request: Request, tokenizer: Tokenizer) -> str:
    """The prompt as echo has it."""
    if not request.prompt_ids:
        return request.prompt
    return str(tokenizer.decode(list(request.prompt_ids), skip_special_tokens=True))


class TextChoice:
    """One answer: see ``choices.Choice``."""

    def __init__(self, index: int, head: Head, tokenizer: Tokenizer, echo: str) -> None:
        self._index = index
        self._head = head
        self._tokenizer = tokenizer
        self._texts = [echo]
        self._offset = len(echo)
        self._tokens: list[TokenLogProb] = []
        self._finish_reason: str | None = None
        self._stop_token: int | None = None
        self._around = head.around(self._choice(_MARK), _MARK)

    def begin(self) -> bytes:
        """See ``Choice``."""
        echo = self._texts[0]
        return self._head.event([self._choice(echo)]) if echo else b""

    def events(self, chunk: Chunk) -> bytes:
        """See ``Choice``."""
        if chunk.log_probs:
            log_probs = text_log_probs(self._tokenizer, chunk.log_probs, self._offset)
            self._offset += sum(map(len, log_probs["tokens"]))
            return self._event(chunk, log_probs)
        if chunk.finish_reason is not None:
            return self._event(chunk, None)
        before, behind = self._around
        return before + dumps(chunk.text) + behind if chunk.text else b""

    def add(self, chunk: Chunk) -> None:
        """See ``Choice``."""
        self._texts.append(chunk.text)
        self._tokens += chunk.log_probs
        self._finish_reason, self._stop_token = chunk.finish_reason, chunk.stop_token

    def body(self) -> dict[str, Any]:
        """See ``Choice``."""
        log_probs = None
        if self._tokens:
            log_probs = text_log_probs(self._tokenizer, self._tokens, self._offset)
        whole = self._choice("".join(self._texts), log_probs, self._finish_reason)
        return {**whole, **stop_reason(self._stop_token)}

    def _event(self, chunk: Chunk, log_probs: Any) -> bytes:
        choice = self._choice(chunk.text, log_probs, chunk.finish_reason)
        return self._head.event([{**choice, **stop_reason(chunk.stop_token)}])

    def _choice(
        self, text: str, log_probs: Any = None, finish_reason: str | None = None
    ) -> dict[str, Any]:
        return {
            "text": text,
            "index": self._index,
            "logprobs": log_probs,
            "finish_reason": finish_reason,
        }
