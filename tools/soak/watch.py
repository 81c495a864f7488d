"""The processes of a soak's server: samples, kills, and what is left. Times are time.time()."""

import contextlib
import os
import re
import shutil
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import psutil  # type: ignore[import-untyped, unused-ignore]

from tools.benchmark.processes import MEGABYTE, command_of, role_of, tree
from tools.soak.load import ID_PREFIX, Tally

COGLET = Path("/tmp/coglet/predictions")  # of every Cog server of the machine, whatever TMPDIR is
CACHES = ("torchinductor_",)  # PyTorch's, one a user, which its next process uses
GUARD, WORKER, SOAK, STUB = "guard", "worker", "soak", "triton_python_backend_stub"
VICTIMS = ("tritonserver", STUB, GUARD, WORKER)
GONE_SECONDS = 5.0  # from a server's end until nothing of it is there
JUDGED_SECONDS = 50.0  # that a process has to run under load for its growth to be judged
SETTLED_SECONDS = 2.0  # from the start of a process, or of the load, until its memory is sampled
NO_GROWTH_MB = 2.0  # what an allocator keeps or gives back; no leak shows in so little
_REGION = re.compile(r"\.?cog_triton_(\d+)_\d+_")


@dataclass
class Watched:
    """A process of the server."""

    process: psutil.Process
    started: float  # when it was first seen
    role: str = ""  # the benchmark's, guard, or worker: a process of OpenAI's API
    kind: str = ""  # the role, but one for all stubs
    rss: list[tuple[float, float]] = field(default_factory=list)  # (time, MB)
    ended: float | None = None  # when it was first missed

    def growth(self, began: float, until: float) -> float:
        """Return how much its memory grew under load, in %: the last quarter by the second one."""
        since = max(self.started, began) + SETTLED_SECONDS
        during = [(at, mb) for at, mb in self.rss if since <= at <= until]
        if not during or during[-1][0] - during[0][0] < JUDGED_SECONDS:
            return 0.0
        quarter = len(during) // 4
        before = median(mb for _, mb in during[quarter : 2 * quarter + 1])
        after = median(mb for _, mb in during[-quarter - 1 :])
        return 0.0 if after - before <= NO_GROWTH_MB else 100 * (after - before) / before


class Watch:
    """Everything seen of a process, by default this one, and of those that it has started."""

    def __init__(self, pid: int | None = None) -> None:
        self.pid = pid or os.getpid()
        self.parts: dict[psutil.Process, Watched] = {}
        self.killed: list[Watched] = []  # parts whose end is not a crash

    def sample(self) -> None:
        now = time.time()
        for process in tree(self.pid):
            # Each time: between fork and exec, a process has the command of its parent.
            if command := command_of(process):
                part = self.parts.setdefault(process, Watched(process, now))
                part.role = SOAK if process.pid == os.getpid() else role_of_part(command)
                part.kind = STUB if Path(command[0]).name == STUB else part.role
                with contextlib.suppress(psutil.Error):
                    part.rss.append((now, process.memory_info().rss / MEGABYTE))
        for part in self.parts.values():
            if part.ended is None and not alive(part.process):
                part.ended = now

    def alive(self) -> list[Watched]:
        return [part for part in self.parts.values() if alive(part.process)]

    def of(self, role: str) -> list[Watched]:
        """Return the processes of a role, in the order of their starts."""
        found = [part for part in self.parts.values() if part.role == role]
        return sorted(found, key=lambda part: part.started)

    def kill(self, random: Random) -> Watched | None:
        """Kill a part, each kind as likely as the others; None if there is none."""
        kinds = [[p for p in self.alive() if p.kind == kind] for kind in VICTIMS]
        there = [parts for parts in kinds if parts]
        guards = [part for part in self.of(GUARD) if part.ended is None]
        if not there or not guards:
            return None
        victim = random.choice(random.choice(there))
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.process.kill()
        # A server ends with any of its parts, and its guard with it.
        self.killed.append(victim if victim.kind == WORKER else guards[-1])
        return victim

    def crashes(self, until: float) -> list[str]:
        """Return the servers and the processes of OpenAI's API that ended without being killed."""
        return [
            f"{part.role} {part.process.pid} ended although no part of it was killed"
            for part in [*self.of(GUARD), *self.of(WORKER)]
            if part.ended is not None and part.ended <= until and part not in self.killed
        ]

    def usage(self) -> dict[str, dict[float, float]]:
        """Return the memory of each role over time, in MB."""
        roles: dict[str, dict[float, float]] = defaultdict(lambda: defaultdict(float))
        for part in self.parts.values():
            for at, mb in part.rss:
                roles[part.role][at] += mb
        return {role: dict(sorted(samples.items())) for role, samples in roles.items()}

    def leftovers(self, temporary: Path) -> list[str]:
        """Name what is left of a server that has ended, also in its TMPDIR, and remove it."""
        deadline = time.time() + GONE_SECONDS
        while len(left := [p for p in self.alive() if p.role != SOAK]) and time.time() < deadline:
            time.sleep(0.1)
        names = [f"process {part.process.pid}: {part.role}" for part in left]
        for part in left:
            part.process.kill()
        started = {str(process.pid) for process in self.parts}
        for region in Path("/dev/shm").iterdir():
            if (match := _REGION.match(region.name)) and match[1] in started:
                names.append(str(region))
                region.unlink(missing_ok=True)
        names += sorted(p.name for p in temporary.iterdir() if not p.name.startswith(CACHES))
        for directory in COGLET.glob(f"{ID_PREFIX}*"):
            names.append(str(directory))
            shutil.rmtree(directory, ignore_errors=True)
        return names


@dataclass
class Phase:
    """A server, the load on it, and what was seen; ``kills`` are None for ``seconds`` of load."""

    engine: str
    kind: str
    seconds: float
    kills: int | None
    began: float = 0.0
    ended: float = 0.0
    tally: Tally = field(default_factory=Tally)
    recoveries: list[dict[str, Any]] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    interrupted: bool = False
    watch: Watch = field(default_factory=Watch)


def alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def role_of_part(command: list[str]) -> str:
    """Return a process's role by its command line: the benchmark's, or a soak's own."""
    if any(argument.endswith("server/guard.py") for argument in command):
        return GUARD
    if "cog_triton.api.openai.workers" in command:
        return WORKER
    return role_of(command)
