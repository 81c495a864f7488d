"""Template variables of tensorrt_llm → the arguments of the library that an engine runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml  # type: ignore[import-untyped, unused-ignore]

logger = logging.getLogger(__name__)

Library = Literal["llmapi", "vllm"]
Parse = Callable[[str], Any]
Convert = Callable[[dict[str, Any], dict[str, Any], str], dict[str, Any]]

CONFIG: dict[Library, str] = {"llmapi": "llm_api_config", "vllm": "vllm_config"}
CPU_CACHE_BYTES = 1 << 30  # holds 8,192 tokens of an 8 B model


def _boolean(text: str) -> bool:
    return text == "true"


def _integers(text: str) -> list[int]:
    return [int(item) for item in text.split(",")]


_KV = "kv_cache_config"
# Variable → how it is parsed, the LLM API's argument (of a section before a dot), and vLLM's.
TABLE: dict[str, tuple[Parse, str | None, str | None]] = {
    "model": (str, "model", "model"),
    "dtype": (str, "dtype", "dtype"),
    "tensor_parallel_size": (int, "tensor_parallel_size", "tensor_parallel_size"),
    "pipeline_parallel_size": (int, "pipeline_parallel_size", "pipeline_parallel_size"),
    "max_batch_size": (int, "max_batch_size", "max_num_seqs"),
    "max_num_tokens": (int, "max_num_tokens", "max_num_batched_tokens"),
    "max_seq_len": (int, "max_seq_len", "max_model_len"),
    "max_beam_width": (int, "max_beam_width", None),
    "enable_chunked_context": (_boolean, "enable_chunked_prefill", "enable_chunked_prefill"),
    "stream_interval": (int, "stream_interval", "stream_interval"),
    "trust_remote_code": (_boolean, "trust_remote_code", "trust_remote_code"),
    "batch_scheduler_policy": (str.upper, "scheduler_config.capacity_scheduler_policy", None),
    "lora_prefetch_dir": (bool, "enable_lora", "enable_lora"),
    "lora_cache_max_adapter_size": (int, "lora_config.max_lora_rank", "max_lora_rank"),
    "enable_kv_cache_reuse": (_boolean, f"{_KV}.enable_block_reuse", "enable_prefix_caching"),
    "kv_cache_free_gpu_mem_fraction": (
        float,
        f"{_KV}.free_gpu_memory_fraction",
        "gpu_memory_utilization",
    ),
    "max_tokens_in_paged_kv_cache": (int, f"{_KV}.max_tokens", None),
    "max_attention_window_size": (_integers, f"{_KV}.max_attention_window", None),
    "sink_token_length": (int, f"{_KV}.sink_token_length", None),
    "kv_cache_host_memory_bytes": (int, f"{_KV}.host_cache_size", None),
}
# Those that only the C++ backend or the engine on transformers uses.
_OTHERS = """
    cancellation_check_period_ms cross_kv_cache_fraction cuda_graph_cache_size cuda_graph_mode
    decoding_mode device eagle_choices enable_context_fmha_fp32_acc encoder_model_path gpt_model_type
    gpu_device_ids gpu_weights_percent iter_stats_max_iterations kv_cache_onboard_blocks
    lookahead_ngram_size lookahead_verification_set_size lookahead_window_size
    lora_cache_gpu_memory_fraction lora_cache_host_memory_bytes lora_cache_optimal_adapter_size
    medusa_choices multi_block_mode normalize_log_probs num_nodes participant_ids
    request_stats_max_iterations speculative_decoding_fast_logits stats_check_period_ms
    xgrammar_tokenizer_info_path
"""
NO_ARGUMENT: dict[Library, frozenset[str]] = {
    "llmapi": frozenset({*_OTHERS.split(), "vllm_config"}),
    "vllm": frozenset(
        {*_OTHERS.split(), "llm_api_config"} | {name for name, row in TABLE.items() if not row[2]}
    ),
}
# Some variables always have a value: with this one a library does what it does anyway.
_SAME_AS_UNSET = {
    "batch_scheduler_policy": "guaranteed_no_evict",
    "device": "auto",
    "dtype": "auto",
    "gpt_model_type": "inflight_fused_batching",
    "max_beam_width": "1",
    "trust_remote_code": "false",
}


def without_effect(parameters: Mapping[str, str], library: Library) -> list[str]:
    """Return the parameters that are set, and that the library has no argument for."""
    return sorted(_given(parameters).keys() & NO_ARGUMENT[library])


def _given(parameters: Mapping[str, str]) -> dict[str, str]:
    given = {name: text for name, text in parameters.items() if _SAME_AS_UNSET.get(name) != text}
    if "lora_prefetch_dir" not in given:
        given.pop("lora_cache_max_adapter_size", None)
    return given


def _from_table(given: Mapping[str, str], library: Library) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for name, (parse, llmapi, vllm) in TABLE.items():
        argument = llmapi if library == "llmapi" else vllm
        if name not in given or argument is None:
            continue
        section, _, last = argument.rpartition(".")
        into = arguments.setdefault(section, {}) if section else arguments
        try:
            into[last] = parse(given[name])
        except ValueError as error:
            raise ValueError(f"tensorrt_llm: {name}: {error}") from None
    if given.get("guided_decoding_backend"):  # it compiles grammars for a vocabulary
        arguments["tokenizer"] = given.get("tokenizer_dir") or given.get("model")
    else:
        arguments["skip_tokenizer_init"] = True
    return arguments


def read_arguments(path: Path, variable: str) -> dict[str, Any]:
    """Return the arguments in a YAML file, which the template variable ``variable`` names.

    Raises:
        ValueError: it is not YAML, or not a mapping.
        OSError: it cannot be read.
    """
    try:
        content = yaml.safe_load(path.read_bytes())
    except yaml.YAMLError as error:
        raise ValueError(f"{variable} {path}: not valid YAML: {error}") from error
    if content is not None and not isinstance(content, dict):
        raise ValueError(f"{variable} {path}: expected a mapping, got {content!r}")
    return content or {}


def _log_overridden(
    variable: str, ours: Mapping[str, Any], theirs: Mapping[str, Any], prefix: str = ""
) -> None:
    for name in sorted(ours.keys() & theirs.keys()):
        if ours[name] != theirs[name] and name != "kv_cache_config":
            logger.warning(
                "%s: %s%s is %r, and not %r as the template variables have it",
                *(variable, prefix, name, theirs[name], ours[name]),
            )


def llm_arguments(parameters: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of ``tensorrt_llm.LLM`` that the tensorrt_llm model's parameters stand for.

    Raises:
        ValueError: a value is not valid.
    """
    given = _given(parameters)
    arguments = _from_table(given, "llmapi")
    if "lora_prefetch_dir" in given:
        arguments.setdefault("lora_config", {})
    if backend := given.get("guided_decoding_backend"):
        arguments["guided_decoding_backend"] = backend
    return arguments


