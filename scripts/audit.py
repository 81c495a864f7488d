#!/usr/bin/env python3
"""Looks up known vulnerabilities of what the image adds (requirements/image.txt), with pip-audit.

    python scripts/audit.py
    python scripts/audit.py --osv-url https://api.osv.dev/v1/query

Fails if there is one that requirements/audit.yaml does not allow. Where the data cannot be reached it says
so, and does not fail: pip-audit by itself says then that it has found nothing.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from _checkout import ROOT

REQUIREMENTS = ROOT / "requirements"
SECONDS = 300.0
# Of its own: "connection errors", and what requests says below them.
UNREACHABLE = re.compile(r"ConnectionError|Timeout|HTTPError|connection errors?", re.IGNORECASE)


def main(argv: list[str] | None = None) -> int:
    """Prints what was found; returns 1 if there is something that is not allowed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--requirements", type=Path, default=REQUIREMENTS / "image.txt", help="a lock file")
    add("--allowed", type=Path, default=REQUIREMENTS / "audit.yaml", help="ids, with reasons")
    add("--osv-url", help="take the data from there, not from the package index")
    arguments = parser.parse_args(argv)
    allowed = yaml.safe_load(arguments.allowed.read_text(encoding="utf-8")) or {}
    report, problem = audit(command(arguments.requirements, arguments.osv_url))
    if report is None and not UNREACHABLE.search(problem):
        print(problem, file=sys.stderr)
        return 1
    problem = problem if report is None else unaudited(report)
    if problem:
        print(f"not audited, the data on vulnerabilities cannot be had here: {problem}")
        return 0
    assert report is not None
    lines = findings(report, allowed)
    print("\n".join([*lines, *notes(report, allowed)]))
    return int(bool(lines))


def command(requirements: Path, osv_url: str | None) -> list[str]:
    """The command line of pip-audit, which installs nothing and asks pip nothing."""
    source = ["--vulnerability-service=osv", f"--osv-url={osv_url}"] if osv_url else []
    return [
        *(sys.executable, "-m", "pip_audit", f"--requirement={requirements}", "--require-hashes"),
        *("--no-deps", "--disable-pip", "--format=json", "--progress-spinner=off", *source),
    ]


def audit(command: list[str]) -> tuple[list[dict[str, Any]] | None, str]:
    """pip-audit's report, a dictionary for each package; else None, and the last line that it said."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return None, f"Timeout after {SECONDS:g} s"
    if not done.stdout:
        return None, "".join(done.stderr.strip().splitlines()[-1:])
    return json.loads(done.stdout)["dependencies"], ""


def unaudited(report: Iterable[Mapping[str, Any]]) -> str:
    """Return the reason why no package was looked up; empty if one was."""
    reasons = [package.get("skip_reason", "") for package in report]
    return str(reasons[0]) if all(reasons) else ""


def findings(report: Iterable[Mapping[str, Any]], allowed: Mapping[str, str]) -> list[str]:
    """A line for each vulnerability that is not allowed."""
    return [
        f"{package['name']} {package['version']}: {vulnerability['id']}, "
        f"fixed in {', '.join(vulnerability['fix_versions']) or 'no version'}"
        for package in report
        for vulnerability in package.get("vulns", ())
        if not ids(vulnerability) & allowed.keys()
    ]


def notes(report: list[dict[str, Any]], allowed: Mapping[str, str]) -> list[str]:
    """Return remarks on what was looked up, and on exceptions that are not needed."""
    found = {name for p in report for v in p.get("vulns", ()) for name in ids(v)}
    skipped = [p["skip_reason"] for p in report if "skip_reason" in p]
    unneeded = [f"{name} is allowed, and not found any more" for name in allowed.keys() - found]
    return [*skipped, *unneeded, f"{len(report) - len(skipped)} packages audited"]


def ids(vulnerability: Mapping[str, Any]) -> set[str]:
    """All names of a vulnerability."""
    return {vulnerability["id"], *vulnerability.get("aliases", ())}


if __name__ == "__main__":
    sys.exit(main())
