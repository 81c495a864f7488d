"""What this project promises of its speed and memory, measured in one run (``make bench``).

The figures are of the machine that it runs on, load generator included; the promises are for two cores
that nothing else uses. Where a promise is a ratio, both sides are measured here.
"""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from cog_triton.server.installation import PACKAGE_ROOT
from tools.benchmark.generator import BenchmarkError
from tools.benchmark.load import WORDS, Length, Load
from tools.benchmark.measure import measure, run_loads
from tools.benchmark.processes import LOAD_GENERATOR, MEGABYTE, command_of, role_of, tree
from tools.benchmark.report import Check, Result
from tools.benchmark.servers import (
    ANY_PORTS,
    Environment,
    cog_server,
    one_token_engine,
    simulated,
    single_tokens,
    started,
    triton_server,
)
from tools.benchmark.targets import Endpoints
from tools.benchmark.triton_targets import load_tokenizer

STREAMS = 64
PACE_MS = 20.0
LONG_PROMPT_CHARACTERS = 100_000
LONG_PROMPTS = 100
COG, OPENAI = "cog-sse", "openai-sse"

Findings = tuple[list[Result], list[Check]]


def run_suite(environment: Environment, progress: Callable[[str], object]) -> Findings:
    """Measure everything, which takes some minutes.

    Raises:
        CogTritonError, BenchmarkError: something could not be started or measured.
    """
    results: list[Result] = []
    checks: list[Check] = []
    for part in (
        each_token,
        pace,
        faces,
        whole_answers,
        long_outputs,
        long_prompts,
        start_times,
        imports,
    ):
        progress(f"measuring {part.__name__} ...")
        measured, found = part(environment)
        results += measured
        checks += found
    return results, checks


def each_token(environment: Environment) -> Findings:
    """One token a response, as TensorRT-LLM's C++ backend streams: a token's cost to the whole stack."""
    with one_token_engine(environment) as engine, _cog(engine) as running:
        full = measure(running, COG, Load(STREAMS, requests=1000))
        rss = sum(process.memory_info().rss for process in _without_engine(running))
    with one_token_engine(environment) as engine, triton_server(engine) as running:
        base = measure(running, "triton-http", Load(STREAMS, requests=2 * STREAMS))
    base = replace(base, target="triton-http, the classic ensemble", baseline=True)
    ratio = full.output_tokens_per_s / base.output_tokens_per_s
    name = f"one token a response, {STREAMS} streams, no pause"
    return [replace(full, ratio_to_baseline={base.target: ratio}), base], [
        Check(f"{name}: tokens per core-second", full.tokens_per_core_second, 10_000),
        Check(f"{name}: as a multiple of classic HTTP, tokens/s", ratio, 5),
        Check("memory of everything but the engine", rss / MEGABYTE, 900, "MB", least=False),
    ]


def pace(environment: Environment) -> Findings:
    """An engine at a usual pace: tokens have to come when they are made, one by one."""
    # The lengths differ, so that requests do not all begin at the same moment.
    load = Load(STREAMS, requests=8 * STREAMS, output=Length(128, 32))
    with one_token_engine(environment, PACE_MS) as paced, _cog(paced) as running:
        stack = measure(running, COG, load)
        engine = replace(measure(running, "triton-engine", load), baseline=True)
    ratio = stack.output_tokens_per_s / engine.output_tokens_per_s
    added = _number(stack.ttft_ms["p50"]) - _number(engine.ttft_ms["p50"])
    gap, single = stack.chunk_gap_ms["p99"], stack.tokens_per_chunk["one_token_fraction"]
    name = f"{STREAMS} streams at {1000 / PACE_MS:g} tokens/s"
    return [replace(stack, ratio_to_baseline={engine.target: ratio}), engine], [
        Check(f"{name}: tokens per core-second", stack.tokens_per_core_second, 5_000),
        Check(f"{name}: TTFT p50 above the tensorrt_llm model's", added, 15, "ms", least=False),
        Check(f"{name}: gap between chunks p99", _number(gap), 2 * PACE_MS, "ms", least=False),
        Check(f"{name}: chunks of one token", _number(single), 0.95),
    ]


def faces(environment: Environment) -> Findings:
    """OpenAI's API beside Cog's, with each token by itself and with whole answers, in turns."""
    results: list[Result] = []
    checks: list[Check] = []
    for name, requests in (("one token a response", 128), ("whole answers", 500)):
        loads = [Load(streams, requests=requests, rounds=3) for streams in (16, 64)]
        with tempfile.TemporaryDirectory(prefix="cog-triton-benchmark-") as directory:
            given = {**environment, **simulated()}
            if requests == 128:
                given |= single_tokens(Path(directory))

            def start(
                kind: str, cleanup: Any, given: Environment = given, directory: str = directory
            ) -> Endpoints:
                found: Endpoints = cleanup.enter_context(started(kind, given, Path(directory)))
                return found

            found = run_loads([OPENAI, COG], [COG], loads, start, lambda _: None)
        results += [replace(one, target=f"{one.target}, {name}") for one in found]
        for openai, cog in zip(found[: len(loads)], found[len(loads) :], strict=True):
            about = f"OpenAI SSE / Cog SSE, {name}, {openai.concurrency} streams"
            per_core = openai.tokens_per_core_second / cog.tokens_per_core_second
            added = openai.ttft_p50_added_ms[COG]
            checks += [
                Check(f"{about}: tokens/s", openai.ratio_to_baseline[COG], 0.95),
                Check(f"{about}: TTFT p50 above Cog's", added, 5, "ms", least=False),
                Check(f"{about}: tokens per core-second", per_core, 0.95),
            ]
    return results, checks


