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
import signal
import sys

import _checkout  # noqa: F401


def main(argv: list[str] | None = None) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    from cog_triton.errors import CogTritonError
    from tools.benchmark.cli import run
    from tools.benchmark.measure import BenchmarkError

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        met = run(argv)
    except (BenchmarkError, CogTritonError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
