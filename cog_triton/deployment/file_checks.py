"""Checks of a model's files, before Triton is started on them."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cog_triton.deployment.checkpoint import (
    check_weight_files,
    check_weight_names,
    read_json,
    refuse_adapter,
    unused_layers,
)
from cog_triton.deployment.template_variables import context_length, vllm_file
from cog_triton.deployment.transformers_checks import family_problem, transformers_problems
from cog_triton.engines import model_config
from cog_triton.errors import ConfigurationError

logger = logging.getLogger("cog_triton.deployment")


def check_files(llm: Mapping[str, object]) -> None:
    """Check the checkpoint that the variables of tensorrt_llm name, before Triton is started on it."""
    engine = str(llm.get("engine") or "")
    model = str(llm.get("model") or "")
    directory = Path(model)
    if llm.get("triton_backend") == "tensorrtllm":
        check_engines_length(llm)
        return
    if (
        engine == "llmapi"
        and not llm.get("llm_api_config")
        and (directory / "config.json").is_file()
    ):
        check_context_length(llm, read_json(directory / "config.json"))
        return
    if engine not in ("transformers", "vllm") or not model or not directory.is_dir():
        return
    if engine == "vllm" and "load_format" in vllm_file(llm):
        # Here vLLM reads the weights in another way, or makes them up.
        return
    if (directory / "adapter_config.json").is_file():
        refuse_adapter(directory)
        # Transformers loads the model that the adapter's configuration names.
        return
    config = read_json(directory / "config.json")
    names = check_weight_files(directory)
    check_weight_names(directory, names)
    warning = unused_layers(config, names)
    if warning is not None:
        logger.warning("%s: %s", directory, warning)
    if engine == "transformers":
        for problem in transformers_problems(directory, config, names):
            raise ConfigurationError(problem)
    check_context_length(llm, config)


def check_family(llm: Mapping[str, object]) -> None:
    """Refuse a checkpoint whose family of models the installed transformers does not generate text with."""
    directory = Path(str(llm.get("model") or ""))
    if llm.get("triton_backend") == "tensorrtllm" or llm.get("engine") != "transformers":
        return
    if not (directory / "config.json").is_file() or (directory / "adapter_config.json").is_file():
        return
    problem = family_problem(directory, read_json(directory / "config.json"))
    if problem is not None:
        raise ConfigurationError(problem)


def check_engines_length(llm: Mapping[str, object]) -> None:
    """Refuse a MAX_SEQUENCE_LENGTH for which a TensorRT-LLM engine was not built."""
    requested = llm.get("max_seq_len")
    built = context_length({**llm, "max_seq_len": None})
    if requested and built is not None and int(str(requested)) > built:
        raise ConfigurationError(
            f"MAX_SEQUENCE_LENGTH={requested} (max_seq_len) exceeds the {built} tokens that the engine in "
            f"{llm.get('engine_dir')} was built for; reduce it, or rebuild the engine with a larger "
            "max_seq_len"
        )


def check_context_length(llm: Mapping[str, object], config: Mapping[str, Any]) -> None:
    """Refuse a MAX_SEQUENCE_LENGTH that the model's configuration does not allow."""
    requested = llm.get("max_seq_len")
    if requested and not llm.get("vllm_config"):
        try:
            model_config.context_length(config, int(str(requested)), default=0)
        except ValueError as error:
            raise ConfigurationError(str(error)) from None
