"""Parameters that the LLM API's sampler ignores, by TensorRT-LLM's version.

The PyTorch backend has had two samplers. TRTLLMSampler, in C++, honours all that a request can ask for
here. TorchSampler, the default, takes a parameter that it does not know without a word. As read in
TensorRT-LLM's repository and documentation, and checked on none of these versions:

- Up to 1.2 TorchSampler leaves out seeds, penalties and bad words. In 1.0 it takes the most likely
  token besides, whatever the temperature, unless ``enable_mixed_sampler`` is on.
- It learned bad words, penalties and seeds between July and August 2026 (pull requests 16052, 16485 and
  17172), while the release candidates of 1.3 came out. Which candidate was the first with each is not
  known here, so all count as left out up to the last candidate that has TRTLLMSampler as well.
- From 1.3.0rc26 on it is the only one, and ``sampler_type: TRTLLMSampler`` is refused.

A penalty or a bad word that is left out changes the answer and cannot be noticed in it, so such a request
is refused. A seed comes with every request of the predictor, mostly one that nobody asked for, and without
it the answer is as good as any other: that is said once, in a warning.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

from packaging.version import InvalidVersion, Version

from cog_triton.engines.base import EngineError, SamplingParams

TORCH_SAMPLER_ALONE = Version("1.3.0rc26")
SAMPLER_TYPE_KNOWN = Version("1.1.0.dev0")
_NEUTRAL = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


@dataclass(frozen=True)
class Sampler:
    """The sampler of a loaded LLM.

    Attributes:
        version: TensorRT-LLM's.
        forgetful: whether it leaves seeds, penalties and bad words out of account.
    """

    version: str
    forgetful: bool

    @property
    def remedy(self) -> str:
        """The setting with which it honours everything."""
        known = _parsed(self.version) >= SAMPLER_TYPE_KNOWN
        line = "sampler_type: TRTLLMSampler" if known else "enable_trtllm_sampler: true"
        return f"set {line} in the file that llm_api_config names"

    def check(self, sampling: SamplingParams) -> None:
        """Refuse what would be ignored without anybody noticing.

        Raises:
            EngineError: naming the parameters.
        """
        asked = [name for name, value in _NEUTRAL.items() if getattr(sampling, name) != value]
        asked += ["bad_words"] if any(sampling.bad_words) else []
        if self.forgetful and asked:
            raise EngineError(
                f"the default sampler of TensorRT-LLM {self.version} does not support "
                f"{', '.join(asked)}, and would ignore it; {self.remedy}"
            )

    @property
    def warning(self) -> str | None:
        """A warning for the log, None without a need."""
        if not self.forgetful:
            return None
        return (
            f"the default sampler of TensorRT-LLM {self.version} ignores seeds: the same seed may give "
            f"another text. Penalties and bad words are refused. To have them, {self.remedy}"
        )


def sampler_of(version: str, options: Mapping[str, Any]) -> Sampler:
    """The sampler of an LLM.

    Args:
        options: the arguments that the LLM was made with; what is missing is at its default.
    """
    sampler = options.get("sampler_type", "auto")
    chosen = (
        str(getattr(sampler, "value", sampler)) == "TRTLLMSampler"
        or options.get("enable_trtllm_sampler") is True
        # The engines that 1.x can still run by the LLM API sample in C++.
        or options.get("backend") == "tensorrt"
    )
    return Sampler(version, not chosen and _parsed(version) < TORCH_SAMPLER_ALONE)


def sampling_defaults(known: Container[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments without which an LLM would not sample at all.

    Args:
        known: the names of the arguments that this version's PyTorch backend has.
        options: the arguments that are given, by which the backend may be another one.
    """
    pytorch = options.get("backend") in (None, "pytorch")
    return {"enable_mixed_sampler": True} if pytorch and "enable_mixed_sampler" in known else {}


def _parsed(version: str) -> Version:
    try:
        return Version(version)
    except InvalidVersion:
        return Version("0")  # the one of which least is expected
