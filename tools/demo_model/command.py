"""``cog-triton demo-model``: the demo model, trained anew."""

import argparse
from pathlib import Path

DESCRIPTION = """
    cog-triton demo-model --output /tmp/demo

It takes a minute or two on one core of this machine's CPU. Nothing is downloaded.
"""


class Options(argparse.Namespace):
    output: Path | None


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output", type=Path, help="directory of the model; default: cog_triton/demo"
    )


def run(options: Options) -> int:
    from tools.demo_model import main

    return main(options.output)
