"""Cog's HTTP server with the predictor, and OpenAI's API on any Triton."""

import argparse
import asyncio
import errno
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from cog_triton import ROOT
from cog_triton.faces.terminal import end_at_once_on_signals

SCHEMA = Path(".cog", "openapi_schema.json")  # where Cog's server reads it, in its directory


def serve(options: argparse.Namespace) -> int:
    """Serve until a signal comes; return the exit status, 130 after Ctrl-C."""
    end_at_once_on_signals()  # what is imported next takes its time
    from cog_triton.errors import ConfigurationError
    from cog_triton.faces.terminal.serving import Report, Serving
    from cog_triton.processes import write_whole
    from cog_triton.settings import read_settings

    port, problem = os.environ.get("PORT") or "5000", ""
    try:
        settings = read_settings()
        problem = why_not_free(options.host, port)
    except ConfigurationError as error:
        settings, problem = read_settings({}), str(error)
    # Text to a person, JSON to a machine.
    by_itself = "text" if sys.stderr.isatty() else "json"
    form = by_itself if settings.log_format == "auto" else settings.log_format
    report = Report(sys.stderr, os.environ, machine=form == "json")
    report.setLevel(settings.log_level.upper())
    if problem:
        report.say(problem, "ERROR")
        return 1
    SCHEMA.parent.mkdir(exist_ok=True)
    # A second server may be starting, and reading it.
    write_whole(SCHEMA, Path(__file__).with_name(SCHEMA.name).read_text(encoding="utf-8"))
    url = f"http://{options.host.replace('0.0.0.0', '127.0.0.1')}:{port}"
    command = [sys.executable, "-m", "cog_triton.faces.cog.server", "--host", options.host]
    serving = Serving(report, url, settings.stop_timeout)
    return asyncio.run(serving.run(command, environment(os.environ)))


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return the server's environment: as ``cog build`` would set it in an image, under what is given."""
    import yaml

    config = yaml.safe_load((ROOT / "cog.yaml").read_text(encoding="utf-8"))
    # coglet starts its worker with the first python in PATH.
    path = os.pathsep.join([str(Path(sys.executable).parent), given.get("PATH", "")])
    defaults = {
        "COG_MAX_CONCURRENCY": str(config["concurrency"]["max"]),
        "COG_PREDICT_TYPE_STUB": str(ROOT / config["predict"]),
        # With more, Cog's server refuses requests although slots are free. See docs/operations.md.
        "TOKIO_WORKER_THREADS": "1",
    }
    # Cog's server writes JSON, which is read here, unless it is told otherwise.
    return {**defaults, **given, "PATH": path, "LOG_FORMAT": "json"}


def why_not_free(host: str, port: str) -> str:
    """Return the reason why nothing can listen on a port; empty if something can."""
    if not port.isdecimal() or not 0 < int(port) < 65536:
        return f"PORT={port} is not a port"
    try:
        socket.create_server((host, int(port))).close()
    except OSError as error:
        in_use = error.errno == errno.EADDRINUSE
        return f"port {port} is in use" if in_use else f"{host}, port {port}: {error.strerror}"
    return ""


def openai(options: argparse.Namespace) -> int:
    """Serve until a signal comes; return the exit status, 130 after Ctrl-C."""
    end_at_once_on_signals()
    # Else gRPC says of each process that is started that it cannot prepare for it.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    from cog_triton.faces.openai.server import run

    triton = options.triton_endpoint, options.triton_model
    return run(options.host, options.port, *triton)