def merged(
    arguments: Mapping[str, Any],
    extra: Mapping[str, Any],
    source: str = "",
    convert: Convert | None = None,
) -> dict[str, Any]:
    """Return ``arguments`` with those of ``extra``, which win; their ``kv_cache_config`` are merged too.

    Args:
        source: the file that ``extra`` is from.
        convert: TensorRT-LLM's ``update_llm_args_with_extra_dict``, which merges the same way and makes
            objects of the sections that the LLM does not take as dicts, such as ``speculative_config``.

    Raises:
        ValueError: a section is not valid.
    """
    variable, extra = CONFIG["llmapi"], dict(extra)
    ours, theirs = arguments.get(_KV), extra.get(_KV)
    if isinstance(ours, dict) and isinstance(theirs, dict):
        extra[_KV] = {**ours, **theirs}
        _log_overridden(variable, ours, theirs, f"{_KV}.")
    _log_overridden(variable, arguments, extra)
    try:
        return {**arguments, **extra} if convert is None else convert({**arguments}, extra, source)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{variable} {source}: {type(error).__name__}: {error}") from error


def context_length(arguments: Mapping[str, Any], llm: Any) -> int:
    """Return the most tokens that prompt and output of an ``LLM`` may have together.

    Raises:
        ValueError: the arguments, the LLM's and the model's configuration do not have it.
        OSError: the model's configuration cannot be read.
    """
    known = arguments.get("max_seq_len") or getattr(getattr(llm, "args", None), "max_seq_len", None)
    if known is None:
        config = _model_config(arguments)
        known = config.get("text_config", config).get("max_position_embeddings")
    if known is None:
        raise ValueError(f"the configuration of {arguments['model']} does not say; set max_seq_len")
    return int(known)


def _model_config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    from transformers import PretrainedConfig

    model, revision = arguments["model"], arguments.get("revision")
    config: dict[str, Any] = PretrainedConfig.get_config_dict(model, revision=revision)[0]
    return config


def engine_arguments(parameters: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of ``vllm.AsyncEngineArgs``, with those of ``vllm_config``.

    Raises:
        ValueError: a value is not valid, or the model or the file's contents are missing.
        OSError: the file cannot be read.
    """
    given, variable = _given(parameters), CONFIG["vllm"]
    arguments = {
        "disable_log_stats": True,
        # Else the model's own defaults of sampling and of end tokens would be added to each request's.
        "generation_config": "vllm",
        **_from_table(given, "vllm"),
    }
    if backend := given.get("guided_decoding_backend"):
        # Some models write white space until max_tokens. The other backends have no such argument.
        compact = {"disable_any_whitespace": True} if backend in ("xgrammar", "guidance") else {}
        arguments["structured_outputs_config"] = {"backend": backend, **compact}
    if path := parameters.get(variable):
        extra = read_arguments(Path(path), variable)
        _log_overridden(variable, arguments, extra)
        arguments |= extra
    if "model" not in arguments:
        raise ValueError("tensorrt_llm: model: the engine vllm needs it")
    return arguments


def loading_dtype(arguments: Mapping[str, Any], *, on_cpu: bool) -> dict[str, Any]:
    """Return the data type of a model that vLLM would not find by itself.

    It halves float32 weights, which stay as they are here; but on GPUs it applies adapters only in half
    precision.

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
    if "dtype" in arguments:
        return {}
    config = _model_config(arguments)
    saved = config.get("dtype") or config.get("torch_dtype")
    return {"dtype": "float32"} if str(saved).endswith("float32") else {}


def cpu_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments for CPUs, where vLLM would take most of the memory and minutes to compile."""
    cache = {"kv_cache_memory_bytes": CPU_CACHE_BYTES}
    sized = "gpu_memory_utilization" in arguments
    return {"enforce_eager": True, **({} if sized else cache), **arguments}
