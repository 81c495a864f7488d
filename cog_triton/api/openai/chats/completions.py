"""/v1/completions to requests: one for each prompt, and for each of several answers."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cog_triton.api.openai.chats.sampling import sampling
from cog_triton.api.openai.errors import invalid
from cog_triton.api.openai.schemas.completions import MAX_ANSWERS, CompletionBody
from cog_triton.api.openai.served import Served
from cog_triton.errors import prompt_too_long
from cog_triton.request.limits import UNKNOWN_TOKENS
from cog_triton.request.request import MAX_SEED, Request

DEFAULT_MAX_TOKENS = 16


def prompt_requests(body: CompletionBody, served: Served) -> list[Request]:
    """Return the request for the first answer to each prompt."""
    if body.prompt == []:
        raise invalid("prompt must not be an empty list", "prompt")
    is_single = isinstance(body.prompt, str) or isinstance(body.prompt[0], int)
    prompts: Any = [body.prompt] if is_single else body.prompt
    if len(prompts) * (body.n or 1) > MAX_ANSWERS:
        raise invalid(f"prompt and n must ask for at most {MAX_ANSWERS} answers", "prompt")
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if body.echo and max_tokens == 0:
        max_tokens = 1  # engines make one token at least
    values = {
        "max_tokens": max_tokens,
        "add_special_tokens": body.add_special_tokens,
        **sampling(body, served),
    }
    requests = []
    for prompt in prompts:
        if isinstance(prompt, str):
            requests.append(Request(prompt=prompt, **values))
        else:
            requests.append(Request(prompt="", prompt_ids=prompt, **values))
    return requests


def repeated(prompts: Sequence[Request], count: int, served: Served) -> list[Request]:
    """Return so many requests for each prompt, or raise PromptTooLong; their seeds count up."""
    limit = served.backend.context_length or UNKNOWN_TOKENS
    for prompt in prompts:
        if len(prompt.prompt_ids) > limit:
            raise prompt_too_long(len(prompt.prompt_ids), limit - 1)
    return [_nth(prompt, number) for prompt in prompts for number in range(count)]


def _nth(request: Request, number: int) -> Request:
    """Return the request for one of several answers."""
    if request.seed is None:
        return request
    return replace(request, seed=(request.seed + number) % (MAX_SEED + 1))
