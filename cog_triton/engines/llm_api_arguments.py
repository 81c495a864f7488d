"""The template variables of tensorrt_llm → the arguments of ``tensorrt_llm.LLM``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

CONFIG = "llm_api_config"

Convert = Callable[[dict[str, Any], dict[str, Any], str], dict[str, Any]]


def _integers(text: str) -> list[int]:
    return [int(item) for item in text.split(",")]


# Parameter of the tensorrt_llm model → argument of the LLM, and of its kv_cache_config.
_ARGUMENTS: dict[str, tuple[str, Parse]] = {
    "model": ("model", str),
    "dtype": ("dtype", str),
    "tensor_parallel_size": ("tensor_parallel_size", int),
    "pipeline_parallel_size": ("pipeline_parallel_size", int),
    "max_batch_size": ("max_batch_size", int),
    "max_num_tokens": ("max_num_tokens", int),
    "max_seq_len": ("max_seq_len", int),
    "max_beam_width": ("max_beam_width", int),
    "enable_chunked_context": ("enable_chunked_prefill", boolean),
    "stream_interval": ("stream_interval", int),
    "trust_remote_code": ("trust_remote_code", boolean),
}


_KV_CACHE: dict[str, tuple[str, Parse]] = {
    "enable_kv_cache_reuse": ("enable_block_reuse", boolean),
    "max_tokens_in_paged_kv_cache": ("max_tokens", int),
    "max_attention_window_size": ("max_attention_window", _integers),
    "sink_token_length": ("sink_token_length", int),
    "kv_cache_free_gpu_mem_fraction": ("free_gpu_memory_fraction", float),
    "kv_cache_host_memory_bytes": ("host_cache_size", int),
}


_NO_ARGUMENT = (
    *CPP_BACKENDS,
    "vllm_config",
)


def llm_arguments(parameters: Mapping[str, str]) -> dict[str, Any]:
    """The arguments of ``tensorrt_llm.LLM`` that the tensorrt_llm model's parameters stand for.

    What is unset, or set to what the LLM does anyway, is left out. ``kv_cache_config`` and
    ``lora_config`` are dicts.

    Raises:
        ValueError: a value is not valid.
    """
    given = said(parameters, SAME_AS_UNSET)
    arguments = parsed(_ARGUMENTS, given)
    if kv_cache := parsed(_KV_CACHE, given):
        arguments["kv_cache_config"] = kv_cache
    if given.get("batch_scheduler_policy") == "max_utilization":
        arguments["scheduler_config"] = {"capacity_scheduler_policy": "MAX_UTILIZATION"}
    if "lora_prefetch_dir" in given:
        rank = parsed({"lora_cache_max_adapter_size": ("max_lora_rank", int)}, given)
        arguments |= {"enable_lora": True, "lora_config": rank}
    if backend := given.get("guided_decoding_backend"):
        # It compiles grammars for a vocabulary.
        tokenizer = given.get("tokenizer_dir") or given.get("model")
        return {**arguments, "guided_decoding_backend": backend, "tokenizer": tokenizer}
    return {**arguments, "skip_tokenizer_init": True}


def merged(
    arguments: Mapping[str, Any],
    extra: Mapping[str, Any],
    source: str = "",
    convert: Convert | None = None,
) -> dict[str, Any]:
    """``arguments`` with those of ``extra``, which win; their ``kv_cache_config`` are merged too.

    Args:
        source: the file that ``extra`` is from.
        convert: TensorRT-LLM's ``update_llm_args_with_extra_dict``, which merges the same way and makes
            objects of the sections that the LLM does not take as dicts, ``speculative_config`` and
            ``lora_config`` among them. Without it they stay as they are.

    Raises:
        ValueError: a section is not valid.
    """
    extra = dict(extra)
    ours, theirs = arguments.get("kv_cache_config"), extra.get("kv_cache_config")
    if isinstance(ours, dict) and isinstance(theirs, dict):
        extra["kv_cache_config"] = {**ours, **theirs}
        log_overridden(CONFIG, ours, theirs, "kv_cache_config.")
    log_overridden(CONFIG, arguments, extra)
    if convert is None:
        return {**arguments, **extra}
    try:
        return convert(dict(arguments), extra, source)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{CONFIG} {source}: {type(error).__name__}: {error}") from error


def with_objects(
    arguments: Mapping[str, Any], kinds: Mapping[str, Callable[..., Any]]
) -> dict[str, Any]:
    """The arguments with an object for each section that is still a dict.

    Args:
        kinds: what makes it, by the section's name.
    """
    return {
        name: kinds[name](**value) if name in kinds and isinstance(value, dict) else value
        for name, value in arguments.items()
    }


def read_llm_api_config(path: Path) -> dict[str, Any]:
    """The arguments in a YAML file; raises as ``read_arguments`` does."""
    return read_arguments(path, CONFIG)


def context_length(arguments: Mapping[str, Any], llm: Any) -> int:
    """Most tokens that prompt and output may have together.

    The first that is known of: ``max_seq_len`` among the arguments; ``llm.args.max_seq_len``;
    ``max_position_embeddings`` in the model's configuration.

    Raises:
        ValueError: none is.
        OSError: the model's configuration cannot be read.
    """
    known = arguments.get("max_seq_len") or getattr(getattr(llm, "args", None), "max_seq_len", None)
    if known is None:
        from transformers import PretrainedConfig

        config, _ = PretrainedConfig.get_config_dict(
            arguments["model"], revision=arguments.get("revision")
        )
        known = config.get("text_config", config).get("max_position_embeddings")
    if known is None:
        raise ValueError(f"the configuration of {arguments['model']} does not say; set max_seq_len")
    return int(known)


def without_effect(parameters: Mapping[str, str]) -> list[str]:
    """The parameters that say something, and that the LLM has no argument for."""
    return sorted(said(parameters, SAME_AS_UNSET).keys() & set(_NO_ARGUMENT))
