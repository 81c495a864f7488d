"""A prompt as token ids, cut to a length where a body asks for that."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from cog_triton.api.openai.errors import invalid
from cog_triton.api.openai.schemas.sampling import Sampling
from cog_triton.api.openai.served import Served
from cog_triton.errors import is_unicode
from cog_triton.request.limits import UNKNOWN_TOKENS
from cog_triton.request.request import Request

WHOLE_CONTEXT = -1  # the value of ``truncate_prompt_tokens`` for all that the context has room for


async def token_ids(served: Served, text: str, *, special: bool) -> list[int]:
    """Return the token ids of a text, or raise ApiError or UserError.

    Args:
        special: with the tokens that begin a text.
    """
    if not is_unicode(text):
        raise invalid("the prompt must be valid Unicode, without lone surrogates")
    served.backend.limits.check("the prompt", len(text))
    tokenizer = served.backend.tokenizer
    encoding = await asyncio.to_thread(tokenizer, text, add_special_tokens=special)
    return list(encoding.input_ids)


async def with_ids(request: Request, body: Sampling, served: Served) -> Request:
    """Return a request with its prompt as token ids, where a body asks for these or for a part of them."""
    limit = body.truncate_prompt_tokens
    if not body.return_token_ids and limit is None:
        return request
    ids = list(request.prompt_ids)
    beginning: list[int] = []
    if not ids:
        special = request.add_special_tokens is not False
        ids = await token_ids(served, request.prompt, special=special)
        # The ids of an empty text are the tokens that begin every text.
        beginning = await token_ids(served, "", special=special)
    if limit is None:
        return replace(request, prompt_ids=tuple(ids))
    if limit == WHOLE_CONTEXT:
        limit = _room_for_prompt(request, served)
    kept = _cut(ids, beginning, limit, keeps_left=body.truncation_side == "right")
    return replace(request, prompt="", prompt_ids=tuple(kept))


def _room_for_prompt(request: Request, served: Served) -> int:
    context = served.backend.context_length or UNKNOWN_TOKENS
    # A limit of the answer above the context is no limit; one token is left for the answer.
    return context - (request.max_tokens if request.max_tokens < context else 1)


def _cut(
    ids: Sequence[int], beginning: Sequence[int], limit: int, *, keeps_left: bool
) -> list[int]:
    """Return at most ``limit`` ids; the tokens that begin a text stay."""
    begins = list(ids[: len(beginning)]) == list(beginning)
    kept = list(beginning[:limit]) if begins else []
    rest = list(ids[len(kept) :])
    room = limit - len(kept)
    if len(rest) > room:
        rest = rest[:room] if keeps_left else rest[len(rest) - room :]
    return kept + rest
