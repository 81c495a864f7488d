"""What this project promises of its speed and memory, measured in one run (``make bench``).

The figures are of the machine that it runs on, load generator included; the promises are for two cores
that nothing else uses. Where a promise is a ratio, both sides are measured here.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped, unused-ignore]

from cog_triton.server.installation import PACKAGE_ROOT
from cog_triton.server.tritonserver import TritonServer
from cog_triton.settings import read_settings
from tools.benchmark.checks import Check, at_least, at_most
from tools.benchmark.faces import measure_faces
from tools.benchmark.load import WORDS, Length, Load
from tools.benchmark.measure import BenchmarkError, Running, measure
from tools.benchmark.one_token import TEXT, one_token_engine
from tools.benchmark.processes import LOAD_GENERATOR, MEGABYTE, role_of
from tools.benchmark.report import Result
from tools.benchmark.servers import (
    ANY_PORTS,
    cog_server,
    filled_repository,
    triton_server,
)
from tools.benchmark.vocabulary import load_vocabulary

STREAMS = 64
PACE_MS = 20.0
LONG_PROMPT_CHARACTERS = 100_000
LONG_PROMPTS = 100
FREE = {"ENGINE": "simulated", "SIMULATED_TEXT": TEXT, "COG_MAX_CONCURRENCY": "256"}
PACED = {**FREE, "SIMULATED_INTER_TOKEN_MS": str(PACE_MS)}
# TensorRT-LLM's C++ backend streams like this, and so does the ensemble around it.
CLASSIC = "server: {tensorrt_llm: {args: {max_tokens_per_response: 1}}}\n"

Environment = Mapping[str, str]
Progress = Callable[[str], object]


Findings = tuple[list[Result], list[Check]]


def run_suite(environment: Environment, progress: Progress) -> Findings:
    """Measures everything. Takes some minutes.

    Raises:
        CogTritonError, BenchmarkError: something could not be started or measured.
    """
    results: list[Result] = []
    checks: list[Check] = []
    parts = (
        each_token,
        pace,
        faces,
        whole_answers,
        long_outputs,
        long_prompts,
        start_times,
        imports,
    )
    for part in parts:
        progress(f"measuring {part.__name__} ...")
        measured, found = part(environment)
        results += measured
        checks += found
    return results, checks


def each_token(environment: Environment) -> Findings:
    """One token a response, as TensorRT-LLM's C++ backend streams: what a token costs the whole stack."""
    with one_token_engine(environment) as engine, _cog(engine) as running:
        full = measure(running, "cog-sse", Load(STREAMS, requests=1000))
        memory = _memory(running)
    with one_token_engine(environment) as engine, triton_server(engine) as running:
        base = measure(running, "triton-http", Load(STREAMS, requests=2 * STREAMS))
    base = replace(base, target="triton-http, the classic ensemble", baseline=True)
    ratio = _rate(full) / _rate(base)
    full = replace(full, ratio_to_baseline={base.target: ratio})
    name = f"one token a response, {STREAMS} streams, no pause"
    return (
        [full, base],
        [
            at_least(f"{name}: tokens per core-second", _per_core(full), 10_000),
            at_least("  as a multiple of classic HTTP, tokens/s", ratio, 5),
            at_most("memory of everything but the engine", memory, 900, "MB"),
        ],
    )


def pace(environment: Environment) -> Findings:
    """An engine at a usual pace: tokens have to come when they are made, one by one.

    The lengths differ, so that requests do not all begin at the same moment.
    """
    load = Load(STREAMS, requests=8 * STREAMS, output=Length(128, 32))
    with one_token_engine(environment, PACE_MS) as paced, _cog(paced) as running:
        stack = measure(running, "cog-sse", load)
        engine = replace(measure(running, "triton-engine", load), baseline=True)
    stack = replace(stack, ratio_to_baseline={engine.target: _rate(stack) / _rate(engine)})
    added = _value(stack.ttft_ms, "p50") - _value(engine.ttft_ms, "p50")
    gap = _value(stack.chunk_gap_ms, "p99")
    alone = _value(stack.tokens_per_chunk, "one_token_fraction")
    name = f"{STREAMS} streams at {1000 / PACE_MS:g} tokens/s"
    return (
        [stack, engine],
        [
            at_least(f"{name}: tokens per core-second", _per_core(stack), 5_000),
            at_most("  TTFT p50 above the tensorrt_llm model's", added, 15, "ms"),
            at_most("  inter-token latency p99 (between chunks)", gap, 2 * PACE_MS, "ms"),
            at_least("  chunks of one token", alone, 0.95),
        ],
    )


