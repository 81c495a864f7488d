#!/usr/bin/env python3
"""Prompts completed by an engine or a checkpoint, on a Triton of their own."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os

import _checkout

from cog_triton.deployment import Deployment
from cog_triton.request.request import Request
from cog_triton.settings import read_settings
from cog_triton.text.tokenizer import load_tokenizer, without_torch
from tools.accuracy.texts import shortened
from tools.command_line import begin


def main(options: argparse.Namespace) -> None:
    begin()
    asyncio.run(complete(options))


async def complete(options: argparse.Namespace) -> None:
    """Start the engine, print each prompt and its output, and stop everything."""
    prompts = options.input_text
    if options.input_file is not None:
        prompts = options.input_file.read_text(encoding="utf-8", errors="replace").splitlines()
    given = {**vars(options), "top_p": options.top_p or 1.0}
    sampling = {f.name: given[f.name] for f in dataclasses.fields(Request) if f.name in given}
    # A server may run on the usual ports.
    ports = {f"TRITON_{name}_PORT": "0" for name in ("HTTP", "GRPC", "METRICS")}
    deployment = await Deployment.start(read_settings({**os.environ, **ports}))
    try:
        without_torch()
        tokenizer = load_tokenizer(deployment.settings.tokenizer_dir)
        for index, text in enumerate(prompts):
            prompt = shortened(text, tokenizer, options.max_input_length)
            print(f'Input [Text {index}]: "{prompt}"')
            print(f'Output [Text {index} Beam 0]: "', end="", flush=options.streaming)
            async for chunk in deployment.generate(Request(prompt=prompt, **sampling)):
                print(chunk.text, end="", flush=options.streaming)
            print('"', flush=True)
    finally:
        await deployment.stop()


if __name__ == "__main__":
    _checkout.run("run")
