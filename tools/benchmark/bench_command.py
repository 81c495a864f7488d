"""``cog-triton bench``: load on the stack, or on any layer of it."""

import argparse
from pathlib import Path

from cog_triton.cli.options import positive_integer

TARGET_NAMES = (
    "cog-sse",
    "cog-json",
    "openai-sse",
    "generate",
    "triton-grpc",
    "triton-http",
    "triton-engine",
    "engine",
)
DESCRIPTION = f"""
    cog-triton bench --settings ENGINE=simulated --concurrency 1 16 64
    cog-triton bench --target cog-sse generate triton-grpc --rounds 3
    cog-triton bench --url http://localhost:5000 --concurrency 16 --request-count 200

Targets: {", ".join(TARGET_NAMES)}. Flags that
genai-perf has mean the same. The last line on standard output is the path of the report as JSON. The exit
status is 0, 1 when a promise was missed (--suite), and 2 when something could not be measured.
"""


class Options(argparse.Namespace):
    target: list[str]
    baseline: list[str] | None
    suite: bool
    concurrency: list[int]
    requests: int | None
    rounds: int
    warmup: int
    input_tokens: int
    output_tokens: int
    output_stddev: float
    seed: int
    tokenizer: str | None
    url: str | None
    settings: list[str]
    artifact_dir: Path


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target",
        nargs="*",
        default=["cog-sse"],
        metavar="TARGET",
        choices=TARGET_NAMES,
        help="what gets the load; default: cog-sse",
    )
    parser.add_argument(
        "--baseline",
        nargs="*",
        metavar="TARGET",
        choices=TARGET_NAMES,
        help="targets to compare with; default: triton-engine, where the servers are started here",
    )
    parser.add_argument("--suite", action="store_true", help="measure the promises, and only them")
    parser.add_argument(
        "--concurrency",
        type=positive_integer,
        nargs="+",
        default=[1],
        metavar="N",
        help="numbers of streams, one after another; default: 1",
    )
    parser.add_argument(
        "--request-count",
        dest="requests",
        type=positive_integer,
        metavar="N",
        help="requests of each load; default: 100, or 4 a stream",
    )
    parser.add_argument(
        "--rounds",
        type=positive_integer,
        default=1,
        metavar="N",
        help="turns of every target, for medians; default: %(default)s",
    )
    parser.add_argument(
        "--warmup-request-count",
        dest="warmup",
        type=int,
        default=10,
        metavar="N",
        help="requests before, which are not measured; default: %(default)s",
    )
    parser.add_argument(
        "--synthetic-input-tokens-mean",
        dest="input_tokens",
        type=positive_integer,
        default=128,
        metavar="N",
        help="default: %(default)s",
    )
    parser.add_argument(
        "--output-tokens-mean",
        dest="output_tokens",
        type=positive_integer,
        default=128,
        metavar="N",
        help="default: %(default)s",
    )
    parser.add_argument(
        "--output-tokens-stddev",
        dest="output_stddev",
        type=float,
        default=0.0,
        metavar="N",
        help="default: 0",
    )
    parser.add_argument(
        "--random-seed",
        dest="seed",
        type=int,
        default=0,
        metavar="N",
        help="default: %(default)s",
    )
    parser.add_argument(
        "--tokenizer", metavar="DIRECTORY", help="counts tokens; default: the model's"
    )
    parser.add_argument(
        "-u", "--url", metavar="URL", help="a running server; for targets of Triton, a Triton"
    )
    parser.add_argument(
        "--settings",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="environment of the servers that are started, such as ENGINE=simulated",
    )
    parser.add_argument(
        "--artifact-dir",
        type=Path,
        default=Path("artifacts"),
        metavar="DIRECTORY",
        help="default: %(default)s",
    )


def run(options: Options) -> int:
    from tools.benchmark.bench import main

    return main(options)
