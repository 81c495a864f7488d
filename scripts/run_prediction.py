#!/usr/bin/env python3
"""Runs predict.py:Predictor once and streams its answer to the terminal.

    python scripts/run_prediction.py "What is machine learning?"
    python scripts/run_prediction.py -i max_tokens=20 -i temperature=0 "What is a KV cache?"

The answer goes to standard output and nothing else does: the seed, the figures and what Triton warns of go
to standard error, and what is going on as well while somebody looks at it.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":  # a Ctrl-C in the imports below is no reason for a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import asyncio
import contextlib
import inspect
import io
import logging
import os
import sys
import typing
from collections.abc import Iterator
from typing import Any, TextIO

import _checkout  # noqa: F401

from cog_triton.faces.terminal import end_at_once_on_signals
from cog_triton.faces.terminal.report import DIM, RED, Report, style_of

DEFAULT_PROMPT = "What is machine learning?"


def main(argv: list[str] | None = None) -> int:
    """Prints one answer; returns the exit status, 130 after Ctrl-C."""
    style = style_of(sys.stderr, os.environ)
    progress = Report(sys.stderr, style, passing=True)
    end_at_once_on_signals(
        lambda: "" if progress.clear() else "\n"
    )  # what is imported next takes its time
    arguments = parser().parse_args(argv)
    progress.show("starting Triton ...")
    from cog_triton.errors import CogTritonError

    progress.setLevel(logging.DEBUG if arguments.verbose else logging.INFO)
    logging.basicConfig(level=logging.INFO, handlers=[progress])
    try:
        notes = asyncio.run(predict(inputs(arguments), arguments.input, progress))
    except CogTritonError as error:
        progress.clear()
        print(f"{style.paint(RED, 'error:')} {error}", file=sys.stderr)
        return 1
    print(style.paint(DIM, notes), file=sys.stderr)
    return 0


def parser() -> argparse.ArgumentParser:
    """Of the command's arguments."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("prompt", nargs="?")
    options.add_argument("-i", "--input", action="append", default=[], metavar="NAME=VALUE")
    options.add_argument("-v", "--verbose", action="store_true", help="show Triton's whole log")
    return options


def inputs(arguments: argparse.Namespace) -> dict[str, Any]:
    """The prompt, which has a default unless there are messages."""
    chat = any(item.startswith("messages=") for item in arguments.input)
    return {"prompt": arguments.prompt or (None if chat else DEFAULT_PROMPT)}


async def predict(inputs: dict[str, Any], given: list[str], progress: Report) -> str:
    """Sets the predictor up, prints one answer while it is made, and stops everything.

    Returns:
        What the predictor printed, its seed for instance, and the figures.
    """
    from predict import Predictor

    predictor = Predictor()
    metrics: dict[str, Any] = {}
    predictor.record_metric = metrics.__setitem__
    inputs = {**defaults(Predictor.predict), **inputs, **parse(Predictor.predict, given)}
    await predictor.setup()
    answer, printed = sys.stdout, io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            chunks = await predictor.predict(**inputs)
            progress.clear()
            await asyncio.to_thread(show, chunks, answer)
    finally:
        await predictor.deployment.stop()
    return printed.getvalue() + figures(metrics)


def figures(metrics: dict[str, Any]) -> str:
    """Return the measurements, in a line."""
    first, rate = metrics["time_to_first_token"], metrics["tokens_per_second"]
    tokens = metrics["output_token_count"]
    return f"{tokens} tokens, first after {first * 1000:.0f} ms, {rate:.0f} tokens/s"


def show(chunks: Iterator[str], stream: TextIO) -> None:
    """Prints pieces of text as they come."""
    for chunk in chunks:
        stream.write(chunk)
        stream.flush()
    stream.write("\n")
    stream.flush()


def defaults(function: Any) -> dict[str, Any]:
    """The defaults of a predict function's inputs."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default.default for p in parameters if hasattr(p.default, "default")}


def parse(function: Any, given: list[str]) -> dict[str, Any]:
    """NAME=VALUE arguments, the values with their inputs' types."""
    hints = typing.get_type_hints(function)
    values = {}
    for item in given:
        name, _, text = item.partition("=")
        if name not in hints:
            raise SystemExit(f"unknown input {name!r}")
        kinds = [kind for kind in typing.get_args(hints[name]) if kind is not type(None)]
        kind = kinds[0] if kinds else hints[name]
        values[name] = text.lower() in ("1", "true", "yes") if kind is bool else kind(text)
    return values


if __name__ == "__main__":
    sys.exit(main())
