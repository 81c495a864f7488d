"""What a deployment needs before a start: an engine that can run, files in place, template variables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cog_triton.adapters.tensors import AdapterTensors
from cog_triton.deployment.engine_choice import (
    EngineName,
    Machine,
    adapter_dtype,
    check_checkpoint,
    check_engine,
    check_vllm,
    choose_engine,
    look_around,
)
from cog_triton.engines.arguments import read_arguments
from cog_triton.errors import ConfigurationError
from cog_triton.repository.checks import read_config, unmet_needs
from cog_triton.repository.variables import load_overrides
from cog_triton.server.installation import locate
from cog_triton.server.log import GPU
from cog_triton.settings import Settings

Values = dict[str, dict[str, object]]

ADAPTERS: tuple[EngineName, ...] = ("transformers", "vllm", "llmapi", "tensorrtllm")
"""Engines that can use LoRA adapters."""


def resolve_engine(settings: Settings) -> EngineName:
    """The engine to run, after everything that can be known before a start has been checked.

    Raises:
        ConfigurationError: there is no tritonserver, or the engine or model cannot be run.
    """
    here = machine(settings)
    engine = choose_engine(settings.engine, settings.engine_dir, here)
    if engine == "tensorrtllm":
        check_engine(settings.engine_dir, here, settings.world_size)
        return engine
    if engine == "vllm":
        check_vllm(here)
    if settings.world_size > 1 and engine != "simulated":  # which is how ranks are tried out
        raise ConfigurationError(
            f"WORLD_SIZE={settings.world_size} is for TensorRT-LLM's C++ backend, and the engine is "
            f"{engine}; the workers of the LLM API and of vLLM are set by tensor_parallel_size"
        )
    return engine


def machine(settings: Settings) -> Machine:
    """What this machine has of what engines need."""
    return look_around(locate(settings).backends, gpu=GPU)


def with_files(settings: Settings) -> Settings:
    """The settings with what they name on this machine: downloaded, unpacked and checked.

    Raises:
        ConfigurationError: it is missing, or cannot be downloaded.
    """
    return _with_tokenizer(_with_model(settings))


def _with_tokenizer(settings: Settings) -> Settings:
    """Fetched here, because tritonserver, whose models load it as well, has no token for it."""
    name = settings.tokenizer_dir
    if Path(name).is_dir():
        return settings
    from cog_triton.weights import hub  # as in fetched

    if not hub.is_hub_id(name):
        return settings
    found = hub.fetch_from_hub(name, _token(settings), without=hub.WEIGHTS)
    return settings.model_copy(update={"tokenizer": str(found)})


def _with_model(settings: Settings) -> Settings:
    if settings.weights is not None:
        return placed(settings, fetched(settings, settings.weights, settings.weights_checksum))
    if settings.engine_dir is not None or Path(settings.model).is_dir():
        return settings
    check_model(settings)
    return placed(settings, fetched(settings, settings.model, settings.weights_checksum))


def placed(settings: Settings, directory: Path) -> Settings:
    """The settings for weights in a directory: an engine, or a Hugging Face model."""
    for engine_dir in (directory / "engine", directory):
        if any(engine_dir.glob("*.engine")):
            return settings.model_copy(update={"engine_dir": engine_dir})
    return settings.model_copy(update={"model": str(directory)})


def template_values(
    settings: Settings, engine: EngineName, *, num_return_sequences: bool = True
) -> Values:
    """The template variables of each model: from the settings, overridden by the configuration file.

    Args:
        num_return_sequences: whether the models have this input; see ``misplaces_parameters``.

    Raises:
        ConfigurationError: the configuration file cannot be read.
    """
    overrides = read_overrides(settings)
    tokenizer: dict[str, object] = {"tokenizer_dir": settings.tokenizer_dir}
    # Only where it is asked for: the C++ backend and NVIDIA's own templates have no such variable.
    if settings.trust_remote_code:
        tokenizer["trust_remote_code"] = True
    llm = {**tokenizer, **_engine_values(settings, engine)}
    adapters = adapter_tensors(settings, engine)
    limit = context_length({**llm, **overrides.get("tensorrt_llm", {})})
    values: Values = {
        "ensemble": {},
        "preprocessing": {**tokenizer, "max_seq_len": limit},
        "postprocessing": dict(tokenizer),
        "tensorrt_llm": llm,
    }
    for model in ("ensemble", "tensorrt_llm"):
        if not num_return_sequences:
            values[model]["num_return_sequences"] = False
        if adapters is not None:
            values[model]["lora_weights_data_type"] = adapters.triton_dtype
    return merge(values, overrides)


def read_overrides(settings: Settings) -> Values:
    """What the configuration file overrides, by model and variable; nothing without one.

    Raises:
        ConfigurationError: it cannot be read, or it was named and is not there.
    """
    file = settings.config_file
    if file.exists():
        return load_overrides(file)
    if settings.names_config_file:
        raise ConfigurationError(f"COG_TRITON_CONFIG={file} does not exist")
    return {}


def check_files(llm: Mapping[str, object]) -> None:
    """Finds files of a model that are missing or damaged, before Triton is started on them.

    Args:
        llm: the values of tensorrt_llm, as ``template_values`` or a filled configuration have them.

    Raises:
        ConfigurationError: naming the file.
    """
    model = Path(str(llm.get("model", "")))
    if llm.get("engine") not in ("transformers", "vllm") or str(model) == ".":
        return
    if model.is_dir() and not _has_load_format(llm):
        check_checkpoint(model)


def _has_load_format(llm: Mapping[str, object]) -> bool:
    """Whether vLLM is told to read the weights in a way of its own, or to make them up."""
    file = llm.get("vllm_config")
    if llm.get("engine") != "vllm" or not file:
        return False
    try:
        return "load_format" in read_arguments(Path(str(file)), "vllm_config")
    except (OSError, ValueError) as error:
        raise ConfigurationError(str(error)) from error


def check_models(configs: Iterable[Path]) -> None:
    """Finds what the engines of models that are filled already would miss.

    Args:
        configs: their config.pbtxt.

    Raises:
        ConfigurationError: a model's configuration is not valid, or lacks what its engine cannot load
            without; or a file of its model is missing or damaged.
    """
    parsed = {config: read_config(config) for config in configs}
    problems = [
        f"  {problem}"
        for config, content in parsed.items()
        for problem in unmet_needs(config.parent.name, content)
    ]
    if problems:
        raise ConfigurationError(
            "\n".join(["models that cannot be loaded as they were filled:", *problems])
        )
    for content in parsed.values():
        check_files({name: value.string_value for name, value in content.parameters.items()})


def merge(
    values: Mapping[str, Mapping[str, object]], overrides: Mapping[str, Mapping[str, object]]
) -> Values:
    """``values`` with the variables of ``overrides`` in place of those of the same model and name."""
    return {
        model: {**values.get(model, {}), **overrides.get(model, {})}
        for model in [*values, *(model for model in overrides if model not in values)]
    }


def check_model(settings: Settings) -> None:
    """Finds a model that is not there before anything is started.

    Raises:
        ConfigurationError: MODEL looks like a path, and there is nothing.
    """
    path = Path(settings.model)
    looks_like_path = (
        settings.model.startswith((".", "/", "models/")) or settings.model.count("/") > 1
    )
    if looks_like_path and "://" not in settings.model and not path.expanduser().exists():
        raise ConfigurationError(f"MODEL={settings.model} does not exist")


def fetched(settings: Settings, source: str, checksum: str | None = None) -> Path:
    """The local directory of what a source names; see ``cog_triton.weights.fetch``.

    Raises:
        ConfigurationError: there is nothing to return, with the reason and what to do.
    """
    from cog_triton.weights import fetch  # brings httpx and more, which few setups need

    return fetch(
        source,
        cache=settings.weights_cache.expanduser(),
        checksum=checksum,
        token=_token(settings),
    )


def _token(settings: Settings) -> str | None:
    return settings.hf_token.get_secret_value() if settings.hf_token else None


def check_adapters(directory: Path, engine: EngineName) -> None:
    """Whether an engine can use the adapters in LORA_DIR.

    Raises:
        ConfigurationError: it cannot.
    """
    if engine not in ADAPTERS:
        raise ConfigurationError(
            f"LORA_DIR has no effect with ENGINE={engine}: {', '.join(ADAPTERS)} have adapters"
        )
    if not directory.is_dir():
        raise ConfigurationError(f"LORA_DIR={directory} is no directory")


def adapter_tensors(settings: Settings, engine: EngineName) -> AdapterTensors | None:
    """The adapters of LORA_DIR for TensorRT-LLM's C++ backend, which gets them with requests.

    Returns:
        None for an engine that reads them itself, and where there are none.

    Raises:
        ConfigurationError: the engine cannot use them, or the transport cannot send them.
    """
    if engine != "tensorrtllm" or settings.lora_dir is None or settings.engine_dir is None:
        return None
    if settings.transport == "http":
        raise ConfigurationError(
            "LORA_DIR with ENGINE=tensorrtllm needs TRANSPORT=grpc: Triton takes no 16-bit numbers as JSON"
        )
    return AdapterTensors(settings.lora_dir, adapter_dtype(settings.engine_dir))


def _engine_values(settings: Settings, engine: EngineName) -> dict[str, object]:
    # The predictor returns the answer alone; for others the default is NVIDIA's, with the prompt.
    predictors: dict[str, object] = {"exclude_input_in_output": True}
    if settings.lora_dir is not None:
        check_adapters(settings.lora_dir, engine)
        # TensorRT-LLM would look there for numbers as names, in its own form alone.
        if engine != "tensorrtllm":
            predictors["lora_prefetch_dir"] = settings.absolute_lora_dir
    if engine == "tensorrtllm":
        return {
            **predictors,
            "triton_backend": "tensorrtllm",
            "engine_dir": settings.absolute_engine_dir,
        }
    return {
        **predictors,
        "engine": engine,
        "model": settings.model_dir,
        "device": settings.device,
        "dtype": settings.dtype,
        "max_seq_len": settings.max_sequence_length,
        "simulated_prefill_ms": settings.simulated_prefill_ms,
        "simulated_prefill_tokens_per_s": settings.simulated_prefill_tokens_per_s,
        "simulated_inter_token_ms": settings.simulated_inter_token_ms,
        "simulated_max_batch": settings.simulated_max_batch,
        "simulated_failure_rate": settings.simulated_failure_rate,
        "simulated_failures": settings.simulated_failures,
        "simulated_text": settings.simulated_text,
    }


_FURTHER = ("llm_api_config", "vllm_config")


def context_length(values: Mapping[str, object]) -> int | None:
    """The context length of the engine that these template variables of tensorrt_llm describe.

    Returns:
        None where only the engine will know: the model is not on this machine, or does not say.
    """
    limits = [int(str(values["max_seq_len"]))] if values.get("max_seq_len") else []
    if values.get("triton_backend") == "tensorrtllm":
        limits += _of_engine(values.get("engine_dir"))
    # The simulated engine has no model, and a file of further arguments may lift the model's limit.
    elif values.get("engine") != "simulated" and not any(map(values.get, _FURTHER)):
        limits += _of_model(values.get("model"))
    return min(limits, default=None)


def _of_engine(directory: object) -> list[int]:
    build = _configuration(directory).get("build_config", {})
    return _numbers(build.get("max_seq_len"))


def _of_model(directory: object) -> list[int]:
    config = _configuration(directory)
    return _numbers(config.get("text_config", config).get("max_position_embeddings"))


def _configuration(directory: object) -> dict[str, Any]:
    try:
        config = json.loads(Path(str(directory), "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _numbers(value: object) -> list[int]:
    return [value] if isinstance(value, int) and value > 0 else []
