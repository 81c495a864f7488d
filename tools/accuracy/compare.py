"""One comparison: its options, both sides' answers, their figures, and whether these are good enough."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from cog_triton.deployment.preparation import with_files
from cog_triton.errors import ConfigurationError
from cog_triton.settings import read_settings
from cog_triton.text.tokenizer import Tokenizer, load_tokenizer
from tools.accuracy.sides import Answers, Progress, Reference, engine_answers, text_ids
from tools.accuracy.texts import TASKS, DataError, Example, Task, hub_examples, prepared
from tools.accuracy.texts import read_examples as read_file
from tools.benchmark.cli import circumstances
from tools.benchmark.servers import triton_server

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")
ENGINE, HUGGING_FACE = "engine", "hugging_face"
NAMES = {ENGINE: "engine", HUGGING_FACE: "Hugging Face"}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options; end the process with status 2 and the reason if they are not valid."""
    parser = argparse.ArgumentParser(
        prog="summarize.py",
        description="Completes texts by an engine and by Hugging Face's generate() on the same "
        "model, and compares them: ROUGE, token ids, log probabilities, speed.",
        allow_abbrev=False,
    )
    _add_sides(parser.add_argument_group("sides").add_argument)
    _add_data(parser.add_argument_group("data").add_argument)
    _add_result(parser.add_argument_group("result").add_argument)
    options = parser.parse_args(argv)
    both = options.test_trt_llm == options.test_hf
    running = [v for v in (options.url, options.grpc_url, options.http_url) if v is not None]
    if len(running) > 1:
        parser.error("give one of --url, --grpc-url and --http-url")
    if running and (options.engine_dir or options.settings):
        parser.error("--engine_dir and --settings are for an engine to start, and one runs already")
    engine_only = running or options.engine_dir or options.check_accuracy
    if engine_only and not (both or options.test_trt_llm):
        parser.error("--test_hf alone tests no engine; give --test_trt_llm as well")
    if options.leading_threshold is not None and not both:
        parser.error("--leading_threshold compares both sides; give --test_trt_llm and --test_hf")
    options.test_trt_llm |= both
    options.test_hf |= both
    options.data_type = DTYPES.get(options.data_type, options.data_type)
    options.starts_engine = options.test_trt_llm and not running
    return options


def _add_sides(add: Any) -> None:
    add("--hf_model_dir", required=True, metavar="MODEL", help="directory or id of the model")
    add("--tokenizer_dir", metavar="DIRECTORY", help="the tokenizer, if not the model's")
    text = "test the engine; both sides are, when neither flag is given"
    add("--test_trt_llm", "--test_engine", action="store_true", help=text)
    add("--test_hf", action="store_true", help="complete the texts by Hugging Face as well")
    add("--engine_dir", help="a TensorRT-LLM engine to start (ENGINE_DIR)")
    add("--url", help="a running Cog server; the ids compared are those of its texts")
    add("--grpc-url", metavar="HOST:PORT", help="a running Triton's gRPC endpoint")
    add("--http-url", metavar="HOST:PORT", help="a running Triton's HTTP endpoint")
    text = "environment of an engine that is started, such as ENGINE=transformers"
    add(
        "--settings",
        nargs="+",
        action="extend",
        default=[],
        type=_setting,
        metavar="KEY=VALUE",
        help=text,
    )
    text = "data type of Hugging Face's side (default: as saved); the engine has its own"
    types = ["auto", *DTYPES, *DTYPES.values()]
    add("--data_type", "--hf_data_type", default="auto", choices=types, help=text)
    add("--device", default="auto", help="device of Hugging Face's side (default: a GPU if any)")
    add("--batch_size", type=_positive, default=1, metavar="N", help="texts at once (default: 1)")
    add("--output_len", type=_positive, default=100, metavar="N", help="most output tokens (100)")
    add("--end_id", type=int, metavar="ID", help="ends an output (default: the tokenizer's)")


