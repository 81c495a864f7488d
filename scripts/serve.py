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
from pathlib import Path

import make_schema
from _checkout import ROOT

from cog_triton.server.guard import adopt_orphans

MAX_CONCURRENCY = "256"  # that of predict.py's decorator, which only `cog build` reads


def environment() -> dict[str, str]:
    """The server's environment: as `cog build` would set it in an image."""
    # coglet starts its worker with the first python in PATH.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    defaults = {
        "COG_MAX_CONCURRENCY": MAX_CONCURRENCY,
        "COG_PREDICT_TYPE_STUB": "predict.py:Predictor",
    }
    return {**defaults, **os.environ, "PATH": path}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--host", default=os.environ.get("HOST", "127.0.0.1"))
    arguments = parser.parse_args(argv)
    make_schema.main([])
    adopt_orphans()  # to wait for them
    server = subprocess.Popen(
        [sys.executable, "-m", "cog_triton.faces.cog.no_delay", "--host", arguments.host],
        cwd=ROOT,
        env=environment(),
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
