"""Transformers' KV cache, in which a beginning that was computed with an adapter is that adapter's alone.

Blocks of equal tokens are shared by a hash of the tokens, each chained to the one before it. What an
adapter changes, the tokens do not say: so the first of them is replaced, for the hash alone, by a number
that stands for the token and the adapter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers.generation.continuous_batching.requests import RequestState, RequestStatus

from cog_triton.adapters.layers import LoadedAdapter
from cog_triton.engines.transformers_rows import Row


class Marks:
    """Numbers below 0, which no token has, for first tokens under an adapter."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], int] = {}

    def marked(self, ids: list[int], adapter: LoadedAdapter | None) -> list[int]:
        """The ids that are hashed in place of these."""
        if adapter is None or not ids:
            return ids
        key = (adapter.number, ids[0])
        return [self._numbers.setdefault(key, -1 - len(self._numbers)), *ids[1:]]


def keep_adapters_apart(cache: Any, row_of: Callable[[str], Row | None]) -> None:
    """Make a ``PagedAttentionCache`` share blocks under one adapter, or under none, not between them.

    Args:
        row_of: the request of an id; None when it is cancelled, which shares nothing then.
    """
    marks = Marks()
    search, mark = cache.search_prefix_match, cache.mark_complete_blocks

    def search_prefix_match(request_id: str, prompt_ids: list[int]) -> int:
        row = row_of(request_id)
        # A prompt whose log probabilities are asked for goes through the model, all of it.
        if row is None or row.request.prompt_log_probs:
            return 0
        return int(search(request_id, marks.marked(prompt_ids, row.adapter)))

    def mark_complete_blocks(state: RequestState, complete_blocks: dict[str, int]) -> None:
        adapter = state.logit_processor_kwargs["row"].adapter
        if adapter is None or state.status == RequestStatus.FINISHED:
            mark(state, complete_blocks)
            return
        ids = marks.marked(state.initial_tokens + state.generated_tokens, adapter)
        for name, count in complete_blocks.items():
            cache.cache_allocators[name].mark_complete_blocks(state.request_id, ids, count)

    cache.search_prefix_match = search_prefix_match
    cache.mark_complete_blocks = mark_complete_blocks
