"""``cog-triton identity-test``: a batch of random prompts on a running Triton, timed."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from statistics import fmean
from typing import TYPE_CHECKING

from cog_triton.cli.options import positive_integer
from cog_triton.errors import TritonMalformedEvent
from tools.token_clients.options import (
    IdentityTestOptions,
    add_prompts,
    add_sampling,
    add_server,
)

if TYPE_CHECKING:
    from tools.token_clients.engine import Client, Inputs

Options = IdentityTestOptions
DESCRIPTION = """
It has the flags of the TensorRT-LLM backend's identity_test.py.

    cog-triton identity-test --batch_size=8 --start_len=128 --output_len=20
    cog-triton identity-test -i grpc -m async -p 4 -n 3 --tokenizer_dir cog_triton/demo

A run sends the batch --request_parallelism times, one after another or, with -m async, all at once. The
latency is a run's time divided by that number, averaged over all runs; the throughput follows from it.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_sampling(parser)
    add_server(parser)
    add_prompts(parser)
    parser.add_argument(
        "-w", "--warm_up", action="store_true", help="send two unmeasured batches first"
    )
    parser.add_argument(
        "-p",
        "--request_parallelism",
        type=positive_integer,
        default=10,
        metavar="N",
        help="batches per run; default: %(default)s",
    )
    parser.add_argument(
        "-m", "--mode", choices=["sync", "async"], default="sync", help="default: %(default)s"
    )
    parser.add_argument(
        "-n",
        "--num_runs",
        type=positive_integer,
        default=1,
        metavar="N",
        help="default: %(default)s",
    )


def run(options: IdentityTestOptions) -> None:
    """Print a batch, its latency and the throughput."""
    seconds = asyncio.run(batch_seconds(options))
    size = f"Start len: {options.start_len}, Output len: {options.output_len}"
    print(f"[INFO] Batch size: {options.batch_size}, {size}")
    print(f"[INFO] Latency: {seconds * 1000:.3f} ms")
    print(f"[INFO] Throughput: {options.batch_size / seconds:.3f} sentences / sec")


async def batch_seconds(options: IdentityTestOptions) -> float:
    from tools.token_clients.engine import connect, engine_inputs, random_prompts

    prompts = random_prompts(options, options.batch_size)
    batch = [engine_inputs(options, ids) for ids in prompts]
    times = options.request_parallelism
    together = options.mode == "async"
    async with contextlib.aclosing(connect(options)) as triton:
        if options.warm_up:
            print("[INFO] sending requests to warm up")
            await send(triton, batch, 2, together=False)
        seconds = [await send(triton, batch, times, together) for _ in range(options.num_runs)]
    return fmean(seconds) / float(times)


async def send(triton: Client, batch: list[Inputs], times: int, together: bool) -> float:
    """Send a batch so many times; return the seconds that all of them took."""
    from tools.token_clients.engine import engine_ids

    async def is_answered(inputs: Inputs) -> bool:
        return any([ids async for ids in engine_ids(triton, inputs)])

    began = time.perf_counter()
    done: list[bool] = []
    # Together, all requests of all batches are sent at once; otherwise a batch waits for the one before.
    groups = [batch * times] if together else [batch] * times
    for requests in groups:
        done += await asyncio.gather(*map(is_answered, requests))
    seconds = time.perf_counter() - began
    if not all(done):
        raise TritonMalformedEvent(f"{done.count(False)} of {len(done)} outputs are empty")
    return seconds
