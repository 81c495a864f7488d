from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, ClassVar, Literal

from packaging.version import Version
from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class KvCacheConfig(_Strict):
    enable_block_reuse: bool = True
    max_tokens: int | None = None
    max_attention_window: list[int] | None = None
    sink_token_length: int | None = None
    free_gpu_memory_fraction: float | None = 0.9
    host_cache_size: int | None = None


class LoraConfig(_Strict):
    max_lora_rank: int = 64


class BuildConfig(_Strict):
    max_beam_width: int = 1

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> BuildConfig:
        return cls(**values)


class DecodingBaseConfig(_Strict):
    """Speculative decoding. As with the real one, no object of it is made from a dict but here."""

    max_draft_len: int

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DecodingBaseConfig:
        kinds: dict[str, type[DecodingBaseConfig]] = {"Eagle": EagleDecodingConfig}
        values = dict(values)
        return kinds[values.pop("decoding_type")](**values)


class EagleDecodingConfig(DecodingBaseConfig):
    speculative_model_dir: str


class LlmArgs(_Strict):
    """The arguments that are promised, and behind them those that are not."""

    _objects_only: ClassVar[bool] = True

    model: str | Path
    tokenizer: Any = None
    tokenizer_mode: Literal["auto", "slow"] = "auto"
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    dtype: str = "auto"
    revision: str | None = None
    enable_lora: bool = False
    lora_config: LoraConfig | None = None
    guided_decoding_backend: Literal["xgrammar", "llguidance"] | None = None
    speculative_config: DecodingBaseConfig | None = None
    max_batch_size: int | None = 2048
    max_input_len: int | None = 1024
    max_seq_len: int | None = None
    max_beam_width: int | None = 1
    max_num_tokens: int | None = 8192
    load_format: Any = "auto"
    enable_chunked_prefill: bool = False
    kv_cache_config: KvCacheConfig = KvCacheConfig()
    stream_interval: int = 1

    backend: str | None = None
    cuda_graph_config: Any = None
    scheduler_config: Any = None
    attn_backend: str = "TRTLLM"
    build_config: BuildConfig | None = None

    @field_validator("speculative_config", "build_config", "lora_config", mode="before")
    @classmethod
    def _converted_before(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, dict) and cls._objects_only:
            raise ValueError(f"{info.field_name} is a dict, and no object")
        return value


class TorchLlmArgs11(LlmArgs):
    """1.1 to the candidates of 1.3."""

    sampler_type: Literal["TRTLLMSampler", "TorchSampler", "auto"] = "auto"


class TorchLlmArgs10(LlmArgs):
    enable_mixed_sampler: bool = False
    enable_trtllm_sampler: bool = False


class TorchLlmArgs13(LlmArgs):
    """From 1.3.0rc26 on: one sampler, whose name is still taken, and sections may be dicts."""

    _objects_only: ClassVar[bool] = False
    speculative_config: Any = None
    sampler_type: Literal["TorchSampler", "auto"] = "auto"


def args_of(version: str) -> type[LlmArgs]:
    if Version(version) < Version("1.1.0.dev0"):
        return TorchLlmArgs10
    return TorchLlmArgs11 if Version(version) < Version("1.3.0rc26") else TorchLlmArgs13


def update_llm_args_with_extra_dict(
    llm_args: dict[str, Any],
    llm_args_dict: dict[str, Any],
    extra_llm_api_options: str | None = None,  # noqa: ARG001
) -> dict[str, Any]:
    """Shallow, and ``llm_args_dict`` is changed, as in 1.0 to 1.2."""
    sections: dict[str, Any] = {
        "build_config": BuildConfig.from_dict,
        "speculative_config": DecodingBaseConfig.from_dict,
        "lora_config": lambda values: LoraConfig(**values),
    }
    if args_of(sys.modules["tensorrt_llm"].__version__) is TorchLlmArgs13:
        sections = {"lora_config": sections["lora_config"]}
    for name, convert in sections.items():
        if name in llm_args_dict:
            llm_args_dict[name] = convert(llm_args_dict[name])
    return llm_args | llm_args_dict
