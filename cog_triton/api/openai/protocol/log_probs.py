"""Log probabilities of tokens, with their texts."""

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from cog_triton.protocol.log_probs import TokenLogProb
from cog_triton.text.tokenizer import Tokenizer

CACHED_TEXTS = 1 << 16


@lru_cache(CACHED_TEXTS)  # each costs dozens of microseconds, and a response may have a million
def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Return the text of one token by itself, also of a special one."""
    return str(tokenizer.decode([token], skip_special_tokens=False))


def chat_log_probs(
    tokenizer: Tokenizer, tokens: Iterable[TokenLogProb], top: int | None = None
) -> list[dict[str, Any]]:
    """Return the entries of a chat's log probabilities, with so many alternatives; None for all."""

    def entry(token: int, log_prob: float) -> dict[str, Any]:
        text = token_text(tokenizer, token)
        return {"token": text, "logprob": log_prob, "bytes": list(text.encode())}

    entries = []
    for token in tokens:
        alternatives = [entry(other, log_prob) for other, log_prob in token.top[:top]]
        entries.append({**entry(token.id, token.log_prob), "top_logprobs": alternatives})
    return entries
