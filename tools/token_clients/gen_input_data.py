"""``cog-triton gen-input-data``: random prompts for perf_analyzer."""

import argparse
import json
from pathlib import Path

from cog_triton.cli.options import positive_integer
from tools.token_clients.options import InputDataOptions, add_prompts, add_sampling

Options = InputDataOptions
DESCRIPTION = """
It has the flags of the TensorRT-LLM backend's gen_input_data.py.

    cog-triton gen-input-data --start_len 128 --output_len 20 --num_samples 100
    perf_analyzer -m tensorrt_llm -b 8 --input-data input_data.json --concurrency-range 1:10:2 \\
        -i grpc --async --streaming -u localhost:8001

The prompts are random token ids, all different. --batch_size is ignored: perf_analyzer's -b sets the batch
size.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_sampling(parser)
    add_prompts(parser)
    parser.add_argument(
        "--num_samples", type=positive_integer, default=10_000, help="default: %(default)s"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("input_data.json"), help="default: %(default)s"
    )


def run(options: InputDataOptions) -> None:
    """Write each sample's tensors, without the batch's dimension."""
    from tools.token_clients.engine import random_prompts

    scalars = {
        "input_lengths": options.start_len,
        "request_output_len": options.output_len,
        "runtime_top_k": options.topk,
        "runtime_top_p": options.topp,
        "beam_search_diversity_rate": 0.0,
        "temperature": 1.0,
        "len_penalty": 1.0,
        "repetition_penalty": 1.0,
        "seed": 0,
        "beam_width": options.beam_width,
    }
    same = {name: {"content": [value], "shape": [1]} for name, value in scalars.items()}
    samples = [
        {"input_ids": {"content": ids, "shape": [len(ids)]}, **same}
        for ids in random_prompts(options, options.num_samples)
    ]
    options.output.write_text(json.dumps({"data": samples}), encoding="utf-8")
    print(f"{options.output}: {options.num_samples} samples")
