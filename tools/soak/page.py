"""A soak's report as one HTML page that needs no network; it looks like the benchmark's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
from jinja2 import ChoiceLoader, Environment, PackageLoader
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from tools.benchmark.figures import Line, Panel, Point, figure_of, linear_axis
from tools.benchmark.html import machine_facts
from tools.soak.report import phase_rows, recovery_rows

NOTES = 20  # of a phase, at most, and so many characters of each
NOTE_LENGTH = 600
TOKENS, KILLS, SHARED = "tokens", "kills", "/dev/shm"


@dataclass(frozen=True)
class Section:
    """The part of the page on one phase."""

    title: str
    figure: Markup
    remarks: Sequence[str]


def render(report: Mapping[str, Any]) -> str:
    """The page of a report; see ``report.as_json``."""
    loader = ChoiceLoader([PackageLoader("tools.soak"), PackageLoader("tools.benchmark")])
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page = environment.get_template("soak.html").render(
        report=report,
        facts={
            "Machine": machine_facts(report["machine"]),
            "Versions": report["versions"],
            "Settings": report["settings"],
        },
        checks=report["checks"],
        met=sum(check["met"] for check in report["checks"]),
        phases=phase_rows(dict(report)),
        recovery={name: recovery_rows(rows) for name, rows in report["recovery"].items()},
        sections=[_section(phase) for phase in report["phases"]],
        library=Markup(get_plotlyjs()),
    )
    return page + "\n"


def _section(phase: Mapping[str, Any]) -> Section:
    # plotly writes ``<``, ``>`` and ``/`` so that no script ends in it.
    return Section(phase["server"], Markup(figure_over_time(phase).to_json()), remarks(phase))


def remarks(phase: Mapping[str, Any]) -> list[str]:
    """Return the broken promises of a phase, with its logs' lines on them."""
    told = [f"{name}: {text}" for name in ("crashes", "left", "unfinished") for text in phase[name]]
    told += [f"log: {count} × {sign}" for sign, count in phase["signs"].items()]
    notes = [f"request: {note}"[:NOTE_LENGTH] for note in phase["notes"][:NOTES]]
    rest = len(phase["notes"]) - len(notes)
    return [*told, *notes, *([f"and {rest} more requests"] if rest else [])]


def figure_over_time(phase: Mapping[str, Any]) -> go.Figure:
    """Tokens a second with the kills, and what each role used, over the seconds of a phase."""
    slots = {name: slot for slot, name in enumerate([TOKENS, KILLS, SHARED, *phase["usage"]])}
    tokens = _line(TOKENS, slots, phase["tokens_per_s"]["at"], phase["tokens_per_s"]["tokens"])
    shared = phase["shared_memory"]
    rows = [
        [
            _panel("Tokens/s", [tokens, _kills(phase["recoveries"], slots)]),
            _panel("RSS (MB)", _by_role(phase["usage"], "rss_mb", slots)),
        ],
        [
            _panel("File descriptors", _by_role(phase["usage"], "descriptors", slots)),
            _panel("Threads", _by_role(phase["usage"], "threads", slots)),
        ],
        [_panel("/dev/shm (MB)", [_line(SHARED, slots, shared["at"], shared["mb"])])],
    ]
    figure = figure_of(rows)
    figure.update_layout(legend_title_text="")
    return figure


def _by_role(
    usage: Mapping[str, Mapping[str, list[float]]], figure: str, slots: Mapping[str, int]
) -> list[Line]:
    return [_line(role, slots, series["at"], series[figure]) for role, series in usage.items()]


def _line(
    name: str, slots: Mapping[str, int], at: Sequence[float], values: Sequence[float]
) -> Line:
    return Line(name, slots[name], False, (), tuple(zip(at, values, strict=True)) or ((0.0, 0.0),))


def _kills(recoveries: Sequence[Mapping[str, Any]], slots: Mapping[str, int]) -> Line:
    points = tuple(Point(r["at"], 0.0, "", f"{r['role']} killed") for r in recoveries)
    return Line(KILLS, slots[KILLS], False, points, ((0.0, 0.0),))


def _panel(title: str, lines: Sequence[Line]) -> Panel:
    return Panel(lines, linear_axis("Time (s)"), linear_axis(title))
