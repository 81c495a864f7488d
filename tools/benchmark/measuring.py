"""Loads on targets in turns, and their figures; each target has a process that sends the requests."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import os
import secrets
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from multiprocessing import get_context
from typing import TypeVar

import numpy as np
import uvloop

from cog_triton.processes import end_with_parent
from tools.benchmark.load import Load, Record, plan
from tools.benchmark.processes import LOAD_GENERATOR, Usage, command_of, role_of, tree
from tools.benchmark.targets import Endpoints, Inputs, Target, fast_tokenizer
from tools.command_line import progress
from tools.server_sent_events import AnswerError

REQUEST_TIMEOUT = 300.0  # seconds
SAMPLE_SECONDS = 0.5
PERCENTILES = (50, 90, 99)

T = TypeVar("T")
Start = Callable[[str], AbstractContextManager[Endpoints]]


@dataclass(frozen=True)
class Round:
    """One turn of a target: its requests, and the CPU seconds of the load generator."""

    records: Sequence[Record]
    generator_s: float
    usage: Usage

    @cached_property
    def good(self) -> list[Record]:
        return [one for one in self.records if one.error is None]

    @cached_property
    def figures(self) -> dict[str, float]:
        # An answer in one piece has no time between its tokens that could be seen.
        several = [one for one in self.good if len(one.chunks) > 1 and one.output_tokens > 1]
        sizes = [size for one in self.good for _, size in one.chunks]
        tokens, cpu_s = sum(one.output_tokens for one in self.good), self.usage.cpu_s
        stack_s = sum(used for role, used in cpu_s.items() if role != LOAD_GENERATOR)
        began, ended = min(one.start for one in self.records), max(one.end for one in self.records)
        duration = ended - began or math.nan
        latencies = {
            "ttft_ms": [one.ttft for one in self.good],
            "itl_ms": [(one.end - one.chunks[0][0]) / (one.output_tokens - 1) for one in several],
            "gap_ms": [gap for one in several for gap in np.diff([at for at, _ in one.chunks])],
            "e2e_ms": [one.end - one.start for one in self.good],
        }
        return {
            "duration_s": duration,
            "cpu_s": sum(cpu_s.values()) or math.nan,
            "output_tokens": float(tokens),
            "tokens_per_s": tokens / duration,
            "requests_per_s": len(self.good) / duration,
            "tokens_per_core_second": tokens / (stack_s or math.nan),
            "tokens_per_chunk": sum(sizes) / (len(sizes) or math.nan),
            "one_token_chunks": sizes.count(1) / (len(sizes) or math.nan),
            "generator_cpu": self.generator_s / duration,
        } | {
            f"{name}_p{p}": 1000 * float(np.percentile(seconds or [math.nan], p))
            for name, seconds in latencies.items()
            for p in PERCENTILES
        }


@dataclass(frozen=True)
class Result:
    """One load on one target. Latencies and lengths are of the requests without an error.

    Of the figures, ``ttft_ms`` is from a request's start to its first chunk with content, ``itl_ms`` of
    each request its time after that divided by its tokens but one, ``gap_ms`` between any two consecutive
    chunks, ``e2e_ms`` from start to end, and ``generator_cpu`` the share of a core of the load generator.
    All streams of a load start at once, and go on when an answer has ended.
    """

    target: str
    concurrency: int
    requests: int  # all that were sent
    errors: dict[str, int]  # of requests, by its text
    figures: dict[str, float]  # medians of the rounds, NaN where there is none
    cpu_s: dict[str, float]  # of the processes of each role, and so is the next one
    rss_mb: dict[str, float]
    ttft_samples_ms: list[float]
    baseline: bool  # it was run to compare others with
    rounds: int
    ratios: dict[str, dict[str, float]]  # to each baseline, medians of those within a round

    @property
    def name(self) -> str:
        return f"{self.target} c={self.concurrency}"

    @property
    def rate(self) -> float:
        return self.figures["tokens_per_s"]

    @property
    def ttft(self) -> float:
        return self.figures["ttft_ms_p50"]


def result_of(
    name: str, load: Load, rounds: Mapping[str, Sequence[Round]], baselines: Sequence[str] = ()
) -> Result:
    """Sum up a target's rounds of a load, beside those of the baselines."""
    own = rounds[name]
    records = [record for one in own for record in one.records]
    used = [one.usage for one in own]
    return Result(
        name,
        load.concurrency,
        requests=len(records),
        errors=dict(Counter(one.error for one in records if one.error is not None)),
        figures={key: _median(one.figures[key] for one in own) for key in own[0].figures},
        cpu_s={role: _median(one.cpu_s.get(role, 0.0) for one in used) for role in used[0].cpu_s},
        rss_mb={role: max(one.rss_mb.get(role, 0.0) for one in used) for role in used[0].rss_mb},
        ttft_samples_ms=[round(1000 * record.ttft, 3) for one in own for record in one.good],
        baseline=name in baselines,
        rounds=len(own),
        ratios={other: _ratios(own, rounds[other]) for other in baselines if other != name},
    )


def _ratios(own: Sequence[Round], others: Sequence[Round]) -> dict[str, float]:
    pairs = [(one.figures, other.figures) for one, other in zip(own, others, strict=True)]
    return {
        "tokens_per_s": _median(
            a["tokens_per_s"] / (b["tokens_per_s"] or math.nan) for a, b in pairs
        ),
        "cpu_s": _median(a["cpu_s"] / b["cpu_s"] for a, b in pairs),
        "ttft_added_ms": _median(a["ttft_ms_p50"] - b["ttft_ms_p50"] for a, b in pairs),
    }


