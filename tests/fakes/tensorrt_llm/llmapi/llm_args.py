import sys
from pathlib import Path
from typing import Any, Literal

from packaging.version import Version
from pydantic import BaseModel, ConfigDict, InstanceOf


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


class EagleDecodingConfig(_Strict):
    max_draft_len: int
    speculative_model_dir: str


class TorchLlmArgs(_Strict):
    """Arguments that are promised and that the engine gives, and some that are not; of 1.1 to 1.3.0rc25."""

    model: str | Path
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    enable_lora: bool = False
    lora_config: InstanceOf[LoraConfig] | None = None
    speculative_config: Any = None
    max_batch_size: int | None = 2048
    max_seq_len: int | None = None
    max_beam_width: int | None = 1
    max_num_tokens: int | None = 8192
    enable_chunked_prefill: bool = False
    kv_cache_config: KvCacheConfig = KvCacheConfig()
    stream_interval: int = 1

    build_config: InstanceOf[BuildConfig] | None = None
    sampler_type: Literal["TRTLLMSampler", "TorchSampler", "auto"] = "auto"


def update_llm_args_with_extra_dict(
    llm_args: dict[str, Any], llm_args_dict: dict[str, Any], _: str | None = None
) -> dict[str, Any]:
    """Shallow, and ``llm_args_dict`` is changed. From 1.3.0rc26 on it converts only one section."""
    sections: dict[str, Any] = {"lora_config": LoraConfig}
    if Version(sys.modules["tensorrt_llm"].__version__) < Version("1.3.0rc26"):
        sections["build_config"] = BuildConfig
        sections["speculative_config"] = _decoding_config
    for name in sections.keys() & llm_args_dict.keys():
        llm_args_dict[name] = sections[name](**llm_args_dict[name])
    return llm_args | llm_args_dict


def _decoding_config(**values: Any) -> EagleDecodingConfig:
    return {"Eagle": EagleDecodingConfig}[values.pop("decoding_type")](**values)
