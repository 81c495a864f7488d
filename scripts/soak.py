#!/usr/bin/env python3
"""Put streams on real servers for minutes or hours, kill parts of them, and check every answer.

    python scripts/soak.py --minutes 10
    python scripts/soak.py --minutes 2 --chaos
    python scripts/soak.py --kills 200 --engine simulated

Its report is in artifacts/soak: soak.json, and soak.html with the plots. The exit status is 0, 1 when a
promise was missed (docs/reliability.md lists them), and 2 when a server could not be started.
"""

import sys

import _checkout  # noqa: F401

from tools.soak.cli import main

if __name__ == "__main__":
    sys.exit(main())
