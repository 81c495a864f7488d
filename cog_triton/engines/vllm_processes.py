"""What vLLM needs of the process that it runs in, which may be Triton's stub.

The stub embeds a Python of its own making: it reads files as ASCII, and names no interpreter that a
spawned process could run. A forked one would be a second stub, to those who watch stubs as well.
"""

from __future__ import annotations

import locale
import multiprocessing
import os
import shutil
import sys
from pathlib import Path

_ENVIRONMENT = {
    "LC_ALL": "C.UTF-8",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",  # it would report to its makers
}


def prepare() -> None:
    """Makes this process one that vLLM can be imported in and start its own from.

    Raises:
        ValueError: there is no Python interpreter to start them with.
    """
    locale.setlocale(locale.LC_ALL, "C.UTF-8")
    os.environ.update(_ENVIRONMENT)
    sys.executable = python()
    multiprocessing.set_executable(sys.executable)


def python() -> str:
    """The interpreter of this process, or of the stub that it is.

    Raises:
        ValueError: there is none.
    """
    return sys.executable if _is_interpreter(sys.executable) else interpreter()


def interpreter() -> str:
    """The Python of this version that comes first in PATH, which is that of the packages here.

    Raises:
        ValueError: there is none.
    """
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    path = shutil.which(name)
    if path is None:
        raise ValueError(f"processes of the engine need an interpreter, and PATH has no {name}")
    return path


def _is_interpreter(executable: str | None) -> bool:
    return bool(executable) and Path(str(executable)).name.startswith("python")
