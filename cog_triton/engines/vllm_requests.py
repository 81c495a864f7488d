"""Requests as vLLM takes them, and what it answers."""

from __future__ import annotations

from typing import Any

from cog_triton.engines.base import (
    LEAST_LOG_PROB,
    EngineError,
    GenerationRequest,
    SamplingParams,
    Tokens,
    TopLogProbs,
)
from cog_triton.request.guide import Guide, GuideKind

SEEDS = 2**63  # of an int64 that is not negative: others end vLLM's runner


def sampling_arguments(request: GenerationRequest) -> dict[str, Any]:
    """The arguments of ``vllm.SamplingParams`` that a request stands for, but for bad words and guides.

    What changes nothing is left out. Stop words are not vLLM's business: they stay in the output here,
    and are looked for elsewhere.
    """
    arguments: dict[str, Any] = {
        "max_tokens": request.max_tokens,
        "detokenize": False,
        "ignore_eos": True,  # the request's end token is the one that counts
        **_choice(request.sampling, request.continued),
        **request.sampling.unusual,
    }
    # The context may have cut the maximum since the two were compared.
    if "min_tokens" in arguments:
        arguments["min_tokens"] = min(arguments["min_tokens"], request.max_tokens)
    if request.end_id is not None:
        arguments["stop_token_ids"] = [request.end_id]
    if request.logit_bias:
        arguments["logit_bias"] = dict(request.logit_bias)
    if request.allowed_ids:
        arguments["allowed_token_ids"] = list(request.allowed_ids)
    if request.return_log_probs:
        arguments["logprobs"] = request.top_log_probs  # with 0 of the chosen tokens alone
    if request.prompt_log_probs:
        arguments["prompt_logprobs"] = request.top_log_probs
    return arguments


def _choice(sampling: SamplingParams, continued: int) -> dict[str, Any]:
    if sampling.greedy:
        return {"temperature": 0.0}
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p or 1.0,
        "top_k": sampling.top_k,
        **({"min_p": sampling.min_p} if sampling.min_p else {}),
        # Its noise begins anew with a request: a continuation is not to repeat that of the beginning.
        "seed": (sampling.seed + continued) % SEEDS,
    }


def guide_arguments(guide: Guide) -> dict[str, Any]:
    """The arguments of vLLM's ``StructuredOutputsParams``."""
    if guide.kind is GuideKind.JSON:
        return {"json_object": True}
    names = {
        GuideKind.JSON_SCHEMA: "json",
        GuideKind.REGEX: "regex",
        GuideKind.GRAMMAR: "grammar",
        GuideKind.STRUCTURAL_TAG: "structural_tag",
    }
    return {names[guide.kind]: guide.text}


def next_tokens(output: Any, request: GenerationRequest, *, finished: bool) -> Tokens:
    """Return the new tokens of one of vLLM's ``CompletionOutput`` of the kind DELTA.

    Args:
        finished: whether the ``RequestOutput`` is.

    Raises:
        EngineError: vLLM gave the request up.
    """
    ids = list(output.token_ids)
    log_probs = _log_probs(ids, output.logprobs) if request.return_log_probs else []
    top = _top_log_probs(output.logprobs, request.top_log_probs) if request.top_log_probs else []
    if finished and output.finish_reason not in ("stop", "length"):
        raise EngineError(f"vLLM ended the request: {output.finish_reason}")
    return Tokens(ids, log_probs, finished=finished, top_log_probs=top)


def _log_probs(ids: list[int], entries: Any) -> list[float]:
    return [_log_prob(entry[token]) for token, entry in zip(ids, entries, strict=True)]


def _top_log_probs(entries: Any, count: int) -> list[TopLogProbs]:
    """The most likely tokens of each place; vLLM adds the chosen one to them."""
    return [
        tuple(
            (token, _log_prob(value))
            for token, value in sorted(entry.items(), key=lambda item: -item[1].logprob)
        )[:count]
        for entry in entries or ()
    ]


def prompt_log_probs(entries: Any, request: GenerationRequest) -> list[TopLogProbs]:
    """At each of the prompt's places its token, and then the most likely ones.

    Args:
        entries: vLLM's, None at the first place.
    """
    ids, count = request.input_ids, request.top_log_probs
    top = _top_log_probs(entries[1:], count) if count else [()] * (len(ids) - 1)
    return [
        ((ids[0], 0.0),),
        *(
            ((token, _log_prob(entry[token])), *others)
            for token, entry, others in zip(ids[1:], entries[1:], top, strict=True)
        ),
    ]


def _log_prob(entry: Any) -> float:
    # Rounding may leave a certain token a hair above 0.
    return max(LEAST_LOG_PROB, min(0.0, float(entry.logprob)))
