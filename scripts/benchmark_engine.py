#!/usr/bin/env python3
"""Compares an embedded engine with its library, called directly: transformers or vLLM.

The model has random weights and is made on the spot. The contestants take turns; what counts are the
ratios of one run. The last line is JSON; the report is also written to artifacts/engine/.

Examples:
    On a CPU, 135 million parameters, 16 streams:

        python scripts/benchmark_engine.py

    With transformers serve, whose packages are in an environment of their own:

        python scripts/benchmark_engine.py --serve-python /tmp/tserve/bin/python

    On a GPU, vLLM on 8 billion parameters, which it makes up itself:

        echo "load_format: dummy" > dummy.yaml
        python scripts/benchmark_engine.py --engine vllm --vllm-config dummy.yaml --shape 8b \\
            --dtype bfloat16 --device cuda --streams 1 16 64 256 --output-tokens 128 --repeat 3

    The OpenAI face beside vLLM's own server, which stream text completions of the same model:

        python scripts/benchmark_engine.py --engine vllm --contestants openai vllm-serve \\
            --vllm-config dummy.yaml --shape 8b --dtype bfloat16 --device cuda --streams 64 256 \\
            --output-tokens 128 --repeat 3
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from _checkout import ROOT

NAMES = {
    "transformers": ("transformers", "engine", "stack", "serve"),
    "vllm": ("vllm", "engine", "stack", "openai", "vllm-serve"),
}
NOT_REPORTED = ("model_directory", "vllm_config", "serve_python", "check", "artifact_dir")


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    if options.threads is not None:  # read when torch is imported, here and in the servers
        os.environ["OMP_NUM_THREADS"] = str(options.threads)
    from cog_triton.errors import CogTritonError
    from tools.benchmark.measure import BenchmarkError

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="engine-benchmark-") as directory:
        try:
            report = run(options, Path(directory), sys.argv[1:] if argv is None else argv)
        except (CogTritonError, BenchmarkError) as error:
            print(error, file=sys.stderr)
            return 1
    print(json.dumps(report))
    failed = any(result["errors"] for result in report["results"])
    missed = not all(check["met"] for check in report.get("checks", ()))
    return 1 if failed or (options.check and missed) else 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--engine", choices=NAMES, default="transformers", help="default: %(default)s")
    add(
        "--vllm-config",
        type=Path,
        metavar="FILE",
        help="YAML file of vLLM's arguments; with load_format: dummy no weights are written",
    )
    add("--shape", choices=("tiny", "135m", "8b"), default="135m", help="of the model")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    add("--device", default="cpu", help="cpu or cuda")
    add("--streams", type=int, nargs="+", default=[16], help="requests at once, each a load")
    add("--input-tokens", type=int, default=32)
    add("--output-tokens", type=int, default=64)
    add("--repeat", type=int, default=3, metavar="N", help="rounds of each load")
    add(
        "--contestants",
        choices=sorted({name for names in NAMES.values() for name in names}),
        nargs="+",
        help="targets of scripts/benchmark.py, stack is generate(); default: all that the engine has",
    )
    add("--seed", type=int, default=0)
    add(
        "--threads",
        type=int,
        metavar="N",
        help="of each contestant on a CPU; 1 is steadier than all cores where these are shared",
    )
    add(
        "--model-directory",
        type=Path,
        metavar="DIR",
        help="where the model is made, or is from before; a temporary directory otherwise",
    )
    add(
        "--serve-python",
        default=sys.executable,
        metavar="PATH",
        help="a Python that has transformers[serving]",
    )
    add("--async-batching", action="store_true", help="for transformers called directly")
    add("--artifact-dir", type=Path, default=Path("artifacts/engine"), metavar="DIRECTORY")
    add("--check", action="store_true", help="exit with status 1 if a target is missed")
    options = parser.parse_args(argv)
    options.contestants = options.contestants or NAMES[options.engine]
    if others := set(options.contestants) - set(NAMES[options.engine]):
        parser.error(f"the engine {options.engine} has no contestant {', '.join(sorted(others))}")
    return options


def run(options: argparse.Namespace, directory: Path, argv: list[str]) -> dict[str, Any]:
    """Makes the model, compares the contestants and returns the report."""
    from tools.benchmark.cli import progress, publish
    from tools.benchmark.engine_comparison import compare, environment, promises
    from tools.benchmark.servers import why_no_serve

    skipped = {}
    if "serve" in options.contestants and (reason := why_no_serve(options.serve_python)):
        skipped["serve"] = reason
        progress(f"serve is skipped: {reason}")
    setup = setup_of(options, directory)
    make(setup.model, options)
    contestants = [name for name in options.contestants if name not in skipped]
    results = compare(setup, contestants, directory, options.serve_python, progress)
    about = {
        "title": f"The engine {options.engine} beside its library",
        "command": shlex.join(["scripts/benchmark_engine.py", *argv]),
        "options": {
            name: value for name, value in vars(options).items() if name not in NOT_REPORTED
        },
        "skipped": skipped,
    }
    return publish(
        about,
        environment(setup, directory / "engine.yaml"),
        results,
        promises(results, options.device),
        directory=options.artifact_dir,
    )


def setup_of(options: argparse.Namespace, directory: Path) -> Any:
    """Return the comparison that the options name."""
    from tools.benchmark.engine_comparison import Setup

    model = options.model_directory or directory / "model"
    return Setup(
        model.absolute(),  # tritonserver has a working directory of its own
        ROOT / "triton_model_repo",
        options.device,
        options.streams,
        options.input_tokens,
        options.output_tokens,
        options.repeat,
        options.seed,
        engine=options.engine,
        vllm_config=options.vllm_config and options.vllm_config.absolute(),
        at_once=len(options.contestants) if options.repeat > 1 else 1,
        alone={"use_async_batching": "true"} if options.async_batching else {},
    )


def make(model: Path, options: argparse.Namespace) -> None:
    """Makes the model, unless it is there from before."""
    import torch

    from tools.benchmark.cli import progress
    from tools.benchmark.random_model import (
        SHAPES,
        is_made,
        make_model,
        make_model_without_weights,
    )

    if is_made(model):
        return
    progress(f"making {model} ...")
    shape, dtype = SHAPES[options.shape], getattr(torch, options.dtype)
    if makes_weights_up(options.vllm_config):
        make_model_without_weights(model, shape, dtype=dtype)
        return
    device = torch.device(options.device)
    make_model(model, shape, dtype=dtype, device=device, seed=options.seed)
    if device.type == "cuda":
        torch.cuda.empty_cache()


def makes_weights_up(vllm_config: Path | None) -> bool:
    """Return whether vLLM makes the weights up instead of reading them."""
    if vllm_config is None:
        return False
    import yaml  # type: ignore[import-untyped, unused-ignore]

    return (yaml.safe_load(vllm_config.read_text()) or {}).get("load_format") == "dummy"


if __name__ == "__main__":
    sys.exit(main())
