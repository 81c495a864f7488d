"""``cog-triton build-engine``: a YAML file to the tar of a TensorRT-LLM engine."""

import argparse
from pathlib import Path

DESCRIPTION = """
    cog-triton build-engine examples/engines/phi-3-mini-4k.yaml --dry-run
    cog-triton build-engine examples/engines/phi-3-mini-4k.yaml --output phi-3.tar
    HF_TOKEN=hf_… cog-triton build-engine examples/engines/llama-2-7b-tp4.yaml \\
        --output llama.tar --workdir /data/llama

Run it where TensorRT-LLM 0.11 to 1.2 is installed, on the kind of GPU that will serve the engine. Set
TENSORRT_LLM_EXAMPLES to the examples directory of its repository (default: /app/tensorrt_llm/examples or
/app/examples) and TENSORRT_LLM_PYTHON to the Python in which it is installed.

To serve the tar, unpack it and set ENGINE_DIR=<directory>/engine and TOKENIZER=<directory>/tokenizer. The
exit status is 1 if a step failed, and 2 if the file is invalid or this machine cannot build the engine.
"""


class Options(argparse.Namespace):
    config: Path
    output: Path
    workdir: Path | None
    dry_run: bool


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", type=Path, metavar="CONFIG.yaml", help="description of the engine"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("engine.tar"), help="tar to write; default: %(default)s"
    )
    parser.add_argument(
        "--workdir",
        type=Path,
        help="directory that keeps downloads, checkpoint, engine and log; default: nothing is kept",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the commands without running or downloading anything",
    )


def run(options: Options) -> int:
    from tools.engine_builder.build import main

    return main(options)
