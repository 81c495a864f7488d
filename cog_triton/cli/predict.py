"""``cog-triton predict``: one answer of predict.py:Predictor, streamed to the terminal."""

import argparse
import asyncio
import contextlib
import inspect
import io
import logging
import os
import sys
import typing
from typing import Any

from cog_triton.cli.options import Variables, add_model, model_variables
from cog_triton.errors import CogTritonError
from cog_triton.faces.terminal import end_at_once_on_signals
from cog_triton.faces.terminal.serving import DIM, Report

DESCRIPTION = """
    cog-triton predict "What is machine learning?"
    cog-triton predict -i max_tokens=20 -i temperature=0 "What is a KV cache?"

The answer goes to standard output and nothing else does: the progress of the start, the seed, the figures
and Triton's warnings go to standard error.
"""


class Options(argparse.Namespace):
    prompt: str | None
    model: str | None
    input: list[str]
    verbose: bool


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="default: What is machine learning?")
    add_model(parser)
    parser.add_argument(
        "-i",
        "--input",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another input of the predictor, such as max_tokens; may be repeated",
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
    try:
        asyncio.run(answer(options, progress))
    except (CogTritonError, OSError) as error:
        progress.say(str(error), "ERROR")
        return 1
    return 0


async def answer(options: Options, progress: Report) -> None:
    """Set the predictor up, print its answer while it is made, stop everything, and print the figures."""
    from predict import Predictor

    predictor = Predictor()
    metrics: dict[str, Any] = {}
    predictor.record_metric = metrics.__setitem__
    inputs = inputs_of(Predictor.predict, options)
    await predictor.setup()
    stdout, printed = sys.stdout, io.StringIO()  # such as its seed

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
    first, rate = metrics["time_to_first_token"], metrics["tokens_per_second"]
    figures = f"first after {first * 1000:.0f} ms, {rate:.0f} tokens/s"
    notes = f"{printed.getvalue()}{metrics['output_token_count']} tokens, {figures}"
    print(progress.paint(DIM, notes), file=sys.stderr)


def inputs_of(function: Any, options: Options) -> dict[str, Any]:
    """Return the inputs of ``predict``: its defaults, the prompt, and NAME=VALUE with the input's type."""
    parameters = inspect.signature(function).parameters.values()
    values = {p.name: p.default.default for p in parameters if hasattr(p.default, "default")}
    values["prompt"] = options.prompt or None
    hints = typing.get_type_hints(function)
    for item in options.input:
        name, _, text = item.partition("=")
        if name not in hints:
            raise SystemExit(f"unknown input {name!r}")
        kinds = [kind for kind in typing.get_args(hints[name]) if kind is not type(None)]
        kind = kinds[0] if kinds else hints[name]
        values[name] = text.lower() in ("1", "true", "yes") if kind is bool else kind(text)
    if values["prompt"] is None and values["messages"] is None:
        values["prompt"] = "What is machine learning?"
    return values
