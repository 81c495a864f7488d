#!/usr/bin/env python3
"""Puts streams on real servers for minutes or hours, kills parts of them, and checks every answer.

    python scripts/soak.py --minutes 10
    python scripts/soak.py --minutes 2 --chaos
    python scripts/soak.py --kills 200 --engine simulated

Its report is in artifacts/soak: soak.json, and soak.html with the plots. The exit status is 0, 1 when a
promise was missed (docs/reliability.md lists them), and 2 when a server could not be started.
"""

from __future__ import annotations

import logging
import sys

import _checkout  # noqa: F401


def main(argv: list[str] | None = None) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    from tools.benchmark.command import exit_status
    from tools.soak.cli import run

    return exit_status(run, argv)


if __name__ == "__main__":
    sys.exit(main())
