"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter

from cog_triton.faces.openai.answers import Answering
from cog_triton.faces.openai.bodies import BodyRoute, off_loop
from cog_triton.faces.openai.choices import answering, head_of
from cog_triton.faces.openai.dependencies import FromApp, RequestId
from cog_triton.faces.openai.errors import invalid
from cog_triton.faces.openai.fields import MOST_ANSWERS, CompletionBody
from cog_triton.faces.openai.log_probs import prompt_entries, text_log_probs, wanted
from cog_triton.faces.openai.openapi import STREAMED
from cog_triton.faces.openai.sampling import log_probs, sampling, with_seed
from cog_triton.faces.openai.served import Served
from cog_triton.faces.openai.tokens import with_ids
from cog_triton.faces.openai.wire import Head, dumps, stop_reason
from cog_triton.generation import Chunk, FinishReason
from cog_triton.request.request import Request
from cog_triton.text.tokenizer import Tokenizer
from cog_triton.wire import TokenLogProb

router = APIRouter(route_class=BodyRoute)
DEFAULT_MAX_TOKENS = 16
_MARK = "\x00text\x00"


@router.post("/v1/completions", responses=STREAMED)
async def completions(body: CompletionBody, served: FromApp, request_id: RequestId) -> Answering:
    """Completes prompts, in one body or as events."""
    requests = await off_loop(completion_requests, body, served)
    requests = await with_ids(requests, body, served)
    head = head_of(body, served, "cmpl-", "text_completion", "text_completion")
    tokenizer = served.backend.tokenizer
    choices = [
        TextChoice(number, head, tokenizer, body, request)
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
        **log_probs(body, echo=bool(body.echo)),
        "add_special_tokens": body.add_special_tokens,
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


def echoed(body: CompletionBody, request: Request, tokenizer: Tokenizer) -> str:
    """The prompt as it stands before the answer."""
    if not body.echo:
        return ""
    return request.prompt or str(tokenizer.decode(list(request.prompt_ids)))


class TextChoice:
    """One answer: see ``choices.Choice``."""

    def __init__(
        self, index: int, head: Head, tokenizer: Tokenizer, body: CompletionBody, request: Request
    ) -> None:
        self._index = index
        self._head = head
        self._tokenizer = tokenizer
        self._asked = body
        self._request = request
        self._prompt = echoed(body, request, tokenizer)
        # Engines make one token at least.
        self._prompt_only = bool(body.echo) and body.max_tokens == 0
        self._prompt_log_probs = bool(body.echo) and body.logprobs is not None
        self._texts = [self._prompt]
        self._offset = 0 if self._prompt_log_probs else len(self._prompt)
        self._tokens: list[TokenLogProb] = []
        self._prompt_tokens: list[TokenLogProb] = []
        self._ids: list[int] = []
        self._finish_reason: str | None = None
        self._stop_token: int | None = None
        self._begun = False
        self._around = head.around(self._choice(_MARK), _MARK)

    def begin(self) -> bytes:
        """See ``Choice``."""
        if not self._prompt or self._prompt_log_probs:  # which come with the first chunk
            return b""
        return self._head.event([self._choice(self._prompt)])

    def events(self, chunk: Chunk) -> bytes:
        """See ``Choice``."""
        chunk, tokens = self._wanted(chunk)
        begins, self._begun = not self._begun, True
        if first := begins and self._prompt_log_probs:
            chunk = replace(chunk, text=self._prompt + chunk.text)
        if not (tokens or self._asked.return_token_ids or chunk.finish_reason):
            before, behind = self._around
            return before + dumps(chunk.text) + behind if chunk.text else b""
        log_probs = None
        if tokens:
            log_probs = self._log_probs(tokens, first=first)
            self._offset = log_probs["text_offset"][-1] + len(log_probs["tokens"][-1])
        choice = self._choice(chunk.text, log_probs, chunk.finish_reason)
        ids = self._token_ids(chunk.ids, prompt=begins)
        return self._head.event([{**choice, **stop_reason(chunk.stop_token), **ids}])

    def add(self, chunk: Chunk) -> None:
        """See ``Choice``."""
        chunk, tokens = self._wanted(chunk)
        self._texts.append(chunk.text)
        self._tokens += tokens
        self._prompt_tokens += chunk.prompt_log_probs
        self._ids += chunk.ids
        self._finish_reason, self._stop_token = chunk.finish_reason, chunk.stop_token

    def body(self) -> dict[str, Any]:
        """See ``Choice``."""
        log_probs = None
        if self._tokens:
            log_probs = self._log_probs(self._tokens, first=self._prompt_log_probs)
        whole = self._choice("".join(self._texts), log_probs, self._finish_reason)
        whole |= stop_reason(self._stop_token) | self._token_ids(self._ids, prompt=True)
        if (top := self._asked.prompt_logprobs) is not None:
            whole["prompt_logprobs"] = prompt_entries(self._tokenizer, self._prompt_tokens, top)
        return whole

    def prompt(self) -> dict[str, Any]:
        """See ``Choice``."""
        return {}

    def _wanted(self, chunk: Chunk) -> tuple[Chunk, tuple[TokenLogProb, ...]]:
        """The chunk as it is asked for, and the tokens of its ``logprobs``."""
        top = self._asked.logprobs
        tokens = chunk.prompt_log_probs if self._prompt_log_probs else ()
        if not self._prompt_only:
            return chunk, wanted((*tokens, *chunk.log_probs), top)
        reason: FinishReason | None = None if chunk.finish_reason is None else "length"
        chunk = replace(chunk, text="", ids=(), finish_reason=reason, stop_token=None)
        return chunk, wanted(tokens, top)

    def _token_ids(self, ids: Sequence[int], *, prompt: bool) -> dict[str, Any]:
        if not self._asked.return_token_ids:
            return {}
        own: dict[str, Any] = {"token_ids": ids}
        return own | ({"prompt_token_ids": self._request.prompt_ids} if prompt else {})

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
        return log_probs

    def _choice(
        self, text: str, log_probs: Any = None, finish_reason: str | None = None
    ) -> dict[str, Any]:
        return {
            "text": text,
            "index": self._index,
            "logprobs": log_probs,
            "finish_reason": finish_reason,
        }
