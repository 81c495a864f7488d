"""``cog-triton serve``: Cog's HTTP server with the predictor."""

import argparse
import asyncio
import errno
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from cog_triton import ROOT
from cog_triton.cli.options import (
    Variables,
    add_host,
    add_model,
    add_port,
    add_served_model_names,
    add_verbose,
    check_device,
    model_variables,
    port_of,
    served_model_variables,
    verbose_variables,
)
from cog_triton.terminal import end_at_once_on_signals

SCHEMA = Path(".cog", "openapi_schema.json")  # where Cog's server reads it, in its directory

DESCRIPTION = """
    cog-triton serve
    cog-triton serve --port 5001 --host 0.0.0.0 --model /path/to/model --verbose

After SIGTERM or the first Ctrl-C, running predictions have DRAIN_SECONDS to finish; then the server stops.
A second signal stops it at once. The command creates a directory .cog in the current directory, with a
schema that Cog's server needs.
"""


class Options(argparse.Namespace):
    host: str
    port: int | None
    model: str | None
    served_model_name: list[str] | None
    verbose: bool


def add_options(parser: argparse.ArgumentParser) -> None:
    add_host(parser)
    add_port(parser, 5000)
    add_model(parser)
    add_served_model_names(parser)
    add_verbose(parser)


def variables(options: Options) -> Variables:
    return {
        **model_variables(options.model),
        **served_model_variables(options.served_model_name),
        **verbose_variables(options.verbose),
    }


def run(options: Options) -> int:
    """Serve until a signal comes; return the exit status, 130 after Ctrl-C."""
    end_at_once_on_signals()  # what is imported next takes its time
    from cog_triton.errors import ConfigurationError
    from cog_triton.processes import write_whole
    from cog_triton.settings import read_settings
    from cog_triton.terminal.serving import Report, Serving

    port = 0
    try:
        settings = read_settings()
        port = port_of(options.port, 5000)
        check_device()
        problem = why_not_free(options.host, port)
    except ConfigurationError as error:
        settings = read_settings({})
        problem = str(error)
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
    url = url_of(options.host, port)
    command = [sys.executable, "-m", "cog_triton.api.cog.server", "--host", options.host]
    serving = Serving(report, url, settings.stop_timeout)
    return asyncio.run(serving.run(command, environment({**os.environ, "PORT": str(port)})))


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the server's environment: ``environ`` over what ``cog build`` would set in an image."""
    import yaml

    config = yaml.safe_load((ROOT / "cog.yaml").read_text(encoding="utf-8"))
    # coglet starts its worker with the first python in PATH.
    path = os.pathsep.join([str(Path(sys.executable).parent), environ.get("PATH", "")])
    defaults = {
        "COG_MAX_CONCURRENCY": str(config["concurrency"]["max"]),
        "COG_PREDICT_TYPE_STUB": str(ROOT / config["predict"]),
        # With more, Cog's server refuses requests although slots are free. See docs/operations.md.
        "TOKIO_WORKER_THREADS": "1",
    }
    # This process reads the log of Cog's server, and writes it in the format that the user wants.
    return {**defaults, **environ, "PATH": path, "LOG_FORMAT": "json"}


def url_of(host: str, port: int) -> str:
    """Return the URL by which this machine reaches a server that listens on an address."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


def why_not_free(host: str, port: int) -> str:
    """Return the reason why nothing can listen on a port; empty if something can."""
    if port == 0:
        return "Cog's server cannot choose a free port: use --port with 1 to 65535"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return f"port {port} is in use"
        return f"{host}, port {port}: {error.strerror}"
    return ""
