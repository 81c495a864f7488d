"""A benchmark report as one HTML page that needs nothing else: no network, no script, no library.

From the numbers to the picture: results are grouped into `Series` (one line each), a `Measure` reads
one figure of a result, two measures make the `Line` objects of a panel, an `Axis` holds the range
and the ticks of their values, and a `Scale` places a value on the paper. All lengths are in SVG user
units, which are pixels unless the page is narrower than the plot.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import groupby
from typing import Any

Result = Mapping[str, Any]
Box = tuple[float, float, float, float]

COLORS = 7
"""How many colours the style sheet has: Okabe and Ito's, which all common colour blindness tells
apart, with a grey for their black and no yellow, which is too light on white."""

PANEL_WIDTH = 560.0
PANEL_HEIGHT = 340.0
WIDE = 900.0
CHARACTER = 7.0
"""The width of a letter at the 12 px of the plots' text, in the wider of the fonts asked for."""

_MISSING = "–"
_NOT_TEXT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def render_html(report: dict[str, Any]) -> str:
    """The page of a report.

    Args:
        report: ``title``, ``command``, ``date``, ``machine``, ``versions``, ``settings``,
            ``results`` and, if there are any, ``checks``. Times are in seconds, or milliseconds
            where the key ends with ``_ms``; memory is in MB, that of the machine in GB. Figures
            that are null, missing or not finite are shown as a dash and are not plotted.
    """
    results = report.get("results") or []
    series = series_of(results)
    body = [
        _header(report),
        _checks(report.get("checks") or []),
        _results_section(results),
        _plot_section(
            "Throughput and latency",
            "Towards the lower right is better. Numbers at the points are the load: the "
            "concurrency, or with “/s” the requests per second of an open loop.",
            _throughput_latency(series),
        ),
        _plot_section(
            "Time to first token",
            "Share of the requests whose first token had come by then, each target at its highest "
            "load. Points mark the 50th, 90th and 99th percentile.",
            _ttft_distribution(series),
        ),
        _plot_section(
            "Scaling",
            "Output tokens per second against the load.",
            _against_load(series, (THROUGHPUT,), log=True),
        ),
        _plot_section(
            "CPU time",
            "CPU seconds that the processes of a role used for 1,000 output tokens, at each load.",
            _cpu_time(series),
        ),
        _plot_section(
            "Inter-token latency",
            "Median and 99th percentile against the load.",
            _against_load(series, INTER_TOKEN),
        ),
        _processes_section(results),
    ]
    return _PAGE.format(
        title=text(report.get("title")), style=_STYLE, body="\n".join(part for part in body if part)
    )


# Values and their text


def text(value: object) -> str:
    """`value` as the text of an element or of a quoted attribute, in HTML and in XML."""
    return _MISSING if value is None else escape(_NOT_TEXT.sub("\ufffd", str(value)))


def number(value: object) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def format_number(value: float | None) -> str:
    """Three significant digits, or all of those before the decimal point."""
    if value is None:
        return _MISSING
    if value == 0:
        return "0"
    digits = 2 - math.floor(math.log10(abs(value)))
    return f"{value:,.{min(max(digits, 0), 6)}f}"


def format_tick(value: float) -> str:
    return f"{value:,.10g}"


def shorten(name: str, most: int) -> str:
    """`name` in at most `most` characters, its middle left out: names often differ at their end."""
    if len(name) <= most:
        return name
    end = (most - 1) // 2
    return f"{name[: most - 1 - end]}…{name[len(name) - end :]}"


def stat(result: Result, key: str, which: str) -> float | None:
    """One statistic of a result, such as the ``p50`` of its ``ttft_ms``."""
    return number((result.get(key) or {}).get(which))


def is_open(result: Result) -> bool:
    return result.get("mode") == "open"


def load(result: Result) -> float | None:
    """Requests in flight of a closed loop, requests per second of an open one."""
    value = number(result.get("request_rate" if is_open(result) else "concurrency"))
    return value if value and value > 0 else None


def load_mark(result: Result) -> str:
    """The load, short enough for a point."""
    value = load(result)
    return "" if value is None else format_tick(value) + ("/s" if is_open(result) else "")


def load_text(result: Result) -> str:
    value = load(result)
    if value is None:
        return "load not given"
    tick = format_tick(value)
    return f"{tick} requests/s" if is_open(result) else f"concurrency {tick}"


