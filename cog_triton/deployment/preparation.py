"""Before a start: files in place and checked, adapters, template variables of the models."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cog_triton.adapters.tensors import AdapterTensors
from cog_triton.deployment.engine_choice import EngineName, adapter_dtype, check_checkpoint
from cog_triton.engines.library import read_arguments
from cog_triton.errors import ConfigurationError
from cog_triton.repository.fill import read_config, unmet_needs
from cog_triton.repository.variables import load_overrides
from cog_triton.settings import Settings

Values = dict[str, dict[str, object]]
"""Template variables by model and name."""
ADAPTERS: tuple[EngineName, ...] = ("transformers", "vllm", "llmapi", "tensorrtllm")
"""Engines that can use LoRA adapters."""


def with_files(settings: Settings) -> Settings:
    """Return the settings with the model and the tokenizer downloaded, unpacked and checked.

    Raises:
        ConfigurationError: one is missing, or cannot be downloaded.
    """
    source = settings.weights
    if source is None and settings.engine_dir is None and not Path(settings.model).is_dir():
        source = settings.model
        looks_like_path = source.startswith((".", "/", "models/")) or source.count("/") > 1
        if looks_like_path and "://" not in source and not Path(source).expanduser().exists():
            raise ConfigurationError(f"MODEL={source} does not exist")
    if source is not None:
        directory = fetched(settings, source, settings.weights_checksum)
        engines = [e for e in (directory / "engine", directory) if any(e.glob("*.engine"))]
        placed = {"engine_dir": engines[0]} if engines else {"model": str(directory)}
        settings = settings.model_copy(update=placed)
    name = settings.tokenizer_dir
    if Path(name).is_dir():
        return settings
    from cog_triton.weights import download

    if not download.is_hub_id(name):
        return settings
    # Triton's models load the tokenizer as well, and get no token to download it.
    directory = download.fetch_from_hub(name, _token(settings), without=download.WEIGHTS)
    return settings.model_copy(update={"tokenizer": str(directory)})


def fetched(settings: Settings, source: str, checksum: str | None = None) -> Path:
    """Return the local directory of a source; see ``cog_triton.weights.fetch``.

    Raises:
        ConfigurationError: it cannot be had, with the reason and what to do.
    """
    from cog_triton.weights import fetch  # brings httpx and more, which few setups need

    cache = settings.weights_cache.expanduser()
    return fetch(source, cache=cache, checksum=checksum, token=_token(settings))


def _token(settings: Settings) -> str | None:
    return settings.hf_token.get_secret_value() if settings.hf_token else None


def template_values(
    settings: Settings, engine: EngineName, *, num_return_sequences: bool = True
) -> Values:
    """Return the template variables: from the settings, overridden by the configuration file.

    Args:
        num_return_sequences: the models have this input; see ``has_swapped_sampling_params``.

    Raises:
        ConfigurationError: the configuration file cannot be read, or the engine has no adapters.
    """
    overrides = read_overrides(settings)
    tokenizer: dict[str, object] = {"tokenizer_dir": settings.tokenizer_dir}
    # Only where it is set: the C++ backend and NVIDIA's own templates have no such variable.
    if settings.trust_remote_code:
        tokenizer["trust_remote_code"] = True
    llm = {**tokenizer, **_engine_values(settings, engine)}
    limit = context_length({**llm, **overrides.get("tensorrt_llm", {})})
    values: Values = {
        "ensemble": {},
        "preprocessing": {**tokenizer, "max_seq_len": limit},
        "postprocessing": dict(tokenizer),
        "tensorrt_llm": llm,
    }
    adapters = adapter_tensors(settings, engine)
    for model in ("ensemble", "tensorrt_llm"):
        if not num_return_sequences:
            values[model]["num_return_sequences"] = False
        if adapters is not None:
            values[model]["lora_weights_data_type"] = adapters.triton_dtype
    return merge(values, overrides)


def _engine_values(settings: Settings, engine: EngineName) -> dict[str, object]:
    # The predictor returns only the output; for others the default is NVIDIA's, with the prompt.
    values: dict[str, object] = {"exclude_input_in_output": True}
    if settings.lora_dir is not None:
        check_adapters(settings.lora_dir, engine)
        # TensorRT-LLM would look there for numbers as names, in its own form only.
        if engine != "tensorrtllm":
            values["lora_prefetch_dir"] = str(settings.lora_dir.resolve())
    if engine == "tensorrtllm":
        directory = settings.engine_dir
        engine_dir = None if directory is None else str(directory.resolve())
        return {**values, "triton_backend": "tensorrtllm", "engine_dir": engine_dir}
    simulated = [name for name in type(settings).model_fields if name.startswith("simulated_")]
    return {
        **values,
        "engine": engine,
        "model": settings.model_dir,
        "device": settings.device,
        "dtype": settings.dtype,
        "max_seq_len": settings.max_sequence_length,
        **{name: getattr(settings, name) for name in simulated},
    }


def read_overrides(settings: Settings) -> Values:
    """Return the variables of the configuration file; none without one.

    Raises:
        ConfigurationError: it cannot be read, or it was named and does not exist.
    """
    file = settings.config_file
    if file.exists():
        return load_overrides(file)
    if "config_file" in settings.model_fields_set:
        raise ConfigurationError(f"COG_TRITON_CONFIG={file} does not exist")
    return {}


def merge(
    values: Mapping[str, Mapping[str, object]], overrides: Mapping[str, Mapping[str, object]]
) -> Values:
    """Return ``values`` with the variables of ``overrides`` over them."""
    models = {**values, **overrides}
    return {model: {**values.get(model, {}), **overrides.get(model, {})} for model in models}


def check_adapters(directory: Path, engine: EngineName) -> None:
    """Refuse a LORA_DIR that is missing, or that the engine cannot use."""
    if engine not in ADAPTERS:
        raise ConfigurationError(
            f"LORA_DIR has no effect with ENGINE={engine}: {', '.join(ADAPTERS)} have adapters"
        )
    if not directory.is_dir():
        raise ConfigurationError(f"LORA_DIR={directory} is not a directory")


def adapter_tensors(settings: Settings, engine: EngineName) -> AdapterTensors | None:
    """Return the adapters that are sent with requests, as only TensorRT-LLM's C++ backend takes them.

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