def _add_data(add: Any) -> None:
    add("--eval_task", choices=list(TASKS), default="summarize", help="default: %(default)s")
    text = "a JSONL or Parquet file, or a directory of them, read in order (default: the task's "
    text += "data set on the hub, shuffled)"
    add("--dataset_dir", type=Path, metavar="FILE", help=text)
    add("--dataset_cache_dir", type=Path, metavar="DIRECTORY", help="cache of the hub's data")
    add("--input_key", metavar="NAME", help="column of the text (default: the task's)")
    add("--output_key", metavar="NAME", help="column of the reference (default: the task's)")
    add("--max_ite", type=_positive, default=20, metavar="N", help="most batches (default: 20)")
    text = "tokens that a prompt is cut to (default: 923)"
    add("--max_input_length", type=_positive, default=923, metavar="N", help=text)
    text = "texts of no more tokens are left out (default: 0)"
    add("--min_input_length", type=int, default=0, metavar="N", help=text)
    add("--random_seed", type=int, default=0, metavar="N", help="shuffles the hub's data (0)")


def _add_result(add: Any) -> None:
    add("--check_accuracy", action="store_true", help="exit with 1 if ROUGE-1 is too low")
    text = "the engine's ROUGE-1 must be greater (default: 15)"
    flag = "--tensorrt_llm_rouge1_threshold"
    add(flag, type=float, default=15.0, metavar="R", help=text)
    text = "exit with 1 if less of the tokens agree with Hugging Face's, 0 to 1"
    add("--leading_threshold", type=_share, metavar="SHARE", help=text)
    add("--output_dir", type=Path, help="gets outputs.jsonl: each prompt, reference and output")
    add("--json", type=Path, metavar="FILE", help="gets the report, which is else the last line")


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return int(text)


def _share(text: str) -> float:
    if not 0 <= float(text) <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return float(text)


def _setting(text: str) -> str:
    if "=" not in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return text


def compare(options: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, Any]:
    """Run a comparison and return its report, as it is written as JSON.

    Args:
        environment: of an engine that is started; the options of ours are added to it.

    Raises:
        DataError, CogTritonError: there are no texts, or a side could not be set up or failed.
    """
    if importlib.util.find_spec("rouge_score") is None:  # before anything takes time
        raise ConfigurationError("rouge-score is not installed: pip install 'cog-triton[eval]'")
    ours = {k: v for k, v in environment.items() if k not in ("COG_WEIGHTS", "ENGINE_DIR")}
    model = with_files(read_settings({**ours, "MODEL": options.hf_model_dir})).model_dir
    tokenizer = load_tokenizer(options.tokenizer_dir or model)
    end_id = tokenizer.eos_token_id if options.end_id is None else options.end_id
    examples = read_examples(options, tokenizer)
    prompts = [example.text for example in examples]
    environment = engine_environment(options, model, environment)
    size, length = options.batch_size, options.output_len
    sides: dict[str, Answers] = {}
    if options.test_trt_llm:
        # It ends before the other side is loaded: both may not fit on one machine at once.
        with _address(options, environment) as address, _bar(ENGINE, prompts) as bar:
            limits = {"batch_size": size, "max_tokens": length, "end_id": end_id, "progress": bar}
            sides[ENGINE] = asyncio.run(engine_answers(address, prompts, tokenizer, **limits))
    reference = None
    if options.test_hf:
        kind = {"dtype": options.data_type, "device": options.device, "end_id": end_id}
        reference = Reference(model, tokenizer, **kind)
        with _bar(HUGGING_FACE, prompts) as bar:
            sides[HUGGING_FACE] = reference.answers(prompts, size, length, bar)
    if options.url is not None:  # of whose texts no other ids are known
        sides = {name: with_ids_of_texts(side, tokenizer) for name, side in sides.items()}
    if options.output_dir is not None:
        write_outputs(options.output_dir, examples, sides)
    figures = {name: side_figures(side, examples, reference) for name, side in sides.items()}
    return report(options, examples, sides, figures, environment)


