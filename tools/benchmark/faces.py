"""OpenAI's API beside Cog's: the same load on both, in turns, each on a Triton of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from tools.benchmark.checks import Check, at_least, at_most
from tools.benchmark.load import Load
from tools.benchmark.measure import Running
from tools.benchmark.processes import LOAD_GENERATOR
from tools.benchmark.report import Result
from tools.benchmark.servers import started
from tools.benchmark.turns import run_loads

OPENAI, COG = "openai-sse", "cog-sse"
STREAMS = (16, 64)
ROUNDS = 3
LEAST_SHARE = 0.95
MOST_ADDED_MS = 5


def measure_faces(
    name: str, environment: Mapping[str, str], requests: int
) -> tuple[list[Result], list[Check]]:
    """Measure one face as a share of the other.

    Args:
        name: of the engine's way to stream, for the report.
        environment: of both servers, each of which answers in one process.
        requests: in each turn.

    Raises:
        CogTritonError, BenchmarkError: something could not be started or measured.
    """
    loads = [Load(streams, requests=requests, rounds=ROUNDS) for streams in STREAMS]
    with tempfile.TemporaryDirectory(prefix="cog-triton-benchmark-") as directory:

        def start(kind: str, cleanup: ExitStack) -> Running:
            return cleanup.enter_context(started(kind, environment, Path(directory)))

        results = run_loads([OPENAI, COG], [COG], loads, start, lambda _: None)
    checks = [
        check
        for openai, cog in zip(of(OPENAI, results), of(COG, results), strict=True)
        for check in promises(name, openai, cog)
    ]
    return [replace(result, target=f"{result.target}, {name}") for result in results], checks


def promises(name: str, openai: Result, cog: Result) -> list[Check]:
    """Return the promises under one load, of results in turns."""
    ratio, added = openai.ratio_to_baseline[COG], openai.ttft_p50_added_ms[COG]
    least = LEAST_SHARE * tokens_per_core_second(cog)
    return [
        at_least(
            f"OpenAI SSE / Cog SSE, {name}, {openai.concurrency} streams: tokens/s",
            *(ratio, LEAST_SHARE),
        ),
        at_most("  TTFT p50 above Cog's", added, MOST_ADDED_MS, "ms"),
        at_least("  tokens per core-second; 0.95 of Cog's", tokens_per_core_second(openai), least),
    ]


def tokens_per_core_second(result: Result) -> float:
    """Output tokens for each second that a core works for the stack, load generator aside."""
    used = sum(one["cpu_s"] for one in result.processes if one["role"] != LOAD_GENERATOR)
    return result.output_tokens / used if used else float("nan")


def of(target: str, results: list[Result]) -> list[Result]:
    """A target's results, in the order of the loads."""
    return [result for result in results if result.target == target]
