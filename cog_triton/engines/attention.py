"""PyTorch's own FlashAttention in transformers' continuous batching, without the flash-attn package.

Transformers' SDPA attends from every query to the keys of every request and masks those of others,
after repeating each key for its group of query heads. A kernel for sequences of different lengths
reads each request's own keys once and needs no mask. PyTorch carries such a kernel for NVIDIA GPUs
and half precision.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# Transformers passes sequence lengths instead of a mask to what has "flash" in its name; a 2 or 3
# would promise a kernel that reads the paged cache by itself.
TORCH_FLASH = "torch_flash"


def use_attention(model: Any, name: str) -> None:
    """Sets a loaded model's attention: sdpa, paged|eager, torch_flash, or what transformers knows.

    Raises:
        ValueError, ImportError: transformers cannot provide it.
    """
    if name == TORCH_FLASH:
        ALL_ATTENTION_FUNCTIONS.register(TORCH_FLASH, torch_flash_forward)
        # The public setter would look for a package or a kernel of that name.
        model.config._attn_implementation_internal = TORCH_FLASH
    else:
        model.set_attn_implementation(name)


def torch_flash_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001 - given to every attention function
    *,
    cache: PagedAttentionCache,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """One layer's attention of a batch whose sequences stand one behind the other.

    Args:
        query: [1, heads, tokens, size]; key and value the same with their own number of heads.

    Returns:
        [1, tokens, heads, size].
    """
    key, value = cache.update(key, value, layer_idx=module.layer_idx, kwargs=kwargs)
    query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    attend = _flash if query.is_cuda else _one_by_one
    ends = kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"]
    longest = kwargs["max_length_q"], kwargs["max_length_k"]
    return attend(query, key, value, ends, longest, scaling).unsqueeze(0), None


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: tuple[torch.Tensor, torch.Tensor],
    longest: tuple[int, int],
    scale: float | None,
) -> torch.Tensor:
    output: torch.Tensor = torch.ops.aten._flash_attention_forward(
        query.contiguous(),
        key,
        value,
        *ends,
        *longest,
        0.0,  # dropout
        True,  # causal, aligned at the last query and the last key
        False,
        scale=scale,
    )[0]
    return output


def _one_by_one(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: tuple[torch.Tensor, torch.Tensor],
    _longest: tuple[int, int],
    scale: float | None,
) -> torch.Tensor:
    """What the kernel computes, where there is none."""
    output = torch.zeros_like(query)  # a padded batch ends in queries of nobody
    for q, k in zip(*(pairwise(e.tolist()) for e in ends), strict=True):
        parts = query[slice(*q)], key[slice(*k)], value[slice(*k)]
        own, keys, values = (part.transpose(0, 1).unsqueeze(0) for part in parts)
        size_q, size_k = own.shape[2], keys.shape[2]
        mask = torch.ones(size_q, size_k, dtype=torch.bool).tril(size_k - size_q)
        attended = scaled_dot_product_attention(
            own, keys, values, mask, scale=scale, enable_gqa=True
        )
        output[slice(*q)] = attended.squeeze(0).transpose(0, 1)
    return output
