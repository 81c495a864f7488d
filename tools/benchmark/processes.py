"""CPU seconds and memory of processes, by their role in the stack; and free ports for them."""

import contextlib
import random
import socket
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path

import psutil  # type: ignore[import-untyped, unused-ignore]

MEGABYTE = 1e6
LOAD_GENERATOR = "load-generator"
# Texts in the command line of a process, and its role; the first that is there counts.
ROLES = {
    "cog.server.http": "cog",
    "cog_triton.api.cog.server": "cog",
    "serve_openai.py": "openai",
    "cog_triton.api.openai.workers": "openai",
    "vllm.entrypoints": "vllm-serve",
    "VLLM::": "vllm-engine",
    "coglet.server._run_worker": "predictor",
}
_TAKEN: list[socket.socket] = []  # of free_port


class Usage:
    """CPU seconds and resident memory of processes by role, from now until the last sample."""

    def __init__(self, roles: Mapping[psutil.Process, str]) -> None:
        self._roles = roles
        self._last: dict[psutil.Process, float] = {}
        self.cpu_s: dict[str, float] = defaultdict(float)
        self.rss_mb: dict[str, float] = {}  # the most at any sample, shared pages included
        self.sample()

    def sample(self) -> None:
        memory: Counter[str] = Counter()
        for process, role in self._roles.items():
            with contextlib.suppress(psutil.Error), process.oneshot():
                used = process.cpu_times().user + process.cpu_times().system
                self.cpu_s[role] += used - self._last.get(process, used)
                self._last[process] = used
                memory[role] += process.memory_info().rss
        for role, size in memory.items():
            self.rss_mb[role] = max(self.rss_mb.get(role, 0.0), size / MEGABYTE)


def role_of(command: list[str]) -> str:
    """Return a process's role in the stack, by its command line."""
    program = Path(command[0]).name if command else ""
    if program == "triton_python_backend_stub":  # .../repository/MODEL/VERSION/model.py
        return next((Path(arg).parts[-3] for arg in command if arg.endswith("/model.py")), "other")
    if program == "tritonserver":
        return program
    line = " ".join(command)
    for text, role in ROLES.items():
        if text in line:
            return role
    return "other"


def free_port() -> int:
    """Return a port that nobody listens on, below those that the system gives to connections.

    No other process gets it from here until this one ends, also while no server listens.
    """
    while True:
        port = random.randrange(10_000, 32_768)
        mark = socket.socket(socket.AF_UNIX)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            mark.bind(f"\0cog-triton-port-{port}")
            _TAKEN.append(mark)
            return port


def tree(pid: int) -> list[psutil.Process]:
    """Return a process and its descendants; nothing if it has ended."""
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    return []


def command_of(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return list(process.cmdline())
    return []
