#!/usr/bin/env python3
"""Compares the embedded engine with transformers, called directly and as its own server.

The model has random weights and is made on the spot. The contestants take turns; what counts are the
ratios of one run. The last line is JSON.

Examples:
    On a CPU, 135 million parameters, 16 streams:

        python scripts/benchmark_engine.py

    With transformers serve, whose packages are in an environment of their own:

        python scripts/benchmark_engine.py --serve-python /tmp/tserve/bin/python

    On a GPU, 8 billion parameters:

        python scripts/benchmark_engine.py --shape 8b --dtype bfloat16 --device cuda \\
            --streams 1 16 64 --output-tokens 128 --contestants transformers engine stack
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _checkout import ROOT

NAMES = ("transformers", "engine", "stack", "serve")
NOT_REPORTED = ("model_directory", "serve_python", "check")
PAGE = 256  # tokens; what transformers reserves is a multiple of it


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    if options.threads is not None:  # read when torch is imported, here and in the servers
        os.environ["OMP_NUM_THREADS"] = str(options.threads)
    from cog_triton.errors import CogTritonError
    from tools.benchmark.engine import table, targets
    from tools.benchmark.engine_contestants import ContestantError

    with tempfile.TemporaryDirectory(prefix="engine-benchmark-") as directory:
        try:
            results, report = run(options, Path(directory))
        except (CogTritonError, ContestantError) as error:
            print(error, file=sys.stderr)
            return 1
    print(table(results))
    wanted = targets(results, options.device)
    for target in wanted:
        verdict = "met" if target.met else "MISSED"
        limit = f">= {target.least}" if target.least > -1e9 else f"<= {target.most}"
        print(
            f"{target.name} at {target.streams} streams: {target.value:.3f}, {limit} is {verdict}"
        )
    print(json.dumps(report))
    return 1 if options.check and not all(target.met for target in wanted) else 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shape", choices=("tiny", "135m", "8b"), default="135m", help="of the model")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    add("--device", default="cpu", help="cpu or cuda")
    add("--streams", type=int, nargs="+", default=[16], help="requests at once, each a load")
    add("--input-tokens", type=int, default=32)
    add("--output-tokens", type=int, default=64)
    add("--repeat", type=int, default=3, metavar="N", help="rounds of each load")
    add("--contestants", choices=NAMES, nargs="+", default=NAMES)
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
    add(
        "--attention",
        metavar="NAME",
        help="sdpa, paged|eager, torch_flash (PyTorch's own, NVIDIA GPUs) or one of transformers'; "
        "default: what the engine chooses",
    )
    add("--cuda-graph", action="store_true", help="capture the model's forward pass")
    add("--async-batching", action="store_true", help="for transformers called directly")
    add("--q-padding", type=int, default=0, metavar="TOKENS", help="of CUDA graphs; 0: default")
    add("--kv-padding", type=int, default=0, metavar="TOKENS", help="of CUDA graphs; 0: default")
    add("--check", action="store_true", help="exit with status 1 if a target is missed")
    return parser.parse_args(argv)


def run(options: argparse.Namespace, directory: Path) -> tuple[list[Any], dict[str, Any]]:
    """Makes the model, starts the contestants and compares them; returns results and report."""
    import torch

    from tools.benchmark.engine import Load, compare, report
    from tools.benchmark.engine_contestants import Setup, why_no_serve
    from tools.benchmark.engine_model import SHAPES, make_model

    load = Load(
        options.streams, options.input_tokens, options.output_tokens, options.repeat, options.seed
    )
    skipped = {}
    if "serve" in options.contestants and (reason := why_no_serve(options.serve_python)):
        skipped["serve"] = reason
        say(f"serve is skipped: {reason}")
    model = options.model_directory or directory / "model"
    shape = SHAPES[options.shape]
    if not (model / "model.safetensors.index.json").is_file():
        with timed(f"making {model}"):
            dtype = getattr(torch, options.dtype)
            device = torch.device(options.device)
            make_model(model, shape, dtype=dtype, device=device, seed=options.seed)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    context = -(-(options.input_tokens + options.output_tokens + 1) // PAGE) * PAGE
    setup = Setup(
        model.absolute(),  # tritonserver has a working directory of its own
        ROOT / "triton_model_repo",
        options.device,
        context,
        # Twice what is used: some blocks stay free, and finished prompts' are kept for a while.
        cache_tokens=2 * (max(options.streams) + 1) * context,
        attention=options.attention,
        cuda_graph=options.cuda_graph,
        async_batching=options.async_batching,
        padding=(options.q_padding, options.kv_padding),
    )
    for name in setup.ignored:
        say(f"the stack's engine has no parameter {name}, and runs without it")
    names = [name for name in options.contestants if name not in skipped]
    with started(names, setup, directory, options.serve_python) as contestants:
        results = compare(contestants, load, shape.vocabulary, say)
    given = {name: value for name, value in vars(options).items() if name not in NOT_REPORTED}
    about: dict[str, Any] = {
        "torch": torch.__version__,
        "skipped": skipped,
        "ignored_by_stack": setup.ignored,
    }
    return results, report(results, **given, **about)


@contextlib.contextmanager
def started(
    names: list[str], setup: Any, directory: Path, serve_python: str
) -> Iterator[dict[str, Any]]:
    """The contestants, from the start of all of them to the end of the context."""
    from tools.benchmark.engine_contestants import start

    with contextlib.ExitStack() as cleanup:
        contestants = {}
        for name in names:
            with timed(f"starting {name}"):
                contestants[name] = start(name, setup, directory, serve_python)
            cleanup.callback(contestants[name].close)
        yield contestants


@contextlib.contextmanager
def timed(what: str) -> Iterator[None]:
    """Says how long something took."""
    begin = time.monotonic()
    yield
    say(f"{what}: {time.monotonic() - begin:.1f} s")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