def whole_answers(environment: Environment) -> Findings:
    """An engine that costs nothing and hands over all that is ready: a response is a whole answer."""
    with _cog({**environment, **FREE}) as running:
        many = measure(running, "cog-sse", Load(STREAMS, requests=2000))
        one = measure(running, "cog-sse", Load(1, requests=200))
        torch = _processes_with_torch(running)
    return (
        [many, one],
        [
            at_least(f"whole answers, {STREAMS} streams", many.requests_per_s, 235, "requests/s"),
            at_least("whole answers, 1 stream", one.requests_per_s, 40, "requests/s"),
            at_most("processes other than the engine that loaded torch", torch, 0),
        ],
    )


def faces(environment: Environment) -> Findings:
    """OpenAI's API beside Cog's, with each token by itself and with whole answers."""
    with _classic(environment) as classic:
        each, each_checks = measure_faces("one token a response", classic, 128)
    whole, whole_checks = measure_faces("whole answers", {**environment, **FREE}, 500)
    return [*each, *whole], [*each_checks, *whole_checks]


def long_outputs(environment: Environment) -> Findings:
    """The same work for each token however many came before it: one token a response, through Cog."""
    with _classic(environment) as classic, _cog(classic) as running:
        short = measure(running, "cog-sse", Load(16, requests=256, output=Length(128)))
        long = measure(running, "cog-sse", Load(16, requests=16, output=Length(4096)))
    before, after = (sum(_rss(one, "tensorrt_llm").values()) for one in (short, long))
    short = replace(short, target="cog-sse, one token a response", baseline=True)
    return (
        [replace(long, target="cog-sse, one token a response, 4,096 tokens"), short],
        [
            at_least("tokens/s at 4,096 output tokens / at 128", _rate(long) / _rate(short), 0.9),
            at_most("memory at 4,096 output tokens / at 128", after / before, 1.1),
        ],
    )


def long_prompts(environment: Environment) -> Findings:
    """Streams of which each token is due at a time, while long prompts arrive one after another."""
    load = Load(16, requests=64, output=Length(200))
    with _cog({**environment, **PACED}) as running:
        alone = measure(running, "cog-sse", load)
        with _long_prompts_sent(running):
            beside = measure(running, "cog-sse", load)
    delay = _value(beside.chunk_gap_ms, "p99") - _value(alone.chunk_gap_ms, "p99")
    name = f"delay of others by prompts of {LONG_PROMPT_CHARACTERS:,} characters (gap p99)"
    alone = replace(alone, target="cog-sse, alone", baseline=True)
    return (
        [replace(beside, target="cog-sse, beside long prompts"), alone],
        [at_most(name, delay, 20, "ms")],
    )


def start_times(environment: Environment) -> Findings:
    """setup() against a bare tritonserver on the same repository, turn by turn; medians of three."""
    demo, bare = [], []
    for _ in range(3):
        demo.append(_setup_seconds(environment))
        bare.append(_bare_seconds(environment))
    simulated = [_setup_seconds({**environment, **FREE}) for _ in range(3)]
    ratio = statistics.median(demo) / statistics.median(bare)
    return (
        [],
        [
            at_most("setup() with the demo model / bare tritonserver", ratio, 1.5),
            at_most("setup() with the simulated engine", statistics.median(simulated), 3, "s"),
        ],
    )


