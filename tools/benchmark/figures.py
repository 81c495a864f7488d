"""Plotly figures of lines and bars: `Line` objects make a `Panel`, panels make a figure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from tools.benchmark.reading import (
    Result,
    clean,
    format_number,
    format_tick,
    load_mark,
    load_text,
    shorten,
)

# Okabe and Ito's colours, which all common colour blindness tells apart, with a grey for their black and
# no yellow, which is too light on white.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#777777")
MARKS = ("circle", "square", "triangle-up", "diamond", "triangle-down")
LABEL_SIDES = ("top center", "bottom center", "middle right", "middle left")
PANEL_HEIGHT = 380
BAR_HEIGHT = 26
NAME_LENGTH = 36
# Readable on the light page and on the dark one.
INK, RULE, CLEAR = "#7b8794", "rgba(128,128,128,0.25)", "rgba(0,0,0,0)"

Axis = dict[str, Any]  # a plotly axis


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


@dataclass(frozen=True)
class Panel:
    """Lines over two axes."""

    lines: Sequence[Line]
    x: Axis
    y: Axis


def linear_axis(title: str) -> Axis:
    """From zero."""
    return {"title": {"text": title}, "type": "linear", "rangemode": "tozero"}


def log_axis(title: str, ticks: Iterable[float] = ()) -> Axis:
    """For values above zero; plotly chooses the ticks if none are given."""
    axis: Axis = {"title": {"text": f"{title}, log scale"}, "type": "log"}
    if named := sorted(set(ticks)):
        axis |= {"tickvals": named, "ticktext": [format_tick(tick) for tick in named]}
    return axis


def fitting_axis(title: str, values: Sequence[float]) -> Axis:
    """Logarithmic if the values are five times apart."""
    wide = min(values) > 0 and max(values) >= 5 * min(values)
    return log_axis(title) if wide else linear_axis(title)


def figure_of(rows: Sequence[Sequence[Panel]], *, shared: bool = False) -> go.Figure:
    """Panels side by side. `shared`: those of a row have one range of values."""
    columns = max(map(len, rows))
    figure = make_subplots(rows=len(rows), cols=columns, horizontal_spacing=0.1)
    shown: set[int] = set()
    for number_of_row, panels in enumerate(rows):
        for column, panel in enumerate(panels):
            at = {"row": number_of_row + 1, "col": column + 1}
            for line in panel.lines:
                figure.add_traces(
                    _traces(line, in_legend=line.slot not in shown), **_each(at, line)
                )
                shown.add(line.slot)
            first = number_of_row * columns + 1
            matches = {"matches": f"y{first if first > 1 else ''}"} if shared and column else {}
            figure.update_xaxes(panel.x, **at)
            figure.update_yaxes(panel.y | matches, **at)
    return _styled(figure, PANEL_HEIGHT * len(rows), "Target")


def bar_chart(bars: Sequence[tuple[str, Result, Mapping[str, float]]]) -> go.Figure:
    """Stacked horizontal bars: each the name of its series, its result and the seconds of each role."""
    places = list(range(len(bars)))
    roles = dict.fromkeys(role for _, _, seconds in bars for role in seconds)
    figure = go.Figure()
    for slot, role in enumerate(roles):
        used = [seconds.get(role, 0.0) for _, _, seconds in bars]
        titles = [
            f"{name}, {load_text(result)}\n{role}: {format_number(value)} s"
            for (name, result, _), value in zip(bars, used, strict=True)
        ]
        color, opacity = color_of(slot)
        figure.add_bar(
            x=used,
            y=places,
            orientation="h",
            name=_text(role),
            marker={"color": color},
            opacity=opacity,
            hovertext=list(map(_text, titles)),
            hoverinfo="text",
        )
    sums = [sum(seconds.values()) for _, _, seconds in bars]
    figure.add_scatter(
        x=sums,
        y=places,
        mode="text",
        text=[f" {format_number(value)}" for value in sums],
        textposition="middle right",
        hoverinfo="skip",
        showlegend=False,
    )
    names = [
        _text(f"{shorten(name, NAME_LENGTH)}  {load_mark(result) or '?'}")
        for name, result, _ in bars
    ]
    figure.update_layout(barmode="stack")
    figure.update_xaxes(linear_axis("CPU time (s per 1,000 output tokens)"))
    figure.update_yaxes(tickvals=places, ticktext=names, autorange="reversed", automargin=True)
    return _styled(figure, BAR_HEIGHT * len(bars) + 160, "Process")


def color_of(slot: int) -> tuple[str, float]:
    """A colour and its opacity: the same ones fainter once all are used."""
    return COLORS[slot % len(COLORS)], 0.55 if slot >= len(COLORS) else 1.0


def _each(at: Mapping[str, int], line: Line) -> dict[str, list[int]]:
    """The row and the column of each trace of a line."""
    count = 2 if line.path else 1
    return {"rows": [at["row"]] * count, "cols": [at["col"]] * count}


def _traces(line: Line, *, in_legend: bool) -> list[go.Scatter]:
    """The line and its marks; two traces if the line does not go from mark to mark."""
    color, opacity = color_of(line.slot)
    course = {"color": color, "width": 2, "dash": "dash" if line.dashed else "solid"}
    same = {
        "name": _text(line.name),
        "legendgroup": str(line.slot),
        "opacity": opacity,
        "marker": {"color": color, "size": 9, "symbol": MARKS[line.slot % len(MARKS)]},
        "line": course,
    }
    marks = go.Scatter(
        x=[point.x for point in line.points],
        y=[point.y for point in line.points],
        mode="markers" if line.path else "lines+markers+text",
        text=[point.label for point in line.points],
        # Lines that run close together have their labels on different sides.
        textposition=LABEL_SIDES[line.slot % len(LABEL_SIDES)],
        hovertext=[_text(point.title) for point in line.points],
        hoverinfo="text",
        showlegend=in_legend,
        **same,
    )
    if not line.path:
        return [marks]
    xs, ys = zip(*line.path, strict=True)
    path = go.Scatter(x=xs, y=ys, mode="lines", hoverinfo="skip", showlegend=False, **same)
    return [path, marks]


def _styled(figure: go.Figure, height: int, legend: str) -> go.Figure:
    """`legend`: what its entries are."""
    figure.update_layout(
        template="none",
        height=height,
        margin={"l": 70, "r": 30, "t": 20, "b": 60},
        paper_bgcolor=CLEAR,
        plot_bgcolor=CLEAR,
        font={"color": INK, "size": 12},
        legend={
            "orientation": "h",
            "y": 1.0,
            "yanchor": "bottom",
            "title": {"text": f"{legend}: "},
        },
        hoverlabel={"align": "left"},
        showlegend=True,
    )
    figure.update_xaxes(gridcolor=RULE, zerolinecolor=RULE)
    figure.update_yaxes(gridcolor=RULE, zerolinecolor=RULE)
    return figure


def _text(value: str) -> str:
    """Text as plotly takes it, which reads a few tags and has no other line breaks."""
    return escape(clean(value), quote=False).replace("\n", "<br>")
