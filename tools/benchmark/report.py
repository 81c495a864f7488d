"""A report: goals with their bounds, tables for a terminal, JSON, and an HTML page with plots."""

import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import orjson
from jinja2 import Environment, PackageLoader
from markupsafe import Markup
from plotly.offline import get_plotlyjs
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from cog_triton.redaction import HIDDEN, shown_value, shown_words
from cog_triton.settings import VARIABLES
from tools.benchmark.measuring import Result

# Columns of the table of results, and the figures in them.
COLUMNS = {
    "tok/s": "tokens_per_s",
    "req/s": "requests_per_s",
    "TTFT p50": "ttft_ms_p50",
    "p99": "ttft_ms_p99",
    "ITL p50": "itl_ms_p50",
    "gap p99": "gap_ms_p99",
    "e2e p50": "e2e_ms_p50",
    "tok/chunk": "tokens_per_chunk",
    "tok/core-s": "tokens_per_core_second",
}
BUSY_SHARE = 0.8  # of a core; above, a load generator measures itself
WIDTH = 120  # characters of a table
PACKAGES = "cog-triton cog nvidia-pytriton tritonclient tensorrt_llm vllm torch transformers"
Table = tuple[Sequence[str], Sequence[Sequence[str]]]  # a heading, and rows


@dataclass(frozen=True)
class Check:
    """A goal: ``value`` is at least or at most ``limit``, both in ``unit``."""

    name: str
    value: float
    limit: float
    unit: str = ""
    least: bool = True

    @property
    def met(self) -> bool:
        return self.value >= self.limit if self.least else self.value <= self.limit

    @property
    def texts(self) -> tuple[str, str, str, str]:
        """The row of a table: the result, the goal, the measured value, and the bound."""
        measured, bound = (f"{figure(v)} {self.unit}".rstrip() for v in (self.value, self.limit))
        sign = ">=" if self.least else "<="
        return "met" if self.met else "MISSED", self.name, measured, f"{sign} {bound}"


@dataclass(frozen=True)
class Report:
    """The results of a run, to print and to write."""

    title: str
    environment: Mapping[str, str]  # of the servers
    content: Mapping[str, Any]  # the JSON's, besides goals and circumstances
    tables: Sequence[Table]
    checks: Sequence[Check]
    plots: Mapping[str, Any]  # Plotly's data and layout, by title
    notes: Sequence[str] = ()  # lines below the tables

    @property
    def met(self) -> bool:
        return all(check.met for check in self.checks)

    def publish(self, file: Path) -> dict[str, Any]:
        """Print the tables and goals, write JSON and an HTML page beside it, and return the JSON."""
        command = shlex.join([Path(sys.argv[0]).name, *shown_words(sys.argv[1:])])
        about = {"title": self.title, "command": command, **circumstances(self.environment)}
        checks = [{**asdict(check), "met": check.met} for check in self.checks]
        found: dict[str, Any] = _plain({**about, "checks": checks, **self.content})
        goals = (("", "goal", "measured", "bound"), [check.texts for check in self.checks])
        pages = Environment(loader=PackageLoader("tools.benchmark"), autoescape=True)
        html = pages.get_template("report.html").render(
            about=about,
            tables=self.tables,
            goals=goals,
            plots=_plain(self.plots),
            notes=self.notes,
            library=Markup(get_plotlyjs()),
        )
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found, indent=1), encoding="utf-8")
        file.with_suffix(".html").write_text(html, encoding="utf-8")
        for table in [*self.tables, *([goals] if checks else [])]:
            print_table(*table)
        print(*self.notes, sep="\n")
        if checks:
            missed = sum(not check.met for check in self.checks)
            print(f"{missed} of {len(checks)} goals missed.")
        return found


