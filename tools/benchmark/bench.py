"""The command ``bench``: load on targets, or with ``--suite`` every goal for speed and memory.

The suite measures the machine that it runs on, including the load generator. The goals assume two
otherwise idle cores. For a goal that is a ratio, the suite measures both sides.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median

from cog_triton.server.installation import PACKAGE_ROOT
from cog_triton.settings import read_settings
from tools.benchmark import servers
from tools.benchmark.bench_command import Options
from tools.benchmark.load import WORDS, Load, loads_of
from tools.benchmark.measuring import Result, measure, run_loads
from tools.benchmark.processes import LOAD_GENERATOR
from tools.benchmark.report import Check, report_of
from tools.benchmark.servers import Environment, one_token_engine, simulated, started
from tools.benchmark.targets import (
    TARGETS,
    CogSse,
    Endpoints,
    TritonEngine,
    TritonHttp,
    fast_tokenizer,
)
from tools.command_line import begin, environment, progress

STREAMS, PACE_MS = 64, 20.0
LONG_PROMPTS, LONG_PROMPT_CHARACTERS = 100, 100_000

Found = Iterator[Result | Check]


def main(options: Options) -> int:
    """Measure what the options ask for and publish it; return 1 if a goal was missed."""
    begin()
    given = environment(options.settings)
    found = [*(run_suite(given) if options.suite else run_targets(options, given))]
    results = [one for one in found if isinstance(one, Result)]
    checks = [one for one in found if isinstance(one, Check)]
    report = report_of("Benchmark of cog-triton", given, results, checks)
    report.publish(file := options.artifact_dir / "benchmark.json")
    print(file)
    return int(not report.met)


def run_targets(options: Options, given: Environment) -> Found:
    def start(kind: str) -> AbstractContextManager[Endpoints]:
        if not options.url:
            return started(kind, given, options.artifact_dir)
        address = options.url.rpartition("://")[2]
        tokenizer = options.tokenizer or read_settings(given).tokenizer_dir
        return nullcontext(Endpoints(tokenizer, f"http://{address}", grpc=address, http=address))

    usual = [] if options.url else ["triton-engine"]
    baselines = usual if options.baseline is None else options.baseline
    names = dict.fromkeys([*options.target, *baselines])
    chosen = [TARGETS[name] for name in names]
    compared = [TARGETS[name] for name in baselines]
    return iter(run_loads(chosen, compared, loads_of(options, options.concurrency), start))


def run_suite(given: Environment) -> Found:
    """Measure every goal, which takes some minutes."""
    for part in (each_token, pace, whole_answers, long_outputs, long_prompts, start_times):
        progress(f"measuring {part.__name__} ...")
        with tempfile.TemporaryDirectory(prefix="cog-triton-benchmark-") as directory:
            yield from part(given, Path(directory))


def each_token(environment: Environment, directory: Path) -> Found:
    """One token a response, as TensorRT-LLM's C++ backend streams: a token's cost to the whole stack."""
    with started("cog", one_token_engine(environment, directory), directory) as running:
        full = measure(running, CogSse, Load(STREAMS, requests=1000))
        yield full
        classic = measure(running, TritonHttp, Load(STREAMS, requests=2 * STREAMS))
        yield classic
    name = f"one token a response, {STREAMS} streams, no pause"
    per_core_second = full.figures["tokens_per_core_second"]
    yield Check(f"{name}: tokens per core-second", per_core_second, 10_000)
    yield Check(f"{name}: as a multiple of classic HTTP, tokens/s", full.rate / classic.rate, 5)
    yield Check("memory of everything but the engine", memory(full), 900, "MB", least=False)


def pace(environment: Environment, directory: Path) -> Found:
    """An engine at a usual pace: tokens have to come when they are made, one by one."""
    # The lengths differ, so that requests do not all begin at the same moment.
    load = Load(STREAMS, requests=8 * STREAMS, output_stddev=32)
    with started("cog", one_token_engine(environment, directory, PACE_MS), directory) as running:
        stack = measure(running, CogSse, load, "paced")
        yield stack
        engine = measure(running, TritonEngine, load, "paced")
        yield engine
    name = f"{STREAMS} streams at {1000 / PACE_MS:g} tokens/s"
    found = stack.figures
    added = stack.ttft - engine.ttft
    gap = found["gap_ms_p99"]
    yield Check(f"{name}: tokens per core-second", found["tokens_per_core_second"], 5_000)
    yield Check(f"{name}: TTFT p50 above the tensorrt_llm model's", added, 15, "ms", least=False)
    yield Check(f"{name}: gap between chunks p99", gap, 2 * PACE_MS, "ms", least=False)
    yield Check(f"{name}: chunks of one token", found["one_token_chunks"], 0.95)


def whole_answers(environment: Environment, directory: Path) -> Found:
    """An engine that costs nothing and hands over all that is ready: a response is a whole answer."""
    given = {**environment, **simulated(directory)}
    with started("cog", given, directory) as running:
        for streams, requests, least in ((STREAMS, 2000, 235), (1, 200, 40)):
            measured = measure(running, CogSse, Load(streams, requests), "whole answers")
            yield measured
            name = (
                "whole answers, 1 stream" if streams == 1 else f"whole answers, {streams} streams"
            )
            yield Check(name, measured.figures["requests_per_s"], least, "requests/s")


def long_outputs(environment: Environment, directory: Path) -> Found:
    """The same work for each token however many came before it: one token a response, through Cog."""
    given = {**environment, **simulated(directory, each_token=True)}
    with started("cog", given, directory) as running:
        short = measure(running, CogSse, Load(16, requests=256), "128 tokens")
        yield short
        load = Load(16, requests=16, output_tokens=4096)
        long = measure(running, CogSse, load, "4,096 tokens")
        yield long
    grown = memory(long) / memory(short)
    yield Check("tokens/s at 4,096 output tokens / at 128", long.rate / short.rate, 0.9)
    yield Check("memory at 4,096 output tokens / at 128", grown, 1.1, least=False)


def long_prompts(environment: Environment, directory: Path) -> Found:
    """Streams of which each token is due at a time, while long prompts arrive one after another."""
    load = Load(16, requests=64, output_tokens=200)
    words = " ".join(WORDS)
    given = {**environment, **simulated(directory, PACE_MS)}
    with started("cog", given, directory) as running, ThreadPoolExecutor(1) as pool:
        base = measure(running, CogSse, load, "without long prompts")
        yield base
        tokens = len(fast_tokenizer(running.tokenizer).encode(words).ids)
        length = LONG_PROMPT_CHARACTERS * tokens // len(words)
        long = Load(requests=LONG_PROMPTS, warmup=0, input_tokens=length, output_tokens=2)
        sent = pool.submit(measure, running, CogSse, long)
        beside = measure(running, CogSse, load, "with long prompts")
        yield beside
        sent.result()
    delay = beside.figures["gap_ms_p99"] - base.figures["gap_ms_p99"]
    name = f"delay of others by prompts of {LONG_PROMPT_CHARACTERS:,} characters (gap p99)"
    yield Check(name, delay, 20, "ms", least=False)


def start_times(environment: Environment, directory: Path) -> Found:
    """Time setup() against a bare tritonserver on the same repository, turn by turn; medians of three."""

    def setup_seconds(given: Environment) -> float:
        done = subprocess.run(
            [sys.executable, "-m", "tools.benchmark.setup_time"],
            env={**given, **servers.ANY_PORTS},
            cwd=PACKAGE_ROOT,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise ChildProcessError(f"a setup failed: {done.stderr.strip().splitlines()[-1]}")
        return float(done.stdout.splitlines()[-1])

    def bare_seconds() -> float:
        began = time.perf_counter()
        with servers.triton_server(environment):
            return time.perf_counter() - began

    turns = [(setup_seconds(environment), bare_seconds()) for _ in range(3)]
    demo, bare = (median(seconds) for seconds in zip(*turns, strict=True))
    free = median(setup_seconds({**environment, **simulated(directory)}) for _ in range(3))
    yield Check("setup() with the demo model / bare tritonserver", demo / bare, 1.5, least=False)
    yield Check("setup() with the simulated engine", free, 3, "s", least=False)


def memory(one: Result) -> float:
    """Return the megabytes of all processes but the engine's and the load generator."""
    ours = one.rss_mb.keys() - {"tensorrt_llm", LOAD_GENERATOR}
    return sum(one.rss_mb[role] for role in ours)
