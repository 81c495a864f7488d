"""From records of requests to figures: results, a table, CSV."""

from __future__ import annotations

import csv
import io
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tools.benchmark.load import Load
from tools.benchmark.processes import Usage
from tools.benchmark.tables import WIDTH, text_table
from tools.benchmark.worker import Record

MAX_SAMPLES = 2000
BUSY_SHARE = 0.8  # of a core; above, a load generator measures itself

Statistics = dict[str, float | None]


@dataclass(frozen=True)
class Result:
    """One load on one target. Latencies and lengths are those of the requests without an error.

    Attributes:
        baseline: whether it was run to compare others with.
        mode: ``closed`` or ``open``; see ``Load``.
        requests: all that were sent, those with an error too.
        errors: how many requests ended in each, by its text.
        duration_s: from the first request's start to the last one's end.
        ttft_ms: from a request's start to its first chunk with content.
        itl_ms: of each request, what is left of its time divided by its tokens but one.
        chunk_gap_ms: between any two consecutive chunks of a request, of all requests together.
        load_generator_cpu_share: of a core, of the busiest generator.
        cpu_s: CPU seconds of all processes that were watched.
        rounds: of which the figures are medians; requests, errors and samples are of all of them.
        ratio_to_baseline: output tokens a second divided by those of the baseline, same load; of
            several rounds the median of their ratios.
        cpu_ratio_to_baseline: CPU seconds likewise; steadier on a machine with other work to do.
        ttft_p50_added_ms: to that of the baseline, likewise.
    """

    target: str
    baseline: bool
    mode: str
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
        return f"c={self.concurrency}" if self.mode == "closed" else f"{self.request_rate:g}/s"


def statistics(values: Sequence[float]) -> Statistics:
    """Mean, extremes and percentiles; all None where there are no values."""
    if not len(values):
        return dict.fromkeys(("mean", "min", "max", "p50", "p90", "p99"))
    array = np.asarray(values, float)
    p50, p90, p99 = np.percentile(array, (50, 90, 99))
    figures = {
        "mean": array.mean(),
        "min": array.min(),
        "max": array.max(),
        "p50": p50,
        "p90": p90,
        "p99": p99,
    }
    return {name: float(value) for name, value in figures.items()}


def result(
    target: str,
    load: Load,
    records: Sequence[Record],
    processes: Sequence[Usage],
    generator_cpu_s: Sequence[float],
) -> Result:
    """Sum up the records of one load.

    Args:
        generator_cpu_s: CPU seconds of each load generator.
    """
    good = [record for record in records if record.error is None]
    start, end = min(record.start for record in records), max(record.end for record in records)
    duration = max(end - start, 1e-9)
    output_tokens = sum(record.output_tokens for record in good)
    ttft = [_ms(record.times[0] - record.start) for record in good]
    chunk_sizes = [tokens for record in good for tokens in record.tokens]
    one_token = chunk_sizes.count(1) / len(chunk_sizes) if chunk_sizes else None
    return Result(
        target=target,
        baseline=False,
        mode="open" if load.concurrency is None else "closed",
        concurrency=load.concurrency,
        request_rate=load.request_rate,
        input_tokens_mean=_mean([record.input_tokens for record in good]),
        output_tokens_mean=_mean([record.output_tokens for record in good]),
        requests=len(records),
        errors=dict(Counter(record.error for record in records if record.error is not None)),
        duration_s=duration,
        output_tokens=output_tokens,
        output_tokens_per_s=output_tokens / duration,
        requests_per_s=len(good) / duration,
        ttft_ms=statistics(ttft),
        itl_ms=statistics([value for record in good for value in _inter_token_ms(record)]),
        chunk_gap_ms=statistics(_gaps_ms(good)),
        e2e_ms=statistics([_ms(record.end - record.start) for record in good]),
        tokens_per_chunk={**statistics(chunk_sizes), "one_token_fraction": one_token},
        ttft_samples_ms=[round(value, 3) for value in thinned(ttft)],
        processes=[asdict(usage) for usage in processes],
        load_generator_cpu_share=max(generator_cpu_s, default=0.0) / duration,
        cpu_s=sum(usage.cpu_s for usage in processes),
    )


def table(results: Sequence[Result]) -> str:
    """Throughput, latency and CPU time of each result, and what to beware of, in 120 columns."""
    baselines = list(dict.fromkeys(name for one in results for name in one.ratio_to_baseline))
    rounds = max((one.rounds for one in results), default=1)
    medians = f" Figures are medians of {rounds} rounds in turns." if rounds > 1 else ""
    blocks = [
        _block([*THROUGHPUT, *map(_ratio_to, baselines)], results),
        _block(LATENCY, results),
        _block(CPU, results),
    ]
    notes = [
        f"Latencies in ms. * is a baseline; /name is the throughput divided by its.{medians}",
        *_warnings(results),
    ]
    return "\n\n".join([*blocks, "\n".join(map(_fill, notes))])


