"""The arguments of vLLM and of TensorRT-LLM's LLM API, from the template variables of tensorrt_llm.

``ARGUMENTS`` says which variable becomes which argument. The arguments in a YAML file, which the variable
``vllm_config`` or ``llm_api_config`` names, are passed on unchanged, and take precedence.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml  # type: ignore[import-untyped, unused-ignore]

logger = logging.getLogger(__name__)

Library = Literal["llmapi", "vllm"]
Arguments = dict[str, Any]
# Merges the arguments of the variables with those of a file, given the file's name.
Convert = Callable[[Arguments, Arguments, str], Arguments]

_KV_CACHE = "kv_cache_config"


def _integers(text: str) -> list[int]:
    return [int(item) for item in text.split(",")]


def _is_true(text: str) -> bool:
    return text == "true"


@dataclass(frozen=True)
class Argument:
    """What a variable of the model tensorrt_llm becomes.

    Attributes:
        llmapi: the argument of ``tensorrt_llm.LLM``, after the name of its section and a dot; None if the
            variable has no effect with that library.
        vllm: the same of ``vllm.AsyncEngineArgs``.
        parse: makes the argument's value of the variable's text.
        same_as_unset: a value with which a library does what it does without the argument.
        needs: another variable, without which this one is ignored.
    """

    llmapi: str | None = None
    vllm: str | None = None
    parse: Callable[[str], Any] = str
    same_as_unset: str | None = None
    needs: str | None = None


# The variables that name a library's own file.
CONFIG_FILES: dict[Library, str] = {"llmapi": "llm_api_config", "vllm": "vllm_config"}

ARGUMENTS: dict[str, Argument] = {
    "model": Argument("model", "model"),
    "dtype": Argument("dtype", "dtype", same_as_unset="auto"),
    "tensor_parallel_size": Argument("tensor_parallel_size", "tensor_parallel_size", int),
    "pipeline_parallel_size": Argument("pipeline_parallel_size", "pipeline_parallel_size", int),
    "max_batch_size": Argument("max_batch_size", "max_num_seqs", int),
    "max_num_tokens": Argument("max_num_tokens", "max_num_batched_tokens", int),
    "max_seq_len": Argument("max_seq_len", "max_model_len", int),
    "max_beam_width": Argument("max_beam_width", parse=int, same_as_unset="1"),
    "enable_chunked_context": Argument(
        "enable_chunked_prefill", "enable_chunked_prefill", _is_true
    ),
    "stream_interval": Argument("stream_interval", "stream_interval", int),
    "trust_remote_code": Argument(
        "trust_remote_code", "trust_remote_code", _is_true, same_as_unset="false"
    ),
    "batch_scheduler_policy": Argument(
        "scheduler_config.capacity_scheduler_policy",
        parse=str.upper,
        same_as_unset="guaranteed_no_evict",
    ),
    "lora_prefetch_dir": Argument("enable_lora", "enable_lora", bool),
    "lora_cache_max_adapter_size": Argument(
        "lora_config.max_lora_rank", "max_lora_rank", int, needs="lora_prefetch_dir"
    ),
    "guided_decoding_backend": Argument(
        "guided_decoding_backend", "structured_outputs_config.backend"
    ),
    "enable_kv_cache_reuse": Argument(
        "kv_cache_config.enable_block_reuse", "enable_prefix_caching", _is_true
    ),
    "kv_cache_free_gpu_mem_fraction": Argument(
        "kv_cache_config.free_gpu_memory_fraction", "gpu_memory_utilization", float
    ),
    "max_tokens_in_paged_kv_cache": Argument("kv_cache_config.max_tokens", parse=int),
    "max_attention_window_size": Argument("kv_cache_config.max_attention_window", parse=_integers),
    "sink_token_length": Argument("kv_cache_config.sink_token_length", parse=int),
    "kv_cache_host_memory_bytes": Argument("kv_cache_config.host_cache_size", parse=int),
    "kv_events_endpoint": Argument(vllm="kv_events_config.endpoint"),
    # A library reads the file that its variable names; the other one has no use for it.
    "llm_api_config": Argument(),
    "vllm_config": Argument(),
    # Only TensorRT-LLM's C++ backend or the transformers engine uses the rest.
    "cancellation_check_period_ms": Argument(),
    "cross_kv_cache_fraction": Argument(),
    "cuda_graph_cache_size": Argument(),
    "cuda_graph_mode": Argument(),
    "decoding_mode": Argument(),
    "device": Argument(same_as_unset="auto"),
    "eagle_choices": Argument(),
    "enable_context_fmha_fp32_acc": Argument(),
    "encoder_model_path": Argument(),
    "gpt_model_type": Argument(same_as_unset="inflight_fused_batching"),
    "gpu_device_ids": Argument(),
    "gpu_weights_percent": Argument(),
    "iter_stats_max_iterations": Argument(),
    "kv_cache_onboard_blocks": Argument(),
    "lookahead_ngram_size": Argument(),
    "lookahead_verification_set_size": Argument(),
    "lookahead_window_size": Argument(),
    "lora_cache_gpu_memory_fraction": Argument(),
    "lora_cache_host_memory_bytes": Argument(),
    "lora_cache_optimal_adapter_size": Argument(),
    "medusa_choices": Argument(),
    "multi_block_mode": Argument(),
    "normalize_log_probs": Argument(),
    "num_nodes": Argument(),
    "participant_ids": Argument(),
    "request_stats_max_iterations": Argument(),
    "speculative_decoding_fast_logits": Argument(),
    "stats_check_period_ms": Argument(),
    "xgrammar_tokenizer_info_path": Argument(),
}


def read_arguments(path: Path, variable: str) -> Arguments:
    """Return the arguments in the YAML file that ``variable`` names, or raise ValueError or OSError."""
    try:
        content = yaml.safe_load(path.read_bytes())
    except yaml.YAMLError as error:
        raise ValueError(f"{variable} {path}: not valid YAML: {error}") from error
    if content is not None and not isinstance(content, dict):
        raise ValueError(f"{variable} {path}: expected a mapping, got {content!r}")
    return content or {}


def table_arguments(parameters: Mapping[str, str], library: Library) -> Arguments:
    """Return the arguments for the parameters of tensorrt_llm; warn of parameters without an effect."""
    arguments: Arguments = {}
    for name, argument in ARGUMENTS.items():
        text = parameters.get(name)
        if text is None or text == argument.same_as_unset or name == CONFIG_FILES[library]:
            continue
        target = argument.llmapi if library == "llmapi" else argument.vllm
        if target is None:
            logger.warning("tensorrt_llm: %s has no effect with the engine %s", name, library)
            continue
        if argument.needs is not None and argument.needs not in parameters:
            continue
        try:
            value = argument.parse(text)
        except ValueError as error:
            raise ValueError(f"tensorrt_llm: {name}: {error}") from None
        section, _, last = target.rpartition(".")
        into = arguments.setdefault(section, {}) if section else arguments
        into[last] = value
    if "guided_decoding_backend" in parameters:
        # Grammars are compiled for a vocabulary.
        arguments["tokenizer"] = parameters.get("tokenizer_dir") or parameters.get("model")
    else:
        arguments["skip_tokenizer_init"] = True
    return arguments


def with_file(
    arguments: Arguments,
    parameters: Mapping[str, str],
    library: Library,
    convert: Convert | None = None,
) -> Arguments:
    """Return the arguments with those of the library's file over them; ``kv_cache_config`` is merged.

    Args:
        convert: merges the two, if sections must become objects of the library.

    Raises:
        OSError, ValueError: the file cannot be read or used, or no model is named.
    """
    variable = CONFIG_FILES[library]
    path = parameters.get(variable)
    if path:
        extra = read_arguments(Path(path), variable)
        if _KV_CACHE in arguments and isinstance(extra.get(_KV_CACHE), dict):
            cache = _merged(
                variable, arguments[_KV_CACHE], extra[_KV_CACHE], section=f"{_KV_CACHE}."
            )
            # In both, because ``convert`` may replace the whole section by the file's.
            arguments[_KV_CACHE] = cache
            extra[_KV_CACHE] = cache
        # Even if ``convert`` merges them again, this warns of those that differ.
        merged = _merged(variable, arguments, extra)
        try:
            arguments = merged if convert is None else convert(arguments, extra, path)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{variable} {path}: {type(error).__name__}: {error}") from error
    if "model" not in arguments:
        raise ValueError(f"tensorrt_llm: model: the engine {library} needs it")
    return arguments


def _merged(variable: str, ours: Arguments, theirs: Arguments, section: str = "") -> Arguments:
    """Return the arguments of a file over those of the variables; warn of those that differ."""
    for name in sorted(ours.keys() & theirs.keys()):
        if ours[name] != theirs[name]:
            logger.warning(
                "%s: %s%s is %r, and not %r as the template variables have it",
                variable,
                section,
                name,
                theirs[name],
                ours[name],
            )
    return {**ours, **theirs}
