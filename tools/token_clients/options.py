"""The options that the clients share, as NVIDIA's scripts have them."""

import argparse
from pathlib import Path

from cog_triton.cli.options import positive_integer


class SamplingOptions(argparse.Namespace):
    beam_width: int
    topk: int
    topp: float
    output_len: int


class ServerOptions(argparse.Namespace):
    url: str | None
    protocol: str
    concurrency: int | None
    verbose: bool


class PromptOptions(argparse.Namespace):
    batch_size: int
    start_len: int
    tokenizer_dir: str | None
    vocab_size: int
    random_seed: int


class IdentityTestOptions(SamplingOptions, ServerOptions, PromptOptions):
    warm_up: bool
    request_parallelism: int
    mode: str
    num_runs: int


class ClientOptions(SamplingOptions, ServerOptions):
    text: str
    tokenizer_dir: str
    tokenizer_type: str | None
    streaming: bool


class InputDataOptions(SamplingOptions, PromptOptions):
    num_samples: int
    output: Path


def add_sampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-beam",
        "--beam_width",
        type=positive_integer,
        default=1,
        metavar="N",
        help="default: %(default)s",
    )
    parser.add_argument(
        "-topk", "--topk", type=int, default=1, metavar="K", help="default: 1 (greedy)"
    )
    parser.add_argument(
        "-topp", "--topp", type=float, default=0.0, metavar="P", help="default: 0 (no limit)"
    )
    parser.add_argument(
        "-o",
        "--output_len",
        type=positive_integer,
        default=10,
        metavar="TOKENS",
        help="maximum length of an output; default: %(default)s",
    )


def add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-u",
        "--url",
        metavar="HOST:PORT",
        help="default: localhost and $TRITON_HTTP_PORT (8000) or $TRITON_GRPC_PORT (8001)",
    )
    parser.add_argument(
        "-i",
        "--protocol",
        choices=["http", "grpc"],
        default="http",
        help="default: %(default)s",
    )
    parser.add_argument(
        "-c",
        "--concurrency",
        type=int,
        help="ignored: one connection carries all requests",
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="log every request")


def add_prompts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-b",
        "--batch_size",
        type=positive_integer,
        default=8,
        metavar="N",
        help="default: %(default)s",
    )
    parser.add_argument(
        "-s",
        "--start_len",
        type=positive_integer,
        default=8,
        metavar="TOKENS",
        help="length of a prompt; default: %(default)s",
    )
    parser.add_argument(
        "--tokenizer_dir",
        "--tokenizer",
        metavar="DIRECTORY",
        help="draw ids from this tokenizer's vocabulary",
    )
    # 256 ids are in every vocabulary.
    parser.add_argument(
        "--vocab_size",
        type=positive_integer,
        default=256,
        metavar="N",
        help="without a tokenizer, draw ids below N; default: %(default)s",
    )
    parser.add_argument(
        "--random_seed",
        type=int,
        default=0,
        metavar="N",
        help="random seed of the ids; default: %(default)s",
    )
