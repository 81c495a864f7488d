"""Compares the embedded engine with transformers, called directly and as its own server.

Figures of different machines, or of one machine at different times, say little. So the contestants
take turns, round by round, and what counts are the ratios within a round, of which medians are taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np

from tools.benchmark.engine_contestants import (
    Contestant,
    ContestantError,
    Prompts,
    Stream,
)

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Load:
    """Streams that start together, so many times.

    Attributes:
        streams: how many at once; one load for each number.
        input_tokens, output_tokens: of each stream.
        rounds: how often each contestant has its turn.
        seed: of the prompts, which are all different.
    """

    streams: Sequence[int]
    input_tokens: int
    output_tokens: int
    rounds: int
    seed: int = 0


@dataclass(frozen=True)
class Round:
    """One turn of one contestant. Times are in milliseconds, latencies are percentiles.

    Attributes:
        tokens_per_s: output tokens of all streams by the time from the start to the last of them.
        ttft_ms: time to first token of the streams.
        itl_ms: inter-token latency; several tokens that arrive together share their wait.
        cpu_s: CPU seconds of the contestant and of the client.
    """

    tokens_per_s: float
    ttft_ms: Mapping[str, float]
    itl_ms: Mapping[str, float]
    cpu_s: float


@dataclass(frozen=True)
class Result:
    """The medians of one contestant's rounds at one number of streams.

    Attributes:
        ratios: tokens/s by that of each other contestant in the same round.
        cpu_ratios: CPU seconds likewise; steadier on a machine with other work to do.
        ttft_p50_added_ms: to that of each other contestant in the same round.
    """

    contestant: str
    streams: int
    tokens_per_s: float
    ttft_ms: Mapping[str, float]
    itl_ms: Mapping[str, float]
    cpu_s: float
    ratios: Mapping[str, float]
    cpu_ratios: Mapping[str, float]
    ttft_p50_added_ms: Mapping[str, float]


@dataclass(frozen=True)
class Target:
    """What is asked for, ``value`` being between ``least`` and ``most``."""

    name: str
    streams: int
    value: float
    least: float = -np.inf
    most: float = np.inf

    @property
    def met(self) -> bool:
        return self.least <= self.value <= self.most


def compare(
    contestants: Mapping[str, Contestant],
    load: Load,
    vocabulary: int,
    progress: Callable[[str], None],
) -> list[Result]:
    """Lets the contestants take turns at every load. Their order is turned round each time.

    Raises:
        ContestantError: one failed, or made fewer tokens than asked for.
    """
    random = np.random.default_rng(load.seed)
    results = []
    for streams in load.streams:
        rounds: dict[str, list[Round]] = {name: [] for name in contestants}
        for number in range(load.rounds):
            order = list(contestants.items())
            for name, contestant in order if number % 2 == 0 else reversed(order):
                if number == 0:
                    warm_up = prompts(streams, load.input_tokens, vocabulary, random)
                    contestant.run(warm_up, min(WARM_UP_TOKENS, load.output_tokens))
                fresh = prompts(streams, load.input_tokens, vocabulary, random)
                rounds[name].append(measure(name, contestant, fresh, load.output_tokens))
                rate = rounds[name][-1].tokens_per_s
                progress(f"{streams} streams, round {number + 1}: {name} {rate:.1f} tokens/s")
        results += [summary(name, streams, rounds) for name in contestants]
    return results


def prompts(streams: int, tokens: int, vocabulary: int, random: np.random.Generator) -> Prompts:
    """Prompts of random token ids, without the end token, 0."""
    found: Prompts = random.integers(1, vocabulary, (streams, tokens)).tolist()
    return found


def measure(name: str, contestant: Contestant, requests: Prompts, output_tokens: int) -> Round:
    """One turn.

    Raises:
        ContestantError: it failed, or made fewer tokens than asked for.
    """
    before = contestant.cpu_seconds()
    streams = contestant.run(requests, output_tokens)
    cpu_s = contestant.cpu_seconds() - before
    for stream in streams:
        if not stream or stream[-1][1] != output_tokens:
            made = stream[-1][1] if stream else 0
            raise ContestantError(f"{name} made {made} of {output_tokens} tokens")
    return figures(streams, cpu_s)


def figures(streams: Sequence[Stream], cpu_s: float) -> Round:
    """What the arrivals of one turn amount to."""
    tokens = sum(stream[-1][1] for stream in streams)
    seconds = max(stream[-1][0] for stream in streams)
    first = [next(at for at, count in stream if count > 0) for stream in streams]
    gaps = [gap for stream in streams for gap in token_gaps(stream)]
    return Round(
        tokens / seconds,
        _percentiles(first, (50, 90, 99)),
        _percentiles(gaps, (50, 99)),
        cpu_s,
    )


def token_gaps(stream: Stream) -> list[float]:
    """The seconds between each token and the one before, except the first arrival's."""
    with_tokens = [after for before, after in pairwise([(0.0, 0), *stream]) if after[1] > before[1]]
    return [
        (at - earlier) / (count - had)
        for (earlier, had), (at, count) in pairwise(with_tokens)
        for _ in range(count - had)
    ]


