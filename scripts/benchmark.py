#!/usr/bin/env python3
"""Measures the stack, layer by layer, under a load like its users'.

    python scripts/benchmark.py --settings ENGINE=simulated --concurrency 1 16 64
    python scripts/benchmark.py --target cog-sse generate triton-grpc --request-rate 10 50
    python scripts/benchmark.py --url http://localhost:5000 --concurrency 16 --request-count 200

The last line on standard output is the path of the report as JSON. The exit status is 0, 1 when a promise
was missed (``--suite``), and 2 when something could not be measured.
"""

from __future__ import annotations

import logging
import sys

import _checkout  # noqa: F401


def main(argv: list[str] | None = None) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    from tools.benchmark.cli import run
    from tools.benchmark.command import exit_status

    return exit_status(run, argv)


if __name__ == "__main__":
    sys.exit(main())
