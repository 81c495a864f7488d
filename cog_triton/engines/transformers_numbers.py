"""Finds the sequences of a step whose numbers are not finite, and keeps them from the others.

With SDPA and eager attention, all sequences of a step are one row, apart by a mask: a weight of 0 times NaN
is NaN, so that one sequence's keys and values would make all of them NaN. Zeros are cached in their place,
and the sequence fails.
"""

import logging
from typing import Any

import torch
from torch import Tensor

from cog_triton.errors import EngineFailure

logger = logging.getLogger(__name__)


def not_finite() -> EngineFailure:
    """Return the error of a sequence for which the model computes no numbers."""
    return EngineFailure(
        "the model's logits are not finite numbers (NaN or infinite): its weights, or those of the "
        "adapter, are damaged, or overflow in this DTYPE"
    )


class FiniteCache:
    """Stands before the KV cache of continuous batching, and notes which tokens are not finite.

    Without a cache it looks at logits only.
    """

    def __init__(self, cache: Any | None) -> None:
        self._cache = cache
        # One sum for each token of the step, which is not finite if one of its keys or values is not.
        self._sums: Tensor | None = None
        if cache is not None:
            self._update = cache.update
            cache.update = self.update

    def begin_step(self) -> None:
        self._sums = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: dict[str, Any]
    ) -> Any:
        """Cache the keys and values of a step's tokens, [1, heads, tokens, size]."""
        # With a block table, it is FlashAttention that writes to the cache, and it keeps sequences apart.
        if kwargs.get("block_table") is None:
            sums = key_states.sum(dim=(0, 1, 3), dtype=torch.float32)
            sums += value_states.sum(dim=(0, 1, 3), dtype=torch.float32)
            self._sums = sums if self._sums is None else self._sums + sums
            key_states = torch.nan_to_num(key_states, nan=0.0, posinf=0.0, neginf=0.0)
            value_states = torch.nan_to_num(value_states, nan=0.0, posinf=0.0, neginf=0.0)
        return self._update(key_states, value_states, layer_idx, kwargs)

    def failed(self, logits: Tensor) -> tuple[list[bool], list[bool]] | None:
        """Return which tokens of the step and which rows of its logits are not finite; None for none.

        After a step with one that is not, prompts share no blocks of the cache any more: some hold zeros.
        """
        # NaN if any logit is NaN. A logit of -inf is a token that the model excludes.
        greatest = logits.amax(dim=-1)
        finite = greatest.isfinite().all()
        if self._sums is not None:
            finite &= self._sums.isfinite().all()
        if finite:
            return None
        if self._cache is not None and self._cache.use_prefix_sharing:
            self._cache.use_prefix_sharing = False
            logger.warning("%s; prefix caching is now off", not_finite())
        tokens = [] if self._sums is None else (~self._sums.isfinite()).tolist()
        return tokens, (~greatest.isfinite()).tolist()
