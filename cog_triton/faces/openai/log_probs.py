"""Log probabilities, in the two forms of OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from cog_triton.text.tokenizer import Tokenizer
from cog_triton.wire import TokenLogProb


def chat_log_probs(tokenizer: Tokenizer, tokens: Iterable[TokenLogProb]) -> list[dict[str, Any]]:
    """The entries of a chat completion's ``logprobs.content``."""
    return [
        {
            **_entry(tokenizer, token.id, token.log_prob),
            "top_logprobs": [_entry(tokenizer, other, value) for other, value in token.top],
        }
        for token in tokens
    ]


def wanted(tokens: Iterable[TokenLogProb], top: int | None) -> tuple[TokenLogProb, ...]:
    """The tokens with so many alternatives each; None for no tokens."""
    if top is None:
        return ()
    return tuple(replace(token, top=token.top[:top]) for token in tokens)


def prompt_entries(
    tokenizer: Tokenizer, tokens: Iterable[TokenLogProb], top: int
) -> list[dict[str, Any] | None]:
    """vLLM's ``prompt_logprobs``: of each token its own entry and those of the likeliest, by their ids.

    The first token follows nothing. A rank is only known of the likeliest.
    """
    entries: list[dict[str, Any] | None] = []
    for token in tokens:
        ranks = {other: rank for rank, (other, _) in enumerate(token.top, 1)}
        values = {token.id: token.log_prob, **dict(token.top[:top])}
        entries.append(
            {
                str(id): {
                    "logprob": value,
                    "rank": ranks.get(id),
                    "decoded_token": token_text(tokenizer, id),
                }
                for id, value in values.items()
            }
        )
    return [None, *entries[1:]]


def text_log_probs(
    tokenizer: Tokenizer,
    tokens: Iterable[TokenLogProb],
    offset: int,
    *,
    prompt: str = "",
    skip_special_tokens: bool = True,
) -> dict[str, list[Any]]:
    """A text completion's ``logprobs``.

    Args:
        offset: characters of the text before these tokens.
        prompt: with which the text begins. Special tokens that it does not have take no characters.
        skip_special_tokens: whether those of the answer take none.
    """
    hidden = frozenset(tokenizer.all_special_ids) if skip_special_tokens or prompt else ()
    result: dict[str, list[Any]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for token in tokens:
        name = token_text(tokenizer, token.id)
        top: dict[str, float] = {}
        for other, value in token.top:
            # Parts of characters all have one text, under which the likeliest is told.
            top.setdefault(token_text(tokenizer, other), value)
        top.setdefault(name, token.log_prob)
        result["tokens"].append(name)
        result["token_logprobs"].append(token.log_prob)
        result["top_logprobs"].append(top)
        result["text_offset"].append(offset)
        shown = token.id not in hidden or prompt.startswith(name, offset)
        offset += len(name) if shown else 0
    return result


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """One token's text, by itself; special ones have theirs."""
    return str(tokenizer.decode([token], skip_special_tokens=False))


def _entry(tokenizer: Tokenizer, token: int, log_prob: float) -> dict[str, Any]:
    text = token_text(tokenizer, token)
    return {"token": text, "logprob": log_prob, "bytes": list(text.encode())}
