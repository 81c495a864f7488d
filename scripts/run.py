#!/usr/bin/env python3
r"""Completes prompts on an engine or a checkpoint, with the flags of TensorRT-LLM's run.py.

Examples:
  python3 scripts/run.py --engine_dir cog_triton/demo --max_output_len 100 \
      --input_text "What is machine learning?" "What is a KV cache?"
  python3 scripts/run.py --engine_dir ./phi-engine --tokenizer_dir ./Phi-3-mini-4k-instruct \
      --max_output_len 500 --input_text "How do I count to nine in French?"

It starts Triton on free ports with the deployment's own settings, asks, prints and stops everything.
--engine_dir is a directory of TensorRT-LLM's engine or of a checkpoint, a tar file of one, or a Hugging
Face id; without it, MODEL and ENGINE_DIR count, as docs/configuration.md has them.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import _checkout  # noqa: F401

from cog_triton.deployment import Deployment
from cog_triton.errors import CogTritonError
from cog_triton.request.request import Request
from cog_triton.settings import read_settings
from cog_triton.text.tokenizer import Tokenizer, load_tokenizer, without_torch

TEXT = "Born in north-east France, Soyer trained as a"
# Flags that change nothing here, and those that cannot be honoured, with the reason.
WITHOUT_EFFECT = {
    "--log_level": 1,
    "--tokenizer_type": 1,
    "--streaming_interval": 1,
    "--no_prompt_template": 0,
}
REFUSED = {
    "--num_beams": "one sequence is streamed for each prompt; a client of Triton's ports may ask for more",
    "--output_csv": "texts are printed, and ids are not kept",
    "--output_npy": "texts are printed, and ids are not kept",
    "--lora_dir": "a client of Triton's ports may send lora_weights",
    "--use_py_session": "the engine runs behind Triton",
}


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status: 0, 1 with the reason, or 130 after Ctrl-C."""
    arguments = parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        asyncio.run(complete(arguments, os.environ))
    except (CogTritonError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted: everything that was started has been stopped.", file=sys.stderr)
        return 130
    return 0


async def complete(arguments: argparse.Namespace, environ: Mapping[str, str]) -> None:
    """Starts the engine, prints each prompt and its output, and stops everything.

    Raises:
        CogTritonError: the engine cannot be run, or refused or failed a prompt.
        OSError: the file of prompts cannot be read.
    """
    prompts = prompts_of(arguments)
    deployment = await Deployment.start(read_settings(environment(arguments, environ)))
    try:
        tokenizer = _tokenizer(deployment.settings.tokenizer_dir)
        for index, text in enumerate(prompts):
            prompt = cut(text, tokenizer, arguments.max_input_length)
            print(f'Input [Text {index}]: "{prompt}"')
            print(f'Output [Text {index} Beam 0]: "', end="", flush=True)
            await _print(deployment, request_of(arguments, prompt), streaming=arguments.streaming)
            print('"')
    finally:
        await deployment.stop()


def environment(arguments: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, str]:
    """The deployment's environment; it takes free ports, as a server may run on the usual ones."""
    given = {
        "COG_WEIGHTS": arguments.engine_dir,
        "MODEL": arguments.hf_model_dir,
        "TOKENIZER": arguments.tokenizer_dir,
    }
    ports = {f"TRITON_{name}_PORT": "0" for name in ("HTTP", "GRPC", "METRICS")}
    return {**environ, **ports, **{name: value for name, value in given.items() if value}}


def prompts_of(arguments: argparse.Namespace) -> list[str]:
    """The prompts, in order.

    Raises:
        OSError: their file cannot be read.
    """
    if arguments.input_file is None:
        return list(arguments.input_text)
    text: str = arguments.input_file.read_text(encoding="utf-8", errors="replace")
    return text.splitlines()


def request_of(arguments: argparse.Namespace, prompt: str) -> Request:
    """A prompt's request; a top_p of 0 is TensorRT-LLM's for none."""
    return Request(
        prompt=prompt,
        seed=arguments.random_seed,
        max_tokens=arguments.max_output_len,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p or 1.0,
        length_penalty=arguments.length_penalty,
        repetition_penalty=arguments.repetition_penalty,
        presence_penalty=arguments.presence_penalty,
        frequency_penalty=arguments.frequency_penalty,
        stop_sequences=tuple(arguments.stop_words),
        bad_words=tuple(arguments.bad_words),
        end_id=arguments.end_id,
    )


def cut(prompt: str, tokenizer: Tokenizer, longest: int) -> str:
    """The prompt without what is beyond so many tokens."""
    encoded = tokenizer(prompt, truncation=True, max_length=longest, return_offsets_mapping=True)
    end = max((stop for _, stop in encoded["offset_mapping"]), default=0)
    return prompt[:end] if len(encoded.input_ids) >= longest else prompt


async def _print(deployment: Deployment, request: Request, *, streaming: bool) -> None:
    pieces = []
    async for chunk in deployment.generate(request):
        pieces.append(chunk.text)
        if streaming:
            print(chunk.text, end="", flush=True)
    if not streaming:
        print("".join(pieces), end="")


def _tokenizer(directory: str) -> Tokenizer:
    without_torch()
    return load_tokenizer(directory)


class _Refuse(argparse.Action):
    """A flag that cannot be honoured, unless its value is the one that changes nothing."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,  # noqa: ARG002
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if (option_string, values) != ("--num_beams", "1"):
            parser.error(f"{option_string} cannot be honoured: {REFUSED[option_string or '']}")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("--max_output_len", type=int, required=True, metavar="TOKENS", help="of each output")
    add("--input_text", nargs="+", default=[TEXT], metavar="TEXT", help=f"default: {TEXT}")
    add("--input_file", type=Path, metavar="FILE", help="a prompt a line, instead of --input_text")
    add("--max_input_length", type=int, default=923, metavar="TOKENS", help="of a prompt; 923")
    add("--engine_dir", metavar="DIRECTORY", help="what to run; see above")
    add("--hf_model_dir", "--model_dir", metavar="DIRECTORY", help="the checkpoint (MODEL)")
    add("--tokenizer_dir", metavar="DIRECTORY", help="default: the checkpoint's (TOKENIZER)")
    add("--streaming", action="store_true", help="print an output as it is made")
    _add_sampling(made)
    for flag, values in WITHOUT_EFFECT.items():
        add(flag, nargs="?" if values else "*", help=argparse.SUPPRESS)
    for flag in REFUSED:
        add(flag, nargs="?", action=_Refuse, help=argparse.SUPPRESS)
    return made


def _add_sampling(made: argparse.ArgumentParser) -> None:
    add = made.add_argument_group("sampling").add_argument
    add("--temperature", type=float, default=1.0, help="default: 1")
    add("--top_k", type=int, default=1, help="default: 1, which is greedy")
    add("--top_p", type=float, default=0.0, help="default: 0, which is none")
    add("--length_penalty", type=float, default=1.0)
    add("--repetition_penalty", type=float, default=1.0)
    add("--presence_penalty", type=float, default=0.0)
    add("--frequency_penalty", type=float, default=0.0)
    add("--random_seed", type=int, default=0)
    add("--end_id", type=int, help="ends an output; default: the tokenizer's")
    words: dict[str, Any] = {"nargs": "+", "action": "extend", "default": [], "metavar": "WORD"}
    add("--stop_words", **words, help="end an output, and are left out of it")
    add("--bad_words", **words, help="never made")


if __name__ == "__main__":
    for name in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, lambda number, _frame: sys.exit(128 + number))
    sys.exit(main())
