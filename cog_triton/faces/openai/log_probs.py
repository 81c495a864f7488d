"""Log probabilities, in the two forms of OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cog_triton.protocol import TokenLogProb
from cog_triton.text.tokenizer import Tokenizer


def chat_log_probs(tokenizer: Tokenizer, tokens: Iterable[TokenLogProb]) -> list[dict[str, Any]]:
    """The entries of a chat completion's ``logprobs.content``."""
    return [
        {
            **_entry(tokenizer, token.id, token.log_prob),
            "top_logprobs": [_entry(tokenizer, other, value) for other, value in token.top],
        }
        for token in tokens
    ]


def text_log_probs(
    tokenizer: Tokenizer, tokens: Iterable[TokenLogProb], offset: int
) -> dict[str, list[Any]]:
    """A text completion's ``logprobs``.

    Args:
        offset: characters of the text before these tokens. Special ones among them take none.
    """
    special = frozenset(tokenizer.all_special_ids)
    result: dict[str, list[Any]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for token in tokens:
        text = token_text(tokenizer, token.id)
        top: dict[str, float] = {}
        for other, value in token.top:
            # Parts of characters all have one text, under which the likeliest is told.
            top.setdefault(token_text(tokenizer, other), value)
        result["tokens"].append(text)
        result["token_logprobs"].append(token.log_prob)
        result["top_logprobs"].append(top or None)
        result["text_offset"].append(offset)
        offset += 0 if token.id in special else len(text)
    return result


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """One token's text, by itself; special ones have theirs."""
    return str(tokenizer.decode([token], skip_special_tokens=False))


def _entry(tokenizer: Tokenizer, token: int, log_prob: float) -> dict[str, Any]:
    text = token_text(tokenizer, token)
    return {"token": text, "logprob": log_prob, "bytes": list(text.encode())}
