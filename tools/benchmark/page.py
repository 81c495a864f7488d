"""A report as one HTML page that needs no network: the library of its plots is in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from jinja2 import Environment, PackageLoader
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from tools.benchmark.report import Check, Result, cpu_by_role, figure

# Okabe and Ito's colours, which all common colour blindness tells apart; no yellow on white.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#777777")
# Readable on the light page and on the dark one.
INK, RULE, CLEAR = "#7b8794", "rgba(128,128,128,0.25)", "rgba(0,0,0,0)"

Columns = Mapping[str, Callable[[Result], str]]


def _of(name: str, which: str) -> Callable[[Result], str]:
    return lambda one: figure(getattr(one, name)[which])


COLUMNS: Columns = {
    "Load": lambda one: one.load_name,
    "Tokens in": lambda one: figure(one.input_tokens_mean),
    "Tokens out": lambda one: figure(one.output_tokens_mean),
    "Requests": lambda one: str(one.requests),
    "Failed": lambda one: str(sum(one.errors.values())),
    "Tokens/s": lambda one: figure(one.output_tokens_per_s),
    "Requests/s": lambda one: figure(one.requests_per_s),
    "TTFT p50": _of("ttft_ms", "p50"),
    "TTFT p99": _of("ttft_ms", "p99"),
    "ITL p50": _of("itl_ms", "p50"),
    "ITL p99": _of("itl_ms", "p99"),
    "Gap p99": _of("chunk_gap_ms", "p99"),
    "End-to-end p50": _of("e2e_ms", "p50"),
    "Tokens a chunk": _of("tokens_per_chunk", "mean"),
    "Generator CPU": lambda one: f"{one.load_generator_cpu_share:.0%}",
}


def render(about: Mapping[str, Any], results: Sequence[Result], checks: Sequence[Check]) -> str:
    """Return the page.

    Args:
        about: ``title``, ``command``, ``date``, and ``machine``, ``versions``, ``settings`` by name.
        checks: promises, of which there may be none.
    """
    baselines = dict.fromkeys(name for one in results for name in one.ratio_to_baseline)
    columns = {**COLUMNS, **{f"of {name}": _ratio_to(name) for name in baselines}}
    environment = Environment(
        loader=PackageLoader("tools.benchmark"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("report.html").render(
        about=about,
        facts={name: about[name] for name in ("machine", "versions", "settings")},
        checks=[(one, _bar(one)) for one in checks],
        columns=columns,
        results=results,
        plots={name: Markup(plot.to_json()) for name, plot in plots(results).items()},
        library=Markup(get_plotlyjs()) if results else "",
    )
    return page + "\n"


def plots(results: Sequence[Result]) -> dict[str, go.Figure]:
    """Return the plots of the results, by title; each target has its colour in all of them."""
    if not results:
        return {}
    targets = list(dict.fromkeys(one.target for one in results))
    colors = {name: COLORS[at % len(COLORS)] for at, name in enumerate(targets)}
    latency, first, cpu = go.Figure(), go.Figure(), go.Figure()
    for name in targets:
        own = [one for one in results if one.target == name]
        drawn = {"name": name, "marker": {"color": colors[name]}, "line": {"color": colors[name]}}
        shown = [one for one in own if one.ttft_ms["p50"] is not None]
        latency.add_scatter(
            x=[one.output_tokens_per_s for one in shown],
            y=[one.ttft_ms["p50"] for one in shown],
            text=[one.load_name for one in shown],
            mode="lines+markers+text",
            textposition="top center",
            **drawn,
        )
        samples = sorted(own[-1].ttft_samples_ms)
        percent = [100 * (at + 1) / len(samples) for at in range(len(samples))]
        first.add_scatter(x=samples, y=percent, mode="lines", line_shape="hv", **drawn)
    used = [(f"{one.target} {one.load_name}", cpu_by_role(one)) for one in results]
    for role in dict.fromkeys(role for _, roles in used for role in roles):
        seconds = [roles.get(role, 0.0) for _, roles in used]
        cpu.add_bar(x=seconds, y=[name for name, _ in used], orientation="h", name=role)
    latency.update_xaxes(title="Output tokens per second", rangemode="tozero")
    latency.update_yaxes(title="TTFT p50 (ms)", rangemode="tozero")
    first.update_xaxes(title="TTFT (ms), log scale", type="log")
    first.update_yaxes(title="Requests (%)")
    cpu.update_xaxes(title="CPU seconds per 1,000 output tokens")
    cpu.update_yaxes(autorange="reversed", automargin=True)
    cpu.update_layout(barmode="stack", height=160 + 26 * len(used))
    found = {
        "Throughput and time to first token": latency,
        "Time to first token, at each target's last load": first,
        "CPU time by role": cpu,
    }
    return {title: styled(plot) for title, plot in found.items()}


def styled(plot: go.Figure) -> go.Figure:
    """Give a plot the look of the page, light or dark."""
    plot.update_layout(
        template="none",
        colorway=COLORS,
        paper_bgcolor=CLEAR,
        plot_bgcolor=CLEAR,
        font={"color": INK, "size": 12},
        margin={"l": 70, "r": 30, "t": 20, "b": 60},
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom"},
        showlegend=True,
    )
    plot.update_xaxes(gridcolor=RULE, zerolinecolor=RULE)
    plot.update_yaxes(gridcolor=RULE, zerolinecolor=RULE)
    return plot


def _ratio_to(baseline: str) -> Callable[[Result], str]:
    return lambda one: figure(one.ratio_to_baseline.get(baseline))


def _bar(check: Check) -> float:
    """Return the length of a promise's bar in percent of its track; the bound is in the middle."""
    if check.limit <= 0:
        return 0.0 if check.met else 100.0
    return float(min(max(50 * check.value / check.limit, 0.0), 100.0))