def check_models(configs: Iterable[Path]) -> None:
    """Check models that are filled already, given by their config.pbtxt.

    Raises:
        ConfigurationError: a configuration is not valid, or lacks what its engine cannot load without;
            or a file of a model is missing or damaged.
    """
    parsed = [(config.parent.name, read_config(config)) for config in configs]
    problems = [f"  {problem}" for model in parsed for problem in unmet_needs(*model)]
    if problems:
        raise ConfigurationError(
            "\n".join(["models that cannot be loaded as they were filled:", *problems])
        )
    for _, content in parsed:
        check_files({name: value.string_value for name, value in content.parameters.items()})


def check_files(llm: Mapping[str, object]) -> None:
    """Check the checkpoint that the variables of tensorrt_llm name, before Triton is started on it."""
    model, vllm_config = Path(str(llm.get("model", ""))), llm.get("vllm_config")
    if llm.get("engine") not in ("transformers", "vllm") or str(model) == "." or not model.is_dir():
        return
    if llm["engine"] == "vllm" and vllm_config:
        try:
            if "load_format" in read_arguments(Path(str(vllm_config)), "vllm_config"):
                return  # vLLM reads the weights in another way, or makes them up
        except (OSError, ValueError) as error:
            raise ConfigurationError(str(error)) from error
    check_checkpoint(model)


def context_length(values: Mapping[str, object]) -> int | None:
    """Return the most tokens of prompt and output together, by the variables of tensorrt_llm.

    None if only the engine knows: the model is not on this machine, or does not say.
    """
    known = [int(str(values["max_seq_len"]))] if values.get("max_seq_len") else []
    config: dict[str, Any] = {}
    name = "max_position_embeddings"
    if values.get("triton_backend") == "tensorrtllm":
        config, name = _config_of(values.get("engine_dir")).get("build_config", {}), "max_seq_len"
    # The simulated engine has no model, and a file of further arguments may lift the model's limit.
    elif values.get("engine") != "simulated" and not (
        values.get("llm_api_config") or values.get("vllm_config")
    ):
        config = _config_of(values.get("model"))
        config = config.get("text_config", config)
    limit = config.get(name)
    return min([*known, limit] if isinstance(limit, int) and limit > 0 else known, default=None)


def _config_of(directory: object) -> dict[str, Any]:
    try:
        config = json.loads(Path(str(directory), "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}
