"""The plots of a report: a `Measure` reads one figure of a result, and two measures make lines.

A section whose results do not suffice for a plot says so in a remark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from tools.benchmark.figures import (
    Line,
    Panel,
    Point,
    bar_chart,
    figure_of,
    fitting_axis,
    linear_axis,
    log_axis,
)
from tools.benchmark.reading import (
    Result,
    Series,
    cpu_by_role,
    format_number,
    load,
    load_mark,
    load_text,
    number,
    stat,
)


@dataclass(frozen=True)
class Measure:
    """One figure of a result: what it is called, its unit and where it is found."""

    name: str
    unit: str
    of: Callable[[Result], float | None]

    @property
    def title(self) -> str:
        return f"{self.name} ({self.unit})"

    def describe(self, value: float) -> str:
        return f"{self.name}: {format_number(value)} {self.unit}"


def stat_measure(name: str, key: str, which: str) -> Measure:
    """A statistic of a latency in ms."""
    return Measure(f"{name} {which}", "ms", lambda result: stat(result, key, which))


THROUGHPUT = Measure(
    "Throughput", "output tokens/s", lambda result: number(result.get("output_tokens_per_s"))
)
LATENCIES = (stat_measure("TTFT", "ttft_ms", "p50"), stat_measure("End-to-end", "e2e_ms", "p50"))
INTER_TOKEN = (
    stat_measure("Inter-token latency", "itl_ms", "p50"),
    stat_measure("Inter-token latency", "itl_ms", "p99"),
)
CONCURRENCY = Measure("Concurrency", "requests in flight", load)
REQUEST_RATE = Measure("Request rate of the open loop", "requests/s", load)


@dataclass(frozen=True)
class Plots:
    """A section's figure with one legend, or the reason for none, and remarks."""

    figure: go.Figure | None = None
    remarks: tuple[str, ...] = ()


# The sections


def throughput_latency(series: Sequence[Series]) -> Plots:
    """Each latency against the throughput."""
    panels, remarks = [], []
    for latency in LATENCIES:
        lines = lines_of(series, THROUGHPUT, latency)
        points = [point for line in lines for point in line.points]
        if len(points) < 2:
            remarks.append(f"{latency.name} is not plotted: it takes two results that have it.")
            continue
        x = fitting_axis(THROUGHPUT.title, [point.x for point in points])
        panels.append(Panel(lines, x, fitting_axis(latency.title, [point.y for point in points])))
        remarks.extend(_left_out(series, lines, latency.name))
    return Plots(figure_of([panels]) if panels else None, tuple(remarks))


def against_load(
    series: Sequence[Series], measures: Sequence[Measure], *, log: bool = False
) -> Plots:
    """A row of panels for each kind of load, with one range of values for the measures."""
    rows: list[list[Panel]] = []
    remarks: list[str] = []
    for kind, axis, chosen in (
        ("closed", CONCURRENCY, [one for one in series if not one.open_loop]),
        ("open", REQUEST_RATE, [one for one in series if one.open_loop]),
    ):
        if not chosen:
            if kind == "closed":
                remarks.append("There are no closed-loop results to plot against concurrency.")
            continue
        panels = [lines_of(chosen, axis, measure, log=log, label=False) for measure in measures]
        if not any(len({p.x for p in line.points}) > 1 for lines in panels for line in lines):
            remarks.append(
                f"The {kind} loop is not plotted: it takes one target with figures at two loads."
            )
            continue
        points = [point for lines in panels for line in lines for point in line.points]
        x = log_axis(axis.title, ticks=[point.x for point in points])
        values = [point.y for point in points]
        row = []
        for measure, lines in zip(measures, panels, strict=True):
            y = log_axis(measure.title) if log else fitting_axis(measure.title, values)
            row.append(Panel(lines, x, y))
            remarks.extend(_left_out(chosen, lines, measure.name))
        rows.append(row)
        if kind == "open":
            remarks.append("The load of open-loop results (dashed) is their request rate.")
    return Plots(figure_of(rows, shared=True) if rows else None, tuple(remarks))


