"""The run that a command line asks for, and its report."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cog_triton.settings import read_settings
from tools.benchmark.cli import circumstances, exit_status, server_environment
from tools.soak.judge import judge
from tools.soak.openai_faces import CHAT_TEMPLATE
from tools.soak.page import render
from tools.soak.phase import Load, PhaseReport, answers, run_phase
from tools.soak.plan import KINDS, POOL, Phase, engines_here, phases, pool
from tools.soak.report import as_json, figures, terminal

DEFAULTS = {"SIMULATED_INTER_TOKEN_MS": "30", "CHAT_TEMPLATE": CHAT_TEMPLATE}
# A kill every few seconds is more than anybody's policy allows for.
CHAOS = {"TRITON_RESTARTS": "1000000", "RESUME_ATTEMPTS": "100", "RESUME_TIMEOUT": "120"}

say = partial(print, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Run a command line. Returns the status of the benchmark's ``exit_status``."""
    return exit_status(lambda: run(argv))


def run(argv: Sequence[str] | None = None) -> bool:
    """Soaks what the command line names, prints the report and writes its files.

    Returns:
        Whether every promise was kept.

    Raises:
        CogTritonError, BenchmarkError: a server could not be set up.
    """
    arguments = parse(argv)
    chaos = arguments.chaos or arguments.kills is not None
    given = server_environment(arguments.settings)
    environment = {**DEFAULTS, **(CHAOS if chaos else {}), **given}
    for engine in arguments.engine:  # a mistake in them comes before anything is started
        read_settings({**environment, "ENGINE": engine})
    directory = arguments.artifact_dir
    directory.mkdir(parents=True, exist_ok=True)
    cases = tuple(pool(POOL, arguments.seed))
    load = Load(environment, directory, arguments.streams, arguments.seed, cases, chaos)
    plan = phases(arguments.engine, arguments.kind, 60 * arguments.minutes, arguments.kills)
    reports = soak(plan, load)
    checks = judge(figures(reports))
    report = as_json(about(argv, environment), reports, checks)
    write(report, directory)
    print(terminal(report, checks))
    print(directory / "soak.json")
    return all(check.met for check in checks)


def soak(plan: Sequence[Phase], load: Load) -> list[PhaseReport]:
    """Goes through the phases."""
    expected = {engine: answers(engine, load) for engine in dict.fromkeys(p.engine for p in plan)}
    reports = []
    for number, phase in enumerate(plan, 1):
        what = f"{phase.kills} kills" if phase.kills is not None else f"{phase.seconds:.0f} s"
        say(f"{number} of {len(plan)}: {phase}, {what}")
        name = f"{number}-{phase.engine}-{phase.kind}-{phase.transport}"
        reports.append(run_phase(phase, load, expected[phase.engine], name))
        if reports[-1].interrupted:
            say("interrupted: the report is of what came until then")
            break
    return reports


def about(argv: Sequence[str] | None, environment: dict[str, str]) -> dict[str, Any]:
    """Return the facts of a run: options, time, place and commit."""
    given = sys.argv[1:] if argv is None else argv
    return {
        "title": "Soak",
        "command": shlex.join(["scripts/soak.py", *given]),
        **circumstances(environment),
    }


def write(report: dict[str, Any], directory: Path) -> None:
    """Writes the report's files."""
    (directory / "soak.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    (directory / "soak.html").write_text(render(report), encoding="utf-8")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command's arguments."""
    parser = argparse.ArgumentParser(
        description="Puts load on real servers and checks every answer."
    )
    add = parser.add_argument
    add("--minutes", type=_positive, default=10.0, help="of load, in all; default: 10")
    add("--chaos", action="store_true", help="kill parts of the servers at random")
    add("--kills", type=int, metavar="N", help="go on until N parts were killed, not by the minute")
    add("--streams", type=int, default=64, metavar="N", help="requests in flight; default: 64")
    add("--engine", nargs="+", default=engines_here(), help=f"default: {' '.join(engines_here())}")
    add("--kind", nargs="+", choices=KINDS, default=list(KINDS), help="which servers; default: all")
    add("--seed", type=int, default=0, help="of everything random; default: 0")
    add("--settings", nargs="+", default=[], metavar="KEY=VALUE", help="of the servers")
    add("--artifact-dir", type=Path, default=Path("artifacts/soak"), metavar="DIR")
    return parser.parse_args(argv)


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value
