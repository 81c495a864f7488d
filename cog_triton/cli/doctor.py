"""``cog-triton doctor``: what this machine has for serving, and what is missing, with the remedy."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cog_triton.cli.options import Variables, add_model, model_variables
from cog_triton.errors import CogTritonError, ConfigurationError

if TYPE_CHECKING:
    from cog_triton.settings import Settings

DESCRIPTION = """
    cog-triton doctor
    cog-triton doctor --model /path/to/model

It does not start, download or change anything. The exit status is 1 if a server with these settings could
not start.
"""
GIB = 1 << 30
SHARED_MEMORY_GIB = 1.0  # that the stubs of a busy server may take
CACHE_GIB = 20.0
INSTALLATIONS = {
    "tensorrtllm": "run in NVIDIA's image nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3",
    "llmapi": "pip install 'cog-triton[tensorrt-llm]' --extra-index-url https://pypi.nvidia.com",
    "vllm": "in an environment without the extra local: pip install 'cog-triton[vllm]'",
    "transformers": (
        "pip install 'cog-triton[local]' --extra-index-url https://download.pytorch.org/whl/cpu"
    ),
}


class Options(argparse.Namespace):
    model: str | None


def add_options(parser: argparse.ArgumentParser) -> None:
    add_model(parser)


def variables(options: Options) -> Variables:
    return model_variables(options.model)


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    subject: str
    text: str
    state: str = "ok"  # or "absent" and "note", which hinder nothing, or "problem"
    remedy: str = ""

    def lines(self) -> list[str]:
        mark = "PROBLEM" if self.state == "problem" else self.state
        lines = [f"{mark:7}  {self.subject:13} {self.text}"]
        if self.remedy:
            lines.append(f"{'':24}{self.remedy}")
        return lines


def run(options: Options) -> int:  # noqa: ARG001
    from cog_triton.settings import read_settings

    try:
        settings = read_settings()
    except ConfigurationError as error:
        print("\n".join(Finding("settings", error.message, "problem").lines()))
        return 1
    failed = False
    for check in CHECKS:
        for finding in check(settings):
            print("\n".join(finding.lines()), flush=True)
            failed = failed or finding.state == "problem"
    return int(failed)


def check_software(_: Settings) -> Iterator[Finding]:
    from cog_triton import __version__

    yield Finding("cog-triton", f"{__version__}, in {Path(__file__).resolve().parents[1]}")
    yield Finding("Python", f"{platform.python_version()}, {sys.executable}")


def check_settings(_: Settings) -> Iterator[Finding]:
    from cog_triton.settings import VARIABLES, misspelt_variables

    names = [name for name in VARIABLES if os.environ.get(name)]
    yield Finding("settings", ", ".join(names) if names else "all defaults")
    for warning in misspelt_variables():
        yield Finding("settings", warning, "note")


def check_gpus(_: Settings) -> Iterator[Finding]:
    from cog_triton.server.devices import gpu_count, installed_torch
    from cog_triton.server.log import GPU

    if GPU:
        count = gpu_count()
        yield Finding("GPU", f"{count} NVIDIA" if count else "the NVIDIA driver is installed")
    else:
        yield Finding(
            "GPU",
            "no NVIDIA GPU found: models run on the CPU",
            "note",
            "in a container, use docker run --gpus all; otherwise, check the driver with nvidia-smi",
        )
    torch = installed_torch()
    if torch is None:
        yield Finding(
            "PyTorch",
            "not installed: the transformers engine cannot run",
            "note",
            INSTALLATIONS["transformers"],
        )
    elif torch.for_cpus and GPU:
        yield Finding(
            "PyTorch",
            f"{torch.version} is a CPU build, but this machine has a GPU",
            "note",
            "install a CUDA build: https://pytorch.org/get-started/locally/",
        )
    else:
        built = f"built for CUDA {torch.cuda}" if torch.cuda else "CPU build"
        yield Finding("PyTorch", f"{torch.version}, {built}")


def check_triton(settings: Settings) -> Iterator[Finding]:
    from cog_triton.server.installation import locate

    try:
        found = locate(settings)
    except ConfigurationError as error:
        yield Finding(
            "tritonserver", error.message, "problem", "pip install 'nvidia-pytriton>=0.7,<0.8'"
        )
        return
    yield Finding("tritonserver", str(found.server))


def check_engines(settings: Settings) -> Iterator[Finding]:
    from cog_triton.deployment.engine_choice import detect_runtimes, resolve_engine

    try:
        runtimes = detect_runtimes(settings)
    except ConfigurationError:
        return  # check_triton reports it
    engines = {
        "tensorrtllm": str(runtimes.backends) if runtimes.has_backend else None,
        "llmapi": runtimes.tensorrt_llm,
        "vllm": runtimes.vllm,
        "transformers": _version("transformers"),
        "simulated": "built in",
    }
    for name, found in engines.items():
        if found is not None:
            yield Finding("engine", f"{name}: {found}")
        else:
            yield Finding("engine", f"{name} is not installed", "absent", INSTALLATIONS[name])
    try:
        engine = resolve_engine(settings)
    except ConfigurationError as error:
        yield Finding("ENGINE", error.message, "problem")
        return
    yield Finding("ENGINE", f"{settings.engine} selects {engine} on this machine")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_model(settings: Settings) -> Iterator[Finding]:
    name = settings.weights or settings.model
    directory = Path(name)
    if not directory.exists():
        is_hub_id = name.count("/") == 1 and name[0] not in "/.~"
        if "://" in name or is_hub_id:
            cache = settings.weights_cache.expanduser()
            yield Finding(
                "MODEL", f"{name} will be downloaded to {cache} unless it is already there"
            )
        else:
            yield Finding("MODEL", f"{name} does not exist", "problem", "set MODEL or pass --model")
        return
    if directory.is_dir() and not (directory / "config.json").is_file():
        yield Finding("MODEL", f"{name} has no config.json", "problem")
        return
    what = "toy demo model" if (directory / "demo.json").is_file() else "found"
    yield Finding("MODEL", f"{name}: {what}")


def check_ports(settings: Settings) -> Iterator[Finding]:
    ports = {
        "TRITON_HTTP_PORT": settings.http_port,
        "TRITON_GRPC_PORT": settings.grpc_port,
        "TRITON_METRICS_PORT": settings.metrics_port,
    }
    taken = {}
    for name, port in ports.items():
        if port and not is_free(settings.host, port):
            taken[name] = port
    if not taken:
        yield Finding(
            "ports", ", ".join(f"{port or 'any'}" for port in ports.values()) + " are free"
        )
    for name, port in taken.items():
        yield Finding(
            "ports",
            f"{name}={port} is in use on {settings.host}",
            "problem",
            f"find what uses it with ss -ltnp 'sport = :{port}', or set {name}=0 for a free port",
        )


def is_free(host: str, port: int) -> bool:
    try:
        socket.create_server((host, port)).close()
    except OSError:
        return False
    return True


def check_disks(settings: Settings) -> Iterator[Finding]:
    places = {
        "/dev/shm": (Path("/dev/shm"), SHARED_MEMORY_GIB, "docker run --shm-size 1g"),
        "WEIGHTS_CACHE": (
            settings.weights_cache.expanduser(),
            CACHE_GIB,
            "set WEIGHTS_CACHE to a directory on another disk",
        ),
    }
    for name, (directory, wanted, remedy) in places.items():
        existing = next(place for place in (directory, *directory.parents) if place.exists())
        free = shutil.disk_usage(existing).free / GIB
        if free >= wanted:
            yield Finding("disk", f"{name}: {free:.1f} GiB free")
        else:
            text = f"{name}: only {free:.1f} GiB free"
            yield Finding("disk", text, "note", remedy)
        if not os.access(existing, os.W_OK):
            yield Finding("disk", f"this user cannot write to {existing}", "problem", remedy)


def guarded(check: Callable[[Settings], Iterator[Finding]]) -> Callable[..., Iterator[Finding]]:
    """Let the report go on after a check that fails itself."""

    def findings(settings: Settings) -> Iterator[Finding]:
        try:
            yield from check(settings)
        except (CogTritonError, OSError) as error:
            yield Finding(check.__name__.removeprefix("check_"), str(error), "problem")

    return findings


CHECKS = tuple(
    guarded(check)
    for check in (
        check_software,
        check_settings,
        check_gpus,
        check_triton,
        check_engines,
        check_model,
        check_ports,
        check_disks,
    )
)