def cpu_by_role(result: Result) -> dict[str, float]:
    """CPU seconds for 1,000 output tokens, of all processes of a role together."""
    tokens = number(result.get("output_tokens"))
    seconds: dict[str, float] = {}
    for process in result.get("processes") or []:
        used = number(process.get("cpu_s"))
        if tokens and used is not None:
            role = str(process.get("role"))
            seconds[role] = seconds.get(role, 0.0) + used * 1000 / tokens
    return seconds


@dataclass(frozen=True)
class Series:
    """The results that one line goes through, by rising load.

    Attributes:
        slot: chooses the colour and the mark, the same in all plots.
    """

    name: str
    slot: int
    open_loop: bool
    results: tuple[Result, ...]


def series_of(results: Sequence[Result]) -> list[Series]:
    """One series per target and mode.

    A load that was measured again, with other lengths for instance, begins another series.
    """
    measured: Counter[tuple[str, bool, float | None]] = Counter()
    groups: dict[tuple[str, bool, int], list[Result]] = {}
    for result in results:
        target, open_loop = str(result.get("target")), is_open(result)
        at = (target, open_loop, load(result))
        groups.setdefault((target, open_loop, measured[at]), []).append(result)
        measured[at] += 1
    return [
        Series(
            name=_series_name(group, run, repeated=(target, open_loop, 1) in groups),
            slot=slot,
            open_loop=open_loop,
            results=tuple(sorted(group, key=lambda result: load(result) or 0.0)),
        )
        for slot, ((target, open_loop, run), group) in enumerate(groups.items())
    ]


def _series_name(group: Sequence[Result], run: int, *, repeated: bool) -> str:
    first = group[0]
    name = str(first.get("target"))
    if first.get("baseline"):
        name += " (baseline)"
    if is_open(first):
        name += ", open loop"
    if repeated:
        tokens = (
            format_number(number(first.get(key)))
            for key in ("input_tokens_mean", "output_tokens_mean")
        )
        name += f", run {run + 1}: " + " → ".join(tokens) + " tokens"
    return name


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


# Axes


@dataclass(frozen=True)
class Scale:
    """Places the values from `low` to `high` on the lengths from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = (
            (math.log10(number) if self.log else number) for number in (self.low, self.high, value)
        )
        return self.start + (self.end - self.start) * (at - low) / (high - low)


@dataclass(frozen=True)
class Axis:
    """A range of values, of which `ticks` are named."""

    title: str
    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def scale(self, start: float, end: float) -> Scale:
        return Scale(self.low, self.high, start, end, self.log)


def linear_ticks(low: float, high: float, about: int = 5) -> tuple[float, ...]:
    """Multiples of 1, 2 or 5 times a power of ten from `low` to `high`."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return tuple(float(f"{index * step:.12g}") for index in range(first, last + 1))


