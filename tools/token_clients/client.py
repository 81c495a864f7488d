"""``cog-triton client``: one text, completed by a running Triton."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time

from tools.token_clients.options import ClientOptions, add_sampling, add_server

Options = ClientOptions
DESCRIPTION = """
It has the flags of the TensorRT-LLM backend's client.py.

    cog-triton client --text="Born in north-east France, Soyer trained as a" --output_len=10 \\
        --tokenizer_dir cog_triton/demo --tokenizer_type auto
    cog-triton client -i grpc -u localhost:8001 --tokenizer_dir cog_triton/demo --streaming

It sends token ids to the model tensorrt_llm rather than text to the ensemble, and does the tokenization
itself.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_sampling(parser)
    add_server(parser)
    parser.add_argument(
        "-t",
        "--text",
        default="Born in north-east France, Soyer trained as a",
        help="default: %(default)s",
    )
    parser.add_argument(
        "--tokenizer_dir",
        required=True,
        metavar="DIRECTORY",
        help="directory or Hugging Face id of the tokenizer",
    )
    parser.add_argument("--tokenizer_type", help="ignored: the tokenizer's files determine it")
    parser.add_argument(
        "--streaming", action="store_true", help="print the answer as it is generated"
    )


def run(options: ClientOptions) -> None:
    """Print the time that the answer took, the text and the answer; streamed, the answer comes first."""
    asyncio.run(answer(options))


async def answer(options: ClientOptions) -> None:
    import numpy as np

    from cog_triton.text.detokenizer import IncrementalDetokenizer
    from cog_triton.text.tokenizer import load_tokenizer, without_torch
    from tools.token_clients.engine import connect, engine_ids, engine_inputs

    without_torch()
    tokenizer = load_tokenizer(options.tokenizer_dir)
    detokenizer = IncrementalDetokenizer(tokenizer)
    end_id = tokenizer.eos_token_id
    pad_id = end_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    inputs = engine_inputs(
        options,
        tokenizer(options.text).input_ids,
        end_id=np.int32(end_id),
        pad_id=np.int32(pad_id),
        streaming=np.bool_(options.streaming),
    )

    def text_of(ids: list[int]) -> str:
        # The embedded engines send the end token, TensorRT-LLM does not.
        return detokenizer.decode(ids[:-1] if ids[-1:] == [end_id] else ids)

    if options.streaming:
        print(f"Input: {options.text}\nOutput: ", end="", flush=True)
    ids: list[int] = []
    async with contextlib.aclosing(connect(options)) as triton:
        began = time.perf_counter()
        async for new in engine_ids(triton, inputs):
            # With beams, a streamed response has all tokens so far.
            ids = new if "beam_width" in inputs else ids + new
            if options.streaming:
                print(text_of(new), end="", flush=True)
        latency = f"[INFO] Latency: {(time.perf_counter() - began) * 1000:.3f} ms"
    if options.streaming:
        print(f"{detokenizer.flush()}\n{latency}")
    else:
        print(f"{latency}\nInput: {options.text}\nOutput: {text_of(ids)}{detokenizer.flush()}")
