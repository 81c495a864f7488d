"""``cog-triton run``: prompts completed by an engine or a checkpoint, on a Triton of their own."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
from pathlib import Path

from cog_triton.cli.options import Variables

DEFAULT_TEXT = "Born in north-east France, Soyer trained as a"
DESCRIPTION = """
It has the flags of TensorRT-LLM's run.py.

    cog-triton run --engine_dir cog_triton/demo --max_output_len 100 \\
        --input_text "What is machine learning?" "What is a KV cache?"
    cog-triton run --engine_dir ./phi-engine --tokenizer_dir ./Phi-3-mini-4k-instruct \\
        --max_output_len 500 --input_text "How do I count to nine in French?"

It starts Triton on free ports, with the settings in the environment, prints the completions, and stops
Triton. --engine_dir is the directory or tar file of a TensorRT-LLM engine or a checkpoint, or a Hugging
Face id. The default is the settings ENGINE_DIR and MODEL.
"""


class Options(argparse.Namespace):
    max_tokens: int
    input_text: list[str]
    input_file: Path | None
    max_input_length: int
    engine_dir: str | None
    hf_model_dir: str | None
    tokenizer_dir: str | None
    streaming: bool
    temperature: float
    top_k: int
    top_p: float
    length_penalty: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    end_id: int | None
    stop_sequences: list[str]
    bad_words: list[str]
    num_beams: int | None


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max_output_len",
        dest="max_tokens",
        type=int,
        required=True,
        metavar="TOKENS",
        help="maximum length of each output",
    )
    parser.add_argument(
        "--input_text",
        nargs="+",
        default=[DEFAULT_TEXT],
        metavar="TEXT",
        help=f"prompts; default: {DEFAULT_TEXT}",
    )
    parser.add_argument(
        "--input_file",
        type=Path,
        metavar="FILE",
        help="file of prompts, one per line, to use instead of --input_text",
    )
    parser.add_argument(
        "--max_input_length",
        type=int,
        default=923,
        metavar="TOKENS",
        help="maximum length of a prompt; default: %(default)s",
    )
    parser.add_argument(
        "--engine_dir", metavar="DIRECTORY", help="engine or checkpoint to run; see above"
    )
    parser.add_argument(
        "--hf_model_dir",
        "--model_dir",
        metavar="DIRECTORY",
        help="checkpoint to run; default: $MODEL",
    )
    parser.add_argument(
        "--tokenizer_dir", metavar="DIRECTORY", help="default: $TOKENIZER, or the checkpoint's"
    )
    parser.add_argument(
        "--streaming", action="store_true", help="print each output as it is generated"
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="default: 1")
    parser.add_argument("--top_k", type=int, default=1, help="default: 1 (greedy)")
    parser.add_argument("--top_p", type=float, default=0.0, help="default: 0 (no limit)")
    parser.add_argument("--length_penalty", type=float, default=1.0, help="default: 1")
    parser.add_argument("--repetition_penalty", type=float, default=1.0, help="default: 1")
    parser.add_argument("--presence_penalty", type=float, default=0.0, help="default: 0")
    parser.add_argument("--frequency_penalty", type=float, default=0.0, help="default: 0")
    parser.add_argument(
        "--random_seed", dest="seed", type=int, default=0, metavar="N", help="default: 0"
    )
    parser.add_argument(
        "--end_id", type=int, help="token id that ends an output; default: the tokenizer's"
    )
    parser.add_argument(
        "--stop_words",
        dest="stop_sequences",
        nargs="+",
        action="extend",
        default=[],
        metavar="WORD",
        help="words that end an output and are removed from it",
    )
    parser.add_argument(
        "--bad_words",
        nargs="+",
        action="extend",
        default=[],
        metavar="WORD",
        help="words that are never generated",
    )
    parser.add_argument("--num_beams", type=int, choices=[1], help="only 1 is supported")
    # Flags of run.py that change nothing here.
    parser.add_argument("--log_level", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--tokenizer_type", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--streaming_interval", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--no_prompt_template", nargs="*", help=argparse.SUPPRESS)


def variables(options: Options) -> Variables:
    return {
        "COG_WEIGHTS": options.engine_dir,
        "MODEL": options.hf_model_dir,
        "TOKENIZER": options.tokenizer_dir,
    }


def run(options: Options) -> None:
    from tools.command_line import begin

    begin()
    asyncio.run(complete(options))


async def complete(options: Options) -> None:
    """Start the engine, print each prompt and its output, and stop everything."""
    from cog_triton.deployment import Deployment
    from cog_triton.request.request import Request
    from cog_triton.settings import read_settings
    from cog_triton.text.tokenizer import load_tokenizer, without_torch
    from tools.accuracy.texts import shortened

    prompts = options.input_text
    if options.input_file is not None:
        prompts = options.input_file.read_text(encoding="utf-8", errors="replace").splitlines()
    values = {**vars(options), "top_p": options.top_p or 1.0}
    fields = [field.name for field in dataclasses.fields(Request)]
    sampling = {name: values[name] for name in fields if name in values}
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
