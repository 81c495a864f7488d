#!/usr/bin/env python3
"""Runs predict.py:Predictor once and streams its answer to the terminal.

    python scripts/run_prediction.py "What is machine learning?"
    python scripts/run_prediction.py -i max_tokens=20 -i temperature=0 "What is a KV cache?"

The answer goes to standard output, the figures and what Triton warns of to standard error.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import logging
import sys
import typing
from collections.abc import Iterator
from typing import Any

import _checkout  # noqa: F401


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompt", nargs="?", default="What is machine learning?")
    parser.add_argument("-i", "--input", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("-v", "--verbose", action="store_true", help="show Triton's whole log")
    arguments = parser.parse_args(argv)
    logging.basicConfig(
        level=logging.INFO if arguments.verbose else logging.WARNING,
        format="%(levelname)s %(name)s: %(message)s",
    )
    from cog_triton.errors import CogTritonError

    try:
        asyncio.run(predict({"prompt": arguments.prompt}, arguments.input))
    except CogTritonError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


async def predict(inputs: dict[str, Any], given: list[str]) -> None:
    """Sets the predictor up, prints one answer while it is made, and stops everything."""
    from predict import Predictor

    predictor = Predictor()
    metrics: dict[str, Any] = {}
    predictor.record_metric = metrics.__setitem__
    inputs = {**defaults(Predictor.predict), **inputs, **parse(Predictor.predict, given)}
    print("Starting Triton ...", file=sys.stderr)
    await predictor.setup()
    try:
        chunks = await predictor.predict(**inputs)
        await asyncio.to_thread(show, chunks)
    finally:
        await predictor.deployment.stop()
    first, rate = metrics["time_to_first_token"], metrics["tokens_per_second"]
    print(
        f"{metrics['output_token_count']} tokens, first after {first * 1000:.0f} ms, {rate:.0f} tokens/s",
        file=sys.stderr,
    )


def show(chunks: Iterator[str]) -> None:
    """Prints pieces of text as they come."""
    for chunk in chunks:
        print(chunk, end="", flush=True)
    print()


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