def to_csv(results: Sequence[Result]) -> str:
    """One row for each result; what has parts, such as ttft_ms, has a column for each."""
    rows = [_flat(one) for one in results]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _inter_token_ms(record: Record) -> list[float]:
    # An answer in one piece has no time between its tokens that could be seen.
    if len(record.times) < 2 or record.output_tokens < 2:
        return []
    return [_ms((record.end - record.times[0]) / (record.output_tokens - 1))]


def _gaps_ms(records: Sequence[Record]) -> list[float]:
    gaps = [np.diff(record.times) for record in records if len(record.times) > 1]
    return [_ms(gap) for gap in np.concatenate(gaps)] if gaps else []


class Column(NamedTuple):
    """Its heading, its cell for a result, and whether long cells may be wrapped."""

    head: str
    cell: Callable[[Result], str]
    wrapped: bool = False


NAME = (
    Column("target", lambda one: one.target + ("*" if one.baseline else ""), wrapped=True),
    Column("load", lambda one: one.load_name),
)
THROUGHPUT = (
    *NAME,
    Column("tok/s", lambda one: f"{one.output_tokens_per_s:.0f}"),
    Column("req/s", lambda one: f"{one.requests_per_s:.2f}"),
    Column("errors", lambda one: f"{sum(one.errors.values())}/{one.requests}"),
    Column("gen CPU", lambda one: f"{one.load_generator_cpu_share:.0%}"),
)
LATENCY = (
    *NAME,
    Column("TTFT p50/p99", lambda one: _pair(one.ttft_ms)),
    Column("ITL p50/p99", lambda one: _pair(one.itl_ms)),
    Column("gap p99", lambda one: _figure(one.chunk_gap_ms["p99"])),
    Column("e2e p50/p99", lambda one: _pair(one.e2e_ms)),
    Column("tok/chunk", lambda one: _figure(one.tokens_per_chunk["mean"])),
)


def _ratio_to(baseline: str) -> Column:
    return Column(
        f"/{baseline}", lambda one: _ratio(one.ratio_to_baseline.get(baseline)), wrapped=True
    )


def _block(columns: Sequence[Column], results: Sequence[Result]) -> str:
    rows = [[column.cell(one) for column in columns] for one in results]
    wrapped = [index for index, column in enumerate(columns) if column.wrapped]
    return text_table([column.head for column in columns], rows, wrapped)


def _fill(line: str) -> str:
    return textwrap.fill(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _warnings(results: Sequence[Result]) -> list[str]:
    lines = []
    for one in results:
        name = f"{one.target} {one.load_name}"
        if one.load_generator_cpu_share > BUSY_SHARE:
            lines.append(
                f"! {name}: a load generator used {one.load_generator_cpu_share:.0%} of a core, so it "
                "may have measured itself; try --generators 2"
            )
        lines += [f"! {name}: {count} x {error}" for error, count in one.errors.items()]
    return lines


def _cpu_by_role(one: Result) -> str:
    if not one.output_tokens:
        return "-"
    used = ((usage["role"], usage["cpu_s"] / one.output_tokens * 1000) for usage in one.processes)
    return " ".join(f"{role}={seconds:.3f}" for role, seconds in used if seconds >= 0.0005)


CPU = (*NAME, Column("CPU s per 1,000 output tokens", _cpu_by_role, wrapped=True))


def _flat(one: Result) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, value in asdict(one).items():
        if name == "errors":
            row["errors"] = sum(value.values())
        elif name == "processes":
            row |= {
                f"{usage['role']}.{what}": usage[what]
                for usage in value
                for what in ("cpu_s", "rss_mb", "uss_mb")
            }
        elif isinstance(value, Mapping):
            row |= {f"{name}.{part}": figure for part, figure in value.items()}
        elif name != "ttft_samples_ms":
            row[name] = value
    return row


def thinned(values: Sequence[float]) -> Sequence[float]:
    """So many of them, evenly chosen, that a report stays small."""
    return values[:: -(-len(values) // MAX_SAMPLES) or 1]


def _pair(figures: Statistics) -> str:
    return f"{_figure(figures['p50'])}/{_figure(figures['p99'])}"


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _ms(seconds: float) -> float:
    return float(seconds) * 1000
