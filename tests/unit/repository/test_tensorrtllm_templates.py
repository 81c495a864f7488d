"""The tensorrt_llm template filled as users of TensorRT-LLM's C++ backend fill NVIDIA's.

No engine can be run here, so what the backend would read is compared with what the guides ask for.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from cog_triton.repository.fill import fill_model, fill_repository

ROOT = Path(__file__).resolve().parents[3]
TEMPLATE = (ROOT / "triton_model_repo" / "tensorrt_llm" / "config.pbtxt").read_text()

# What is in every filled config whatever is asked for: the last three must not be missing.
ALWAYS = {
    "batch_scheduler_policy": "guaranteed_no_evict",
    "exclude_input_in_output": "false",
    "FORCE_CPU_ONLY_INPUT_TENSORS": "no",
    "executor_worker_path": "/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker",
    "gpt_model_type": "inflight_fused_batching",
    "max_beam_width": "1",
    "guided_decoding_backend": "",
    "tokenizer_dir": "",
    "xgrammar_tokenizer_info_path": "",
}
OURS = set(re.findall(r'key: "(\w+)"', TEMPLATE.partition("# Read by the embedded engines")[2]))


def filled(**values: Any) -> Any:
    config = model_config_pb2.ModelConfig()
    text_format.Parse(
        fill_model("tensorrt_llm", TEMPLATE, {"triton_backend": "tensorrtllm", **values}), config
    )
    return config


def parameters(config: Any) -> dict[str, str]:
    return {key: value.string_value for key, value in config.parameters.items() if key not in OURS}


CASES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "Llama guide, 4 GPUs, fp16": (
        {
            "triton_max_batch_size": 64,
            "decoupled_mode": "False",
            "max_beam_width": 1,
            "engine_dir": "/tmp/llama/7B/trt_engines/fp16/4-gpu/",
            "max_tokens_in_paged_kv_cache": 2560,
            "max_attention_window_size": 2560,
            "kv_cache_free_gpu_mem_fraction": 0.5,
            "exclude_input_in_output": "True",
            "enable_kv_cache_reuse": "False",
            "batching_strategy": "inflight_batching",
            "max_queue_delay_microseconds": 600,
        },
        {
            "exclude_input_in_output": "true",
            "gpt_model_path": "/tmp/llama/7B/trt_engines/fp16/4-gpu/",
            "max_tokens_in_paged_kv_cache": "2560",
            "max_attention_window_size": "2560",
            "kv_cache_free_gpu_mem_fraction": "0.5",
            "enable_kv_cache_reuse": "false",
            "gpt_model_type": "inflight_batching",
        },
    ),
    "Phi-3 guide, old names": (
        {
            "decoupled_mode": "true",
            "engine_dir": "/opt/all_models/inflight_batcher_llm/tensorrt_llm/1",
            "max_tokens_in_paged_kv_cache": "1",
            "batch_scheduler_policy": "guaranteed_completion",
            "kv_cache_free_gpu_mem_fraction": "0.2",
            "max_num_sequences": "4",
            "triton_max_batch_size": "128",
            "max_queue_delay_microseconds": "10",
            "max_beam_width": "1",
            "batching_strategy": "inflight_fused_batching",
        },
        {
            "gpt_model_path": "/opt/all_models/inflight_batcher_llm/tensorrt_llm/1",
            "max_tokens_in_paged_kv_cache": "1",
            "kv_cache_free_gpu_mem_fraction": "0.2",
        },
    ),
    "old names of model and type": (
        {"gpt_model_path": "/engine", "gpt_model_type": "V1", "decoupled": "False"},
        {"gpt_model_path": "/engine", "gpt_model_type": "V1"},
    ),
    "in-flight batching off": (
        {"engine_dir": "/engine", "batching_strategy": "V1", "decoupled_mode": False},
        {"gpt_model_path": "/engine", "gpt_model_type": "V1"},
    ),
    "LoRA": (
        {
            "engine_dir": "/engine",
            "lora_cache_optimal_adapter_size": 8,
            "lora_cache_max_adapter_size": 64,
            "lora_cache_gpu_memory_fraction": 0.05,
            "lora_cache_host_memory_bytes": 1 << 30,
            "lora_prefetch_dir": "/lora",
        },
        {
            "gpt_model_path": "/engine",
            "lora_cache_optimal_adapter_size": "8",
            "lora_cache_max_adapter_size": "64",
            "lora_cache_gpu_memory_fraction": "0.05",
            "lora_cache_host_memory_bytes": "1073741824",
            "lora_prefetch_dir": "/lora",
        },
    ),
    "guided decoding": (
        {
            "engine_dir": "/engine",
            "tokenizer_dir": "/tokenizer",
            "guided_decoding_backend": "xgrammar",
            "xgrammar_tokenizer_info_path": "/xgrammar.json",
        },
        {
            "gpt_model_path": "/engine",
            "tokenizer_dir": "/tokenizer",
            "guided_decoding_backend": "xgrammar",
            "xgrammar_tokenizer_info_path": "/xgrammar.json",
        },
    ),
    "KV cache reuse with host memory": (
        {
            "engine_dir": "/engine",
            "enable_kv_cache_reuse": True,
            "kv_cache_host_memory_bytes": 45 * 10**9,
            "enable_chunked_context": True,
        },
        {
            "gpt_model_path": "/engine",
            "enable_kv_cache_reuse": "true",
            "kv_cache_host_memory_bytes": "45000000000",
            "enable_chunked_context": "true",
        },
    ),
    "Medusa": (
        {"engine_dir": "/engine", "decoding_mode": "medusa", "medusa_choices": "{0}, {0, 0}, {1}"},
        {
            "gpt_model_path": "/engine",
            "decoding_mode": "medusa",
            "medusa_choices": "{0}, {0, 0}, {1}",
        },
    ),
    "Eagle": (
        {"engine_dir": "/engine", "decoding_mode": "eagle", "eagle_choices": "{0}, {0, 0}"},
        {"gpt_model_path": "/engine", "decoding_mode": "eagle", "eagle_choices": "{0}, {0, 0}"},
    ),
    "lookahead": (
        {
            "engine_dir": "/engine",
            "decoding_mode": "lookahead",
            "lookahead_window_size": 7,
            "lookahead_ngram_size": 7,
            "lookahead_verification_set_size": 7,
        },
        {
            "gpt_model_path": "/engine",
            "decoding_mode": "lookahead",
            "lookahead_window_size": "7",
            "lookahead_ngram_size": "7",
            "lookahead_verification_set_size": "7",
        },
    ),
}


@pytest.mark.parametrize("case", CASES, ids=list(CASES))
def test_the_backend_reads_what_was_asked_for_and_nothing_else(case: str) -> None:
    values, expected = CASES[case]
    config = filled(**values)
    assert config.backend == "tensorrtllm"
    assert parameters(config) == {**ALWAYS, **expected}


@pytest.mark.parametrize(("streaming", "decoupled"), [("True", True), ("False", False)])
def test_the_field_reports_two_configurations(streaming: str, decoupled: bool) -> None:
    config = filled(
        triton_max_batch_size=64,
        decoupled_mode=streaming,
        max_beam_width=1,
        engine_dir="/models/baichuan_v2_13b/trt_engines/fp16/1-gpu/",
        max_tokens_in_paged_kv_cache=2560,
        max_attention_window_size=2560,
        kv_cache_free_gpu_mem_fraction=0.5,
        exclude_input_in_output="True",
        enable_kv_cache_reuse="False",
        batching_strategy="inflight_batching",
        max_queue_delay_microseconds=600,
    )
    assert config.model_transaction_policy.decoupled is decoupled
    assert config.max_batch_size == 64
    assert config.dynamic_batching.max_queue_delay_microseconds == 600


def test_data_types_are_data_types() -> None:
    config = filled(engine_dir="/engine", logits_datatype="FP16")
    kinds = {t.name: t.data_type for t in config.output}
    assert kinds["generation_logits"] == model_config_pb2.TYPE_FP16


def test_the_backend_has_no_decoding_context(tmp_path: Path) -> None:
    """context_ids and is_final are outputs of the embedded engine alone."""
    tokenizer = {"tokenizer_dir": "/tokenizer"}
    fill_repository(
        ROOT / "triton_model_repo",
        tmp_path / "repository",
        {
            "preprocessing": tokenizer,
            "postprocessing": tokenizer,
            "tensorrt_llm": {"triton_backend": "tensorrtllm", "engine_dir": "/engine"},
        },
    )
    text = (tmp_path / "repository" / "tensorrt_llm" / "config.pbtxt").read_text()
    assert "is_final" not in text
    assert "${" not in text
