"""``cog-triton soak``: load on real servers, parts of which are killed; every answer is checked."""

import argparse
from pathlib import Path

from cog_triton.cli.options import positive_integer

DESCRIPTION = """
    cog-triton soak --minutes 10
    cog-triton soak --minutes 2 --chaos
    cog-triton soak --kills 200 --engine simulated

The report is in artifacts/soak: soak.json, and soak.html with the plots. The exit
status is 1 if a goal was missed (docs/measuring.md lists them) and 2 if a server could not be started.
"""
KINDS = ["cog", "openai", "cog-http"]


class Options(argparse.Namespace):
    minutes: float
    chaos: bool
    kills: int | None
    streams: int
    engine: list[str]
    kind: list[str]
    seed: int
    settings: list[str]
    artifact_dir: Path


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--minutes",
        type=float,
        default=10.0,
        metavar="N",
        help="total minutes of load; default: 10",
    )
    parser.add_argument("--chaos", action="store_true", help="kill parts of the servers at random")
    parser.add_argument(
        "--kills",
        type=positive_integer,
        metavar="N",
        help="kill N parts, then stop; overrides --minutes",
    )
    parser.add_argument(
        "--streams",
        type=positive_integer,
        default=64,
        metavar="N",
        help="number of concurrent requests; default: %(default)s",
    )
    parser.add_argument(
        "--engine",
        nargs="+",
        default=["simulated", "transformers"],
        help="engines to test; default: simulated transformers",
    )
    parser.add_argument(
        "--kind", nargs="+", choices=KINDS, default=KINDS, help="servers to test; default: all"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="random seed; default: %(default)s",
    )
    parser.add_argument(
        "--settings",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="environment variables of the servers",
    )
    parser.add_argument(
        "--artifact-dir",
        type=Path,
        default=Path("artifacts", "soak"),
        metavar="DIR",
        help="default: %(default)s",
    )


def run(options: Options) -> int:
    from tools.soak.run import main

    return main(options)
