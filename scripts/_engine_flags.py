"""What the small clients of NVIDIA's TensorRT-LLM backend share: their flags, and the way to the engine."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

import _checkout  # noqa: F401
from _token_clients import CLIENTS, TokenClient

from cog_triton.errors import CogTritonError
from cog_triton.settings import read_settings

ANY_VOCABULARY = 256  # ids that every model has


def add_server(parser: argparse.ArgumentParser) -> None:
    """Add the flags of Triton's address."""
    add = parser.add_argument
    add(
        "-u",
        "--url",
        metavar="HOST:PORT",
        help="default: localhost:8000, or 8001 for gRPC; or the "
        "port in TRITON_HTTP_PORT or TRITON_GRPC_PORT",
    )
    add("-i", "--protocol", choices=["http", "grpc"], default="http", help="default: http")
    add("-c", "--concurrency", type=int, help="no effect: one connection carries all requests")
    add("-v", "--verbose", action="store_true", help="say what is sent, and where")


def add_sampling(parser: argparse.ArgumentParser, *, output_len: int = 10) -> None:
    """Add the flags of sampling parameters."""
    add = parser.add_argument
    add("-beam", "--beam_width", type=positive, default=1, metavar="N", help="default: 1")
    add("-topk", "--topk", type=int, default=1, metavar="K", help="default: 1, which is greedy")
    add("-topp", "--topp", type=float, default=0.0, metavar="P", help="default: 0, which is none")
    add(
        *("-o", "--output_len"),
        type=positive,
        default=output_len,
        metavar="TOKENS",
        help=f"of an output, at most; default: {output_len}",
    )


def add_random_prompts(parser: argparse.ArgumentParser) -> None:
    """Add the flags of prompts of random ids."""
    add = parser.add_argument
    add("-b", "--batch_size", type=positive, default=8, metavar="N", help="default: 8")
    add("-s", "--start_len", type=positive, default=8, metavar="TOKENS", help="of a prompt; 8")
    add("--tokenizer_dir", "--tokenizer", metavar="DIRECTORY", help="draws ids of its vocabulary")
    add(
        "--vocab_size",
        type=positive,
        default=ANY_VOCABULARY,
        metavar="N",
        help=f"without a tokenizer: draws ids below N; default: {ANY_VOCABULARY}",
    )
    add("--random_seed", type=int, default=0, metavar="N", help="draws the same ids again; 0")


def vocabulary(arguments: argparse.Namespace) -> int:
    """Return the number of ids to draw from.

    Raises:
        ConfigurationError: there is no tokenizer in the directory.
    """
    if arguments.tokenizer_dir is None:
        return int(arguments.vocab_size)
    from cog_triton.text.tokenizer import load_tokenizer, without_torch

    without_torch()
    return len(load_tokenizer(arguments.tokenizer_dir))


def default_url(protocol: str, environ: Mapping[str, str]) -> str:
    """Return the address of this machine's Triton, started with the same environment.

    Raises:
        ConfigurationError: a setting in it is not valid.
    """
    settings = read_settings(environ)
    return f"localhost:{settings.http_port if protocol == 'http' else settings.grpc_port}"


@asynccontextmanager
async def connected(arguments: argparse.Namespace) -> AsyncIterator[TokenClient]:
    """A connection to the engine's model."""
    address = arguments.url or default_url(arguments.protocol, os.environ)
    if arguments.verbose:
        print(f"[INFO] {arguments.protocol} to tensorrt_llm at {address}", file=sys.stderr)
    client = CLIENTS[arguments.protocol](address)
    try:
        yield client
    finally:
        await client.aclose()


def run(work: Callable[[argparse.Namespace], Awaitable[None]], given: argparse.Namespace) -> int:
    """Runs a client; returns its exit status: 1 with the reason, 130 after Ctrl-C."""
    try:
        asyncio.run(_awaited(work(given)))
    except CogTritonError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def positive(text: str) -> int:
    """A number of the command line that is at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


async def _awaited(work: Awaitable[None]) -> None:
    await work
