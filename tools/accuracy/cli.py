"""The command line, with the flags of TensorRT-LLM's ``summarize.py`` where they make sense."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.accuracy.data import TASKS, Task
from tools.accuracy.report import Limits

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}

GREEDY = "both sides decode greedily, or they could not be compared token by token"
ONE_GPU_SCRIPT = "is of TensorRT-LLM's own runtime, and the engine runs behind Triton"
# Flags of summarize.py that cannot be honoured: the value that changes nothing, and why no other.
REFUSED: dict[str, tuple[str | None, str]] = {
    "--num_beams": ("1", GREEDY),
    "--num_return_sequences": ("1", GREEDY),
    "--top_k": ("1", GREEDY),
    "--top_p": ("0.0", GREEDY),
    "--temperature": ("1.0", GREEDY),
    "--length_penalty": ("1.0", GREEDY),
    "--repetition_penalty": ("1.0", GREEDY),
    "--presence_penalty": ("0.0", GREEDY),
    "--frequency_penalty": ("0.0", GREEDY),
    "--tensorrt_llm_ppl_threshold": (None, "the log probability per token is always reported"),
    "--max_attention_window_size": (None, "set it in the configuration file of the deployment"),
    "--sink_token_length": (None, "set it in the configuration file of the deployment"),
    "--kv_cache_free_gpu_memory_fraction": (
        None,
        "set kv_cache_free_gpu_mem_fraction in the configuration file of the deployment",
    ),
    "--max_tokens_in_paged_kv_cache": (None, "set it in the configuration file of the deployment"),
    "--gpu_weights_percent": (None, "set it in the configuration file of the deployment"),
    "--medusa_choices": (None, ONE_GPU_SCRIPT),
    "--lora_dir": (None, "Hugging Face's side would be another model"),
    "--lora_task_uids": (None, "Hugging Face's side would be another model"),
    "--vocab_file": (
        None,
        "the tokenizer is Hugging Face's; name its directory by --tokenizer_dir",
    ),
    "--tokenizer_type": (None, "the tokenizer is Hugging Face's; it knows its type"),
    "--rouge_dir": (None, "ROUGE is computed by the library rouge-score, which needs no download"),
    "--stop_words": (None, "Hugging Face's generate() is given none"),
    "--bad_words": (None, "Hugging Face's generate() is given none"),
}
REFUSED_SWITCHES: dict[str, str] = {
    "--eval_ppl": "the log probability per token is always reported",
    "--use_py_session": ONE_GPU_SCRIPT,
    "--debug_mode": ONE_GPU_SCRIPT,
    "--enable_context_fmha_fp32_acc": ONE_GPU_SCRIPT,
    "--hf_device_map_auto": "the model has to fit on one device (--device)",
    "--estimate_accuracy_std_dev": "means alone are reported; --output_dir has every output",
}


@dataclass(frozen=True)
class Options:
    """The options of a comparison.

    Attributes:
        model: a directory, a tar file, a URL of one or a Hugging Face id.
        url, grpc_url, http_url: where the engine runs; with none of them it is started.
        settings: KEY=VALUE of the environment of an engine that is started.
        dtype: ``auto`` or a name of PyTorch's.
        examples: how many at most.
    """

    task: Task
    task_name: str
    model: str
    tokenizer: str | None
    engine_dir: Path | None
    test_engine: bool
    test_hf: bool
    url: str | None
    grpc_url: str | None
    http_url: str | None
    settings: tuple[str, ...]
    dtype: str
    device: str
    batch_size: int
    max_iterations: int
    output_len: int
    longest: int
    shortest: int
    end_id: int | None
    data: Path | None
    data_cache: Path | None
    seed: int
    output_dir: Path | None
    json_file: Path | None
    limits: Limits

    @property
    def examples(self) -> int:
        return self.batch_size * self.max_iterations

    @property
    def starts_engine(self) -> bool:
        """True if the engine has to be started."""
        return self.test_engine and not (self.url or self.grpc_url or self.http_url)


def parse(argv: Sequence[str] | None = None) -> Options:
    """The options; ends the process with status 2 and the reason if they are not valid."""
    arguments = parser()
    given = arguments.parse_args(argv)
    if problem := _contradiction(given):
        arguments.error(problem)
    both = not (given.test_trt_llm or given.test_hf)
    task = TASKS[given.eval_task]
    return Options(
        task=Task(
            given.input_key or task.input_key,
            given.output_key or task.output_key,
            task.suffix,
            task.hub,
            task.hub_config,
            task.hub_split,
        ),
        task_name=given.eval_task,
        model=given.hf_model_dir,
        tokenizer=given.tokenizer_dir,
        engine_dir=given.engine_dir,
        test_engine=given.test_trt_llm or both,
        test_hf=given.test_hf or both,
        url=given.url,
        grpc_url=given.grpc_url,
        http_url=given.http_url,
        settings=tuple(given.settings),
        dtype=DTYPES.get(given.data_type, given.data_type),
        device=given.device,
        batch_size=given.batch_size,
        max_iterations=given.max_ite,
        output_len=given.output_len,
        longest=given.max_input_length,
        shortest=given.min_input_length,
        end_id=given.end_id,
        data=given.dataset_dir,
        data_cache=given.dataset_cache_dir,
        seed=given.random_seed,
        output_dir=given.output_dir,
        json_file=given.json,
        limits=Limits(
            given.tensorrt_llm_rouge1_threshold if given.check_accuracy else None,
            given.leading_threshold,
        ),
    )


def _contradiction(given: argparse.Namespace) -> str | None:
    """Return the fault of options that are each right."""
    running = [name for name in ("url", "grpc_url", "http_url") if getattr(given, name) is not None]
    both = given.test_trt_llm == given.test_hf
    if len(running) > 1:
        return "give one of --url, --grpc-url and --http-url"
    if running and (given.engine_dir or given.settings):
        return "--engine_dir and --settings are for an engine that is started, and one runs already"
    if (running or given.engine_dir or given.check_accuracy) and not (both or given.test_trt_llm):
        return "--test_hf alone tests no engine; give --test_trt_llm as well"
    if given.leading_threshold is not None and not both:
        return "--leading_threshold compares both sides; give --test_trt_llm and --test_hf"
    return None


def parser() -> argparse.ArgumentParser:
    """The command line."""
    arguments = argparse.ArgumentParser(
        prog="summarize.py",
        description="Completes texts by an engine and by Hugging Face's generate() on the same model, and "
        "compares them: ROUGE, token ids, log probabilities, speed.",
    )
    _add_sides(arguments.add_argument_group("sides"))
    _add_data(arguments.add_argument_group("data"))
    _add_output(arguments.add_argument_group("result"))
    for flag, (neutral, reason) in REFUSED.items():
        arguments.add_argument(flag, action=_Refuse, neutral=neutral, reason=reason)
    for flag, reason in REFUSED_SWITCHES.items():
        arguments.add_argument(flag, action=_Refuse, neutral=None, reason=reason, nargs=0)
    return arguments


def _add_sides(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--hf_model_dir", required=True, metavar="MODEL", help="directory or id of the model")
    add("--tokenizer_dir", metavar="DIRECTORY", help="the tokenizer, if not the model's")
    add(
        "--test_trt_llm",
        "--test_engine",
        action="store_true",
        help="test the engine; both sides are, when neither flag is given",
    )
    add("--test_hf", action="store_true", help="complete the texts by Hugging Face as well")
    add("--engine_dir", type=Path, help="a TensorRT-LLM engine to start (ENGINE_DIR)")
    add("--url", help="a running Cog server; the ids compared are those of its texts")
    add("--grpc-url", metavar="HOST:PORT", help="a running Triton's gRPC endpoint")
    add("--http-url", metavar="HOST:PORT", help="a running Triton's HTTP endpoint")
    add(
        "--settings",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        type=_setting,
        help="environment of an engine that is started, such as ENGINE=transformers",
    )
    add(
        "--data_type",
        "--hf_data_type",
        default="auto",
        choices=["auto", *DTYPES, *DTYPES.values()],
        help="data type of Hugging Face's side (default: as saved); the engine has its own",
    )
    add("--device", default="auto", help="device of Hugging Face's side (default: a GPU if any)")
    add("--batch_size", type=_positive, default=1, metavar="N", help="texts at once (default: 1)")
    add("--output_len", type=_positive, default=100, metavar="N", help="most output tokens (100)")
    add("--end_id", type=int, metavar="ID", help="ends an output (default: the tokenizer's)")


def _add_data(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--eval_task", choices=list(TASKS), default="summarize", help="default: %(default)s")
    add(
        "--dataset_dir",
        type=Path,
        metavar="FILE",
        help="a JSONL or Parquet file, or a directory of them, read in order (default: the task's data "
        "set on the hub, shuffled)",
    )
    add("--dataset_cache_dir", type=Path, metavar="DIRECTORY", help="where the hub's data is kept")
    add("--input_key", metavar="NAME", help="column of the text (default: the task's)")
    add("--output_key", metavar="NAME", help="column of the reference (default: the task's)")
    add("--max_ite", type=_positive, default=20, metavar="N", help="most batches (default: 20)")
    add(
        "--max_input_length",
        type=_positive,
        default=923,
        metavar="N",
        help="tokens that a prompt is cut to (default: 923)",
    )
    add(
        "--min_input_length",
        type=int,
        default=0,
        metavar="N",
        help="texts of no more tokens are left out (default: 0)",
    )
    add("--random_seed", type=int, default=0, metavar="N", help="shuffles the hub's data (0)")


def _add_output(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--check_accuracy", action="store_true", help="exit with 1 if ROUGE-1 is too low")
    add(
        "--tensorrt_llm_rouge1_threshold",
        type=float,
        default=15.0,
        metavar="R",
        help="the engine's ROUGE-1 must be greater (default: 15)",
    )
    add(
        "--leading_threshold",
        type=_share,
        metavar="SHARE",
        help="exit with 1 if less of the tokens agree with Hugging Face's, 0 to 1",
    )
    add("--output_dir", type=Path, help="gets outputs.jsonl: each prompt, reference and output")
    add("--json", type=Path, metavar="FILE", help="gets the report, which is else the last line")


class _Refuse(argparse.Action):
    """A flag that changes nothing, or is refused with its reason."""

    def __init__(self, *, neutral: str | None, reason: str, **arguments: Any) -> None:
        arguments |= {"help": argparse.SUPPRESS, "default": argparse.SUPPRESS}
        super().__init__(**arguments)
        self._neutral, self._reason = neutral, reason

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,  # noqa: ARG002
        values: object,
        option_string: str | None = None,
    ) -> None:
        if self._neutral is None or not _equal(str(values), self._neutral):
            parser.error(f"{option_string} cannot be honoured: {self._reason}")


def _equal(first: str, second: str) -> bool:
    try:
        return float(first) == float(second)
    except ValueError:
        return False


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def _setting(text: str) -> str:
    if "=" not in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return text
