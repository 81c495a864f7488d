"""``cog-triton scale``: NVIDIA Dynamo's frontend and workers on this machine."""

import argparse

from cog_triton.cli.options import add_host, add_port, port_of, positive_integer
from cog_triton.cli.worker import check_dynamo

DESCRIPTION = """
Ctrl-C or SIGTERM stops all of them.

    cog-triton scale --port 8080 --workers 2
"""


class Options(argparse.Namespace):
    host: str
    port: int | None
    workers: int


def add_options(parser: argparse.ArgumentParser) -> None:
    add_host(parser, short="-H")
    add_port(parser, 8080)
    parser.add_argument(
        "--workers", type=positive_integer, default=2, help="number of workers; default: 2"
    )


def run(options: Options) -> int:
    check_dynamo()
    from cog_triton.api.dynamo.scale import run as serve

    return serve(options.host, port_of(options.port, 8080), options.workers)
