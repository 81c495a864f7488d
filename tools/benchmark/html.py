"""A benchmark report as one HTML page that needs no network: the library of its plots is in it.

The page is ``templates/report.html``; here is what it is filled with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from jinja2 import Environment, PackageLoader, Undefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from tools.benchmark.plots import (
    INTER_TOKEN,
    THROUGHPUT,
    Plots,
    against_load,
    cpu_time,
    throughput_latency,
    ttft_distribution,
)
from tools.benchmark.reading import (
    MISSING,
    Result,
    clean,
    format_number,
    format_percent,
    load_mark,
    load_text,
    number,
    series_of,
    stat,
)


def render_html(report: Mapping[str, Any]) -> str:
    """The page of a report.

    Args:
        report: ``title``, ``command``, ``date``, ``machine``, ``versions``, ``settings``,
            ``results`` and, if there are any, ``checks``. Times are in seconds, or milliseconds
            where the key ends with ``_ms``; memory is in MB, that of the machine in GB. Figures
            that are null, missing or not finite are shown as a dash and are not plotted.
    """
    results = report.get("results") or []
    sections = plot_sections(results)
    checks = [{**check, "bar": bar_of(check)} for check in report.get("checks") or []]
    plotted = any(section.plots.figure is not None for section in sections)
    page = (
        _environment()
        .get_template("report.html")
        .render(
            title=report.get("title"),
            date=report.get("date"),
            command=report.get("command"),
            facts={
                "Machine": machine_facts(report.get("machine") or {}),
                "Versions": report.get("versions") or {},
                "Settings": report.get("settings") or {},
            },
            checks=checks,
            met=sum(bool(check.get("met")) for check in checks),
            tables=tables_of(results),
            targets=[list(of) for _, of in groupby(results, _target)],
            errors=list(_errors(results)),
            sections=sections,
            processes=list(_processes(results)),
            library=Markup(get_plotlyjs()) if plotted else "",
        )
    )
    return page + "\n"


@dataclass(frozen=True)
class Section:
    """A section of plots."""

    title: str
    caption: str
    plots: Plots

    @property
    def figure(self) -> Markup | None:
        """The figure as JSON; plotly writes ``<``, ``>`` and ``/`` so that no script ends in it."""
        figure = self.plots.figure
        return None if figure is None else Markup(figure.to_json())


def plot_sections(results: Sequence[Result]) -> list[Section]:
    """The sections of a report on these results, plotted or not."""
    series = series_of(results)
    return [
        Section(
            "Throughput and latency",
            "Towards the lower right is better. Numbers at the points are the load: the "
            "concurrency, or with “/s” the requests per second of an open loop.",
            throughput_latency(series),
        ),
        Section(
            "Time to first token",
            "Share of the requests whose first token had come by then, each target at its highest "
            "load. Points mark the 50th, 90th and 99th percentile.",
            ttft_distribution(series),
        ),
        Section(
            "Scaling",
            "Output tokens per second against the load. A dashed line is an open loop.",
            against_load(series, (THROUGHPUT,), log=True),
        ),
        Section(
            "CPU time",
            "CPU seconds that the processes of a role used for 1,000 output tokens. A bar is a target at "
            "one load, which stands behind its name; a colour is a role.",
            cpu_time(series),
        ),
        Section(
            "Inter-token latency",
            "Median (left) and 99th percentile (right) against the load.",
            against_load(series, INTER_TOKEN),
        ),
    ]


def machine_facts(machine: Mapping[str, Any]) -> dict[str, object]:
    """Return the machine's facts, by the names of the page."""
    memory = number(machine.get("memory_gb"))
    return {
        "CPU": machine.get("cpu"),
        "Cores": machine.get("cores"),
        "Memory": None if memory is None else f"{format_number(memory)} GB",
        "GPU": machine.get("gpu") or "none",
        "Python": machine.get("python"),
    }


@dataclass(frozen=True)
class Column:
    """A column of the result table: the heading over its neighbours, its own, and its figures."""

    group: str
    head: str
    of: Callable[[Result], object]


@dataclass(frozen=True)
class ResultTable:
    """A table of the results, narrow enough for a window of 1,280 pixels.

    Attributes:
        legend: what its headings mean.
    """

    title: str
    legend: str
    columns: Sequence[Column]

    @property
    def groups(self) -> list[tuple[str, int]]:
        """The headings over the columns', and over how many of them."""
        by_group = groupby(self.columns, lambda column: column.group)
        return [(group, len(list(of))) for group, of in by_group]


def tables_of(results: Iterable[Result]) -> list[ResultTable]:
    """Throughput, with a ratio to each baseline, and latency."""
    baselines = dict.fromkeys(
        str(name) for result in results for name in result.get("ratio_to_baseline") or {}
    )
    return [
        ResultTable("Throughput", THROUGHPUT_LEGEND, [*LOAD_COLUMNS, *map(_ratio, baselines)]),
        ResultTable("Latency", LATENCY_LEGEND, LATENCY_COLUMNS),
    ]


