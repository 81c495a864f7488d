"""Template variables of Triton's models: those of the settings, with the configuration file over them."""

import os
from collections.abc import Mapping
from pathlib import Path

from cog_triton.adapters.tensors import TRITON_DTYPES, AdapterTensors
from cog_triton.deployment.checkpoint import (
    read_json,
)
from cog_triton.deployment.engine_choice import KV_EVENTS, EngineName
from cog_triton.engines import model_config
from cog_triton.engines.library_arguments import read_arguments
from cog_triton.errors import ConfigurationError
from cog_triton.repository.variables import load_overrides
from cog_triton.server.log import GPU
from cog_triton.settings import Settings
from cog_triton.text.tokenizer import vocabulary_size

# Template variables by model and name.
Values = dict[str, dict[str, object]]
MANY_CORES = 8


def template_values(
    settings: Settings, engine: EngineName, *, num_return_sequences: bool = True
) -> Values:
    """Return the template variables: from the settings, overridden by the configuration file."""
    overrides = read_overrides(settings)
    tokenizer: dict[str, object] = {"tokenizer_dir": settings.tokenizer_dir}
    # Only where it is set: the C++ backend and NVIDIA's own templates have no such variable.
    if settings.trust_remote_code:
        tokenizer["trust_remote_code"] = True
    inputs: dict[str, object] = {} if num_return_sequences else {"num_return_sequences": False}
    adapters = adapter_tensors(settings, engine)
    if adapters is not None:
        inputs["lora_weights_data_type"] = TRITON_DTYPES[adapters.dtype]
    llm = tokenizer | inputs | _engine_values(settings, engine)
    # A process stands still while it hands over. What more of them bring is in tools/benchmark/notes.md.
    has_many_cores = len(os.sched_getaffinity(0)) >= MANY_CORES
    if has_many_cores and engine == "vllm" and GPU:
        file = vllm_file(overrides.get("tensorrt_llm", {}))
        llm["tensorrt_llm_instance_count"] = 1 if "data_parallel_size" in file else 2
    # The preprocessing has to fit the engine as it will be, with the overrides.
    used = llm | overrides.get("tensorrt_llm", {})
    model = used.get("engine_dir" if used.get("triton_backend") == "tensorrtllm" else "model")
    preprocessing = tokenizer | {
        "max_seq_len": context_length(used),
        "vocab_size": vocabulary_size(str(model)),
    }
    if has_many_cores:
        preprocessing["preprocessing_instance_count"] = 3
    if is_limited_by_preprocessing(used):
        preprocessing["ends_at_max_seq_len"] = True
    values: Values = {
        "ensemble": inputs,
        "preprocessing": preprocessing,
        "postprocessing": tokenizer,
        "tensorrt_llm": llm,
    }
    return merge(values, overrides)


def _engine_values(settings: Settings, engine: EngineName) -> dict[str, object]:
    """Return the variables of tensorrt_llm that the settings have for an engine."""
    # The predictor returns only the output; for others the default is NVIDIA's, with the prompt.
    values: dict[str, object] = {"exclude_input_in_output": True}
    if settings.max_sequence_length is not None:
        values["max_seq_len"] = settings.max_sequence_length
    if engine == "tensorrtllm":
        directory = settings.engine_dir
        values["triton_backend"] = engine
        values["engine_dir"] = None if directory is None else str(directory.resolve())
        return values
    simulated = {name for name in type(settings).model_fields if name.startswith("simulated_")}
    values |= settings.model_dump(include={"device", "dtype", *simulated})
    values["engine"] = engine
    values["model"] = settings.model_dir
    if settings.lora_dir is not None:
        values["lora_prefetch_dir"] = str(settings.lora_dir.resolve())
    if settings.kv_events_endpoint is not None and engine in KV_EVENTS:
        values["kv_events_endpoint"] = settings.kv_events_endpoint
    return values


def own_preprocessing(settings: Settings) -> bool:
    """Return whether preprocessing is this project's, which reads a request's parameters, not NVIDIA's."""
    model = settings.model_repository / "preprocessing/1/model.py"
    return model.is_file() and "cog_triton.models.preprocessing" in model.read_text()


def read_overrides(settings: Settings) -> Values:
    """Return the variables of the configuration file, which has to exist if it was named."""
    if settings.config_file.exists():
        return load_overrides(settings.config_file)
    if "config_file" in settings.model_fields_set:
        raise ConfigurationError(f"COG_TRITON_CONFIG={settings.config_file} does not exist")
    return {}


def merge(values: Values, overrides: Values) -> Values:
    """Return ``values`` with the variables of ``overrides`` over them."""
    return {model: values.get(model, {}) | overrides.get(model, {}) for model in values | overrides}


def adapter_tensors(settings: Settings, engine: EngineName) -> AdapterTensors | None:
    """Return the adapters that are sent with requests; None where the engine reads them itself."""
    if engine != "tensorrtllm" or settings.lora_dir is None or settings.engine_dir is None:
        return None
    config = read_json(settings.engine_dir / "config.json")
    return AdapterTensors(settings.lora_dir, config["pretrained_config"]["dtype"])


def is_limited_by_preprocessing(llm: Mapping[str, object]) -> bool:
    """Return whether preprocessing has to limit the length, which the C++ backend is not told."""
    return llm.get("triton_backend") == "tensorrtllm" and bool(llm.get("max_seq_len"))


def vllm_file(llm: Mapping[str, object]) -> Mapping[str, object]:
    """Return the arguments in the file that the variables name, if any."""
    config = llm.get("vllm_config")
    try:
        return read_arguments(Path(str(config)), "vllm_config") if config else {}
    except (OSError, ValueError) as error:
        raise ConfigurationError(str(error)) from error


def context_length(values: Mapping[str, object]) -> int | None:
    """Return the limit of prompt and output together, in tokens; None if only the engine knows it."""
    limits = []
    if values.get("max_seq_len"):
        limits.append(int(str(values["max_seq_len"])))
    limit = _limit_in_files(values)
    if isinstance(limit, int) and limit > 0:
        limits.append(limit)
    return min(limits, default=None)


def _limit_in_files(values: Mapping[str, object]) -> object:
    """Return the limit that the files of the engine or of the model have, if any."""
    is_built_engine = values.get("triton_backend") == "tensorrtllm"
    directory = values.get("engine_dir" if is_built_engine else "model")
    try:
        config = read_json(Path(str(directory), "config.json"))
    except ConfigurationError:
        config = {}
    if is_built_engine:
        return config.get("build_config", {}).get("max_seq_len")
    if values.get("engine") == "simulated":
        # This engine has no model.
        return None
    if values.get("llm_api_config") or values.get("vllm_config"):
        # A file of further arguments may lift the model's limit.
        return None
    return model_config.position_limit(config)
