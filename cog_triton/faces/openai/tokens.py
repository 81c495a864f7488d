"""POST /tokenize and /detokenize, in the form of vLLM's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from fastapi import APIRouter

from cog_triton.errors import is_unicode
from cog_triton.faces.openai.bodies import BodyRoute, off_loop
from cog_triton.faces.openai.errors import invalid
from cog_triton.faces.openai.fields import DetokenizeBody, Sampling, TokenizeBody
from cog_triton.faces.openai.served import FromApp, Served
from cog_triton.faces.openai.turns import chat_prompt
from cog_triton.request.limits import UNKNOWN_TOKENS
from cog_triton.request.request import Request
from cog_triton.text.tokenizer import Tokenizer
from cog_triton.wire import TokenLogProb

router = APIRouter(route_class=BodyRoute)


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, served: FromApp) -> dict[str, Any]:
    """The token ids of a prompt, or of messages as the model sees them."""
    served.adapter(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("either prompt or messages must be given", "prompt")
    text, special = body.prompt, body.add_special_tokens is not False
    if text is None:  # the template of a chat has the tokens that begin a text
        text, special = await off_loop(chat_prompt, body, served), bool(body.add_special_tokens)
    tokens = await token_ids(served, text, special=special)
    names = None
    if body.return_token_strs:
        names = served.backend.tokenizer.convert_ids_to_tokens(tokens)
    most = served.backend.context_length
    return {"count": len(tokens), "max_model_len": most, "tokens": tokens, "token_strs": names}


async def token_ids(served: Served, text: str, *, special: bool) -> list[int]:
    """Return the token ids of a text, or refuse it; ``special``: with the tokens that begin a text."""
    if not is_unicode(text):
        raise invalid("the prompt must be valid Unicode; half of a surrogate pair is not")
    served.backend.limits.check("the prompt", len(text))
    tokenizer = served.backend.tokenizer
    encoding = await asyncio.to_thread(tokenizer, text, add_special_tokens=special)
    return list(encoding.input_ids)


async def with_ids(request: Request, body: Sampling, served: Served) -> Request:
    """Return a request with its prompt as token ids, where a body asks for these or for a part of them."""
    most = body.truncate_prompt_tokens
    if not body.return_token_ids and most is None:
        return request
    ids, beginning = list(request.prompt_ids), list[int]()
    if not ids:
        special = request.add_special_tokens is not False
        ids = await token_ids(served, request.prompt, special=special)
        beginning = await token_ids(served, "", special=special)
    if most is None:
        return replace(request, prompt_ids=tuple(ids))
    if most == -1:
        context = served.backend.context_length or UNKNOWN_TOKENS
        output = request.max_tokens if request.max_tokens < context else 1
        most = context - output
    # The tokens that begin a text stay.
    kept = beginning[:most] if ids[: len(beginning)] == beginning else []
    rest, most = ids[len(kept) :], most - len(kept)
    if len(rest) > most:
        rest = rest[:most] if body.truncation_side == "right" else rest[len(rest) - most :]
    return replace(request, prompt="", prompt_ids=(*kept, *rest))


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, served: FromApp) -> dict[str, Any]:
    """The text of token ids, special ones included."""
    served.adapter(body.model)
    size = len(served.backend.tokenizer)
    if any(not 0 <= token < size for token in body.tokens):
        raise invalid(f"tokens must be between 0 and {size - 1}", "tokens")
    return {"prompt": served.backend.tokenizer.decode(body.tokens)}


def chat_log_probs(
    tokenizer: Tokenizer, tokens: Iterable[TokenLogProb], top: int | None = None
) -> list[dict[str, Any]]:
    """Return the entries of a chat's log probabilities, with so many alternatives; None for all."""

    def entry(token: int, log_prob: float) -> dict[str, Any]:
        text = token_text(tokenizer, token)
        return {"token": text, "logprob": log_prob, "bytes": list(text.encode())}

    return [
        entry(token.id, token.log_prob) | {"top_logprobs": [entry(*own) for own in token.top[:top]]}
        for token in tokens
    ]


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Return one token's text, by itself; special ones have theirs."""
    return str(tokenizer.decode([token], skip_special_tokens=False))
