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
genai-perf also has mean the same here. The last line on standard output is the path of the JSON report. The
exit status is 1 if a goal was missed (--suite) and 2 if something could not be measured.
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
        help="targets to put load on; default: cog-sse",
    )
    parser.add_argument(
        "--baseline",
        nargs="*",
        metavar="TARGET",
        choices=TARGET_NAMES,
        help="targets to compare with; default: triton-engine, unless --url is used",
    )
    parser.add_argument("--suite", action="store_true", help="measure only the project's goals")
    parser.add_argument(
        "--concurrency",
        type=positive_integer,
        nargs="+",
        default=[1],
        metavar="N",
        help="numbers of concurrent streams to measure in turn; default: 1",
    )
    parser.add_argument(
        "--request-count",
        dest="requests",
        type=positive_integer,
        metavar="N",
        help="requests per load; default: 100, or 4 per stream if that is more",
    )
    parser.add_argument(
        "--rounds",
        type=positive_integer,
        default=1,
        metavar="N",
        help="times to measure each target; the report has medians; default: %(default)s",
    )
    parser.add_argument(
        "--warmup-request-count",
        dest="warmup",
        type=int,
        default=10,
        metavar="N",
        help="unmeasured requests before each load; default: %(default)s",
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
        "--tokenizer",
        metavar="DIRECTORY",
        help="tokenizer that counts tokens; default: the model's",
    )
    parser.add_argument(
        "-u",
        "--url",
        metavar="URL",
        help="URL of a running server, or of a Triton for Triton's targets",
    )
    parser.add_argument(
        "--settings",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="environment variables of the servers to start, such as ENGINE=simulated",
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