def read_examples(options: argparse.Namespace, tokenizer: Tokenizer) -> list[Example]:
    """Return the examples of the comparison, their texts made prompts.

    Raises:
        DataError: there are none.
    """
    task = TASKS[options.eval_task]
    task = task._replace(
        input_key=options.input_key or task.input_key,
        output_key=options.output_key or task.output_key,
    )
    source = _source(options, task)
    longest, shortest = options.max_input_length, options.min_input_length
    kept = prepared(source, task, tokenizer, longest=longest, shortest=shortest)
    if examples := list(islice(kept, options.batch_size * options.max_ite)):
        return examples
    raise DataError(
        f"there is no text of more than {shortest} tokens in {options.dataset_dir or task.hub}"
    )


def _source(options: argparse.Namespace, task: Task) -> Iterator[Example]:
    if options.dataset_dir is not None:
        return read_file(options.dataset_dir, task)
    return hub_examples(task, options.dataset_cache_dir, options.random_seed)


def engine_environment(
    options: argparse.Namespace, model: str, environment: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of an engine that is started; ``--settings`` have the last word."""
    named = {"MODEL": model, "TOKENIZER": options.tokenizer_dir, "ENGINE_DIR": options.engine_dir}
    given = dict(item.partition("=")[::2] for item in options.settings)
    return {**environment, **{name: text for name, text in named.items() if text}, **given}


@contextmanager
def _address(
    options: argparse.Namespace, environment: Mapping[str, str]
) -> Iterator[dict[str, str]]:
    """Yield the engine's ``url``, ``grpc`` or ``http`` address; start it if need be."""
    if not options.starts_engine:
        given = {"url": options.url, "grpc": options.grpc_url, "http": options.http_url}
        yield {name: address for name, address in given.items() if address}
        return
    with triton_server(environment) as running:
        yield {"grpc": running.grpc}


@contextmanager
def _bar(name: str, prompts: Sequence[str]) -> Iterator[Progress]:
    with tqdm(total=len(prompts), desc=NAMES[name], unit="text") as bar:
        yield bar.update


def with_ids_of_texts(side: Answers, tokenizer: Tokenizer) -> Answers:
    """Return answers with the ids of their texts, instead of those that the texts were made of."""
    answers = (replace(answer, ids=text_ids(answer.text, tokenizer)) for answer in side.answers)
    return replace(side, answers=tuple(answers))


def rouge(texts: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Return mean F-measures, times 100, without stemming.

    The tokenizer is that of rouge-score: letters a to z and digits, in lower case. Anything else
    separates words, so a text without them scores 0.
    """
    from rouge_score.rouge_scorer import RougeScorer  # type: ignore[import-untyped, unused-ignore]

    scorer = RougeScorer(list(ROUGE), use_stemmer=False)
    scores = [scorer.score(ref, text) for text, ref in zip(texts, references, strict=True)]
    return {name: 100 * fmean(score[name].fmeasure for score in scores) for name in ROUGE}


def side_figures(
    side: Answers, examples: Sequence[Example], reference: Reference | None
) -> dict[str, Any]:
    """Return ROUGE, speed, and the mean log probability per token by the Hugging Face model."""
    values: list[float] = []
    if reference is not None:
        for example, answer in zip(examples, side.answers, strict=True):
            values += reference.log_probs(example.text, answer.ids)
    return {
        **rouge([answer.text for answer in side.answers], [e.reference for e in examples]),
        "log_prob_per_token": fmean(values) if values else None,
        "output_tokens": side.tokens,
        "seconds": side.seconds,
        "tokens_per_second": side.tokens / side.seconds if side.seconds else 0.0,
    }


def agreement(first: Answers, second: Answers, *, ids_of_text: bool = False) -> dict[str, Any]:
    """Return how far two sides' outputs are equal.

    ``leading_tokens`` are those before an output's first difference; ``tokens`` those of the longer
    output. Two empty outputs agree.
    """
    pairs = list(zip(first.answers, second.answers, strict=True))
    equal = sum(leading(a.ids, b.ids) for a, b in pairs)
    tokens = sum(max(len(a.ids), len(b.ids)) for a, b in pairs)
    return {
        "outputs": len(pairs),
        "same_ids": sum(a.ids == b.ids for a, b in pairs),
        "same_texts": sum(a.text == b.text for a, b in pairs),
        "leading_tokens": equal,
        "tokens": tokens,
        "leading_share": equal / tokens if tokens else 1.0,
        "ids_of_text": ids_of_text,
    }


def leading(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of equal ids before the first difference."""
    for position, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return position
    return min(len(first), len(second))


def report(
    options: argparse.Namespace,
    examples: Sequence[Example],
    sides: Mapping[str, Answers],
    figures: Mapping[str, dict[str, Any]],
    environment: Mapping[str, str],
) -> dict[str, Any]:
    agreed = None
    facts = circumstances(environment)
    if not options.starts_engine:
        facts["settings"] = None
    if len(sides) == 2:
        pair = sides[ENGINE], sides[HUGGING_FACE]
        agreed = agreement(*pair, ids_of_text=options.url is not None)
    limits = {
        "rouge1": options.tensorrt_llm_rouge1_threshold if options.check_accuracy else None,
        "leading_share": options.leading_threshold,
    }
    return {
        "endpoint": options.url or options.grpc_url or options.http_url,
        "task": options.eval_task,
        "data": str(options.dataset_dir or TASKS[options.eval_task].hub),
        "model": options.hf_model_dir,
        "data_type": options.data_type,
        "batch_size": options.batch_size,
        "output_len": options.output_len,
        "max_input_length": options.max_input_length,
        **facts,
        "examples": len(examples),
        **{name: figures.get(name) for name in NAMES},
        "agreement": agreed,
        "limits": limits,
        "failures": failures(figures.get(ENGINE), agreed, limits),
    }


def failures(
    engine: Mapping[str, Any] | None,
    agreed: Mapping[str, Any] | None,
    limits: Mapping[str, float | None],
) -> list[str]:
    """Return the reasons why the engine is not good enough; empty if it is."""
    found = []
    least, share = limits["rouge1"], limits["leading_share"]
    if least is not None and engine and not engine["rouge1"] > least:
        found.append(f"ROUGE-1 of the engine is {engine['rouge1']:.2f}, not greater than {least:g}")
    if share is not None and agreed and agreed["leading_share"] < share:
        text = f"the share of equal leading tokens is {agreed['leading_share']:.4f}"
        found.append(f"{text}, less than {share:g}")
    return found


def table(found: Mapping[str, Any]) -> str:
    """Return a report, to be read."""
    sides = {NAMES[name]: found[name] for name in NAMES if found[name]}
    rows = [["", *sides]]
    rows += [[name, *(f"{side[name]:.2f}" for side in sides.values())] for name in ROUGE]
    for title, key in (
        *(("log probability per token", "log_prob_per_token"), ("output tokens", "output_tokens")),
        ("output tokens/s", "tokens_per_second"),
    ):
        values = (side[key] for side in sides.values())
        shown = ("-" if v is None else str(v) if isinstance(v, int) else f"{v:.4g}" for v in values)
        rows.append([title, *shown])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"{found['examples']} examples"]
    for name, *cells in rows:
        aligned = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        lines.append("  ".join([name.ljust(widths[0]), *aligned]))
    if agreed := found["agreement"]:
        kind = "token ids of the text" if agreed["ids_of_text"] else "token ids"
        lines.append(
            f"same {kind}: {agreed['same_ids']} of {agreed['outputs']} outputs, same text: "
            f"{agreed['same_texts']}; equal leading tokens: {agreed['leading_tokens']} of "
            f"{agreed['tokens']} ({100 * agreed['leading_share']:.2f} %)"
        )
    return "\n".join(lines)


def write_outputs(
    directory: Path, examples: Sequence[Example], sides: Mapping[str, Answers]
) -> None:
    """Write ``outputs.jsonl``: an object for each example, with the text and ids of each side."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "outputs.jsonl").open("w", encoding="utf-8") as file:
        for position, example in enumerate(examples):
            row: dict[str, Any] = {"prompt": example.text, "reference": example.reference}
            for name, side in sides.items():
                answer = side.answers[position]
                row |= {name: answer.text, f"{name}_ids": answer.ids}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
