#!/usr/bin/env python3
"""Serves the predictor with Cog's HTTP server, and stops all of it on Ctrl-C and SIGTERM.

    python scripts/serve.py
    PORT=5001 ENGINE=simulated python scripts/serve.py --host 0.0.0.0 --verbose

The first Ctrl-C lets running predictions end, for at most DRAIN_SECONDS; the second stops at once. The
settings are in docs/configuration.md.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":  # a Ctrl-C in the imports below is no reason for a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import asyncio
import errno
import logging
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from _checkout import ROOT

from cog_triton.faces.terminal import end_at_once_on_signals

if TYPE_CHECKING:
    from cog_triton.faces.terminal.report import Report
    from cog_triton.settings import Settings

MAX_CONCURRENCY = "512"  # that of predict.py's decorator, which only `cog build` reads


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
    # Cog's server writes JSON, which is read here, unless it is told otherwise.
    return {**defaults, **given, "PATH": path, "LOG_FORMAT": "json"}


def main(argv: list[str] | None = None) -> int:
    """Serves until it is told to stop; returns the exit status, 130 after Ctrl-C."""
    end_at_once_on_signals()  # what is imported next takes its time
    arguments = parse(argv)
    if arguments.verbose:
        os.environ["LOG_LEVEL"] = "debug"
    from cog_triton.errors import ConfigurationError
    from cog_triton.faces.terminal.serving import Serving
    from cog_triton.settings import read_settings

    port = os.environ.get("PORT") or "5000"
    url = f"http://{arguments.host.replace('0.0.0.0', '127.0.0.1')}:{port}"
    try:
        settings = read_settings()
    except ConfigurationError as error:
        report(read_settings({})).say(str(error), logging.ERROR)
        return 1
    reporter = report(settings)
    if reason := why_not_free(arguments.host, port):
        reporter.say(reason, logging.ERROR)
        return 1
    import make_schema

    make_schema.main([])
    command = [sys.executable, "-m", "cog_triton.faces.cog.server", "--host", arguments.host]
    serving = Serving(reporter, url, settings.stop_timeout)
    return asyncio.run(serving.run(command, environment(os.environ), ROOT))


def report(settings: Settings) -> Report:
    """Write the log as text to a person, as JSON to a machine."""
    from cog_triton.faces.terminal.report import Report, style_of

    style = style_of(sys.stderr, os.environ)
    by_itself = "text" if style.terminal else "json"
    text = (by_itself if settings.log_format == "auto" else settings.log_format) == "text"
    level = getattr(logging, settings.log_level.upper())
    return Report(sys.stderr, style if text else None, level)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command's arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--host", default=os.environ.get("HOST", "127.0.0.1"))
    parser.add_argument("-v", "--verbose", action="store_true", help="LOG_LEVEL=debug")
    return parser.parse_args(argv)


def why_not_free(host: str, port: str) -> str | None:
    """Return the reason why nothing can listen on a port; None if something can."""
    if not port.isdecimal() or not 0 < int(port) < 65536:
        return f"PORT={port} is no number of a port"
    with socket.socket() as listener:
        # As Cog's server does: what was open a minute ago is in nobody's way.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, int(port)))
            listener.listen()
        except OSError as error:
            in_use = error.errno == errno.EADDRINUSE
            return f"port {port} is in use" if in_use else f"{host}, port {port}: {error.strerror}"
    return None


if __name__ == "__main__":
    sys.exit(main())
