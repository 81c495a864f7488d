"""The run that a command line asks for, and its report."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from cog_triton.settings import read_settings
from tools.benchmark.checks import Check, as_report, report_rows, verdict
from tools.benchmark.html import render_html
from tools.benchmark.machine import machine, reported_settings, server_environment, versions
from tools.benchmark.measure import Running
from tools.benchmark.options import loads, parse
from tools.benchmark.report import Result, table, to_csv
from tools.benchmark.servers import has_embedded_engine, started
from tools.benchmark.suite import run_suite
from tools.benchmark.turns import run_loads

ENGINE_TARGET = "engine"
RAW_TRITON = "triton-engine"
JSON_FILE = Path("profile_export.json")

Say = Callable[[str], None]
progress: Say = partial(print, file=sys.stderr, flush=True)


def run(argv: Sequence[str] | None = None, say: Say = print) -> bool:
    """Runs what the command line asks for, says the tables and writes the files.

    What is said last is which promises were missed, if any were measured, and the path of the JSON.

    Returns:
        Whether every promise that was measured was met.

    Raises:
        CogTritonError, BenchmarkError: what was to be measured could not be set up, or not be reached.
    """
    arguments = parse(argv)
    environment = server_environment(arguments.settings)
    checks: list[Check] = []
    if arguments.suite:
        results, checks = run_suite(environment, progress)
    else:
        results = measure_all(arguments, environment)
    about = {
        "title": arguments.title,
        "command": shlex.join(["scripts/benchmark.py", *(sys.argv[1:] if argv is None else argv)]),
    }
    directory, export = arguments.artifact_dir, arguments.profile_export_file
    publish(about, environment, results, checks, directory=directory, export=export, say=say)
    if checks:
        say(verdict(checks))
    say(str(json_file(directory, export)))
    return all(check.met for check in checks)


def publish(
    about: Mapping[str, Any],
    environment: Mapping[str, str],
    results: Sequence[Result],
    checks: Sequence[Check],
    *,
    directory: Path,
    export: Path = JSON_FILE,
    say: Say = print,
) -> dict[str, Any]:
    """Says the tables, writes the files and returns the report.

    Args:
        about: ``title`` and ``command``, and what else the report shall have.
        environment: of the servers that were measured.
        directory, export: see ``write``.
    """
    report = {
        **about,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "settings": reported_settings(environment),
        "results": [asdict(result) for result in results],
        **({"checks": as_report(checks)} if checks else {}),
    }
    say(table(results))
    if checks:
        say(report_rows(checks))
    for path in write(report, to_csv(results), directory, export):
        progress(f"wrote {path}")
    return report


def measure_all(arguments: argparse.Namespace, environment: Mapping[str, str]) -> list[Result]:
    """Every load on every target and baseline, with ratios."""
    baselines = default_baselines(arguments, environment)
    targets = [*(name for name in arguments.target if name not in baselines), *baselines]
    start = partial(_start, arguments, environment)
    return run_loads(targets, baselines, list(loads(arguments)), start, progress)


def default_baselines(arguments: argparse.Namespace, environment: Mapping[str, str]) -> list[str]:
    """The baselines named, or those that can be had of servers started here."""
    if arguments.baseline is not None:
        return list(arguments.baseline)
    if arguments.url or arguments.grpc_url or arguments.http_url:
        return []
    raw = [RAW_TRITON, ENGINE_TARGET] if has_embedded_engine(environment) else [RAW_TRITON]
    # What is asked for by name is no baseline, unless there is nothing else.
    return [name for name in raw if name not in arguments.target or len(arguments.target) == 1]


def write(report: Mapping[str, Any], csv: str, directory: Path, export: Path) -> list[Path]:
    """Writes the report's files and returns their paths.

    Args:
        export: see ``json_file``.
    """
    directory.mkdir(parents=True, exist_ok=True)
    files = {
        json_file(directory, export): json.dumps(report, indent=1),
        directory / "benchmark.csv": csv,
        directory / "benchmark.html": render_html(report),
    }
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return list(files)


def json_file(directory: Path, export: Path) -> Path:
    """The file of the JSON; in the directory unless it names one of its own."""
    return export if export.parent != Path() else directory / export


def _start(
    arguments: argparse.Namespace, environment: Mapping[str, str], kind: str, cleanup: ExitStack
) -> Running:
    """A server that the command line names, or one that is started here."""
    given = {"cog": arguments.url, "triton": arguments.grpc_url or arguments.http_url}.get(kind)
    if given:
        running = Running(
            tokenizer=read_settings(environment).tokenizer_dir,
            url=_with_scheme(arguments.url or ""),
            grpc=_without_scheme(arguments.grpc_url or ""),
            http=_without_scheme(arguments.http_url or ""),
        )
    else:
        progress(f"starting {kind} ...")
        directory = arguments.artifact_dir
        directory.mkdir(parents=True, exist_ok=True)
        running = cleanup.enter_context(
            started(kind, environment, directory, arguments.serve_python)
        )
    return replace(running, tokenizer=arguments.tokenizer) if arguments.tokenizer else running


def _with_scheme(url: str) -> str:
    return url if "://" in url or not url else f"http://{url}"


def _without_scheme(url: str) -> str:
    return url.partition("://")[2] or url
