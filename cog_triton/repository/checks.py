"""Problems of filled configurations on which Triton or an engine would fail later."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

# The parameter that each embedded engine needs.
_NEEDS = {"transformers": "model", "llmapi": "model", "vllm": "model", "simulated": "tokenizer_dir"}
_ENGINE_PATHS = frozenset(("gpt_model_path", "encoder_model_path"))


def unmet_needs(model: str, config: Any) -> list[str]:
    """Return what the chosen backend or embedded engine lacks to load; warn of what will not work."""
    values = {
        name: parameter.string_value
        for name, parameter in config.parameters.items()
        if parameter.string_value
    }
    if config.backend == "tensorrtllm":
        _warn_of_long_prompts(model, config, values)
        if _ENGINE_PATHS.isdisjoint(values):
            return [f"{model}: engine_dir: triton_backend tensorrtllm needs it"]
        return []
    engine = values.get("engine", "")
    if engine and "gpt_model_path" in values:
        logger.warning("%s: engine_dir has no effect with triton_backend python", model)
    need = _NEEDS.get(engine)
    if need is not None and need not in values:
        return [f"{model}: {need}: the {engine} engine needs it"]
    return []


def _warn_of_long_prompts(model: str, config: Any, values: Mapping[str, str]) -> None:
    """Warn of settings with which TensorRT-LLM refuses some streamed requests; it serves all others."""
    if (
        config.model_transaction_policy.decoupled
        and values.get("batch_scheduler_policy") == "max_utilization"
        and values.get("enable_chunked_context") != "true"
    ):
        logger.warning(
            "%s: with batch_scheduler_policy max_utilization and without enable_chunked_context, "
            "TensorRT-LLM refuses streamed requests whose prompt tokens plus max_tokens - 1 exceed the "
            "engine's max_input_len; set enable_chunked_context to true, use guaranteed_no_evict, or "
            "build the engine with max_input_len equal to max_seq_len",
            model,
        )


def problems_of(model: str, configs: Mapping[str, Any], directory: Path) -> list[str]:
    """Return the problems of a filled model.

    Args:
        configs: of all models, by name; None for one that could not be filled.
        directory: of the model's template and its versions.
    """
    config = configs[model]
    problems = unmet_needs(model, config)
    for step in config.ensemble_scheduling.step:
        if step.model_name not in configs:
            problems.append(f"{model}: step {step.model_name}: no such model in the repository")
        elif configs[step.model_name] is not None:
            problems += _step_problems(model, config, step, configs[step.model_name])
    # Triton does not fail on this: it waits permanently for the model's process, which has ended.
    if config.backend == "python" and not any(directory.glob("*/model.py")):
        problems.append(f"{model}: none of its versions contains a model.py")
    return problems


def _step_problems(model: str, ensemble: Any, step: Any, called: Any) -> list[str]:
    """Return the problems of a step of an ensemble, which calls another model."""
    problems = []
    if called.max_batch_size < ensemble.max_batch_size:
        problems.append(
            f"{step.model_name}: triton_max_batch_size: {called.max_batch_size} is less than the "
            f"{ensemble.max_batch_size} of {model}, which calls it; set both to "
            "the same value"
        )
    for kind, tensors, mapped in (
        ("input", called.input, step.input_map),
        ("output", called.output, step.output_map),
    ):
        names = {tensor.name for tensor in tensors}
        # A model may leave its tensors to its backend.
        if not names:
            continue
        for name in sorted(mapped.keys() - names):
            problems.append(f"{model}: step {step.model_name} has no {kind} {name}")
    return problems
