"""Where TensorRT-LLM's commands and scripts are on this machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cog_triton.errors import ConfigurationError

EXAMPLES = (Path("/app/tensorrt_llm/examples"), Path("/app/examples"))
"""Where NVIDIA's images have TensorRT-LLM's examples: its own, and Triton's with it."""
FIRST_WITHOUT_ENGINES = (1, 3)

_VERSION = """
import importlib.metadata
print(importlib.metadata.version("tensorrt_llm"))
"""


@dataclass(frozen=True)
class Tools:
    """What the steps are run with.

    Attributes:
        python: runs the scripts; TensorRT-LLM is installed for it.
        trtllm_build: the command.
        examples: TensorRT-LLM's examples directory.
    """

    python: str = "python3"
    trtllm_build: str = "trtllm-build"
    examples: Path = EXAMPLES[0]

    def check(self, *, scripts: bool) -> None:
        """Fails now if a command would not be found in an hour.

        Args:
            scripts: whether any of TensorRT-LLM's examples is needed.

        Raises:
            ConfigurationError: naming what is missing.
        """
        if shutil.which(self.trtllm_build) is None:
            raise ConfigurationError(
                f"{self.trtllm_build} was not found: run where TensorRT-LLM (up to 1.2) is "
                "installed, such as NVIDIA's tritonserver:…-trtllm-python-py3 image"
            )
        if shutil.which(self.python) is None:
            raise ConfigurationError(f"{self.python} was not found; see TENSORRT_LLM_PYTHON")
        if scripts and not self.examples.is_dir():
            raise ConfigurationError(
                f"{self.examples} is not there: set TENSORRT_LLM_EXAMPLES to the examples directory "
                "of TensorRT-LLM's repository, at the version installed"
            )


def find_tools(environ: Mapping[str, str] | None = None) -> Tools:
    """The tools that TENSORRT_LLM_EXAMPLES and TENSORRT_LLM_PYTHON name.

    Without the former, the examples are those of an image of NVIDIA's. Without the latter, the commands
    are those of the Python that runs this if it has trtllm-build, else the first in PATH.
    """
    environ = os.environ if environ is None else environ
    usual = next((path for path in EXAMPLES if path.is_dir()), EXAMPLES[0])
    examples = Path(environ.get("TENSORRT_LLM_EXAMPLES") or usual)
    beside = Path(environ.get("TENSORRT_LLM_PYTHON") or sys.executable)
    command = beside.with_name("trtllm-build")
    if command.is_file():
        return Tools(str(beside), str(command), examples)
    return Tools(environ.get("TENSORRT_LLM_PYTHON") or "python3", "trtllm-build", examples)


def tensorrt_llm_version(python: str) -> str | None:
    """The version of TensorRT-LLM that a Python has, None if it has none. Nothing is imported there."""
    try:
        run = subprocess.run(
            [python, "-c", _VERSION], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.strip() or None


def check_version(version: str | None) -> None:
    """Whether this version of TensorRT-LLM builds engines; an unknown one may.

    Raises:
        ConfigurationError: it does not.
    """
    if version is not None and release(version) >= FIRST_WITHOUT_ENGINES:
        raise ConfigurationError(
            f"TensorRT-LLM {version} builds no engines, they ended with 1.2: use an image with that, "
            "or serve the model as it is with the LLM API"
        )


def release(version: str) -> tuple[int, int]:
    """Major and minor number: (1, 2) of 1.2.0rc3."""
    numbers = re.findall(r"\d+", version)
    return (int(numbers[0]), int(numbers[1])) if len(numbers) > 1 else (0, 0)


def gpus() -> list[str]:
    """Name, compute capability and driver of every GPU: an engine runs on the kind that built it."""
    query = ["nvidia-smi", "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"]
    try:
        run = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in run.stdout.splitlines() if line.strip()]
