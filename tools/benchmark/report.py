"""Figures of the records of requests, tables of them for a terminal, and promises with their bounds."""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tools.benchmark.generator import Record
from tools.benchmark.load import Load
from tools.benchmark.processes import LOAD_GENERATOR, Usage

WIDTH = 120  # characters of a table
MAX_SAMPLES = 2000
BUSY_SHARE = 0.8  # of a core; above, a load generator measures itself
STATISTICS = ("mean", "min", "max", "p50", "p90", "p99")

Statistics = dict[str, float | None]


@dataclass(frozen=True)
class Result:
    """One load on one target. Latencies and lengths are of the requests without an error.

    Attributes:
        baseline: it was run to compare others with.
        requests: all that were sent; ``errors``: how many ended in each, by its text.
        duration_s: from the first request's start to the last one's end.
        ttft_ms: from a request's start to its first chunk with content.
        itl_ms: of each request, its time after that divided by its tokens but one.
        chunk_gap_ms: between any two consecutive chunks of a request.
        processes: ``Usage`` of each role.
        load_generator_cpu_share: of a core, of the busiest generator.
        cpu_s: CPU seconds of all processes that were watched.
        rounds: of which the figures are medians; requests, errors and samples are of all of them.
        ratio_to_baseline: output tokens a second over those of the baseline, same load and round.
        cpu_ratio_to_baseline: CPU seconds likewise; steadier on a machine with other work.
        ttft_p50_added_ms: to that of the baseline, likewise.
    """

    target: str
    baseline: bool
    concurrency: int | None
    request_rate: float | None
    input_tokens_mean: float
    output_tokens_mean: float
    requests: int
    errors: dict[str, int]
    duration_s: float
    output_tokens: int
    output_tokens_per_s: float
    requests_per_s: float
    ttft_ms: Statistics
    itl_ms: Statistics
    chunk_gap_ms: Statistics
    e2e_ms: Statistics
    tokens_per_chunk: Statistics
    ttft_samples_ms: list[float]
    processes: list[dict[str, Any]]
    load_generator_cpu_share: float
    cpu_s: float = 0.0
    rounds: int = 1
    ratio_to_baseline: dict[str, float] = field(default_factory=dict)
    cpu_ratio_to_baseline: dict[str, float] = field(default_factory=dict)
    ttft_p50_added_ms: dict[str, float] = field(default_factory=dict)

    @property
    def load_name(self) -> str:
        """``c=16`` or ``10/s``."""
        return f"c={self.concurrency}" if self.concurrency else f"{self.request_rate:g}/s"

    @property
    def tokens_per_core_second(self) -> float:
        """Output tokens for each second that a core works for the stack, load generator aside."""
        used = sum(one["cpu_s"] for one in self.processes if one["role"] != LOAD_GENERATOR)
        return self.output_tokens / used if used else math.nan


def statistics(values: Sequence[float]) -> Statistics:
    """Return mean, extremes and percentiles; all None where there are no values."""
    if not len(values):
        return dict.fromkeys(STATISTICS)
    array = np.asarray(values, float)
    figures = [array.mean(), array.min(), array.max(), *np.percentile(array, (50, 90, 99))]
    return dict(zip(STATISTICS, map(float, figures), strict=True))


