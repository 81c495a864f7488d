#!/usr/bin/env python3
r"""Times a batch of random prompts on a running Triton, with the flags of the backend's identity_test.py.

Examples:
  python3 scripts/identity_test.py --batch_size=8 --start_len=128 --output_len=20
  python3 scripts/identity_test.py -i grpc -m async -p 4 -n 3 --tokenizer_dir cog_triton/demo

A run sends the batch --request_parallelism times, one after the other or with -m async together. The
latency is a run's time by that number, the mean of all runs; the throughput follows from it.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time

import _engine_flags as flags
from _token_clients import Batch, TokenClient, random_prompts

from cog_triton.errors import TritonMalformedEvent


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    return flags.run(measure, parser().parse_args(argv))


async def measure(arguments: argparse.Namespace) -> None:
    """Prints the batch, its latency and the throughput.

    Raises:
        CogTritonError: there is no tokenizer, or Triton did not answer.
    """
    batch = batch_of(arguments, flags.vocabulary(arguments))
    async with flags.connected(arguments) as client:
        if arguments.warm_up:
            print("[INFO] sending requests to warm up")
            await send(client, batch, 2, together=False)
        together = arguments.mode == "async"
        seconds = [
            await send(client, batch, arguments.request_parallelism, together=together)
            for _ in range(arguments.num_runs)
        ]
    print("\n".join(lines(arguments, statistics.mean(seconds) / arguments.request_parallelism)))


def lines(arguments: argparse.Namespace, seconds: float) -> list[str]:
    """Return the lines printed of a batch and its seconds."""
    size = f"Start len: {arguments.start_len}, Output len: {arguments.output_len}"
    return [
        f"[INFO] Batch size: {arguments.batch_size}, {size}",
        f"[INFO] Latency: {seconds * 1000:.3f} ms",
        f"[INFO] Throughput: {arguments.batch_size / seconds:.3f} sentences / sec",
    ]


async def send(client: TokenClient, batch: Batch, times: int, *, together: bool) -> float:
    """Sends a batch so many times; returns the seconds that all of them took."""
    began = time.perf_counter()
    if together:
        done = await asyncio.gather(*(client.complete(batch) for _ in range(times)))
    else:
        done = [await client.complete(batch) for _ in range(times)]
    seconds = time.perf_counter() - began
    empty = sum(not row for rows in done for row in rows)
    if empty:
        raise TritonMalformedEvent(f"{empty} of {times * len(batch.prompts)} outputs are empty")
    return seconds


def batch_of(arguments: argparse.Namespace, vocabulary: int) -> Batch:
    """The request."""
    return Batch(
        random_prompts(
            arguments.batch_size, arguments.start_len, vocabulary, arguments.random_seed
        ),
        arguments.output_len,
        top_k=arguments.topk,
        top_p=arguments.topp,
        beam_width=arguments.beam_width,
    )


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    flags.add_server(made)
    flags.add_random_prompts(made)
    flags.add_sampling(made)
    add("-w", "--warm_up", action="store_true", help="send two batches that do not count before")
    add(
        *("-p", "--request_parallelism"),
        type=flags.positive,
        default=10,
        metavar="N",
        help="batches of a run; default: 10",
    )
    add("-m", "--mode", choices=["sync", "async"], default="sync", help="default: sync")
    add("-n", "--num_runs", type=flags.positive, default=1, metavar="N", help="default: 1")
    return made


if __name__ == "__main__":
    sys.exit(main())
