"""Requests of vLLM that begin with output, which an earlier attempt has delivered.

vLLM has such requests itself: when it preempts a request, it later computes its output again with its
prompt. So a request whose parameters have delivered ids is made to look preempted. In vLLM's engine core,
its grammar accepts the ids. In the workers, if they have the V1 model runner, its generator draws the same
noise for them again. Then penalties, bad words, minima, guides and seeds go on as if nothing had happened.

This replaces a method in three of vLLM's classes, which are internals. ``problem`` says whether they exist
and can be called as they are here. The engine asks it once, at its start; if there is a problem, nothing is
replaced.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, wraps
from importlib import import_module
from typing import Any

# The key of the delivered ids in the extra_args of SamplingParams.
_DELIVERED = "cog_triton_delivered"


class Resuming:
    """Replaces the methods in each process of vLLM's that unpickles it, with vLLM's configuration."""

    def __reduce__(self) -> tuple[Callable[[], "Resuming"], tuple[()]]:
        return install, ()


def install() -> Resuming:
    """Replace the methods in this process, once."""
    for patch in PATCHES:
        patch.apply()
    return Resuming()


def problem() -> str:
    """Return why the methods cannot be replaced in the installed vLLM; empty if they can."""
    try:
        _sampler_class()
        for patch in PATCHES:
            patch.check()
    except (ImportError, AttributeError, TypeError) as error:
        return str(error)
    return ""


def deliver(sampling: Any, ids: list[int]) -> None:
    """Have the last ids of a request's prompt count as output, and as a part of its limits."""
    sampling.extra_args = {_DELIVERED: ids}
    sampling.max_tokens += len(ids)
    if sampling.min_tokens:
        sampling.min_tokens += len(ids)


def _delivered(request: Any) -> list[int]:
    extra: dict[str, Any] = getattr(request.sampling_params, "extra_args", None) or {}
    ids: list[int] = extra.get(_DELIVERED, [])
    return ids


def _make_request(original: Callable[..., Any], *arguments: Any) -> Any:
    """Make a request whose delivered ids are output, and no part of the prompt."""
    request = original(*arguments)
    ids = _delivered(request)
    if ids:
        del request.prompt_token_ids[-len(ids) :]
        request.num_prompt_tokens -= len(ids)
        request._output_token_ids.extend(ids)
        # These statistics count the cached tokens of the prompt, to which the delivered ids do not belong.
        request.prefill_stats = None
    return request


def _create_grammar(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Compile a request's grammar, which then has accepted the delivered ids."""
    grammar = original(manager, request)
    ids = _delivered(request)
    if ids and not grammar.accept_tokens(request.request_id, ids):
        raise ValueError("the guide does not allow the output that is continued")
    return grammar


def _add_request(original: Callable[..., Any], batch: Any, request: Any) -> Any:
    """Add a request to a worker's batch, with a generator that has drawn for the delivered ids."""
    ids = _delivered(request)
    if ids and not request.output_token_ids:
        request.output_token_ids.extend(ids)
        if request.generator is not None:
            import torch

            logits = torch.zeros(1, batch.vocab_size, device=batch.device)
            for _ in ids:
                _sampler().forward(logits.clone(), {0: request.generator}, None, None)
    return original(batch, request)


def _sampler_class() -> Any:
    return import_module("vllm.v1.sample.ops.topk_topp_sampler").TopKTopPSampler


@lru_cache
def _sampler() -> Any:
    return _sampler_class()()


@dataclass(frozen=True)
class _Patch:
    """A method of a class of vLLM's, and the function that takes its place and gets the original.

    Attributes:
        arguments: their number in a call, with self; None if any number will do.
    """

    module: str
    owner: str
    method: str
    arguments: int | None
    replacement: Callable[..., Any]

    def check(self) -> None:
        """Raise an ImportError, AttributeError or TypeError if the method cannot be replaced."""
        original = getattr(self._class(), self.method)
        if self.arguments is not None:
            inspect.signature(original).bind(*[None] * self.arguments)

    def apply(self) -> None:
        """Replace the method, unless it has been replaced."""
        owner = self._class()
        original = getattr(owner, self.method)
        if hasattr(original, _DELIVERED):
            return

        @wraps(original)
        def replaced(*arguments: Any) -> Any:
            return self.replacement(original, *arguments)

        setattr(replaced, _DELIVERED, True)
        setattr(owner, self.method, replaced)

    def _class(self) -> Any:
        return getattr(import_module(self.module), self.owner)


PATCHES = (
    _Patch(
        module="vllm.v1.request",
        owner="Request",
        method="from_engine_core_request",
        arguments=None,
        replacement=_make_request,
    ),
    _Patch(
        module="vllm.v1.structured_output",
        owner="StructuredOutputManager",
        method="_create_grammar",
        arguments=2,
        replacement=_create_grammar,
    ),
    _Patch(
        module="vllm.v1.worker.gpu_input_batch",
        owner="InputBatch",
        method="add_request",
        arguments=2,
        replacement=_add_request,
    ),
)
