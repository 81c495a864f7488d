#!/usr/bin/env python3
"""Put load on the stack, or on any layer of it: ``cog-triton bench`` of a checkout.

    python scripts/benchmark.py --settings ENGINE=simulated --concurrency 1 16 64
    python scripts/benchmark.py --target cog-sse generate triton-grpc --request-rate 10 50
    python scripts/benchmark.py --url http://localhost:5000 --concurrency 16 --request-count 200

The last line on standard output is the path of the report as JSON. The exit status is 0, 1 when a promise
was missed (``--suite``), and 2 when something could not be measured.
"""

import sys

import _checkout  # noqa: F401

from tools.benchmark.cli import main

if __name__ == "__main__":
    sys.exit(main())
