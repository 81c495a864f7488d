"""Requests of vLLM that begin with output, which an earlier attempt has delivered.

vLLM knows such requests: those that it has set back, whose output it computes again with their prompt. So a
request whose parameters have delivered ids becomes one in vLLM's engine core, where its grammar accepts
them, and with the V1 model runner in the workers, where its generator draws what it drew for them. Then
penalties, bad words, minima, guides and seeds go on as if nothing had happened. These are internals of
vLLM; the range in pyproject.toml is as narrow as that asks for. Its processes import this module as they
unpickle the ``Resuming`` in their configuration.
"""

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

import torch
from vllm.v1.request import Request
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu_input_batch import InputBatch

_DELIVERED = "cog_triton_delivered"  # in the extra_args of SamplingParams


class Resuming:
    """Has this module imported where it is unpickled."""


def deliver(sampling: Any, ids: list[int]) -> None:
    """Have the last ids of a request's prompt count as output, and as a part of its limits."""
    sampling.extra_args = {_DELIVERED: ids}
    sampling.max_tokens += len(ids)
    sampling.min_tokens += len(ids) if sampling.min_tokens else 0


def _delivered(request: Any) -> Any:
    return (getattr(request.sampling_params, "extra_args", None) or {}).get(_DELIVERED, [])


_sampler = lru_cache(TopKTopPSampler)


def _made(make: Callable[..., Any], *arguments: Any) -> Any:
    request = make(*arguments)
    if count := len(_delivered(request)):
        del request.prompt_token_ids[-count:]
        request.num_prompt_tokens -= count
        request._output_token_ids.extend(_delivered(request))
        request.prefill_stats = None  # of prompts, which have no output in the prefix cache
    return request


def _compiled(make: Callable[..., Any], manager: Any, request: Any) -> Any:
    grammar = make(manager, request)
    if (ids := _delivered(request)) and not grammar.accept_tokens(request.request_id, ids):
        raise ValueError("the guide does not allow the output that is continued")
    return grammar


def _added(add: Callable[..., Any], batch: Any, request: Any) -> Any:
    if (ids := _delivered(request)) and not request.output_token_ids:
        request.output_token_ids.extend(ids)
        if request.generator is not None:
            logits = torch.zeros(1, batch.vocab_size, device=batch.device)
            for _ in ids:
                _sampler().forward(logits.clone(), {0: request.generator}, None, None)
    return add(batch, request)


def _replace(owner: Any, name: str, by: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    @wraps(original)
    def replaced(*arguments: Any) -> Any:
        return by(original, *arguments)

    setattr(owner, name, replaced)


_replace(Request, "from_engine_core_request", _made)
_replace(StructuredOutputManager, "_create_grammar", _compiled)
_replace(InputBatch, "add_request", _added)