@dataclass(frozen=True)
class Bar:
    """A promise's measurement beside its bound, which is in the middle of the track.

    Attributes:
        percent: of the track, at most 100.
        text: the measured value as a multiple of the bound.
    """

    percent: float
    text: str


def bar_of(check: Mapping[str, Any]) -> Bar | None:
    """The bar of a promise; None where it has no numbers."""
    value, limit = number(check.get("value")), number(check.get("limit"))
    if value is None or limit is None:
        return None
    if limit <= 0:  # nothing is promised to be there, or less than nothing to be added
        return Bar(0.0 if value <= limit else 100.0, "")
    share = max(value, 0.0) / limit
    return Bar(min(50 * share, 100.0), f"{format_number(value / limit)} × the bound")


def _figure(group: str, head: str, key: str) -> Column:
    return Column(group, head, lambda result: format_number(number(result.get(key))))


def _stats(group: str, key: str, *which: str) -> tuple[Column, ...]:
    def column(one: str) -> Column:
        return Column(group, one, lambda result: format_number(stat(result, key, one)))

    return tuple(column(one) for one in which)


def _ratio(baseline: str) -> Column:
    def ratio(result: Result) -> str:
        value = number((result.get("ratio_to_baseline") or {}).get(baseline))
        return MISSING if value is None else f"{format_number(value)}×"

    return Column("Throughput relative to", baseline, ratio)


THROUGHPUT_LEGEND = (
    "Load: the concurrency, or with “/s” the requests per second of an open loop. Tokens: of a request, "
    "mean of all. Throughput: output tokens and requests in all, divided by the duration. Load gen. CPU: "
    "of the busiest load generator; above 80 % it may have measured itself."
)
LATENCY_LEGEND = (
    "TTFT: from a request's start to its first chunk with content. Inter-token: of a request, its time "
    "after that divided by its tokens but one. Chunk gap: between any two consecutive chunks. End-to-end: "
    "from a request's start to its end. p50 is the median, p99 what 99 of 100 do not exceed. One alone: "
    "share of the chunks that carry one token."
)
LOAD_COLUMNS = (
    Column("", "Load", load_mark),
    _figure("Tokens, mean", "in", "input_tokens_mean"),
    _figure("Tokens, mean", "out", "output_tokens_mean"),
    Column("Requests", "sent", lambda result: result.get("requests")),
    Column("Requests", "failed", lambda result: sum((result.get("errors") or {}).values())),
    _figure("", "Duration (s)", "duration_s"),
    _figure("Throughput", "tokens/s", "output_tokens_per_s"),
    _figure("Throughput", "requests/s", "requests_per_s"),
    Column(
        "",
        "Load gen. CPU (of a core)",
        lambda result: format_percent(number(result.get("load_generator_cpu_share"))),
    ),
)
LATENCY_COLUMNS = (
    Column("", "Load", load_mark),
    *_stats("TTFT (ms)", "ttft_ms", "p50", "p90", "p99"),
    *_stats("Inter-token (ms)", "itl_ms", "p50", "p99"),
    *_stats("Chunk gap (ms)", "chunk_gap_ms", "p50", "p99"),
    *_stats("End-to-end (ms)", "e2e_ms", "p50", "p99"),
    *_stats("Tokens/chunk", "tokens_per_chunk", "mean"),
    Column(
        "Tokens/chunk",
        "one alone",
        lambda result: format_percent(stat(result, "tokens_per_chunk", "one_token_fraction")),
    ),
)


def _target(result: Result) -> tuple[object, object]:
    return result.get("target"), result.get("baseline")


def _errors(results: Iterable[Result]) -> Iterable[tuple[str, object, object]]:
    """The result, how many of its requests ended so, and the error."""
    for result in results:
        for error, count in (result.get("errors") or {}).items():
            yield f"{result.get('target')}, {load_text(result)}", count, error


def _processes(results: Iterable[Result]) -> Iterable[tuple[object, str, object, list[str]]]:
    """The target, its load, the role of the process and its figures."""
    for result in results:
        for process in result.get("processes") or []:
            keys = ("cpu_s", "rss_mb", "uss_mb")
            figures = [format_number(number(process.get(key))) for key in keys]
            yield result.get("target"), load_mark(result), process.get("role"), figures


def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("tools.benchmark"),
        autoescape=True,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _shown(value: object) -> str:
    """Return a value as the template shows it; jinja escapes it unless it is markup."""
    if isinstance(value, Markup):
        return value
    return clean(None if isinstance(value, Undefined) else value)
