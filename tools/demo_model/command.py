"""``cog-triton demo-model``: the demo model, trained anew."""

import argparse
from pathlib import Path

DESCRIPTION = """
    cog-triton demo-model --output /tmp/demo

Training takes a minute or two on one CPU core and downloads nothing.
"""


class Options(argparse.Namespace):
    output: Path | None


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output", type=Path, help="directory to write the model to; default: cog_triton/demo"
    )


def run(options: Options) -> int:
    from tools.demo_model import main

    return main(options.output)
