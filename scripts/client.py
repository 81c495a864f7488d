#!/usr/bin/env python3
r"""Completes one text on a running Triton, with the flags of the TensorRT-LLM backend's client.py.

Examples:
  python3 scripts/client.py --text="Born in north-east France, Soyer trained as a" --output_len=10 \
      --tokenizer_dir cog_triton/demo --tokenizer_type auto
  python3 scripts/client.py -i grpc -u localhost:8001 --tokenizer_dir cog_triton/demo --streaming

It asks the model tensorrt_llm, past the ensemble, and makes ids of the text and text of the ids itself.
"""

from __future__ import annotations

import argparse
import sys
import time

import _engine_flags as flags
from _token_clients import Batch

from cog_triton.text.detokenizer import IncrementalDetokenizer
from cog_triton.text.tokenizer import Tokenizer, load_tokenizer, without_torch

TEXT = "Born in north-east France, Soyer trained as a"


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    return flags.run(complete, parser().parse_args(argv))


async def complete(arguments: argparse.Namespace) -> None:
    """Prints the time that the answer took, the text and the answer; streamed, the answer comes first.

    Raises:
        CogTritonError: there is no tokenizer, or Triton did not answer.
    """
    without_torch()
    tokenizer = load_tokenizer(arguments.tokenizer_dir)
    batch = batch_of(arguments, tokenizer)
    detokenizer = IncrementalDetokenizer(tokenizer)

    def show(_: int, ids: list[int]) -> None:
        if arguments.streaming:
            print(detokenizer.decode(without_end(ids, batch.end_id)), end="", flush=True)

    if arguments.streaming:
        print(f"Input: {arguments.text}\nOutput: ", end="", flush=True)
    async with flags.connected(arguments) as client:
        began = time.perf_counter()
        (ids,) = await client.complete(batch, show)
        latency = f"[INFO] Latency: {(time.perf_counter() - began) * 1000:.3f} ms"
    if arguments.streaming:
        print(f"{detokenizer.flush()}\n{latency}")
        return
    text = detokenizer.decode(without_end(ids, batch.end_id)) + detokenizer.flush()
    print(f"{latency}\nInput: {arguments.text}\nOutput: {text}")


def batch_of(arguments: argparse.Namespace, tokenizer: Tokenizer) -> Batch:
    """The request."""
    end_id, pad_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    return Batch(
        (tuple(tokenizer(arguments.text).input_ids),),
        arguments.output_len,
        top_k=arguments.topk,
        top_p=arguments.topp,
        beam_width=arguments.beam_width,
        end_id=end_id,
        pad_id=end_id if pad_id is None else pad_id,
        streaming=arguments.streaming,
    )


def without_end(ids: list[int], end_id: int | None) -> list[int]:
    """The ids before an end token: the embedded engines send it, TensorRT-LLM does not."""
    return ids[:-1] if ids[-1:] == [end_id] else ids


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("-t", "--text", default=TEXT, help=f"default: {TEXT}")
    made.add_argument("--tokenizer_dir", required=True, metavar="DIRECTORY", help="or a hub's id")
    made.add_argument("--tokenizer_type", help="no effect: the tokenizer's files say what it is")
    made.add_argument("--streaming", action="store_true", help="print the answer as it is made")
    flags.add_server(made)
    flags.add_sampling(made)
    return made


if __name__ == "__main__":
    sys.exit(main())