def whole_answers(environment: Environment) -> Findings:
    """An engine that costs nothing and hands over all that is ready: a response is a whole answer."""
    with _cog({**environment, **simulated()}) as running:
        many = measure(running, COG, Load(STREAMS, requests=2000))
        one = measure(running, COG, Load(1, requests=200))
        maps = [Path(f"/proc/{p.pid}/maps").read_text() for p in _without_engine(running)]
    torch = sum("libtorch" in text for text in maps)
    return [many, one], [
        Check(f"whole answers, {STREAMS} streams", many.requests_per_s, 235, "requests/s"),
        Check("whole answers, 1 stream", one.requests_per_s, 40, "requests/s"),
        Check("processes other than the engine that loaded torch", torch, 0, least=False),
    ]


def long_outputs(environment: Environment) -> Findings:
    """The same work for each token however many came before it: one token a response, through Cog."""
    with tempfile.TemporaryDirectory(prefix="cog-triton-benchmark-") as directory:
        given = {**environment, **simulated(), **single_tokens(Path(directory))}
        with _cog(given) as running:
            short = measure(running, COG, Load(16, requests=256, output=Length(128)))
            long = measure(running, COG, Load(16, requests=16, output=Length(4096)))
    before, after = (
        sum(
            used["rss_mb"]
            for used in one.processes
            if used["role"] not in ("tensorrt_llm", LOAD_GENERATOR)
        )
        for one in (short, long)
    )
    rate = long.output_tokens_per_s / short.output_tokens_per_s
    name = "cog-sse, one token a response"
    return [
        replace(long, target=f"{name}, 4,096 tokens"),
        replace(short, target=name, baseline=True),
    ], [
        Check("tokens/s at 4,096 output tokens / at 128", rate, 0.9),
        Check("memory at 4,096 output tokens / at 128", after / before, 1.1, least=False),
    ]


def long_prompts(environment: Environment) -> Findings:
    """Streams of which each token is due at a time, while long prompts arrive one after another."""
    load = Load(16, requests=64, output=Length(200))
    with _cog({**environment, **simulated(PACE_MS)}) as running:
        base = measure(running, COG, load)
        words = " ".join(WORDS)
        tokens = len(load_tokenizer(running.tokenizer).encode(words).ids)
        length = Length(LONG_PROMPT_CHARACTERS * tokens / len(words))
        long = Load(1, requests=LONG_PROMPTS, warmup=0, input=length, output=Length(2))
        with ThreadPoolExecutor(1) as pool:
            sent = pool.submit(measure, running, COG, long)
            beside = measure(running, COG, load)
            sent.result()
    delay = _number(beside.chunk_gap_ms["p99"]) - _number(base.chunk_gap_ms["p99"])
    name = f"delay of others by prompts of {LONG_PROMPT_CHARACTERS:,} characters (gap p99)"
    return [
        replace(beside, target="cog-sse, beside long prompts"),
        replace(base, target="cog-sse, without them", baseline=True),
    ], [Check(name, delay, 20, "ms", least=False)]


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


def start_times(environment: Environment) -> Findings:
    """setup() against a bare tritonserver on the same repository, turn by turn; medians of three."""

    def setup_seconds(given: Environment) -> float:
        done = subprocess.run(
            [sys.executable, "-c", SETUP],
            env={**given, **ANY_PORTS},
            cwd=PACKAGE_ROOT,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise BenchmarkError(f"a setup failed: {done.stderr.strip().splitlines()[-1]}")
        return float(done.stdout.splitlines()[-1])

    def bare_seconds() -> float:
        began = time.perf_counter()
        with triton_server(environment):
            return time.perf_counter() - began

    turns = [(setup_seconds(environment), bare_seconds()) for _ in range(3)]
    demo, bare = (statistics.median(seconds) for seconds in zip(*turns, strict=True))
    free = statistics.median(setup_seconds({**environment, **simulated()}) for _ in range(3))
    return [], [
        Check("setup() with the demo model / bare tritonserver", demo / bare, 1.5, least=False),
        Check("setup() with the simulated engine", free, 3, "s", least=False),
    ]


def imports(environment: Environment) -> Findings:
    """``import cog_triton``, beyond the start of Python; median of five."""

    def seconds(code: str) -> float:
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True, env=environment, cwd=PACKAGE_ROOT)
        return time.perf_counter() - began

    taken = statistics.median(seconds("import cog_triton") - seconds("pass") for _ in range(5))
    return [], [Check("import cog_triton", taken, 0.3, "s", least=False)]


@contextmanager
def _cog(environment: Environment) -> Iterator[Endpoints]:
    with (
        tempfile.TemporaryDirectory(prefix="cog-triton-benchmark-") as directory,
        cog_server(environment, Path(directory) / "cog.log") as running,
    ):
        yield running


def _without_engine(running: Endpoints) -> list[Any]:
    processes = [process for pid in running.pids for process in tree(pid)]
    return [process for process in processes if role_of(command_of(process)) != "tensorrt_llm"]


def _number(value: float | None) -> float:
    return math.nan if value is None else value
