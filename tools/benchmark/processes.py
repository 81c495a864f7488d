"""What the processes of a stack use while a load runs: CPU seconds and memory, by role; ports for them."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped, unused-ignore]

SAMPLE_SECONDS = 0.5
MEGABYTE = 1e6
LOAD_GENERATOR = "load-generator"
# A text in a process's command line, and its role.
ROLES = {
    "cog.server.http": "cog",
    "cog_triton.faces.cog.server": "cog",
    "serve_openai.py": "openai",
    "cog_triton.faces.openai.workers": "openai",
    "vllm.entrypoints": "vllm-serve",
    "VLLM::": "vllm-engine",
    "coglet.server._run_worker": "predictor",
}
_ERRORS = (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess)


@dataclass(frozen=True)
class Usage:
    """The resources of all processes of a role.

    Attributes:
        cpu_s: CPU seconds while it was watched.
        rss_mb: the most resident memory at any sample, shared pages included (10^6 bytes).
        uss_mb: memory that no other process has, at the end; None where it cannot be read.
    """

    role: str
    cpu_s: float
    rss_mb: float
    uss_mb: float | None


def role_of(command: list[str]) -> str:
    """Return a process's role in the stack, by its command line."""
    program = Path(command[0]).name if command else ""
    if program == "triton_python_backend_stub":  # .../repository/MODEL/VERSION/model.py
        return next((Path(arg).parts[-3] for arg in command if arg.endswith("/model.py")), "other")
    if program == "tritonserver":
        return program
    line = " ".join(command)
    return next((role for text, role in ROLES.items() if text in line), "other")


class Watch:
    """Samples processes and their descendants in a thread, until ``stop``."""

    def __init__(self, servers: Iterable[int], generators: Iterable[int], *, role: str) -> None:
        """Start.

        Args:
            servers: ids of processes that are watched with all their descendants.
            generators: ids of the load generators, whose role is ``role``.
        """
        self._roles = {process: role for pid in generators for process in tree(pid)}
        self._roles |= {
            process: role_of(command_of(process)) for pid in servers for process in tree(pid)
        }
        self._cpu: dict[psutil.Process, tuple[float, float]] = {}
        self._rss: defaultdict[str, float] = defaultdict(float)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="process-watch", daemon=True)
        self._sample()
        self._thread.start()

    def stop(self) -> list[Usage]:
        """Return the usage of each role."""
        self._stopped.set()
        self._thread.join()
        self._sample()
        cpu: defaultdict[str, float] = defaultdict(float)
        uss: dict[str, float | None] = dict.fromkeys(self._roles.values())
        for process, role in self._roles.items():
            first, last = self._cpu.get(process, (0.0, 0.0))
            cpu[role] += last - first
            with contextlib.suppress(*_ERRORS):
                uss[role] = (uss[role] or 0.0) + process.memory_full_info().uss / MEGABYTE
        return [Usage(role, cpu[role], self._rss[role] / MEGABYTE, uss[role]) for role in uss]

    def _run(self) -> None:
        while not self._stopped.wait(SAMPLE_SECONDS):
            self._sample()

    def _sample(self) -> None:
        rss: defaultdict[str, float] = defaultdict(float)
        for process, role in self._roles.items():
            with contextlib.suppress(*_ERRORS):
                with process.oneshot():
                    times = process.cpu_times()
                    rss[role] += process.memory_info().rss
                used = times.user + times.system
                self._cpu[process] = (self._cpu.get(process, (used,))[0], used)
        for role, size in rss.items():
            self._rss[role] = max(self._rss[role], size)


def free_port() -> int:
    """Return a port that nobody listens on, below those that the system gives to connections."""
    while True:
        port = random.randrange(10_000, 32_768)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def tree(pid: int) -> list[psutil.Process]:
    """Return a process and its descendants; nothing if it has ended."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except _ERRORS:
        return []


def command_of(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except _ERRORS:
        return []
