#!/usr/bin/env python3
r"""Writes input_data.json for perf_analyzer, with the flags of the backend's gen_input_data.py.

Examples:
  python3 scripts/gen_input_data.py --start_len 128 --output_len 20 --num_samples 100
  perf_analyzer -m tensorrt_llm -b 8 --input-data input_data.json --concurrency-range 1:10:2 \
      -i grpc --async --streaming -u localhost:8001

The prompts are random ids, each another. --batch_size has no effect: perf_analyzer makes a batch of as many
samples as its own -b says.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import _engine_flags as flags
from _token_clients import random_prompts

from cog_triton.errors import ConfigurationError


def main(argv: list[str] | None = None) -> int:
    """Writes the file; returns 1, with the reason, if it cannot be made."""
    arguments = parser().parse_args(argv)
    try:
        data = samples(arguments, flags.vocabulary(arguments))
        arguments.output.write_text(json.dumps(data), encoding="utf-8")
    except (ConfigurationError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{arguments.output}: {arguments.num_samples} samples")
    return 0


def samples(arguments: argparse.Namespace, vocabulary: int) -> dict[str, Any]:
    """The file: for each sample its tensors, without the batch's dimension."""
    scalars = {
        "request_output_len": arguments.output_len,
        "runtime_top_k": arguments.topk,
        "runtime_top_p": arguments.topp,
        "beam_search_diversity_rate": 0.0,
        "temperature": 1.0,
        "len_penalty": 1.0,
        "repetition_penalty": 1.0,
        "seed": 0,
        "beam_width": arguments.beam_width,
    }
    common = {name: tensor([value]) for name, value in scalars.items()}
    prompts = random_prompts(
        arguments.num_samples, arguments.start_len, vocabulary, arguments.random_seed
    )
    return {
        "data": [
            {"input_ids": tensor(prompt), "input_lengths": tensor([len(prompt)]), **common}
            for prompt in prompts
        ]
    }


def tensor(values: tuple[int, ...] | list[Any]) -> dict[str, Any]:
    """A tensor of one dimension, as perf_analyzer reads it."""
    return {"content": list(values), "shape": [len(values)]}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_random_prompts(made)
    flags.add_sampling(made)
    made.add_argument("--num_samples", type=flags.positive, default=10_000, help="default: 10000")
    made.add_argument(
        "--output", type=Path, default=Path("input_data.json"), help="default: input_data.json"
    )
    return made


if __name__ == "__main__":
    sys.exit(main())
