#!/usr/bin/env python3
"""Build a TensorRT-LLM engine from a YAML file, and pack it with its tokenizer into one tar.

Examples:
  python scripts/build_engine.py examples/engines/phi-3-mini-4k.yaml --dry-run
  python scripts/build_engine.py examples/engines/phi-3-mini-4k.yaml --output phi-3.tar
  HF_TOKEN=hf_… python scripts/build_engine.py examples/engines/llama-2-7b-tp4.yaml \\
      --output llama.tar --workdir /data/llama

Run it where TensorRT-LLM 0.11 to 1.2 is installed, on the kind of GPU that will serve the engine.
TENSORRT_LLM_EXAMPLES is the examples directory of its repository (default:
/app/tensorrt_llm/examples or /app/examples), TENSORRT_LLM_PYTHON the Python that has it.

To serve the tar, unpack it and set ENGINE_DIR=<directory>/engine and
TOKENIZER=<directory>/tokenizer.
"""

from __future__ import annotations

import argparse
import functools
import shlex
import signal
import sys
from pathlib import Path

import _checkout  # noqa: F401

from cog_triton.errors import ConfigurationError, EngineBuildError
from tools.engine_builder.build import build, redact
from tools.engine_builder.config import load_config
from tools.engine_builder.toolchain import find_toolchain, plan


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status.

    That is 0, 1 when a step failed, 2 when the configuration or the machine does not fit, and 130 after
    Ctrl-C.
    """
    arguments = _parser().parse_args(argv)
    try:
        _run(arguments.config, arguments.output, arguments.workdir, arguments.dry_run)
    except ConfigurationError as error:
        print(error, file=sys.stderr)
        return 2
    except EngineBuildError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"Interrupted: {arguments.output} was not written.", file=sys.stderr)
        return 130
    return 0


def _run(file: Path, output: Path, workdir: Path | None, dry_run: bool) -> None:
    config, toolchain = load_config(file), find_toolchain()
    if dry_run:
        directory = workdir or output.with_suffix(".build")
        planned = plan(config, toolchain, directory, toolchain.version())
        for note in planned.notes:
            print(f"note: {note}", file=sys.stderr)
        for step in planned.steps:
            print(f"# {step.name}\n{redact(shlex.join(step.command))}")
        return
    emit = functools.partial(print, flush=True)
    build(config, output, toolchain=toolchain, workdir=workdir, emit=emit)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path, metavar="CONFIG.yaml", help="what to build")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("engine.tar"),
        help="the tar (default: engine.tar); it is complete or not there",
    )
    parser.add_argument(
        "--workdir",
        type=Path,
        help="where downloads, checkpoint, engine and log are made, and kept for the next build "
        "(default: a directory beside the tar, removed after success)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the commands, and fetch and run nothing"
    )
    return parser


if __name__ == "__main__":
    # An exception stops the running step and removes the unfinished tar; the default action would not.
    for name in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, lambda number, _frame: sys.exit(128 + number))
    sys.exit(main())