def result(
    target: str,
    load: Load,
    records: Sequence[Record],
    usages: Sequence[Usage],
    generator_cpu_s: Sequence[float],
) -> Result:
    """Sum up the records of one load."""
    good = [record for record in records if record.error is None]
    start, end = min(one.start for one in records), max(one.end for one in records)
    duration = max(end - start, 1e-9)
    output_tokens = sum(one.output_tokens for one in good)
    ttft = [1000 * (one.times[0] - one.start) for one in good]
    # An answer in one piece has no time between its tokens that could be seen.
    several = [one for one in good if len(one.times) > 1 and one.output_tokens > 1]
    itl = [1000 * (one.end - one.times[0]) / (one.output_tokens - 1) for one in several]
    gaps = [1000 * gap for one in several for gap in np.diff(one.times)]
    sizes = [tokens for one in good for tokens in one.tokens]
    return Result(
        target=target,
        baseline=False,
        concurrency=load.concurrency,
        request_rate=load.request_rate,
        input_tokens_mean=sum(one.input_tokens for one in good) / max(len(good), 1),
        output_tokens_mean=output_tokens / max(len(good), 1),
        requests=len(records),
        errors=dict(Counter(one.error for one in records if one.error is not None)),
        duration_s=duration,
        output_tokens=output_tokens,
        output_tokens_per_s=output_tokens / duration,
        requests_per_s=len(good) / duration,
        ttft_ms=statistics(ttft),
        itl_ms=statistics(itl),
        chunk_gap_ms=statistics(gaps),
        e2e_ms=statistics([1000 * (one.end - one.start) for one in good]),
        tokens_per_chunk={
            **statistics(sizes),
            "one_token_fraction": sizes.count(1) / len(sizes) if sizes else None,
        },
        ttft_samples_ms=_thinned([round(value, 3) for value in ttft]),
        processes=[asdict(usage) for usage in usages],
        load_generator_cpu_share=max(generator_cpu_s, default=0.0) / duration,
        cpu_s=sum(usage.cpu_s for usage in usages),
    )


def medians(rounds: Sequence[Result]) -> Result:
    """Return the rounds of one target under one load as one result."""
    first = rounds[0]
    if len(rounds) == 1:
        return first
    figures = {
        name: _median([getattr(one, name) for one in rounds])
        for name, value in vars(first).items()
        if isinstance(value, float) or name.endswith("_ms") or name == "tokens_per_chunk"
        if name not in ("request_rate", "ttft_samples_ms", "ttft_p50_added_ms")
    }
    processes = [
        {
            "role": role,
            **{
                what: max((one[what] for one in used if one[what] is not None), default=None)
                for what in ("rss_mb", "uss_mb")
            },
            "cpu_s": median(one["cpu_s"] for one in used),
        }
        for role in (one["role"] for one in first.processes)
        if (used := [one for r in rounds for one in r.processes if one["role"] == role])
    ]
    return replace(
        first,
        **figures,
        requests=sum(one.requests for one in rounds),
        errors=dict(sum((Counter(one.errors) for one in rounds), Counter())),
        output_tokens=round(median(one.output_tokens for one in rounds)),
        ttft_samples_ms=_thinned([sample for one in rounds for sample in one.ttft_samples_ms]),
        processes=processes,
        rounds=len(rounds),
    )


