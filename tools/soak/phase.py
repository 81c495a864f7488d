"""One phase of a soak: a worker from its start to its end, what it said, and what was seen of it."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from cog_triton.server.installation import PACKAGE_ROOT
from tools.benchmark.generator import BenchmarkError
from tools.soak.chaos import Kill, Killer, Recovery, crashes, recovery
from tools.soak.expected import Expected
from tools.soak.faces import id_prefix
from tools.soak.judge import LEAST_SECONDS, Tally
from tools.soak.plan import Case, Phase
from tools.soak.streams import SILENCE_SECONDS, Outcome
from tools.soak.watch import FACE, GUARD, Growth, Sample, Shared, Watch, growths
from tools.soak.worker import Spec

LOOK_SECONDS = 0.25
START_SECONDS = 300.0
BACK_SECONDS = 120.0  # from a kill until streams run again
STOP_SECONDS = 90.0
GONE_SECONDS = 5.0  # from a server's end until nothing of it is there
COGLET = Path("/tmp/coglet/predictions")  # of every Cog server of the machine, whatever TMPDIR is
CACHES = ("torchinductor_",)  # PyTorch's, one a user, which its next process uses
PAUSE = 6.0  # most seconds between a recovery and the next kill
_RESUMED = re.compile(r"request ([\w-]+?)(?:-\d{1,3})? is tried again after \d+ tokens")
_SIGNS = re.compile(r"Traceback|Signal \(\d+\)|terminate called|did not stop|could not be stopped")


@dataclass(frozen=True)
class Load:
    """The settings that all phases share.

    Attributes:
        environment: of every server.
        directory: for logs.
        chaos: whether parts are killed.
    """

    environment: Mapping[str, str]
    directory: Path
    streams: int
    seed: int
    cases: tuple[Case, ...]
    chaos: bool


@dataclass
class PhaseReport:
    """The result of a phase; see ``judge`` for the parts of it."""

    phase: Phase
    interrupted: bool = False
    seconds: float = 0.0
    tally: Tally = field(default_factory=Tally)
    kills: list[Kill] = field(default_factory=list)
    recoveries: list[Recovery] = field(default_factory=list)
    restarts: int = 0
    resumed: int = 0
    growths: list[Growth] = field(default_factory=list)
    crashes: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)
    signs: dict[str, int] = field(default_factory=dict)
    began: float = 0.0
    usage: dict[str, list[Sample]] = field(default_factory=dict)
    shared: list[Shared] = field(default_factory=list)
    rate: list[tuple[float, int]] = field(default_factory=list)


class Worker:
    """A worker's process, and what it has said."""

    def __init__(self, spec: Spec, log: Path) -> None:
        """Starts it."""
        self.tally = Tally()
        self.rate: list[tuple[float, int]] = []
        self.polls: list[tuple[float, float, bool]] = []
        self.ready: float | None = None
        self.done: float | None = None
        self.expected: list[Expected] = []
        self.unfinished: list[str] = []
        self._messages: queue.SimpleQueue[str] = queue.SimpleQueue()
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tools.soak.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                cwd=PACKAGE_ROOT,
                env=dict(spec.environment),
                start_new_session=True,  # Ctrl-C reaches the soak alone, which ends this one
            )
        self.pid = self._process.pid
        threading.Thread(target=self._read, daemon=True).start()
        self._write(spec.line())

    def take(self) -> None:
        """Takes in what it has said since."""
        while not self._messages.empty():
            for name, value in json.loads(self._messages.get()).items():
                self._take(name, value)

    @property
    def status(self) -> int | None:
        return self._process.poll()

    def stop(self) -> None:
        """Ends the load: no further request is begun."""
        self._write("\n")

    def end(self, seconds: float) -> bool:
        """Waits for its end; returns False if it had to be killed."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return False
        finally:
            with contextlib.suppress(BrokenPipeError):
                assert self._process.stdin is not None
                self._process.stdin.close()
        return True

    @property
    def tokens(self) -> list[float]:
        """The times at which tokens came."""
        return [at for at, _ in self.rate]

    def _take(self, name: str, value: Any) -> None:
        if name == "outcome":
            self.tally.add(Outcome(**{**value, "tried": tuple(value["tried"])}))
        elif name == "tokens":
            self.rate.append((value[0], value[1]))
        elif name == "health":
            self.polls.append((value[0], value[1], value[2]))
        elif name == "unfinished":
            self.unfinished.append(value)
        elif name == "expected":
            self.expected = [Expected(text, tuple(ids)) for text, ids in value]
        else:  # ready, done
            setattr(self, name, value)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._messages.put(line)

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its end is told by its status
            self._process.stdin.write(line)
            self._process.stdin.flush()


def answers(engine: str, load: Load) -> tuple[Expected, ...]:
    """The answers of an engine that nothing disturbs.

    Raises:
        BenchmarkError: there are none, with the end of the worker's log.
    """
    log = load.directory / f"{engine}-expected.log"
    with _temporary() as temporary:
        worker = _worker(Phase(engine, "deployment", "grpc"), load, temporary, log, ())
        worker.end(START_SECONDS)
        worker.take()
        if len(worker.expected) != len(load.cases):
            raise BenchmarkError(f"{engine} gave no answers:\n{_tail(log)}")
        return tuple(worker.expected)


def run_phase(phase: Phase, load: Load, expected: tuple[Expected, ...], name: str) -> PhaseReport:
    """Runs a phase.

    Raises:
        BenchmarkError: its server did not start.
    """
    log = load.directory / f"{name}.log"
    with _temporary() as temporary:
        worker = _worker(phase, load, temporary, log, expected)
        watch = Watch(worker.pid)
        report = PhaseReport(phase)
        try:
            _wait_until_ready(worker, watch, log)
            killer = Killer(Random(f"{load.seed} {phase}"), PAUSE) if load.chaos else None
            with _interruptible(report):
                _put_under_load(phase, worker, watch, killer, report)
        finally:
            worker.stop()
            stopped = worker.end(STOP_SECONDS)
        if not stopped:
            report.unfinished.append("the server did not stop")
        elif worker.status:
            report.crashes.append(f"the worker ended with status {worker.status}: {_tail(log)}")
        report.left = leftovers(watch, temporary)
    _finish(report, worker, watch, killer, [log, Path(_cog_log(log))])
    return report


def _put_under_load(
    phase: Phase, worker: Worker, watch: Watch, killer: Killer | None, report: PhaseReport
) -> None:
    """Watches and kills until the phase is over, and waits for the last streams."""
    assert worker.ready is not None
    report.began = worker.ready
    while worker.status is None:
        now = _look(worker, watch)
        back = _is_back(worker, watch, killer)
        if report.interrupted or _is_over(phase, now - report.began, back, killer):
            break
        if killer is not None:
            if not back and killer.kills and now - killer.kills[-1].at > BACK_SECONDS:
                report.unfinished.append(f"the server was not back after {killer.kills[-1]}")
                break
            if killer.due(now, back=back):
                killer.kill(now, watch.alive())
    worker.stop()
    wait = 0 if report.unfinished else SILENCE_SECONDS + BACK_SECONDS
    deadline = time.monotonic() + wait
    while worker.done is None and worker.status is None:
        if _look(worker, watch) > deadline:
            report.unfinished.append("streams did not come to their end")
            break
    report.seconds = (worker.done or time.monotonic()) - report.began


@contextlib.contextmanager
def _interruptible(report: PhaseReport) -> Iterator[None]:
    """Has Ctrl-C and SIGTERM end the load, so that what came until then is reported."""

    def note(*_: object) -> None:
        report.interrupted = True

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_over(phase: Phase, seconds: float, back: bool, killer: Killer | None) -> bool:
    if phase.kills is not None:
        return killer is not None and len(killer.kills) >= phase.kills and back
    return seconds >= phase.seconds and back


def _is_back(worker: Worker, watch: Watch, killer: Killer | None) -> bool:
    """Return whether streams run again since the last kill, or at all if there was none."""
    if killer is None or not killer.kills:
        return bool(worker.tokens)
    last = _recovery(worker, watch, killer.kills, len(killer.kills) - 1)
    return last.token is not None and last.healthy is not None


def _recovery(worker: Worker, watch: Watch, kills: Sequence[Kill], index: int) -> Recovery:
    births = [start for start, _ in watch.lives(FACE if kills[index].role == FACE else GUARD)]
    return recovery(kills, index, births, worker.tokens, worker.polls)


def _look(worker: Worker, watch: Watch) -> float:
    """Looks at everything, a little later than the last time; returns when."""
    time.sleep(LOOK_SECONDS)
    now = time.monotonic()
    watch.sample(now)
    worker.take()
    return now


def _wait_until_ready(worker: Worker, watch: Watch, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while worker.ready is None:
        if worker.status is not None or _look(worker, watch) > deadline:
            raise BenchmarkError(f"the server did not start:\n{_tail(log)}")


def _finish(
    report: PhaseReport, worker: Worker, watch: Watch, killer: Killer | None, logs: list[Path]
) -> None:
    """Puts together what a phase has shown."""
    worker.take()
    kills = killer.kills if killer else []
    done = worker.done or time.monotonic()
    lives = {
        role: [(start, end if end and end <= done else None) for start, end in watch.lives(role)]
        for role in (GUARD, FACE)
    }
    texts = [log.read_text(errors="replace") for log in logs if log.is_file()]
    report.tally = worker.tally
    report.unfinished += worker.unfinished
    report.tally.excuse({kill.role for kill in kills})
    report.kills = kills
    report.recoveries = [_recovery(worker, watch, kills, index) for index in range(len(kills))]
    report.restarts = max(0, len(lives[GUARD]) - 1)
    report.resumed = len({name for text in texts for name in _RESUMED.findall(text)})
    report.growths = growths(watch, worker.tokens, done, LEAST_SECONDS)
    report.crashes += [
        f"{what} ended {end - report.began:.1f} s after the start"
        for role, what in ((GUARD, "a server"), (FACE, "a process of the OpenAI face"))
        for end in crashes(lives[role], kills)
    ]
    for text in texts:
        for sign in _SIGNS.findall(text):
            report.signs[sign] = report.signs.get(sign, 0) + 1
    report.usage = watch.by_role()
    report.shared = watch.shared
    report.rate = worker.rate


def leftovers(watch: Watch, temporary: Path) -> list[str]:
    """Return texts on all that is left after a server's end, and remove it.

    Args:
        temporary: the directory in which everything temporary was made.
    """
    deadline = time.monotonic() + GONE_SECONDS
    while watch.alive() and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
    left = []
    for part in watch.alive():
        left.append(f"process {part.pid}: {part.role}")
        with contextlib.suppress(ProcessLookupError):
            os.kill(part.pid, signal.SIGKILL)
    for region in watch.regions():
        left.append(str(region))
        region.unlink(missing_ok=True)
    left += sorted(p.name for p in temporary.iterdir() if not p.name.startswith(CACHES))
    predictions = list(COGLET.glob(f"{id_prefix(watch.root)}*"))
    if predictions:
        left.append(f"{len(predictions)} directories in {COGLET}")
    for directory in predictions:
        shutil.rmtree(directory, ignore_errors=True)
    return left


@contextlib.contextmanager
def _temporary() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="cog-triton-soak-"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _worker(
    phase: Phase, load: Load, temporary: Path, log: Path, expected: tuple[Expected, ...]
) -> Worker:
    environment = {
        **load.environment,
        "ENGINE": phase.engine,
        "TRANSPORT": phase.transport,
        "TMPDIR": str(temporary),
    }
    spec = Spec(
        *(phase.kind, phase.transport, environment, _cog_log(log), load.streams, load.seed),
        cases=load.cases,
        expected=expected,
    )
    return Worker(spec, log)


def _cog_log(log: Path) -> str:
    return str(log.with_suffix(".cog.log"))


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:]
