"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter

from cog_triton.faces.openai.answers import Answering
from cog_triton.faces.openai.bodies import BodyRoute, off_loop
from cog_triton.faces.openai.choices import answering, head_of
from cog_triton.faces.openai.dependencies import FromApp, RequestId
from cog_triton.faces.openai.errors import invalid
from cog_triton.faces.openai.fields import MOST_ANSWERS, CompletionBody
from cog_triton.faces.openai.log_probs import text_log_probs
from cog_triton.faces.openai.openapi import STREAMED
from cog_triton.faces.openai.sampling import sampling, with_seed
from cog_triton.faces.openai.served import Served
from cog_triton.faces.openai.wire import Head, dumps, stop_reason
from cog_triton.generation import Chunk, FinishReason
from cog_triton.protocol import TokenLogProb
from cog_triton.request import Request
from cog_triton.text.tokenizer import Tokenizer

router = APIRouter(route_class=BodyRoute)
DEFAULT_MAX_TOKENS = 16
_MARK = "\x00text\x00"


@router.post("/v1/completions", responses=STREAMED)
async def completions(body: CompletionBody, served: FromApp, request_id: RequestId) -> Answering:
    """Completes prompts, in one body or as events."""
    requests = await off_loop(completion_requests, body, served)
    head = head_of(body, served, "cmpl-", "text_completion", "text_completion")
    tokenizer = served.backend.tokenizer
    choices = [
        TextChoice(number, head, tokenizer, echo_of(body, request, tokenizer))
        for number, request in enumerate(requests)
    ]
    return answering(body, served, head, requests, choices, request_id)


def completion_requests(body: CompletionBody, served: Served) -> list[Request]:
    """The requests for all answers: those to the first prompt, those to the second.

    Raises:
        ApiError, UserError: the body asks for what cannot be had.
    """
    prompts = _prompts(body.prompt)
    if len(prompts) * body.choices > MOST_ANSWERS:
        raise invalid(f"prompt and n must ask for at most {MOST_ANSWERS} answers", "prompt")
    most = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    values = {
        "max_tokens": 1 if body.echo and body.max_tokens == 0 else most,
        "log_probs": body.logprobs,
        "prompt_log_probs": bool(body.echo) and body.logprobs is not None,
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


@dataclass(frozen=True)
class Echo:
    """What of a prompt stands before the answer to it.

    Attributes:
        log_probs: whether those of its tokens are told as well.
        alone: whether the answer is left out, for max_tokens 0. Engines make one token at least.
    """

    text: str = ""
    log_probs: bool = False
    alone: bool = False


def echo_of(body: CompletionBody, request: Request, tokenizer: Tokenizer) -> Echo:
    """What a body wants of a request's prompt."""
    if not body.echo:
        return Echo()
    text = request.prompt
    if request.prompt_ids:
        text = str(tokenizer.decode(list(request.prompt_ids), skip_special_tokens=True))
    return Echo(text, request.prompt_log_probs, alone=body.max_tokens == 0)


class TextChoice:
    """One answer: see ``choices.Choice``."""

    def __init__(self, index: int, head: Head, tokenizer: Tokenizer, echo: Echo) -> None:
        self._index = index
        self._head = head
        self._tokenizer = tokenizer
        self._echo = echo
        self._texts = [echo.text]
        self._offset = 0 if echo.log_probs else len(echo.text)
        self._tokens: list[TokenLogProb] = []
        self._finish_reason: str | None = None
        self._stop_token: int | None = None
        self._around = head.around(self._choice(_MARK), _MARK)

    def begin(self) -> bytes:
        """See ``Choice``."""
        if not self._echo.text or self._echo.log_probs:  # which come with the first chunk
            return b""
        return self._head.event([self._choice(self._echo.text)])

    def events(self, chunk: Chunk) -> bytes:
        """See ``Choice``."""
        chunk = self._wanted(chunk)
        if chunk.prompt_log_probs:
            chunk = replace(chunk, text=self._echo.text + chunk.text)
        if tokens := (*chunk.prompt_log_probs, *chunk.log_probs):
            log_probs = self._log_probs(tokens, first=bool(chunk.prompt_log_probs))
            self._offset = log_probs["text_offset"][-1] + len(log_probs["tokens"][-1])
            return self._event(chunk, log_probs)
        if chunk.finish_reason is not None:
            return self._event(chunk, None)
        before, behind = self._around
        return before + dumps(chunk.text) + behind if chunk.text else b""

    def add(self, chunk: Chunk) -> None:
        """See ``Choice``."""
        chunk = self._wanted(chunk)
        self._texts.append(chunk.text)
        self._tokens += (*chunk.prompt_log_probs, *chunk.log_probs)
        self._finish_reason, self._stop_token = chunk.finish_reason, chunk.stop_token

    def body(self) -> dict[str, Any]:
        """See ``Choice``."""
        log_probs = None
        if self._tokens:
            log_probs = self._log_probs(self._tokens, first=self._echo.log_probs)
        whole = self._choice("".join(self._texts), log_probs, self._finish_reason)
        return {**whole, **stop_reason(self._stop_token)}

    def _wanted(self, chunk: Chunk) -> Chunk:
        if not self._echo.alone:
            return chunk
        reason: FinishReason | None = None if chunk.finish_reason is None else "length"
        return replace(chunk, text="", log_probs=(), finish_reason=reason, stop_token=None)

    def _log_probs(self, tokens: Sequence[TokenLogProb], *, first: bool) -> dict[str, Any]:
        log_probs = text_log_probs(self._tokenizer, tokens, self._offset)
        if first:  # the prompt's first token follows nothing
            log_probs["token_logprobs"][0] = None
        return log_probs

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
