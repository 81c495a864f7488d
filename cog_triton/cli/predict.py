"""``cog-triton predict``: one answer of predict.py:Predictor, streamed to the terminal."""

import argparse
import asyncio
import contextlib
import io
import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

from cog_triton.cli.inputs import assignment, inputs_of
from cog_triton.cli.options import (
    Variables,
    add_model,
    check_device,
    model_variables,
    set_variables,
)
from cog_triton.errors import CogTritonError
from cog_triton.processes import without_collections
from cog_triton.terminal import end_at_once_on_signals
from cog_triton.terminal.serving import DIM, Report

DESCRIPTION = """
    cog-triton predict "What is machine learning?"
    cog-triton predict -i max_tokens=20 -i temperature=0 "What is a KV cache?"

Only the answer goes to standard output. Start-up progress, the seed, timings and Triton's warnings go to
standard error. Triton uses free ports unless TRITON_HTTP_PORT, TRITON_GRPC_PORT and TRITON_METRICS_PORT are
set.
"""
TRITON_PORTS = ("TRITON_HTTP_PORT", "TRITON_GRPC_PORT", "TRITON_METRICS_PORT")


class Options(argparse.Namespace):
    prompt: str | None
    model: str | None
    input: list[tuple[str, str]]
    verbose: bool


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="the prompt; default: What is machine learning?")
    add_model(parser)
    parser.add_argument(
        "-i",
        "--input",
        type=assignment,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another input, such as max_tokens=20; may be repeated",
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="show Triton's whole log")


def variables(options: Options) -> Variables:
    return model_variables(options.model)


def run(options: Options) -> int:
    progress = Report(sys.stderr, os.environ, passing=True)
    # What is imported next takes its time.
    end_at_once_on_signals(lambda: "" if progress.clear() else "\n")
    progress.show("starting Triton ...")
    progress.setLevel(logging.DEBUG if options.verbose else logging.INFO)
    logging.basicConfig(level=logging.INFO, handlers=[progress])
    set_variables(free_ports(os.environ))
    try:
        check_device()
        asyncio.run(answer(options, progress))
    except (CogTritonError, OSError) as error:
        progress.say(str(error), "ERROR")
        return 1
    return 0


def free_ports(environ: Mapping[str, str]) -> Variables:
    """Return the variables that let Triton take free ports, but for those that are set.

    Another server may be running on this machine, and only this process uses this Triton.
    """
    return {name: "0" for name in TRITON_PORTS if not environ.get(name)}


async def answer(options: Options, progress: Report) -> None:
    """Set the predictor up, print its answer while it is made, stop everything, and print the figures."""
    with without_collections():
        from predict import Predictor

    predictor = Predictor()
    metrics: dict[str, Any] = {}
    predictor.record_metric = metrics.__setitem__
    inputs = inputs_of(Predictor.predict, options.prompt, options.input)
    await predictor.setup()
    # The predictor prints notes, such as the seed. They are shown after the answer.
    stdout = sys.stdout
    printed = io.StringIO()

    def show() -> None:
        for chunk in chunks:
            print(chunk, end="", file=stdout, flush=True)
        print(file=stdout, flush=True)

    try:
        with contextlib.redirect_stdout(printed):
            chunks = await predictor.predict(**inputs)
            progress.clear()
            await asyncio.to_thread(show)
    finally:
        await predictor.deployment.stop()
    first = f"first after {metrics['time_to_first_token'] * 1000:.0f} ms"
    rate = f"{metrics['tokens_per_second']:.0f} tokens/s"
    notes = f"{printed.getvalue()}{metrics['output_token_count']} tokens, {first}, {rate}"
    print(progress.paint(DIM, notes), file=sys.stderr)
