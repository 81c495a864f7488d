"""``cog-triton summarize``: an engine's output beside that of Hugging Face's generate()."""

import argparse
from pathlib import Path

from cog_triton.cli.options import Variables, positive_integer

DESCRIPTION = """
It has the flags of summarize.py in NVIDIA's guides.

    cog-triton summarize --hf_model_dir cog_triton/demo --eval_task question_answering \\
        --dataset_dir examples/summarize/demo.jsonl --batch_size 8 --check_accuracy
    cog-triton summarize --engine_dir ./phi-engine --hf_model_dir ./Phi-3-mini-4k-instruct \\
        --batch_size 1 --test_trt_llm --test_hf --data_type fp16 --check_accuracy \\
        --tensorrt_llm_rouge1_threshold=20

It compares ROUGE, token ids and log probabilities; see docs/measuring.md. The exit status is 1 if the
engine is not accurate enough and 2 if nothing could be compared. The last line on standard output is the
JSON report.
"""


class Options(argparse.Namespace):
    hf_model_dir: str
    tokenizer_dir: str | None
    test_trt_llm: bool
    test_hf: bool
    engine_dir: str | None
    settings: list[str]
    grpc_url: str | None
    data_type: str
    batch_size: int
    output_len: int
    eval_task: str
    dataset_dir: Path | None
    max_ite: int
    max_input_length: int
    check_accuracy: bool
    tensorrt_llm_rouge1_threshold: float
    leading_threshold: float | None
    output_dir: Path | None


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hf_model_dir",
        required=True,
        metavar="MODEL",
        help="directory or Hugging Face id of the model",
    )
    parser.add_argument(
        "--tokenizer_dir", metavar="DIRECTORY", help="tokenizer; default: the model's"
    )
    parser.add_argument(
        "--test_trt_llm",
        action="store_true",
        help="test the engine; with neither --test flag, both sides are tested",
    )
    parser.add_argument("--test_hf", action="store_true", help="test Hugging Face's generate()")
    parser.add_argument(
        "--engine_dir",
        metavar="DIRECTORY",
        help="TensorRT-LLM engine to start; default: $ENGINE_DIR",
    )
    parser.add_argument(
        "--settings",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="environment variables of the engine to start, such as ENGINE=transformers",
    )
    parser.add_argument(
        "--grpc-url",
        metavar="HOST:PORT",
        help="gRPC endpoint of a running Triton, such as a Cog server's",
    )
    parser.add_argument(
        "--data_type",
        default="auto",
        choices=["auto", "fp32", "fp16", "bf16", "float32", "float16", "bfloat16"],
        help="data type of Hugging Face's model, not the engine's; default: as saved",
    )
    parser.add_argument(
        "--batch_size",
        type=positive_integer,
        default=1,
        metavar="N",
        help="texts per batch; default: %(default)s",
    )
    parser.add_argument(
        "--output_len",
        type=positive_integer,
        default=100,
        metavar="N",
        help="maximum number of output tokens; default: %(default)s",
    )
    parser.add_argument(
        "--eval_task",
        default="summarize",
        choices=["summarize", "code_completion", "question_answering"],
        help="default: %(default)s",
    )
    parser.add_argument(
        "--dataset_dir",
        type=Path,
        metavar="FILE",
        help="JSONL or Parquet file, or a directory of them; default: the task's data from Hugging Face",
    )
    parser.add_argument(
        "--max_ite",
        type=positive_integer,
        default=20,
        metavar="N",
        help="maximum number of batches; default: %(default)s",
    )
    parser.add_argument(
        "--max_input_length",
        type=positive_integer,
        default=923,
        metavar="N",
        help="maximum length of a prompt in tokens; longer prompts are cut; default: %(default)s",
    )
    parser.add_argument(
        "--check_accuracy", action="store_true", help="exit with 1 if ROUGE-1 is too low"
    )
    parser.add_argument(
        "--tensorrt_llm_rouge1_threshold",
        type=float,
        default=15.0,
        metavar="R",
        help="minimum ROUGE-1 of the engine; default: 15",
    )
    parser.add_argument(
        "--leading_threshold",
        type=float,
        metavar="SHARE",
        help="exit with 1 if less than this fraction of tokens (0 to 1) matches Hugging Face's",
    )
    parser.add_argument(
        "--output_dir",
        type=Path,
        help="directory for outputs.jsonl, which has each prompt, reference and output",
    )


def variables(options: Options) -> Variables:
    return {
        "MODEL": options.hf_model_dir,
        "TOKENIZER": options.tokenizer_dir,
        "ENGINE_DIR": options.engine_dir,
    }


def run(options: Options) -> int:
    from tools.accuracy.compare import main

    return main(options)