def log_ticks(low: float, high: float) -> tuple[float, ...]:
    """Powers of ten, and 2 and 5 times them if there is room; within a decade as on a linear axis."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1,)):
        ticks = tuple(
            tick
            for decade in decades
            for factor in factors
            if low <= (tick := float(f"{factor}e{decade}")) <= high
        )
        if len(ticks) < 3:
            return tuple(tick for tick in linear_ticks(low, high) if tick > 0)
        if len(ticks) <= 8:
            break
    return ticks


def linear_axis(title: str, values: Iterable[float]) -> Axis:
    """From zero to a tick at or above all values."""
    high = max(values, default=0.0) or 1.0
    ticks = linear_ticks(0.0, high)
    step = ticks[1] - ticks[0]
    if ticks[-1] < high:
        ticks = (*ticks, float(f"{ticks[-1] + step:.12g}"))
    return Axis(title, 0.0, ticks[-1], ticks)


def log_axis(title: str, values: Iterable[float], ticks: Iterable[float] | None = None) -> Axis:
    """Around all values, which are above zero, with some room on both sides."""
    found = list(values)
    room = max((max(found) / min(found)) ** 0.06, 1.1)
    low, high = min(found) / room, max(found) * room
    named = log_ticks(low, high) if ticks is None else tuple(sorted(set(ticks)))
    return Axis(f"{title}, log scale", low, high, named, log=True)


def fitting_axis(title: str, values: Iterable[float]) -> Axis:
    """Logarithmic if the values are five times apart."""
    found = list(values)
    wide = min(found) > 0 and max(found) >= 5 * min(found)
    return log_axis(title, found) if wide else linear_axis(title, found)


# Plots


@dataclass(frozen=True)
class Point:
    """A marked point: its label on the plot and the text that is shown on pointing at it."""

    x: float
    y: float
    label: str
    title: str


@dataclass(frozen=True)
class Line:
    """A line of a plot.

    Attributes:
        path: where the line goes, if not straight from point to point.
    """

    name: str
    slot: int
    dashed: bool
    points: tuple[Point, ...]
    path: tuple[tuple[float, float], ...] = ()

    @property
    def course(self) -> tuple[tuple[float, float], ...]:
        return self.path or tuple((point.x, point.y) for point in self.points)


@dataclass(frozen=True)
class Bar:
    """A stacked bar: its series, its load in short and in words, and `seconds` of each role."""

    series: str
    mark: str
    load: str
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class Plots:
    """What a section shows: plots with one legend, or why there is none, and remarks."""

    pictures: tuple[str, ...] = ()
    legend: str = ""
    remarks: tuple[str, ...] = ()


def lines_of(series: Iterable[Series], x: Measure, y: Measure, *, log: bool = False) -> list[Line]:
    """The lines through the results that have both figures, for `log` axes above zero.

    A series without any such result has no line.
    """
    lines = []
    for one in series:
        points = tuple(
            Point(
                at,
                value,
                load_mark(result),
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


def _throughput_latency(series: Sequence[Series]) -> Plots:
    panels = [lines_of(series, THROUGHPUT, latency) for latency in LATENCIES]
    pictures, remarks = [], []
    for latency, lines in zip(LATENCIES, panels, strict=True):
        if _count(lines) < 2:
            remarks.append(f"{latency.name} is not plotted: it takes two results that have it.")
            continue
        points = [point for line in lines for point in line.points]
        x = fitting_axis(THROUGHPUT.title, [point.x for point in points])
        y = fitting_axis(latency.title, [point.y for point in points])
        pictures.append(chart(lines, x, y))
        remarks.extend(_left_out(series, lines, latency.name))
    shown = [line for lines in panels if _count(lines) >= 2 for line in lines]
    return Plots(tuple(pictures), _legend(shown), tuple(remarks))


def _against_load(
    series: Sequence[Series], measures: Sequence[Measure], *, log: bool = False
) -> Plots:
    """One panel per measure for each kind of load, with one range of values for the measures."""
    pictures: list[str] = []
    remarks: list[str] = []
    shown: list[Line] = []
    for kind, axis, chosen in (
        ("closed", CONCURRENCY, [one for one in series if not one.open_loop]),
        ("open", REQUEST_RATE, [one for one in series if one.open_loop]),
    ):
        if not chosen:
            if kind == "closed":
                remarks.append("There are no closed-loop results to plot against concurrency.")
            continue
        panels = [lines_of(chosen, axis, measure, log=log) for measure in measures]
        if not any(len({x for x, _ in line.course}) > 1 for lines in panels for line in lines):
            remarks.append(
                f"The {kind} loop is not plotted: it takes one target with figures at two loads."
            )
            continue
        points = [point for lines in panels for line in lines for point in line.points]
        loads = [point.x for point in points]
        values = [point.y for point in points]
        x = log_axis(axis.title, loads, ticks=loads)
        for measure, lines in zip(measures, panels, strict=True):
            y = (log_axis if log else fitting_axis)(measure.title, values)
            pictures.append(chart([_unlabelled(line) for line in lines], x, y))
            remarks.extend(_left_out(chosen, lines, measure.name))
            shown.extend(lines)
        if kind == "open":
            remarks.append("The load of open-loop results (dashed) is their request rate.")
    return Plots(tuple(pictures), _legend(shown), tuple(remarks))


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


def _ttft_distribution(series: Sequence[Series]) -> Plots:
    lines = [line for one in series if (line := _ttft_line(one)) is not None]
    if not lines:
        return Plots(remarks=("Not plotted: no target has two samples.",))
    axis = log_axis("TTFT (ms)", [x for line in lines for x, _ in line.course])
    percent = Axis("Requests (%)", 0.0, 100.0, (0.0, 25.0, 50.0, 75.0, 90.0, 100.0))
    remarks = []
    plotted = {line.slot for line in lines}
    if len(plotted) < len(series):
        left_out = ", ".join(one.name for one in series if one.slot not in plotted)
        remarks.append(f"Left out for want of two samples: {left_out}.")
    return Plots((chart(lines, axis, percent, width=WIDE),), _legend(lines), tuple(remarks))


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
        path = tuple(cdf(samples))
        return Line(name, series.slot, series.open_loop, tuple(points), path)
    return None


def _cpu_time(series: Sequence[Series]) -> Plots:
    bars = [
        Bar(one.name, load_mark(result) or "?", load_text(result), seconds)
        for one in series
        for result in one.results
        if (seconds := cpu_by_role(result))
    ]
    if not bars:
        return Plots(remarks=("Not plotted: no result has CPU times and output tokens.",))
    roles = list(dict.fromkeys(role for bar in bars for role in bar.seconds))
    missing = sum(len(one.results) for one in series) - len(bars)
    remarks = (
        (f"Left out for want of CPU times or tokens: {_results(missing)}.",) if missing else ()
    )
    legend = _legend_list((_bar_swatch(slot), role) for slot, role in enumerate(roles))
    return Plots((bar_chart(bars, roles),), legend, remarks)


def _count(lines: Iterable[Line]) -> int:
    return sum(len(line.points) for line in lines)


def _unlabelled(line: Line) -> Line:
    """Without labels, which on an axis of loads would repeat it."""
    return replace(line, points=tuple(replace(point, label="") for point in line.points))


def _left_out(series: Iterable[Series], lines: Iterable[Line], name: str) -> list[str]:
    missing = sum(len(one.results) for one in series) - _count(lines)
    return [f"Left out for want of a figure for {name}: {_results(missing)}."] if missing else []


def _results(count: int) -> str:
    return "1 result" if count == 1 else f"{count} results"


# SVG


def chart(
    lines: Sequence[Line],
    x: Axis,
    y: Axis,
    *,
    width: float = PANEL_WIDTH,
    height: float = PANEL_HEIGHT,
) -> str:
    """Lines with their marked points, over two axes."""
    left = 14 + CHARACTER * max((len(format_tick(tick)) for tick in y.ticks), default=0)
    across, up = x.scale(left, width - 18), y.scale(height - 42, 26)
    marks = [
        (across(point.x), up(point.y), line.slot, point) for line in lines for point in line.points
    ]
    labels = place_labels([(at, above, point.label) for at, above, _, point in marks], across, up)
    parts = [
        _y_axis(y, up, across),
        _x_axis(x, across, up),
        *(_course(line, across, up) for line in lines),
        *(_mark(at, above, slot, point.title) for at, above, slot, point in marks),
        *labels,
    ]
    return _svg(f"{y.title} against {x.title}", width, height, parts)


def bar_chart(bars: Sequence[Bar], roles: Sequence[str], *, width: float = WIDE) -> str:
    """Stacked horizontal bars, grouped by their series."""
    pitch, gap, most = 22.0, 12.0, 36
    marks = CHARACTER * max(len(bar.mark) for bar in bars)
    left = 24 + marks + CHARACTER * min(max(len(bar.series) for bar in bars), most)
    axis = linear_axis(
        "CPU time (s per 1,000 output tokens)", [sum(bar.seconds.values()) for bar in bars]
    )
    across = axis.scale(left, width - 64)
    parts, top = [], 0.0
    for name, group in groupby(bars, lambda bar: bar.series):
        top += gap
        parts.append(
            f'<text x="{left - marks - 20:.1f}" y="{top + 12:.1f}" class="axis end">'
            f"{text(shorten(name, most))}<title>{text(name)}</title></text>"
        )
        for bar in group:
            parts += _bar(bar, roles, across, top)
            top += pitch
    parts.insert(0, _x_axis(axis, across, Scale(0, 1, top, 4)))
    return _svg("CPU seconds per 1,000 output tokens", width, top + 42, parts)


def _bar(bar: Bar, roles: Sequence[str], across: Scale, top: float) -> list[str]:
    """A bar 16 high with its load to the left and its sum to the right."""
    reached = 0.0
    parts = []
    for slot, role in enumerate(roles):
        used = bar.seconds.get(role, 0.0)
        if used:
            start, end = across(reached), across(reached + used)
            title = f"{bar.series}, {bar.load}\n{role}: {format_number(used)} s"
            parts.append(
                f'<rect x="{start:.1f}" y="{top:.1f}" width="{max(end - start, 0.5):.1f}" '
                f'height="16" class="bar {_color(slot)}"><title>{text(title)}</title></rect>'
            )
        reached += used
    return [
        f'<text x="{across.start - 8:.1f}" y="{top + 12:.1f}" class="end">{text(bar.mark)}</text>',
        *parts,
        f'<text x="{across(reached) + 6:.1f}" y="{top + 12:.1f}">{format_number(reached)}</text>',
    ]


def place_labels(
    labelled: Sequence[tuple[float, float, str]], across: Scale, up: Scale
) -> list[str]:
    """Labels beside their points, each where it covers no mark and no other label.

    One that finds no room is left out; its point still tells the load when pointed at.
    """
    taken: list[Box] = [(x - 5, y - 5, x + 5, y + 5) for x, y, _ in labelled]
    placed = []
    for x, y, label in labelled:
        if not label:
            continue
        wide = CHARACTER * len(label)
        for left, base in (
            (x - wide / 2, y - 9),
            (x + 8, y + 4),
            (x - wide - 8, y + 4),
            (x - wide / 2, y + 17),
            (x + 6, y - 7),
            (x - wide - 6, y - 7),
            (x + 6, y + 15),
            (x - wide - 6, y + 15),
        ):
            box = (left - 2, base - 10, left + wide + 2, base + 1)
            inside = (
                box[0] > across.start
                and box[2] < across.end + 16
                and box[1] > up.end - 10
                and box[3] < up.start
            )
            if inside and not any(overlap(box, other) for other in taken):
                taken.append(box)
                placed.append(
                    f'<text x="{left:.1f}" y="{base:.1f}" class="label">{text(label)}</text>'
                )
                break
    return placed


def overlap(one: Box, other: Box) -> bool:
    """Whether two boxes (left, top, right, bottom) share an area."""
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _svg(name: str, width: float, height: float, parts: Iterable[str]) -> str:
    return (
        f'<svg role="img" aria-label="{text(name)}" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}">\n' + "\n".join(parts) + "\n</svg>"
    )


def _y_axis(axis: Axis, up: Scale, across: Scale) -> str:
    parts = [f'<text x="0" y="12" class="axis">{text(axis.title)}</text>']
    free = math.inf
    for tick in axis.ticks:
        y = up(tick)
        parts.append(_rule(across.start, y, across.end, y))
        if y <= free:
            parts.append(
                f'<text x="{across.start - 8:.1f}" y="{y + 4:.1f}" class="end">'
                f"{format_tick(tick)}</text>"
            )
            free = y - 14
    return "\n".join(parts)


def _x_axis(axis: Axis, across: Scale, up: Scale) -> str:
    middle = (across.start + across.end) / 2
    parts = [
        f'<text x="{middle:.1f}" y="{up.start + 36:.1f}" class="axis middle">'
        f"{text(axis.title)}</text>"
    ]
    free = -math.inf
    for tick in axis.ticks:
        x, name = across(tick), format_tick(tick)
        half = CHARACTER * len(name) / 2
        parts.append(_rule(x, up.start, x, up.end))
        if x - half >= free:
            parts.append(f'<text x="{x:.1f}" y="{up.start + 17:.1f}" class="middle">{name}</text>')
            free = x + half + 6
    return "\n".join(parts)


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="rule"/>'


def _course(line: Line, across: Scale, up: Scale) -> str:
    points = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in line.course)
    return f'<polyline points="{points}" class="{_line_classes(line)}"/>'


def _line_classes(line: Line) -> str:
    return f"line {_color(line.slot)}" + (" dashed" if line.dashed else "")


def _color(slot: int) -> str:
    """The class of a colour; the same ones fainter once all are used."""
    return f"c{slot % COLORS}" + (" faint" if slot >= COLORS else "")


_MARKS = (
    "M{x} {y}m-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z",
    "M{x} {y}m-4 -4h8v8h-8z",
    "M{x} {y}m0 -5.5l5 9h-10z",
    "M{x} {y}m0 -5.5l5.5 5.5l-5.5 5.5l-5.5 -5.5z",
    "M{x} {y}m0 5.5l5 -9h-10z",
)
"""Circle, square, triangle, diamond, triangle: so that colour is not all that tells lines apart."""


def _mark_path(x: float, y: float, slot: int) -> str:
    path = _MARKS[slot % len(_MARKS)].format(x=f"{x:.1f}", y=f"{y:.1f}")
    return f'<path d="{path}" class="mark {_color(slot)}"/>'


def _mark(x: float, y: float, slot: int, title: str) -> str:
    """A mark with its tooltip, which a wider, unseen circle makes easier to hit."""
    return (
        f"<g><title>{text(title)}</title>"
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="9" class="hit"/>{_mark_path(x, y, slot)}</g>'
    )


# Legends


def _legend(lines: Iterable[Line]) -> str:
    """One entry per line, however many panels show it."""
    once = {line.slot: line for line in lines}
    return _legend_list((_line_swatch(once[slot]), once[slot].name) for slot in sorted(once))


def _legend_list(entries: Iterable[tuple[str, str]]) -> str:
    items = "".join(f"<li>{swatch} {text(name)}</li>" for swatch, name in entries)
    return f'<ul class="legend">{items}</ul>' if items else ""


def _line_swatch(line: Line) -> str:
    course = f'<polyline points="0,7 28,7" class="{_line_classes(line)}"/>'
    return _swatch(course + _mark_path(14, 7, line.slot))


def _bar_swatch(slot: int) -> str:
    return _swatch(f'<rect x="7" y="0" width="14" height="14" class="bar {_color(slot)}"/>')


def _swatch(picture: str) -> str:
    return f'<svg aria-hidden="true" width="28" height="14" viewBox="0 0 28 14">{picture}</svg>'


# Sections


def _plot_section(title: str, caption: str, plots: Plots) -> str:
    pictures = "\n".join(f"<figure>{picture}</figure>" for picture in plots.pictures)
    remarks = "".join(f'<p class="remark">{text(remark)}</p>' for remark in plots.remarks)
    shown = f'<p>{text(caption)}</p>\n{plots.legend}\n<div class="plots">{pictures}</div>\n'
    return f"<section>\n<h2>{text(title)}</h2>\n{shown if pictures else ''}{remarks}\n</section>"


def _header(report: Mapping[str, Any]) -> str:
    machine = report.get("machine") or {}
    memory = number(machine.get("memory_gb"))
    described = {
        "CPU": machine.get("cpu"),
        "Cores": machine.get("cores"),
        "Memory": None if memory is None else f"{format_number(memory)} GB",
        "GPU": machine.get("gpu") or "none",
        "Python": machine.get("python"),
    }
    return (
        f"<header>\n<h1>{text(report.get('title'))}</h1>\n"
        f'<p class="date">{text(report.get("date"))}</p>\n'
        f"<pre><code>{text(report.get('command'))}</code></pre>\n"
        '<div class="facts">\n'
        f"{_facts('Machine', described)}\n"
        f"{_facts('Versions', report.get('versions') or {})}\n"
        f"{_facts('Settings', report.get('settings') or {})}\n"
        "</div>\n</header>"
    )


def _facts(title: str, facts: Mapping[str, object]) -> str:
    pairs = "".join(f"<dt>{text(name)}</dt><dd>{text(value)}</dd>" for name, value in facts.items())
    listed = f"<dl>{pairs}</dl>" if pairs else "<p>none</p>"
    return f"<section><h2>{text(title)}</h2>{listed}</section>"


def _checks(checks: Sequence[Mapping[str, Any]]) -> str:
    if not checks:
        return ""
    rows = "".join(
        f'<tr><th scope="row">{text(check.get("name"))}</th><td>{text(check.get("measured"))}</td>'
        f"<td>{text(check.get('bound'))}</td><td>{_verdict(bool(check.get('met')))}</td></tr>"
        for check in checks
    )
    met = sum(bool(check.get("met")) for check in checks)
    return (
        f"<section>\n<h2>Targets: {met} of {len(checks)} met</h2>\n"
        '<div class="scroll"><table class="checks"><thead><tr><th scope="col">Target</th>'
        '<th scope="col">Measured</th><th scope="col">Bound</th><th scope="col">Result</th>'
        f"</tr></thead><tbody>{rows}</tbody></table></div>\n</section>"
    )


def _verdict(met: bool) -> str:
    return '<b class="met">✓ met</b>' if met else '<b class="not-met">✗ not met</b>'


@dataclass(frozen=True)
class Column:
    """A column of the result table: the heading over its neighbours, its own, and its figures."""

    group: str
    head: str
    of: Callable[[Result], str]


def _figure(group: str, head: str, key: str) -> Column:
    return Column(group, head, lambda result: format_number(number(result.get(key))))


def _stats(group: str, key: str, *which: str) -> tuple[Column, ...]:
    def column(one: str) -> Column:
        return Column(group, one, lambda result: format_number(stat(result, key, one)))

    return tuple(column(one) for one in which)


def _percent(value: float | None) -> str:
    return _MISSING if value is None else f"{100 * value:.0f} %"


LOAD_COLUMNS = (
    Column("", "Load", load_mark),
    _figure("Tokens, mean", "in", "input_tokens_mean"),
    _figure("Tokens, mean", "out", "output_tokens_mean"),
    Column("Requests", "sent", lambda result: text(result.get("requests"))),
    Column("Requests", "failed", lambda result: str(sum((result.get("errors") or {}).values()))),
    _figure("", "Duration (s)", "duration_s"),
    _figure("Throughput", "tokens/s", "output_tokens_per_s"),
    _figure("Throughput", "requests/s", "requests_per_s"),
)
LATENCY_COLUMNS = (
    *_stats("TTFT (ms)", "ttft_ms", "p50", "p90", "p99"),
    *_stats("Inter-token (ms)", "itl_ms", "p50", "p99"),
    *_stats("Chunk gap (ms)", "chunk_gap_ms", "p50", "p99"),
    *_stats("End-to-end (ms)", "e2e_ms", "p50", "p99"),
    *_stats("Tokens/chunk", "tokens_per_chunk", "mean"),
    Column(
        "Tokens/chunk",
        "one alone",
        lambda result: _percent(stat(result, "tokens_per_chunk", "one_token_fraction")),
    ),
    Column(
        "",
        "Load gen. CPU (of a core)",
        lambda result: _percent(number(result.get("load_generator_cpu_share"))),
    ),
)


def _ratio(baseline: str) -> Column:
    def ratio(result: Result) -> str:
        value = number((result.get("ratio_to_baseline") or {}).get(baseline))
        return _MISSING if value is None else f"{format_number(value)}×"

    return Column("Throughput relative to", baseline, ratio)


def _results_section(results: Sequence[Result]) -> str:
    if not results:
        return '<section>\n<h2>Results</h2>\n<p class="remark">There are none.</p>\n</section>'
    baselines = dict.fromkeys(
        name for result in results for name in result.get("ratio_to_baseline") or {}
    )
    columns = (*LOAD_COLUMNS, *(_ratio(str(name)) for name in baselines), *LATENCY_COLUMNS)
    groups = [(group, list(members)) for group, members in groupby(columns, lambda c: c.group)]
    over = "".join(
        f'<th scope="colgroup" colspan="{len(members)}">{text(group)}</th>'
        for group, members in groups
    )
    heads = "".join(f'<th scope="col">{text(column.head)}</th>' for column in columns)
    targets = groupby(results, lambda result: (result.get("target"), result.get("baseline")))
    rows = "\n".join(_result_rows(list(members), columns) for _, members in targets)
    note = (
        '<p class="remark">Loads with “/s” are the request rates of open loops, in requests per '
        "second; the others are concurrencies.</p>\n"
        if any(map(is_open, results))
        else ""
    )
    return (
        '<section>\n<h2>Results</h2>\n<div class="scroll"><table class="results"><thead>'
        f'<tr><th rowspan="2" scope="col">Target</th>{over}</tr><tr>{heads}</tr></thead>\n'
        f"<tbody>{rows}</tbody></table></div>\n{note}{_errors(results)}</section>"
    )


def _result_rows(results: Sequence[Result], columns: Iterable[Column]) -> str:
    """The rows of neighbouring results of one target, which share its name."""
    first = results[0]
    tag = ' <span class="tag">baseline</span>' if first.get("baseline") else ""
    name = f'<th scope="rowgroup" rowspan="{len(results)}">{text(first.get("target"))}{tag}</th>'
    rows = ["".join(f"<td>{column.of(result)}</td>" for column in columns) for result in results]
    return "\n".join(
        f"<tr>{name if row == 0 else ''}{cells}</tr>" for row, cells in enumerate(rows)
    )


def _errors(results: Iterable[Result]) -> str:
    items = "".join(
        f"<li>{text(result.get('target'))}, {load_text(result)}: {text(count)} × "
        f"<code>{text(error)}</code></li>"
        for result in results
        for error, count in (result.get("errors") or {}).items()
    )
    return f'<h3>Errors</h3>\n<ul class="errors">{items}</ul>\n' if items else ""


def _processes_section(results: Iterable[Result]) -> str:
    rows = "".join(
        f'<tr><th scope="row">{text(result.get("target"))}</th><td>{load_mark(result)}</td>'
        f'<td class="name">{text(process.get("role"))}</td>'
        + "".join(
            f"<td>{format_number(number(process.get(key)))}</td>"
            for key in ("cpu_s", "rss_mb", "uss_mb")
        )
        + "</tr>"
        for result in results
        for process in result.get("processes") or []
    )
    if not rows:
        return ""
    heads = "".join(
        f'<th scope="col">{head}</th>'
        for head in ("Target", "Load", "Process", "CPU (s)", "RSS (MB)", "USS (MB)")
    )
    return (
        "<section>\n<details><summary>CPU time and memory of each process</summary>\n"
        f'<div class="scroll"><table class="results"><thead><tr>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div></details>\n</section>"
    )


_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
{body}
</body>
</html>
"""

