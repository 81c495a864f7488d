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
_ERRORS = (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess)


@dataclass(frozen=True)
class Usage:
    """The resources that the processes of one role used together.

    Attributes:
        cpu_s: CPU seconds between begin and end.
        rss_mb: the most resident memory at any sample, shared pages included (10^6 bytes).
        uss_mb: memory that is nobody else's, at the end; None where it cannot be read.
    """

    role: str
    cpu_s: float
    rss_mb: float
    uss_mb: float | None


def role_of(command: list[str]) -> str:
    """Return a process's role in the stack, by its command line."""
    program = Path(command[0]).name if command else ""
    line = " ".join(command)
    if program == "triton_python_backend_stub":
        # …/repository/MODEL/VERSION/model.py
        return next((Path(arg).parts[-3] for arg in command if arg.endswith("/model.py")), "other")
    if program == "tritonserver":
        return "tritonserver"
    if "tools.benchmark.worker" in line:
        return LOAD_GENERATOR
    if "cog.server.http" in line or "cog_triton.faces.cog.server" in line:
        return "cog"
    if "serve_openai.py" in line or "cog_triton.faces.openai.workers" in line:
        return "openai"
    if "vllm.entrypoints" in line:
        return "vllm-serve"
    if "VLLM::" in line:  # the engine of whatever serves it
        return "vllm-engine"
    if "transformers.cli.transformers serve" in line:
        return "serve"
    if "coglet.server._run_worker" in line:
        return "predictor"
    return "other"


class Watch:
    """Samples processes and their descendants in a thread, from ``start`` to ``stop``."""

    def __init__(self, servers: Iterable[int], generators: Iterable[int], *, role: str) -> None:
        """Finds the processes.

        Args:
            servers: ids of processes that are watched with all their descendants.
            generators: ids of the load generators.
            role: what the generators are.
        """
        self._roles = {process: role for pid in generators for process in tree(pid)}
        for process in (process for pid in servers for process in tree(pid)):
            self._roles[process] = role_of(_command(process))
        self._cpu: dict[psutil.Process, tuple[float, float]] = {}
        self._rss: defaultdict[str, float] = defaultdict(float)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="process-watch", daemon=True)

    def start(self) -> None:
        self._sample()
        self._thread.start()

    def stop(self) -> list[Usage]:
        """Stop; return the usage, in the order of the roles' first processes."""
        self._sample()
        self._stopped.set()
        self._thread.join()
        cpu: defaultdict[str, float] = defaultdict(float)
        for process, (first, last) in self._cpu.items():
            cpu[self._roles[process]] += last - first
        uss = self._uss()
        roles = dict.fromkeys(self._roles.values())
        return [Usage(role, cpu[role], self._rss[role] / MEGABYTE, uss[role]) for role in roles]

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

    def _uss(self) -> dict[str, float | None]:
        memory: dict[str, float | None] = dict.fromkeys(self._roles.values())
        for process, role in self._roles.items():
            with contextlib.suppress(*_ERRORS):
                memory[role] = (memory[role] or 0.0) + process.memory_full_info().uss / MEGABYTE
        return memory


def descendant_with(text: str) -> int:
    """The id of this process's first descendant whose command line has ``text``.

    Raises:
        LookupError: there is none.
    """
    for process in psutil.Process().children(recursive=True):
        if any(text in argument for argument in _command(process)):
            return int(process.pid)
    raise LookupError(f"no process has {text!r} in its command line")


def free_port() -> int:
    """A port that nobody listens on, and that the system gives to no connection in the meantime."""
    while True:
        port = random.randrange(10_000, 32_768)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def tree(pid: int) -> list[psutil.Process]:
    """A process and its descendants; nothing if it has ended."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except _ERRORS:
        return []


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except _ERRORS:
        return []
