#!/usr/bin/env python3
"""Serves the predictor with Cog's HTTP server, and stops all of it on Ctrl-C and SIGTERM.

    python scripts/serve.py
    PORT=5001 ENGINE=simulated python scripts/serve.py --host 0.0.0.0

The settings are in docs/configuration.md.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import make_schema
from _checkout import ROOT

from cog_triton.server.guard import adopt_orphans

MAX_CONCURRENCY = "256"  # that of predict.py's decorator, which only `cog build` reads


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """The server's environment: as `cog build` would set it in an image, under what is given."""
    # coglet starts its worker with the first python in PATH.
    path = os.pathsep.join([str(Path(sys.executable).parent), given.get("PATH", "")])
    defaults = {
        "COG_MAX_CONCURRENCY": MAX_CONCURRENCY,
        "COG_PREDICT_TYPE_STUB": "predict.py:Predictor",
        # With more, Cog's server refuses requests although slots are free. See docs/cog.md.
        "TOKIO_WORKER_THREADS": "1",
    }
    return {**defaults, **given, "PATH": path}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--host", default=os.environ.get("HOST", "127.0.0.1"))
    arguments = parser.parse_args(argv)
    make_schema.main([])
    adopt_orphans()  # to wait for them
    server = subprocess.Popen(
        [sys.executable, "-m", "cog_triton.faces.cog.no_delay", "--host", arguments.host],
        cwd=ROOT,
        env=environment(os.environ),
        start_new_session=True,  # Ctrl-C reaches this process alone, which passes it on
    )
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, lambda *_: server.terminate())
    status = server.wait()
    # tritonserver's guard is still stopping it.
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    return 0 if status in (0, -signal.SIGTERM) else status


if __name__ == "__main__":
    sys.exit(main())
