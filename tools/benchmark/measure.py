"""A measurement: a load on one target of servers that run, by generators in processes of their own."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

from cog_triton.server.installation import PACKAGE_ROOT
from tools.benchmark.drivers import is_in_process
from tools.benchmark.load import Load, Planned, Share, plan, shares
from tools.benchmark.processes import LOAD_GENERATOR, Watch
from tools.benchmark.report import Result, result
from tools.benchmark.vocabulary import load_vocabulary
from tools.benchmark.worker import Record

STOP_SECONDS = 10.0


class BenchmarkError(Exception):
    """A measurement that could not be made."""


@dataclass(frozen=True)
class Running:
    """Targets that run and can be measured.

    Attributes:
        tokenizer: directory or Hugging Face id of the tokenizer.
        url: of the Cog server, or of transformers'.
        grpc, http, metrics: host:port of Triton's endpoints.
        engine: parameters of the tensorrt_llm model, for an engine in the load generator.
        pids: of the servers, whose descendants are watched with them.
    """

    tokenizer: str
    url: str = ""
    grpc: str = ""
    http: str = ""
    metrics: str = ""
    engine: Mapping[str, str] = field(default_factory=dict)
    pids: tuple[int, ...] = ()

    @property
    def endpoints(self) -> dict[str, Any]:
        """The addresses that a driver needs."""
        return {"url": self.url, "grpc": self.grpc, "http": self.http, "engine": dict(self.engine)}


class Generator:
    """One load generator process, from its start to the end of the context."""

    def __init__(self, running: Running, target: str, load: Load) -> None:
        self._target = target
        self._spec = {
            "target": target,
            "tokenizer": running.tokenizer,
            "endpoints": running.endpoints,
            "temperature": load.temperature,
            "ignore_eos": load.ignore_eos,
        }

    def __enter__(self) -> Generator:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tools.benchmark.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=PACKAGE_ROOT,  # where -m looks first
            start_new_session=True,  # Ctrl-C reaches the benchmark alone, which ends this one
        )
        self._write(json.dumps(self._spec))
        return self

    def __exit__(self, *_: object) -> None:
        """Ends it: without standard input, a generator does not stay."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def prepare(self, load: Load, warmup: list[Planned], share: Share) -> None:
        """Hands over its share of a load, for which it is ``ready`` after the warm-up."""
        spec = {
            "timeout": load.timeout,
            "concurrency": share.concurrency,
            "warmup": [asdict(request) for request in warmup],
            "requests": [asdict(request) for request in share.requests],
        }
        self._write(json.dumps(spec))

    def start(self) -> None:
        """Starts the load, which runs until ``wait_for("done")``."""
        self._write("go")

    def wait_for(self, line: str) -> None:
        """Waits for a line of the generator's.

        Raises:
            BenchmarkError: it ended instead.
        """
        answer = self._read()
        if answer != line:
            raise BenchmarkError(f"a load generator for {self._target} said {answer[:200]!r}")

    def result(self) -> dict[str, Any]:
        """Return the generator's measurements."""
        report: dict[str, Any] = json.loads(self._read())
        return report

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BenchmarkError(
                f"a load generator for {self._target} ended with status {self._process.wait()}"
            )
        return line.rstrip("\n")

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its end is told where its answer is read
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()


class Session:
    """The load generators of one target, for any number of loads until the end of the context."""

    def __init__(self, running: Running, target: str, loads: Sequence[Load]) -> None:
        """Nothing is started yet.

        Args:
            target: one of ``drivers.DRIVERS``.
            loads: those that will be measured, or the like.
        """
        self._running = running
        self._target = target
        self._tokenizer = load_vocabulary(running.tokenizer).tokenizer
        count = max(len(shares([], load)) for load in loads)
        self._generators = [Generator(running, target, loads[0]) for _ in range(count)]
        self._cleanup = ExitStack()

    def __enter__(self) -> Session:
        with ExitStack() as cleanup:
            for generator in self._generators:
                cleanup.enter_context(generator)
            self._cleanup = cleanup.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def measure(self, load: Load, turn: int = 0, *, warm_up: bool = True) -> Result:
        """Puts a load on the target and returns what was measured.

        Args:
            turn: another one has other prompts.
            warm_up: whether the load's warm-up comes first.

        Raises:
            BenchmarkError: a load generator could not do its work.
        """
        warmup, requests = plan(load, self._tokenizer, turn)
        parts = shares(requests, load)
        generators = self._generators[: len(parts)]
        for number, (generator, share) in enumerate(zip(generators, parts, strict=True)):
            # One generator warms up the server for all of them.
            generator.prepare(load, warmup if warm_up and number == 0 else [], share)
        for generator in generators:
            generator.wait_for("ready")
        alone = is_in_process(self._target)
        watch = Watch(
            () if alone else self._running.pids,
            [generator.pid for generator in generators],
            role=self._target if alone else LOAD_GENERATOR,
        )
        watch.start()
        for generator in generators:
            generator.start()
        for generator in generators:
            generator.wait_for("done")
        usages = watch.stop()
        reports = [generator.result() for generator in generators]
        records = [Record(**record) for report in reports for record in report["records"]]
        cpu_s = [report["cpu_s"] for report in reports]
        return result(self._target, load, records, usages, cpu_s)


def measure(running: Running, target: str, load: Load) -> Result:
    """One load on one target; see ``Session``. May be called by several threads at once."""
    with Session(running, target, [load]) as session:
        return session.measure(load)
