"""Problems of filled configurations that Triton or an engine would fail on: lines, each with its model."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from cog_triton.errors import ConfigurationError

logger = logging.getLogger(__name__)

_NEEDS = {"transformers": "model", "llmapi": "model", "vllm": "model", "simulated": "tokenizer_dir"}


def read_config(file: Path) -> Any:
    """Return the ModelConfig in a filled config.pbtxt.

    Raises:
        ConfigurationError: it cannot be read or parsed.
    """
    try:
        text = file.read_text(encoding="utf-8")
        # A newer Triton may have more fields than this client of it.
        return text_format.Parse(text, ModelConfig(), allow_unknown_field=True)
    except (OSError, UnicodeDecodeError, text_format.ParseError) as error:
        raise ConfigurationError(f"{file}: {error}") from None


def check_streaming(repository: Path) -> None:
    """Raise ConfigurationError for a repository in which the predictor cannot stream."""
    config = read_config(repository / "tensorrt_llm" / "config.pbtxt")
    if not config.model_transaction_policy.decoupled:
        raise ConfigurationError(
            "tensorrt_llm: decoupled_mode is false, but the predictor streams, which needs true"
        )


def problems_of(model: str, configs: Mapping[str, Any], directory: Path) -> list[str]:
    """Return the problems of one model of a repository.

    Args:
        configs: the ModelConfig of every model; None for one that could not be filled.
        directory: the model's, with its versions.
    """
    config = configs[model]
    problems = unmet_needs(model, config)
    for step in config.ensemble_scheduling.step:
        problems += _step_problems(model, step, configs)
    # Triton does not fail on this: it waits permanently for the model's process, which has ended.
    if config.backend == "python" and not any(directory.glob("*/model.py")):
        problems.append(f"{model}: no version of it has a model.py")
    return problems


def unmet_needs(model: str, config: Any) -> list[str]:
    """Return what the chosen backend or embedded engine lacks to load; warn of what will not work."""
    values = {key: p.string_value for key, p in config.parameters.items() if p.string_value}
    if config.backend == "tensorrtllm":
        _warn_of_refused_streams(model, config, values)
        met = values.keys() & {"gpt_model_path", "encoder_model_path"}
        return [] if met else [f"{model}: engine_dir: triton_backend tensorrtllm needs it"]
    engine = values.get("engine", "")
    if engine and "gpt_model_path" in values:
        logger.warning("%s: engine_dir has no effect with triton_backend python", model)
    need = _NEEDS.get(engine)
    return [] if need in {None, *values} else [f"{model}: {need}: the {engine} engine needs it"]


def _warn_of_refused_streams(model: str, config: Any, values: Mapping[str, str]) -> None:
    # Not an error: shorter requests and those that do not stream are served.
    if (
        config.model_transaction_policy.decoupled
        and values.get("batch_scheduler_policy") == "max_utilization"
        and values.get("enable_chunked_context") != "true"
    ):
        logger.warning(
            "%s: with batch_scheduler_policy max_utilization and without enable_chunked_context, "
            "TensorRT-LLM refuses a streamed request whose prompt and max_tokens less 1 exceed the "
            "engine's max_input_len: set enable_chunked_context to true, take guaranteed_no_evict, or "
            "build the engine with max_input_len as great as max_seq_len",
            model,
        )


def _step_problems(model: str, step: Any, configs: Mapping[str, Any]) -> list[str]:
    name, most = step.model_name, configs[model].max_batch_size
    if name not in configs:
        return [f"{model}: step {name}: no such model in the repository"]
    if (inner := configs[name]) is None:
        return []
    problems = []
    if inner.max_batch_size < most:
        problems.append(
            f"{name}: triton_max_batch_size: {inner.max_batch_size} is less than the "
            f"{most} of {model}, which has it as a step; give both the same"
        )
    sides = ("input", step.input_map, inner.input), ("output", step.output_map, inner.output)
    for kind, mapped, tensors in sides:
        for tensor in sorted(mapped.keys() - {t.name for t in tensors}) if tensors else ():
            problems.append(f"{model}: step {name} has no {kind} {tensor}")
    return problems