def ttft_distribution(series: Sequence[Series]) -> Plots:
    """The distribution of each target at its highest load."""
    lines = [line for one in series if (line := _ttft_line(one)) is not None]
    if not lines:
        return Plots(remarks=("Not plotted: no target has two samples.",))
    percent = linear_axis("Requests (%)") | {"tickvals": [0, 25, 50, 75, 90, 100]}
    remarks = []
    plotted = {line.slot for line in lines}
    if len(plotted) < len(series):
        left_out = ", ".join(one.name for one in series if one.slot not in plotted)
        remarks.append(f"Left out for want of two samples: {left_out}.")
    return Plots(figure_of([[Panel(lines, log_axis("TTFT (ms)"), percent)]]), tuple(remarks))


def cpu_time(series: Sequence[Series]) -> Plots:
    """A stacked bar for each result, of the CPU seconds of each role."""
    bars = [
        (one.name, result, seconds)
        for one in series
        for result in one.results
        if (seconds := cpu_by_role(result))
    ]
    if not bars:
        return Plots(remarks=("Not plotted: no result has CPU times and output tokens.",))
    missing = sum(len(one.results) for one in series) - len(bars)
    remark = f"Left out for want of CPU times or tokens: {_results(missing)}."
    return Plots(bar_chart(bars), (remark,) if missing else ())


# From results to lines


def lines_of(
    series: Iterable[Series], x: Measure, y: Measure, *, log: bool = False, label: bool = True
) -> list[Line]:
    """The lines through the results that have both figures, for `log` axes above zero.

    A series without any such result has no line. `label`: whether the points are marked with their load.
    """
    lines = []
    for one in series:
        points = tuple(
            Point(
                at,
                value,
                load_mark(result) if label else "",
                f"{one.name}, {load_text(result)}\n{x.describe(at)}\n{y.describe(value)}",
            )
            for result in one.results
            if (at := x.of(result)) is not None
            and (value := y.of(result)) is not None
            and (not log or min(at, value) > 0)
        )
        if points:
            lines.append(Line(one.name, one.slot, one.open_loop, points))
    return lines


def cdf(samples: Sequence[float], most: int = 300) -> list[tuple[float, float]]:
    """The corners of the empirical distribution of samples: value, and percent not above it.

    Of more than `most` samples so many, evenly chosen, the last among them, make a step.
    """
    ordered = sorted(samples)
    count = len(ordered)
    steps = min(count, most)
    corners: list[tuple[float, float]] = []
    reached = 0.0
    for step in range(1, steps + 1):
        index = step * count // steps
        value, percent = ordered[index - 1], 100.0 * index / count
        corners += [(value, reached), (value, percent)]
        reached = percent
    return corners


def _ttft_line(series: Series) -> Line | None:
    """The distribution at the highest load that has two samples above zero, as a log axis needs."""
    for result in reversed(series.results):
        values = [number(sample) for sample in result.get("ttft_samples_ms") or []]
        samples = sorted(value for value in values if value is not None and value > 0)
        if len(samples) < 2:
            continue
        name = f"{series.name}, {load_text(result)}"
        points = []
        for percent in (50, 90, 99):
            rank = math.ceil(len(samples) * percent / 100)
            at, share = samples[rank - 1], 100.0 * rank / len(samples)
            title = f"{name}\nTTFT p{percent}: {format_number(at)} ms"
            points.append(Point(at, share, "", title))
        return Line(name, series.slot, series.open_loop, tuple(points), tuple(cdf(samples)))
    return None


def _left_out(series: Iterable[Series], lines: Iterable[Line], name: str) -> list[str]:
    missing = sum(len(one.results) for one in series) - sum(len(line.points) for line in lines)
    return [f"Left out for want of a figure for {name}: {_results(missing)}."] if missing else []


def _results(count: int) -> str:
    return "1 result" if count == 1 else f"{count} results"
