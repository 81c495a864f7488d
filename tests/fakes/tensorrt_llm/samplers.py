"""What of a request's sampling parameters is honoured, by version; the rest is dropped without a word."""

from __future__ import annotations

import secrets
from dataclasses import replace

from packaging.version import Version

from .llm_args import LlmArgs
from .sampling_params import SamplingParams


def honoured(sampling: SamplingParams, args: LlmArgs, version: str) -> SamplingParams:
    chosen = getattr(args, "sampler_type", "auto") == "TRTLLMSampler"
    if chosen or getattr(args, "enable_trtllm_sampler", False):
        return sampling
    if not getattr(args, "enable_mixed_sampler", True):
        sampling = replace(sampling, temperature=None, top_k=1, top_p=None)
    if Version(version) >= Version("1.3.0rc26"):
        return sampling
    return replace(
        sampling,
        seed=secrets.randbits(63),
        repetition_penalty=None,
        presence_penalty=None,
        frequency_penalty=None,
        bad=None,
        bad_token_ids=None,
    )