def summary(name: str, streams: int, rounds: Mapping[str, Sequence[Round]]) -> Result:
    """One contestant's medians over its rounds, and those of its ratios to the others."""
    own = rounds[name]
    others = {other: found for other, found in rounds.items() if other != name}

    def against(compared: Callable[[Round, Round], float]) -> dict[str, float]:
        return {other: median(map(compared, own, found)) for other, found in others.items()}

    return Result(
        name,
        streams,
        median(one.tokens_per_s for one in own),
        _medians([one.ttft_ms for one in own]),
        _medians([one.itl_ms for one in own]),
        median(one.cpu_s for one in own),
        ratios=against(lambda a, b: a.tokens_per_s / b.tokens_per_s),
        cpu_ratios=against(lambda a, b: a.cpu_s / b.cpu_s),
        ttft_p50_added_ms=against(lambda a, b: a.ttft_ms["p50"] - b.ttft_ms["p50"]),
    )


def targets(results: Sequence[Result], device: str) -> list[Target]:
    """What the engine and the stack have to reach, as far as it was measured."""
    on_gpu = device.startswith("cuda")
    found = []
    for result in results:
        ratios, added = result.ratios, result.ttft_p50_added_ms
        of = result.contestant, result.streams
        if of[0] == "engine" and "transformers" in ratios:
            found.append(Target("engine/transformers", of[1], ratios["transformers"], least=0.95))
        if of[0] == "stack" and "engine" in ratios:
            found.append(Target("stack/engine", of[1], ratios["engine"], least=0.95))
            if of[1] == 16 and on_gpu:  # on a CPU it is less than a step of the model
                found.append(Target("stack TTFT - engine's, ms", 16, added["engine"], most=10.0))
        if of[0] == "stack" and "serve" in ratios:
            found.append(Target("stack/serve", of[1], ratios["serve"], least=1.0))
            found.append(Target("stack TTFT - serve's, ms", of[1], added["serve"], most=0.0))
    return found


def table(results: Sequence[Result]) -> str:
    """The results for people to read."""
    lines = [
        f"{'':14}{'streams':>8}{'tokens/s':>10}{'TTFT p50':>10}{'p90':>8}{'p99':>8}"
        f"{'ITL p50':>9}{'p99':>8}{'CPU s':>8}{'/transformers':>15}{'/serve':>8}"
    ]
    for one in results:
        ttft = "".join(f"{one.ttft_ms[p]:{w}.1f}" for p, w in (("p50", 10), ("p90", 8), ("p99", 8)))
        itl = f"{one.itl_ms['p50']:9.1f}{one.itl_ms['p99']:8.1f}"
        lines.append(
            f"{one.contestant:14}{one.streams:8}{one.tokens_per_s:10.1f}{ttft}{itl}{one.cpu_s:8.2f}"
            f"{_ratio(one, 'transformers'):>15}{_ratio(one, 'serve'):>8}"
        )
    return "\n".join(lines)


def report(results: Sequence[Result], *, device: str, **settings: Any) -> dict[str, Any]:
    """The results for programs to read: JSON values."""
    return {
        "benchmark": "engine",
        "device": device,
        **settings,
        "results": [_rounded(asdict(result)) for result in results],
        "targets": [
            {
                "name": target.name,
                "streams": target.streams,
                "value": round(target.value, 4),
                "met": target.met,
            }
            for target in targets(results, device)
        ],
    }


def _ratio(result: Result, other: str) -> str:
    if result.contestant == other:
        return "1"
    return f"{result.ratios[other]:.3f}" if other in result.ratios else "-"


def _percentiles(seconds: Sequence[float], wanted: Sequence[int]) -> dict[str, float]:
    values = np.percentile(seconds, wanted) * 1000 if seconds else [0.0] * len(wanted)
    return {f"p{p}": float(value) for p, value in zip(wanted, values, strict=True)}


def _medians(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: median(one[name] for one in found) for name in found[0]}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(inner) for name, inner in value.items()}
    return round(value, 4) if isinstance(value, float) else value