def report_of(
    title: str, environment: Mapping[str, str], results: Sequence[Result], checks: Sequence[Check]
) -> Report:
    """Return the report of results; latencies are in ms, and a * stands for a baseline."""
    content = {"results": [asdict(one) for one in results]}
    notes = [
        "Latencies in ms. * marks a baseline; /NAME is the throughput relative to that baseline's."
    ]
    baselines = list(dict.fromkeys(name for one in results for name in one.ratios))
    rows = []
    for one in results:
        notes += [f"! {one.name}: {number} x {error}" for error, number in one.errors.items()]
        if (share := one.figures["generator_cpu"]) > BUSY_SHARE:
            notes.append(f"! {one.name}: its load generator used {share:.0%} of a core")
        rates = [one.ratios.get(name, {}).get("tokens_per_s", math.nan) for name in baselines]
        shown = [one.figures[name] for name in COLUMNS.values()] + rates
        failed = f"{sum(one.errors.values())}/{one.requests}"
        name = f"{one.name}*" if one.baseline else one.name
        rows.append([name, failed, *map(figure, shown)])
    heading = ("", "errors", *COLUMNS, *(f"/{name}" for name in baselines))
    return Report(title, environment, content, [(heading, rows)], checks, plots(results), notes)


def plots(results: Sequence[Result]) -> dict[str, Any]:
    """Return Plotly's plots of the results, by title; each target has its colour in both of latency."""
    latency = []
    first = []
    cpu = []
    for name in dict.fromkeys(one.target for one in results):
        own = [one for one in results if one.target == name]
        points = {"x": [one.rate for one in own], "y": [one.ttft for one in own]}
        text = [f"c={one.concurrency}" for one in own]
        drawn = {"mode": "lines+markers+text", "textposition": "top center", "text": text}
        latency.append({"name": name, **points, **drawn})
        times = sorted(own[-1].ttft_samples_ms)
        shares = [100 * number / len(times) for number in range(1, len(times) + 1)]
        steps = {"mode": "lines", "line": {"shape": "hv"}}
        first.append({"name": name, "x": times, "y": shares, **steps})
    for role in dict.fromkeys(role for one in results for role in one.cpu_s):
        thousands = [one.figures["output_tokens"] / 1000 or math.nan for one in results]
        x = [one.cpu_s.get(role, 0.0) / n for one, n in zip(results, thousands, strict=True)]
        bars = {"type": "bar", "orientation": "h", "y": [one.name for one in results]}
        cpu.append({"name": role, "x": x, **bars})
    rows = {"autorange": "reversed", "automargin": True}
    stacked = {"barmode": "stack", "height": 160 + 26 * len(results), "yaxis": rows}
    log = {"xaxis": axis("TTFT (ms)", type="log"), "yaxis": axis("Requests (%)")}
    axes = {"xaxis": axis("Output tokens per second"), "yaxis": axis("TTFT p50 (ms)")}
    return {
        "Throughput and time to first token": {"data": latency, "layout": axes},
        "Time to first token, at each target's last load": {"data": first, "layout": log},
        "CPU seconds per 1,000 output tokens": {"data": cpu, "layout": stacked},
    }


def circumstances(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return date, machine, versions, and the settings that are given, without secrets."""
    settings = {
        name: shown_value(name, environment[name]) for name in VARIABLES if environment.get(name)
    }
    versions = {}
    for name in PACKAGES.split():
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    cpu = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    gpus = "none"
    with suppress(OSError, subprocess.CalledProcessError):
        gpus = ", ".join(subprocess.check_output(query, text=True).splitlines())
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": {
            "CPU": next(cpu, platform.machine()),
            "cores": len(os.sched_getaffinity(0)),
            "memory": f"{memory / 1e9:.1f} GB",
            "GPU": gpus,
            "Python": platform.python_version(),
        },
        "versions": versions,
        "settings": {name: shown for name, shown in settings.items() if shown != HIDDEN},
    }


def print_table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns side by side in at most ``WIDTH`` characters; what is too long is wrapped."""
    grid = Grid(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in heading:
        grid.add_column(Text(name), overflow="fold")
    for row in rows:
        grid.add_row(*map(Text, row))
    Console(width=WIDTH, color_system=None, force_jupyter=False).print(grid)
    print()


def figure(value: float) -> str:
    """Return a figure with some three digits."""
    if not math.isfinite(value):
        return "-"
    return f"{value:,.{0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2}f}"


def axis(title: str, **options: Any) -> dict[str, Any]:
    """Return an axis of a plot."""
    return {"title": {"text": title}, **options}


def _plain(value: Any) -> Any:
    """Return a value as JSON has it, which knows no NaN."""
    return orjson.loads(orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS))
