"""Python for the processes that engines start, from one that may be Triton's stub.

The stub's Python reads files as ASCII and names no interpreter. A forked process would pass for a stub.
"""

import locale
import multiprocessing
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path

LEAST_PRIORITY = 19


def prepare_for_vllm() -> None:
    """Prepare this process for importing vLLM and for its processes."""
    locale.setlocale(locale.LC_ALL, "C.UTF-8")
    os.environ.update(LC_ALL="C.UTF-8", VLLM_NO_USAGE_STATS="1")
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    sys.executable = python()
    multiprocessing.set_executable(sys.executable)


def python() -> str:
    """Return this process's interpreter; in Triton's stub, the first one of this version in PATH."""
    if Path(sys.executable or "").name.startswith("python"):
        return sys.executable
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    path = shutil.which(name)
    if path is None:
        raise ValueError(
            f"the engine's processes need the interpreter {name}, which is not in PATH"
        )
    return path


def renice(pid: int) -> None:
    """Give a process and its children the lowest priority.

    On CPUs, vLLM's processes wait for each other by spinning, on every core. So the processes that carry a
    token to its reader got a core some milliseconds late at each step, and tokens arrived by the dozen.
    """
    # This package comes with vLLM.
    import psutil  # type: ignore[import-untyped, unused-ignore]

    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for member in (process, *process.children(recursive=True)):
            for thread in member.threads():
                with suppress(ProcessLookupError):
                    os.setpriority(os.PRIO_PROCESS, thread.id, LEAST_PRIORITY)
