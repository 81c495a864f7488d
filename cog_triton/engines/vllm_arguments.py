"""The template variables of tensorrt_llm → the arguments of vLLM's ``AsyncEngineArgs``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cog_triton.engines.arguments import (
    CPP_BACKENDS,
    SAME_AS_UNSET,
    Parse,
    boolean,
    log_overridden,
    parsed,
    read_arguments,
    said,
)

CONFIG = "vllm_config"

# Without a GPU there is no fraction of its memory to take. 1 GiB holds 8,192 tokens of an 8 B model.
CPU_CACHE_BYTES = 1 << 30

_ARGUMENTS: dict[str, tuple[str, Parse]] = {
    "model": ("model", str),
    "dtype": ("dtype", str),
    "tensor_parallel_size": ("tensor_parallel_size", int),
    "pipeline_parallel_size": ("pipeline_parallel_size", int),
    "max_batch_size": ("max_num_seqs", int),
    "max_num_tokens": ("max_num_batched_tokens", int),
    "max_seq_len": ("max_model_len", int),
    "enable_chunked_context": ("enable_chunked_prefill", boolean),
    "enable_kv_cache_reuse": ("enable_prefix_caching", boolean),
    "kv_cache_free_gpu_mem_fraction": ("gpu_memory_utilization", float),
    "stream_interval": ("stream_interval", int),
    "trust_remote_code": ("trust_remote_code", boolean),
}

_NO_ARGUMENT = (
    *CPP_BACKENDS,
    "batch_scheduler_policy",
    "kv_cache_host_memory_bytes",
    "llm_api_config",
    "max_attention_window_size",
    "max_beam_width",
    "max_tokens_in_paged_kv_cache",
    "sink_token_length",
)

# What the engine lives by: token ids in, as many out as a request says, and no report of one's use.
_ALWAYS = {
    "disable_log_stats": True,
    # Else the model's own defaults of sampling and of end tokens would be added to each request's.
    "generation_config": "vllm",
}


def engine_arguments(parameters: Mapping[str, str]) -> dict[str, Any]:
    """The arguments that the tensorrt_llm model's parameters stand for, with those of ``vllm_config``.

    Raises:
        ValueError: a value is not valid, or the model or the file's contents are missing.
        OSError: the file cannot be read.
    """
    arguments = {**_ALWAYS, **_said_arguments(said(parameters, SAME_AS_UNSET))}
    if path := parameters.get(CONFIG):
        extra = read_arguments(Path(path), CONFIG)
        log_overridden(CONFIG, arguments, extra)
        arguments |= extra
    if "model" not in arguments:
        raise ValueError("tensorrt_llm: model: the engine vllm needs it")
    return arguments


def _said_arguments(given: Mapping[str, str]) -> dict[str, Any]:
    arguments = parsed(_ARGUMENTS, given)
    if "lora_prefetch_dir" in given:
        arguments["enable_lora"] = True
        rank = parsed({"lora_cache_max_adapter_size": ("max_lora_rank", int)}, given)
        arguments |= rank
    if backend := given.get("guided_decoding_backend"):
        # It compiles grammars for a vocabulary.
        tokenizer = given.get("tokenizer_dir") or given.get("model")
        # Some models go on with white space until max_tokens. The other backends have no such argument.
        compact = {"disable_any_whitespace": True} if backend in ("xgrammar", "guidance") else {}
        guided = {"structured_outputs_config": {"backend": backend, **compact}}
        return {**arguments, **guided, "tokenizer": tokenizer}
    return {**arguments, "skip_tokenizer_init": True}


def loading_dtype(arguments: Mapping[str, Any], *, on_cpu: bool) -> dict[str, Any]:
    """The data type of a model, unless vLLM finds the right one by itself.

    vLLM applies adapters on GPUs in half precision only, and there halves float32 weights by itself.

    Raises:
        ValueError: adapters are to be applied in float32 on a GPU.
        OSError: the model's configuration cannot be read.
    """
    if arguments.get("enable_lora") and not on_cpu:
        if arguments.get("dtype") in ("float32", "float"):
            raise ValueError(
                "tensorrt_llm: dtype float32 does not go with lora_prefetch_dir: vLLM applies adapters on "
                "a GPU in float16 or bfloat16 (auto takes one of them)"
            )
        return {}
    return {} if "dtype" in arguments else saved_dtype(arguments)


def saved_dtype(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The data type of a model that was saved in float32, which vLLM by itself would halve.

    Raises:
        OSError: the model's configuration cannot be read.
    """
    from transformers import PretrainedConfig

    config, _ = PretrainedConfig.get_config_dict(
        arguments["model"], revision=arguments.get("revision")
    )
    saved = config.get("dtype") or config.get("torch_dtype")
    return {"dtype": "float32"} if str(saved).endswith("float32") else {}


def cpu_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments on a machine that computes on CPUs, where vLLM's own defaults serve badly.

    It would take most of the memory for the cache, and minutes to compile the model.
    """
    cache = {"kv_cache_memory_bytes": CPU_CACHE_BYTES}
    sized = "gpu_memory_utilization" in arguments
    return {"enforce_eager": True, **({} if sized else cache), **arguments}


def without_effect(parameters: Mapping[str, str]) -> list[str]:
    """The parameters that say something, and that vLLM has no argument for."""
    return sorted(said(parameters, SAME_AS_UNSET).keys() & set(_NO_ARGUMENT))
