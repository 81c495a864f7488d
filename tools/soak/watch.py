"""What belongs to a worker, sampled over time: its processes by role, and their shared memory.

Times are those of ``time.monotonic()``: seconds since the boot on Linux, as the start of a process is.
"""

from __future__ import annotations

import contextlib
import os
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psutil  # type: ignore[import-untyped, unused-ignore]

from tools.benchmark.processes import MEGABYTE, role_of, tree

SHARED_MEMORY = Path("/dev/shm")
GUARD, WORKER, SERVE, FACE = "guard", "worker", "serve.py", "face"
MOMENT = 0.5  # seconds, in which no server starts: tokens of the last may be under way so long
STUB = "triton_python_backend_stub"
_ERRORS = (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess, OSError)
_TICKS = os.sysconf("SC_CLK_TCK")
_REGION = re.compile(r"\.?cog_triton_(\d+)_(\d+)_")


@dataclass(frozen=True)
class Part:
    """One process, which no other one is, and what it is.

    Attributes:
        ticks: when it started, as /proc has it.
        stub: whether it is the process of a Python model, which its role names.
    """

    pid: int
    ticks: int
    role: str
    stub: bool = False

    @property
    def started(self) -> float:
        return self.ticks / _TICKS

    @property
    def alive(self) -> bool:
        with contextlib.suppress(OSError):
            fields = _stat(self.pid)
            return int(fields[19]) == self.ticks and fields[0] != "Z"
        return False


@dataclass(frozen=True)
class Sample:
    """One process's resources at one time."""

    at: float
    rss_mb: float
    descriptors: int
    threads: int


@dataclass(frozen=True)
class Shared:
    """Regions in /dev/shm of a worker's servers at one time."""

    at: float
    regions: int
    mb: float


Key = tuple[int, int]  # a process: its id and its start, in ticks


@dataclass
class Watch:
    """All that has been seen of a worker's processes.

    Attributes:
        parts: every process, in the order in which they were seen.
        samples: of each.
        ended: when one was first missed.
    """

    root: int
    parts: dict[Key, Part] = field(default_factory=dict)
    samples: dict[Key, list[Sample]] = field(default_factory=dict)
    ended: dict[Key, float] = field(default_factory=dict)
    shared: list[Shared] = field(default_factory=list)

    def sample(self, now: float) -> None:
        """Looks at what runs."""
        for process in tree(self.root):
            with contextlib.suppress(*_ERRORS):
                key = (process.pid, int(_stat(process.pid)[19]))
                # Each time: between fork and exec, a process has the command of its parent.
                if command := list(process.cmdline()):
                    self.parts[key] = part_of(key, command)
                    self.samples.setdefault(key, []).append(_sample(process, now))
        for key, part in self.parts.items():
            if key not in self.ended and not part.alive:
                self.ended[key] = now
        self.shared.append(_shared(now, list(self.regions())))

    def alive(self) -> list[Part]:
        """The parts that run."""
        return [p for key, p in self.parts.items() if key not in self.ended and p.alive]

    def lives(self, role: str = GUARD) -> list[tuple[float, float | None]]:
        """Return start and end of each process of a role, in order; a server's are its guards'."""
        keys = sorted(key for key, part in self.parts.items() if part.role == role)
        lives = [(self.parts[key].started, self.ended.get(key)) for key in keys]
        return sorted(lives, key=lambda life: life[0])

    def regions(self) -> Iterator[Path]:
        """The regions of /dev/shm whose server a watched process started."""
        with contextlib.suppress(OSError):
            for region in SHARED_MEMORY.iterdir():
                match = _REGION.match(region.name)
                if match and (int(match[1]), int(match[2])) in self.parts:
                    yield region

    def by_role(self) -> dict[str, list[Sample]]:
        """The samples of each role, those of one time added up."""
        roles: dict[str, dict[float, list[Sample]]] = defaultdict(lambda: defaultdict(list))
        for key, samples in self.samples.items():
            for sample in samples:
                roles[self.parts[key].role][sample.at].append(sample)
        return {
            role: [_sum(at, each) for at, each in sorted(times.items())]
            for role, times in roles.items()
        }


def part_of(key: Key, command: list[str]) -> Part:
    """A process with this command."""
    return Part(*key, role_of_part(command), Path(command[0]).name == STUB)


def role_of_part(command: list[str]) -> str:
    """Return a process's role, by its command line: the benchmark's, or a soak's own."""
    if any(argument.endswith("server/guard.py") for argument in command):
        return GUARD
    if "cog_triton.faces.openai.workers" in command:
        return FACE
    if any(argument.endswith("scripts/serve.py") for argument in command):
        return SERVE
    return WORKER if "tools.soak.worker" in command else role_of(command)


@dataclass(frozen=True)
class Growth:
    """The resident memory of one process, in MB.

    Attributes:
        before: median of the second quarter of its time: the first one warms it up.
        after: median of the last quarter.
    """

    role: str
    pid: int
    seconds: float
    before: float
    after: float


def growths(
    watch: Watch, tokens: Sequence[float], until: float, least_seconds: float
) -> list[Growth]:
    """Return the growth of each process that ran for so long under the load.

    Args:
        tokens: when they came, in order: the first after the start of a process, or of the load, says that
            it is set up.
    """
    grown = []
    for key, samples in watch.samples.items():
        part = watch.parts[key]
        since = bisect_left(tokens, part.started + MOMENT)
        if since == len(tokens):
            continue
        during = [(s.at, s.rss_mb) for s in samples if tokens[since] <= s.at <= until]
        if during and during[-1][0] - during[0][0] >= least_seconds:
            grown.append(Growth(part.role, part.pid, during[-1][0] - during[0][0], *ends(during)))
    return grown


def ends(samples: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The medians of the second and of the last quarter of the time."""
    first, last = samples[0][0], samples[-1][0]
    quarter = (last - first) / 4
    second = [value for at, value in samples if first + quarter <= at <= first + 2 * quarter]
    fourth = [value for at, value in samples if at >= last - quarter]
    return median(second or [samples[0][1]]), median(fourth)


def _sample(process: psutil.Process, now: float) -> Sample:
    with process.oneshot():
        rss = process.memory_info().rss / MEGABYTE
        return Sample(now, rss, process.num_fds(), process.num_threads())


def _sum(at: float, samples: Iterable[Sample]) -> Sample:
    each = [(sample.rss_mb, sample.descriptors, sample.threads) for sample in samples]
    return Sample(at, *map(sum, zip(*each, strict=True)))


def _shared(now: float, regions: Sequence[Path]) -> Shared:
    size = 0
    for region in regions:
        with contextlib.suppress(OSError):
            size += region.stat().st_blocks * 512
    return Shared(now, len(regions), size / MEGABYTE)


def _stat(pid: int) -> list[str]:
    stat = Path("/proc", str(pid), "stat").read_text(errors="replace")
    return stat.rpartition(")")[2].split()
