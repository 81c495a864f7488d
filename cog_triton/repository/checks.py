"""What Triton or an engine would refuse of filled configurations; a problem is a line with its model."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from google.protobuf import text_format  # type: ignore[import-untyped, unused-ignore]
from tritonclient.grpc.model_config_pb2 import (  # type: ignore[import-untyped, unused-ignore]
    ModelConfig,
)

from cog_triton.errors import ConfigurationError

logger = logging.getLogger(__name__)

_NEEDS = {
    "transformers": "model",
    "llmapi": "model",
    "vllm": "model",
    "simulated": "tokenizer_dir",
}


def check_streaming(repository: Path) -> None:
    """Finds what would let Triton start and then refuse every request of the predictor, which streams.

    Args:
        repository: is filled.

    Raises:
        ConfigurationError: its tensorrt_llm is not decoupled.
    """
    config = read_config(repository / "tensorrt_llm" / "config.pbtxt")
    if not config.model_transaction_policy.decoupled:
        raise ConfigurationError(
            "tensorrt_llm: decoupled_mode is false, but the predictor streams, which needs true"
        )


def read_config(file: Path) -> Any:
    """The ModelConfig in a filled config.pbtxt.

    Raises:
        ConfigurationError: it cannot be read or parsed.
    """
    try:
        text = file.read_text(encoding="utf-8")
        # A newer Triton may have more fields than this client of it.
        return text_format.Parse(text, ModelConfig(), allow_unknown_field=True)
    except (OSError, UnicodeDecodeError, text_format.ParseError) as error:
        raise ConfigurationError(f"{file}: {error}") from None


def unmet_needs(model: str, config: Any) -> list[str]:
    """What the backend or the embedded engine that ``config`` chooses cannot load without."""
    given = {key for key, parameter in config.parameters.items() if parameter.string_value}
    if config.backend == "tensorrtllm":
        met = given & {"gpt_model_path", "encoder_model_path"}
        return [] if met else [f"{model}: engine_dir: triton_backend tensorrtllm needs it"]
    if "engine" not in given:
        return []
    if "gpt_model_path" in given:
        logger.warning("%s: engine_dir has no effect with triton_backend python", model)
    engine = config.parameters["engine"].string_value
    need = _NEEDS.get(engine)
    return [] if need in {None, *given} else [f"{model}: {need}: the {engine} engine needs it"]


def warn_of_refusals(model: str, config: Any) -> None:
    """Warns of requests that TensorRT-LLM's C++ backend will refuse because of the configuration.

    No error: shorter requests and those that do not stream are served, and guides have this.
    """
    values = {key: parameter.string_value for key, parameter in config.parameters.items()}
    if (
        config.backend == "tensorrtllm"
        and config.model_transaction_policy.decoupled
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


def missing_code(model: str, config: Any, directory: Path) -> list[str]:
    """That a Python model has no code in any of its versions."""
    # Triton does not fail on this: it waits for the model's process, which has gone, for good.
    if config.backend != "python" or any(directory.glob("*/model.py")):
        return []
    return [f"{model}: no version of it has a model.py"]


def ensemble_problems(model: str, configs: Mapping[str, Any]) -> list[str]:
    """What Triton would refuse of the ensemble ``model``; nothing of a model that is none."""
    return [
        problem
        for step in configs[model].ensemble_scheduling.step
        for problem in _step_problems(model, step, configs)
    ]


def _step_problems(model: str, step: Any, configs: Mapping[str, Any]) -> list[str]:
    """What Triton would refuse of one step of the ensemble ``model``."""
    name, config = step.model_name, configs[model]
    if name not in configs:
        return [f"{model}: step {name}: no such model in the repository"]
    inner = configs[name]
    if inner is None:  # its own problems come first
        return []
    problems = []
    if inner.max_batch_size < config.max_batch_size:
        problems.append(
            f"{name}: triton_max_batch_size: {inner.max_batch_size} is less than the "
            f"{config.max_batch_size} of {model}, which has it as a step; give both the same"
        )
    for kind, mapped, tensors in (
        ("input", step.input_map, inner.input),
        ("output", step.output_map, inner.output),
    ):
        for tensor in sorted(mapped.keys() - {t.name for t in tensors}) if tensors else ():
            problems.append(f"{model}: step {name} has no {kind} {tensor}")
    return problems
