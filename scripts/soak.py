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
import signal
import sys

import _checkout  # noqa: F401


def main(argv: list[str] | None = None) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    from cog_triton.errors import CogTritonError
    from tools.benchmark.measure import BenchmarkError
    from tools.soak.cli import run

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        kept = run(argv)
    except (BenchmarkError, CogTritonError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