def _median(values: Iterable[float]) -> float:
    return float(np.median([*values]))


class Session:
    """The load generator of one target, a process, for any number of loads until the context ends."""

    def __init__(self, endpoints: Endpoints, target: type[Target]) -> None:
        self.target, self._endpoints = target, endpoints
        self._pool = ProcessPoolExecutor(1, get_context("spawn"), _open, (target, endpoints))

    def __enter__(self) -> Session:
        self._pid = self._result(self._pool.submit(os.getpid))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._pool.submit(_close).result()
        else:  # it may have a load for minutes
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        self._pool.shutdown()

    def run(self, load: Load, turn: int = 0) -> Round:
        """Put a load on the target. Raises ``ChildProcessError``: the generator has ended."""
        warmup, requests = plan(load, fast_tokenizer(self._endpoints.tokenizer), turn)
        self._result(self._pool.submit(_send, warmup, load.concurrency))
        server = self.target.server
        roles = dict.fromkeys(tree(self._pid), LOAD_GENERATOR if server else self.target.name)
        for pid in self._endpoints.pids if server else ():
            roles |= {process: role_of(command_of(process)) for process in tree(pid)}
        usage = Usage(roles)
        sent = self._pool.submit(_send, requests, load.concurrency)
        while wait([sent], SAMPLE_SECONDS).not_done:
            usage.sample()
        usage.sample()
        return Round(*self._result(sent), usage)

    def _result(self, sent: Future[T]) -> T:
        try:
            return sent.result()
        except BrokenProcessPool:
            raise ChildProcessError(f"the load generator of {self.target.name} ended") from None


def measure(endpoints: Endpoints, target: type[Target], load: Load, title: str = "") -> Result:
    """Put one load on one target. May be called by several threads at once."""
    with Session(endpoints, target) as session:
        measured = session.run(load)
    name = f"{target.name}, {title}" if title else target.name
    return result_of(name, load, {name: [measured]})


def run_loads(
    targets: Sequence[type[Target]],
    baselines: Sequence[type[Target]],
    loads: Sequence[Load],
    start: Start,
) -> list[Result]:
    """Put every load on every target; return the results in the order of the targets.

    All servers run at once and the targets take turns: figures of a machine at different times say little,
    and the ratios within a round say more. What a target needs is started by ``start``.
    """
    servers = {target: target.server or target.name for target in targets}
    if "cog" in servers.values():  # its Triton serves the others as well
        servers = {target: "cog" if name == "triton" else name for target, name in servers.items()}
    rounds: dict[Load, dict[str, list[Round]]] = {load: defaultdict(list) for load in loads}
    turns = count()
    with ExitStack() as stack:
        names = dict.fromkeys(servers.values())
        running = {name: stack.enter_context(start(name)) for name in names}
        sessions = [
            stack.enter_context(Session(running[server], target))
            for target, server in servers.items()
        ]
        for load in loads:
            for number in range(load.rounds):
                turn = load if number == 0 else replace(load, warmup=0)
                for session in sessions[:: -1 if number % 2 else 1]:
                    done, name = session.run(turn, next(turns)), session.target.name
                    place = f"{name} c={load.concurrency}, round {number + 1}"
                    progress(f"{place}: {done.figures['tokens_per_s']:.0f} tokens/s")
                    rounds[load][name].append(done)
    compared = [target.name for target in baselines]
    return [result_of(t.name, load, rounds[load], compared) for t in targets for load in loads]


# In the process of a load generator.
_loop: asyncio.AbstractEventLoop
_target: Target


def _open(kind: type[Target], endpoints: Endpoints) -> None:
    global _loop, _target
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the benchmark gets it too, and ends this process
    os.dup2(2, 1)  # standard output is the report's
    _loop = uvloop.new_event_loop()

    async def make() -> Target:
        return kind(endpoints)

    _target = _loop.run_until_complete(make())


def _close() -> None:
    _loop.run_until_complete(_target.close())


def _send(records: list[Record], streams: int) -> tuple[list[Record], float]:
    """Send the requests; return them with what came, and the CPU seconds that it took the generator."""
    # An engine's own threads are measured, and not the load generator's.
    clock = time.process_time if _target.server else time.thread_time
    gc.collect()
    gc.disable()  # a collection would count as latency
    began = clock()
    _loop.run_until_complete(_in_streams(records, streams))
    used = clock() - began
    gc.enable()
    for record in records:
        record.count(fast_tokenizer(_target.endpoints.tokenizer))
    return records, used


async def _in_streams(records: Sequence[Record], streams: int) -> None:
    left = iter(records)  # shared by all streams: each takes the next record
    began = time.perf_counter()

    async def stream() -> None:
        start = began  # for all: one whose turn comes late waits, and that counts
        for record in left:
            inputs = {"prompt": record.prompt, "temperature": 0.0, "seed": 0}
            inputs |= _target.forced(record.asked)
            record.start = start
            try:
                await asyncio.wait_for(_ask(inputs, record), REQUEST_TIMEOUT)
            except Exception as error:  # a part of the result: the load continues
                kind = "" if isinstance(error, AnswerError) else f"{type(error).__name__}: "
                record.error = " ".join(f"{kind}{error}".split())[:300]
            start = record.end = time.perf_counter()

    await asyncio.gather(*(stream() for _ in range(streams)))


async def _ask(inputs: Inputs, record: Record) -> None:
    async for part in _target.ask(inputs, secrets.token_hex(8)):
        record.parts.append((time.perf_counter(), part))
