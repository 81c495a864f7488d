"""What engines of a library have in common: template variables → the library's arguments."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped, unused-ignore]

logger = logging.getLogger(__name__)

Parse = Callable[[str], Any]
Table = Mapping[str, tuple[str, Parse]]  # parameter of the tensorrt_llm model → argument, and how

# Parameters that only the C++ backend or the embedded engine on transformers has a use for.
CPP_BACKENDS = (
    "cancellation_check_period_ms",
    "cross_kv_cache_fraction",
    "cuda_graph_cache_size",
    "cuda_graph_mode",
    "decoding_mode",
    "device",
    "eagle_choices",
    "enable_context_fmha_fp32_acc",
    "encoder_model_path",
    "gpt_model_type",
    "gpu_device_ids",
    "gpu_weights_percent",
    "iter_stats_max_iterations",
    "kv_cache_onboard_blocks",
    "lookahead_ngram_size",
    "lookahead_verification_set_size",
    "lookahead_window_size",
    "lora_cache_gpu_memory_fraction",
    "lora_cache_host_memory_bytes",
    "lora_cache_optimal_adapter_size",
    "medusa_choices",
    "multi_block_mode",
    "normalize_log_probs",
    "num_nodes",
    "participant_ids",
    "request_stats_max_iterations",
    "speculative_decoding_fast_logits",
    "stats_check_period_ms",
    "xgrammar_tokenizer_info_path",
)

# Some variables always have a value: with this one a library does what it does anyway.
SAME_AS_UNSET = {
    "batch_scheduler_policy": "guaranteed_no_evict",
    "device": "auto",
    "dtype": "auto",
    "gpt_model_type": "inflight_fused_batching",
    "max_beam_width": "1",
    "trust_remote_code": "false",
}


def boolean(text: str) -> bool:
    return text == "true"


def said(parameters: Mapping[str, str], same_as_unset: Mapping[str, str]) -> dict[str, str]:
    """The parameters but for those with the value that changes nothing: some always have one."""
    return {name: value for name, value in parameters.items() if same_as_unset.get(name) != value}


def parsed(table: Table, parameters: Mapping[str, str]) -> dict[str, Any]:
    """The arguments that parameters stand for.

    Raises:
        ValueError: a value is not valid.
    """
    return {
        argument: _parse(name, parse, parameters[name])
        for name, (argument, parse) in table.items()
        if name in parameters
    }


def read_arguments(path: Path, variable: str) -> dict[str, Any]:
    """The arguments in a YAML file.

    Args:
        variable: the template variable that names the file, for the errors.

    Raises:
        ValueError: it is not YAML, or not a mapping.
        OSError: it cannot be read.
    """
    try:
        content = yaml.safe_load(path.read_bytes())
    except yaml.YAMLError as error:
        raise ValueError(f"{variable} {path}: not valid YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"{variable} {path}: expected a mapping, got {content!r}")
    return content


def log_overridden(
    variable: str, ours: Mapping[str, Any], theirs: Mapping[str, Any], prefix: str = ""
) -> None:
    """Says which arguments of a file win over the template variables."""
    for name in sorted(ours.keys() & theirs.keys()):
        if ours[name] != theirs[name] and name != "kv_cache_config":
            logger.warning(
                "%s: %s%s is %r, and not %r as the template variables have it",
                variable,
                prefix,
                name,
                theirs[name],
                ours[name],
            )


def _parse(name: str, parse: Parse, text: str) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"tensorrt_llm: {name}: {error}") from None
