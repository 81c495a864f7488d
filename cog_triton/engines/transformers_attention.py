"""Eager attention of continuous batching with soft caps, which transformers' own leaves out in silence."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.eager_paged import eager_paged_attention_forward, repeat_kv
from transformers.modeling_utils import AttentionInterface

NAME = "paged|eager"


def register() -> None:
    """Have transformers use this attention where it would use its own."""
    AttentionInterface.register(NAME, attention_with_soft_cap)


def attention_with_soft_cap(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Attend from queries [1, heads, tokens, size] to a step's cached keys and values."""
    if softcap is None:
        output: tuple[Tensor, Tensor] = eager_paged_attention_forward(
            module, query, key, value, attention_mask, scaling, **kwargs
        )
        return output
    cache = kwargs.pop("cache")
    key, value = cache.update(
        key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs
    )
    groups: int = getattr(module, "num_key_value_groups", 1)
    key = repeat_kv(key, groups)
    value = repeat_kv(value, groups)
    weights = torch.matmul(query, key.transpose(2, 3)) * scaling
    weights = torch.tanh(weights / softcap) * softcap
    if attention_mask is not None:
        weights = weights + attention_mask
    weights = nn.functional.softmax(weights, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights
