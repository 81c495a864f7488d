from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class KvCacheConfig(_Strict):
    enable_block_reuse: bool = True
    max_tokens: int | None = None
    max_attention_window: list[int] | None = None
    sink_token_length: int | None = None
    free_gpu_memory_fraction: float | None = 0.9
    host_cache_size: int | None = None


class LlmArgs(_Strict):
    """The arguments that are promised, and behind them those that are not."""

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
    lora_config: Any = None
    guided_decoding_backend: Literal["xgrammar", "llguidance"] | None = None
    speculative_config: Any = None
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