def imports(environment: Environment) -> Findings:
    """``import cog_triton``, beyond the start of Python; median of five."""

    def seconds(code: str) -> float:
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True, env=environment, cwd=PACKAGE_ROOT)
        return time.perf_counter() - started

    taken = [seconds("import cog_triton") - seconds("pass") for _ in range(5)]
    return [], [at_most("import cog_triton", statistics.median(taken), 0.3, "s")]


# What is started and read for a measurement


@contextmanager
def _classic(environment: Environment) -> Iterator[Environment]:
    """The environment of servers with an engine that costs nothing and sends each token by itself."""
    with tempfile.TemporaryDirectory(prefix="cog-triton-benchmark-") as directory:
        config = Path(directory) / "config.yaml"
        config.write_text(CLASSIC)
        yield {**environment, **FREE, "COG_TRITON_CONFIG": str(config)}


@contextmanager
def _cog(environment: Environment) -> Iterator[Running]:
    with (
        tempfile.TemporaryDirectory(prefix="cog-triton-benchmark-") as directory,
        cog_server(environment, Path(directory) / "log") as running,
    ):
        yield running


@contextmanager
def _long_prompts_sent(running: Running) -> Iterator[None]:
    words = " ".join(WORDS)
    tokens = len(load_vocabulary(running.tokenizer).encode(words))
    length = Length(LONG_PROMPT_CHARACTERS * tokens / len(words))
    load = Load(1, requests=LONG_PROMPTS, warmup=0, input=length, output=Length(2))
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(measure, running, "cog-sse", load)
        yield
        sent.result()


def _memory(running: Running) -> float:
    """Resident megabytes, shared pages counted for each process."""
    return float(sum(p.memory_info().rss for p in _without_engine(running))) / MEGABYTE


def _processes_with_torch(running: Running) -> int:
    maps = (Path(f"/proc/{p.pid}/maps").read_text() for p in _without_engine(running))
    return sum("libtorch" in text for text in maps)


def _without_engine(running: Running) -> list[Any]:
    parents = [psutil.Process(pid) for pid in running.pids]
    found = [one for parent in parents for one in (parent, *parent.children(recursive=True))]
    return [one for one in found if role_of(one.cmdline()) != "tensorrt_llm"]


SETUP = """
import asyncio, time
from predict import Predictor
async def main():
    predictor = Predictor()
    started = time.perf_counter()
    await predictor.setup()
    print(time.perf_counter() - started)
    await predictor.deployment.stop()
asyncio.run(main())
"""


def _setup_seconds(environment: Environment) -> float:
    done = subprocess.run(
        [sys.executable, "-c", SETUP],
        check=False,
        env={**environment, **ANY_PORTS},
        cwd=PACKAGE_ROOT,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise BenchmarkError(f"a setup failed: {done.stderr.strip().splitlines()[-1]}")
    return float(done.stdout.splitlines()[-1])


def _bare_seconds(environment: Environment) -> float:
    settings = read_settings({**environment, **ANY_PORTS})
    with tempfile.TemporaryDirectory(prefix="cog-triton-benchmark-") as directory:
        repository = filled_repository(settings, Path(directory))
        server = TritonServer(repository, Path(directory), settings)
        started = time.perf_counter()
        try:
            server.start()
            return time.perf_counter() - started
        finally:
            server.stop()


def _rss(result: Result, *without: str) -> dict[str, float]:
    return {
        one["role"]: one["rss_mb"]
        for one in result.processes
        if one["role"] not in (*without, LOAD_GENERATOR)
    }


def _per_core(result: Result) -> float:
    """Output tokens for each second that a core works for the stack, load generator aside."""
    used = sum(one["cpu_s"] for one in result.processes if one["role"] != LOAD_GENERATOR)
    return result.output_tokens / used if used else float("nan")


def _rate(result: Result) -> float:
    return result.output_tokens_per_s


def _value(figures: Mapping[str, float | None], name: str) -> float:
    value = figures[name]
    return float("nan") if value is None else value