_STYLE = """\
:root {
  --paper: #ffffff; --ink: #1d2530; --muted: #5b6673; --rule: #e1e6eb; --card: #f5f7f9;
  --met: #00775a; --not-met: #b03c00;
  --s0: #0072b2; --s1: #d55e00; --s2: #009e73; --s3: #cc79a7; --s4: #e69f00; --s5: #56b4e9;
  --s6: #777777;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14181d; --ink: #e6eaee; --muted: #9aa5b1; --rule: #2c343d; --card: #1c2229;
    --met: #3fcf9f; --not-met: #ff9a5c;
    --s0: #3d9be0; --s1: #f0803c; --s2: #2cc498; --s3: #e29cc4; --s4: #f2c14a; --s5: #9adcf9;
    --s6: #a8b0b8;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 24px; max-width: 1240px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
h1 { font-size: 26px; line-height: 1.25; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 36px 0 6px; }
h3 { font-size: 15px; margin: 14px 0 4px; }
p { margin: 4px 0; max-width: 80ch; }
.date, .remark { color: var(--muted); }
.remark { font-size: 13px; }
code, dd { overflow-wrap: anywhere; }
pre { background: var(--card); padding: 10px 12px; border-radius: 6px; white-space: pre-wrap; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(260px, 1fr)); gap: 16px; }
.facts section { background: var(--card); border-radius: 6px; padding: 10px 12px; min-width: 0; }
.facts h2 { font-size: 15px; margin: 0 0 4px; }
dl {
  display: grid; grid-template-columns: auto 1fr; gap: 2px 14px; margin: 0; font-size: 13px;
}
dt { color: var(--muted); overflow-wrap: anywhere; }
dd { margin: 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 8px; border-bottom: 1px solid var(--rule); text-align: left; }
thead th { color: var(--muted); font-weight: 600; vertical-align: bottom; }
tbody th { font-weight: 500; }
.results { font-size: 12px; }
.results td, .results thead th { text-align: right; }
.results td { white-space: nowrap; }
.results thead th[colspan] { text-align: center; white-space: nowrap; }
.results thead th:first-child[rowspan], .results td.name { text-align: left; }
.results tbody th { min-width: 130px; max-width: 280px; overflow-wrap: anywhere; }
.results tbody th[rowspan] { vertical-align: top; }
.results tbody th, .results thead th[rowspan] {
  position: sticky; left: 0; background: var(--paper);
}
.tag {
  color: var(--muted); border: 1px solid var(--rule); border-radius: 4px; padding: 0 4px;
  font-size: 11px; white-space: nowrap;
}
.met { color: var(--met); white-space: nowrap; }
.not-met { color: var(--not-met); white-space: nowrap; }
.errors { font-size: 13px; margin: 0; padding-left: 20px; }
summary { cursor: pointer; margin-top: 28px; font-weight: 600; }
.legend {
  list-style: none; display: flex; flex-wrap: wrap; gap: 2px 20px; margin: 8px 0; padding: 0;
  font-size: 13px;
}
.legend li { overflow-wrap: anywhere; }
.legend svg { vertical-align: -2px; }
.plots { display: flex; flex-wrap: wrap; gap: 20px 24px; }
figure { margin: 0; max-width: 100%; }
svg { max-width: 100%; height: auto; overflow: visible; }
svg text { font-size: 12px; fill: var(--muted); font-variant-numeric: tabular-nums; }
svg text.axis { fill: var(--ink); }
svg text.label {
  fill: var(--ink); font-size: 11px; paint-order: stroke; stroke: var(--paper); stroke-width: 3px;
}
.middle { text-anchor: middle; }
.end { text-anchor: end; }
.rule { stroke: var(--rule); }
.line { fill: none; stroke: var(--color); stroke-width: 2; stroke-linejoin: round; }
.dashed { stroke-dasharray: 6 4; }
.mark { fill: var(--color); stroke: var(--paper); stroke-width: 1; }
.bar { fill: var(--color); stroke: var(--paper); stroke-width: 1; }
.faint { opacity: 0.55; }
.hit { fill: transparent; }
.c0 { --color: var(--s0); } .c1 { --color: var(--s1); } .c2 { --color: var(--s2); }
.c3 { --color: var(--s3); } .c4 { --color: var(--s4); } .c5 { --color: var(--s5); }
.c6 { --color: var(--s6); }
@media print { body { max-width: none; } .scroll { overflow: visible; } }
"""
