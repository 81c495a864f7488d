"""``cog-triton bench-engine``: an embedded engine beside its library, and beside vllm serve."""

import argparse
from pathlib import Path

from cog_triton.cli.options import Variables, positive_integer

DESCRIPTION = """
    cog-triton bench-engine --threads 1
    echo "load_format: dummy" > dummy.yaml
    cog-triton bench-engine --engine vllm --vllm-config dummy.yaml --shape 8b \\
        --dtype bfloat16 --device cuda --streams 1 16 64 256 --output-tokens 128
    cog-triton bench-engine --engine vllm --contestants openai vllm-serve \\
        --vllm-config dummy.yaml --shape 8b --dtype bfloat16 --device cuda --streams 64 256

All contestants run the same requests on the same model. Its weights are random, since a model's speed
depends only on its shape. The last line of the output is the JSON report, which is also written to
artifacts/engine/.
"""


class Options(argparse.Namespace):
    engine: str
    vllm_config: Path | None
    shape: str
    dtype: str
    device: str
    streams: list[int]
    input_tokens: int
    output_tokens: int
    rounds: int
    contestants: list[str]
    seed: int
    threads: int | None
    model_directory: Path | None
    artifact_dir: Path
    check: bool


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine",
        choices=["transformers", "vllm"],
        default="transformers",
        help="default: %(default)s",
    )
    parser.add_argument(
        "--vllm-config",
        type=Path,
        metavar="FILE",
        help="YAML file of vLLM's arguments; with load_format: dummy, no weights are written",
    )
    parser.add_argument(
        "--shape",
        choices=["tiny", "135m", "8b"],
        default="135m",
        help="shape of the model; default: %(default)s",
    )
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        default="float32",
        help="default: %(default)s",
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda; default: %(default)s")
    parser.add_argument(
        "--streams",
        type=positive_integer,
        nargs="+",
        default=[16],
        metavar="N",
        help="numbers of concurrent streams to measure in turn; default: 16",
    )
    parser.add_argument(
        "--input-tokens",
        type=positive_integer,
        default=32,
        metavar="N",
        help="default: %(default)s",
    )
    parser.add_argument(
        "--output-tokens",
        type=positive_integer,
        default=64,
        metavar="N",
        help="default: %(default)s",
    )
    parser.add_argument(
        "--repeat",
        dest="rounds",
        type=positive_integer,
        default=3,
        metavar="N",
        help="times to measure each load; default: %(default)s",
    )
    parser.add_argument(
        "--contestants",
        nargs="+",
        default=[],
        choices=["vllm", "engine", "stack", "openai", "vllm-serve"],
        help="stack is generate() on tritonserver; default: all that the engine supports",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--threads",
        type=positive_integer,
        metavar="N",
        help="CPU threads of each contestant; default: $OMP_NUM_THREADS",
    )
    parser.add_argument(
        "--model-directory",
        type=Path,
        metavar="DIR",
        help="directory of the model; created if it does not exist",
    )
    parser.add_argument(
        "--artifact-dir",
        type=Path,
        default=Path("artifacts", "engine"),
        metavar="DIRECTORY",
        help="default: %(default)s",
    )
    parser.add_argument(
        "--check", action="store_true", help="exit with status 1 if a goal is missed"
    )


def variables(options: Options) -> Variables:
    return {"OMP_NUM_THREADS": None if options.threads is None else str(options.threads)}


def run(options: Options) -> int:
    from tools.benchmark.engines import main

    return main(options)