def table(results: Sequence[Result]) -> str:
    """Return throughput, latency and CPU time of each result, and warnings, in 120 columns."""
    baselines = list(dict.fromkeys(name for one in results for name in one.ratio_to_baseline))
    names = [(one.target + "*" * one.baseline, one.load_name) for one in results]
    rates = [
        (
            *name,
            f"{one.output_tokens_per_s:.0f}",
            f"{one.requests_per_s:.2f}",
            f"{sum(one.errors.values())}/{one.requests}",
            f"{one.load_generator_cpu_share:.0%}",
            *(figure(one.ratio_to_baseline.get(baseline)) for baseline in baselines),
        )
        for name, one in zip(names, results, strict=True)
    ]
    latencies = [
        (
            *name,
            *(f"{figure(s['p50'])}/{figure(s['p99'])}" for s in (one.ttft_ms, one.itl_ms)),
            figure(one.chunk_gap_ms["p99"]),
            f"{figure(one.e2e_ms['p50'])}/{figure(one.e2e_ms['p99'])}",
            figure(one.tokens_per_chunk["mean"]),
        )
        for name, one in zip(names, results, strict=True)
    ]
    cpu = [
        (*name, " ".join(f"{role}={used:.3f}" for role, used in cpu_by_role(one).items()))
        for name, one in zip(names, results, strict=True)
    ]
    head = ("target", "load")
    relative = (f"/{baseline}" for baseline in baselines)
    latency = ("TTFT p50/p99", "ITL p50/p99", "gap p99", "e2e p50/p99", "tok/chunk")
    rounds = max((one.rounds for one in results), default=1)
    notes = ["Latencies in ms. * is a baseline; /name is the throughput divided by its."]
    notes += [f"Figures are medians of {rounds} rounds in turns."] if rounds > 1 else []
    for one in results:
        name = f"! {one.target} {one.load_name}:"
        if one.load_generator_cpu_share > BUSY_SHARE:
            share = f"{one.load_generator_cpu_share:.0%}"
            notes.append(f"{name} a load generator used {share} of a core, so it may have")
            notes.append("  measured itself; try --generators 2")
        notes += [f"{name} {count} x {error}" for error, count in one.errors.items()]
    return "\n\n".join(
        [
            text_table((*head, "tok/s", "req/s", "errors", "gen CPU", *relative), rates),
            text_table((*head, *latency), latencies),
            text_table((*head, "CPU s per 1,000 output tokens"), cpu),
            "\n".join(notes),
        ]
    )


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return columns side by side in at most ``WIDTH`` characters; what is too long is wrapped."""
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in header:
        grid.add_column(Text(name), overflow="fold")
    for row in rows:
        grid.add_row(*map(Text, row))
    out = io.StringIO()
    Console(file=out, width=WIDTH, color_system=None, force_jupyter=False).print(grid)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def cpu_by_role(one: Result) -> dict[str, float]:
    """Return the CPU seconds of each role for 1,000 output tokens."""
    thousands = one.output_tokens / 1000
    used = {usage["role"]: usage["cpu_s"] for usage in one.processes if thousands}
    return {role: s / thousands for role, s in used.items() if s / thousands >= 0.0005}


def figure(value: float | None) -> str:
    """Return a figure with some three digits."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:,.{0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2}f}"


@dataclass(frozen=True)
class Check:
    """A promise: ``value`` is at least or at most ``limit``, both in ``unit``."""

    name: str
    value: float
    limit: float
    unit: str = ""
    least: bool = True

    @property
    def met(self) -> bool:
        return self.value >= self.limit if self.least else self.value <= self.limit

    @property
    def measured(self) -> str:
        return f"{figure(self.value)} {self.unit}".rstrip()

    @property
    def bound(self) -> str:
        return f"{'>=' if self.least else '<='} {figure(self.limit)} {self.unit}".rstrip()

    def as_report(self) -> dict[str, Any]:
        value = self.value if math.isfinite(self.value) else None
        texts = {"measured": self.measured, "bound": self.bound, "met": self.met}
        return {"name": self.name, "value": value, "limit": self.limit, **texts}


def check_table(checks: Sequence[Check]) -> str:
    rows = [("met" if c.met else "MISSED", c.name, c.measured, c.bound) for c in checks]
    return text_table(("", "promise", "measured", "bound"), rows)


def verdict(checks: Sequence[Check]) -> str:
    """Return the number of missed promises, and a line for each."""
    missed = [one for one in checks if not one.met]
    if not missed:
        return f"All {len(checks)} promises were met."
    lines = (f"  {one.name}: {one.measured}, promised {one.bound}" for one in missed)
    return "\n".join([f"{len(missed)} of {len(checks)} promises were missed:", *lines])


def _median(values: Sequence[Any]) -> Any:
    """Return the median of figures, or of each in statistics; None if one is missing."""
    if isinstance(values[0], Mapping):
        return {name: _median([value[name] for value in values]) for name in values[0]}
    return None if None in values else median(values)


def _thinned(values: list[float]) -> list[float]:
    """Return so many of them, evenly chosen, that a report stays small."""
    return values[:: -(-len(values) // MAX_SAMPLES) or 1]
