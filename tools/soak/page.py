"""A soak's report as one HTML page that needs no network; it looks like the benchmark's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
from jinja2 import ChoiceLoader, Environment, PackageLoader
from markupsafe import Markup
from plotly.offline import get_plotlyjs
from plotly.subplots import make_subplots

from tools.benchmark.page import styled
from tools.soak.report import phase_rows, recovery_rows

NOTES = 20  # of a phase, at most, and so many characters of each
NOTE_LENGTH = 600
PLOTS = ("Tokens/s", "RSS (MB)", "File descriptors", "Threads", "/dev/shm (MB)")


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
            "Machine": report["machine"],
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
    figure = make_subplots(rows=3, cols=2, subplot_titles=PLOTS)
    tokens, shared, kills = phase["tokens_per_s"], phase["shared_memory"], phase["recoveries"]
    figure.add_scatter(x=tokens["at"], y=tokens["tokens"], name="tokens", row=1, col=1)
    figure.add_scatter(
        x=[kill["at"] for kill in kills],
        y=[0] * len(kills),
        hovertext=[f"{kill['role']} killed" for kill in kills],
        mode="markers",
        name="kills",
        row=1,
        col=1,
    )
    for role, series in phase["usage"].items():
        for number, what in enumerate(("rss_mb", "descriptors", "threads"), 1):
            at = {"row": number // 2 + 1, "col": number % 2 + 1}
            figure.add_scatter(x=series["at"], y=series[what], name=role, **at)
    figure.add_scatter(x=shared["at"], y=shared["mb"], name="/dev/shm", row=3, col=1)
    figure.update_layout(height=1100)
    return styled(figure)
