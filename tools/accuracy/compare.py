"""One comparison: both sides' answers, their figures, and whether these are good enough."""

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from rouge_score.rouge_scorer import RougeScorer  # type: ignore[import-untyped, unused-ignore]

from cog_triton.deployment.model_files import with_files
from cog_triton.errors import ConfigurationError
from cog_triton.settings import read_settings
from cog_triton.text.tokenizer import load_tokenizer
from tools.accuracy.sides import Answer, Reference, engine_answers
from tools.accuracy.summarize_command import Options
from tools.accuracy.texts import TASKS, examples
from tools.benchmark.report import circumstances
from tools.benchmark.servers import triton_server
from tools.command_line import begin, environment

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")
ENGINE, HUGGING_FACE = "engine", "hugging_face"


def main(options: Options) -> int:
    """Print a comparison, for a person and as JSON; return 1 if the engine is not accurate enough."""
    begin()
    report = compare(options)
    print(table(report))
    print(json.dumps(report))
    for failure in report["failures"]:
        print(f"not accurate enough: {failure}", file=sys.stderr)
    return 1 if report["failures"] else 0


def compare(options: Options) -> dict[str, Any]:
    """Run a comparison and return the report."""
    _check(options)
    # These files are for Hugging Face's side, which runs MODEL and no engine.
    without_engine = {
        name: value
        for name, value in os.environ.items()
        if name not in ("COG_WEIGHTS", "ENGINE_DIR")
    }
    settings = environment(options.settings)
    files = with_files(read_settings(without_engine))
    tokenizer = load_tokenizer(files.tokenizer_dir)
    task = TASKS[options.eval_task]
    batch = options.batch_size
    rows = examples(task, options.dataset_dir, tokenizer, options.max_input_length)
    pairs = list(islice(rows, batch * options.max_ite))
    if not pairs:
        raise ConfigurationError(f"there is no text in {options.dataset_dir or task.hub[0]}")
    prompts = [prompt for prompt, _ in pairs]
    sides: dict[str, Sequence[Answer]] = {}
    reference = None
    if options.test_trt_llm or not options.test_hf:
        # It ends before the other side is loaded: both may not fit on one machine at once.
        with nullcontext() if options.grpc_url else triton_server(settings) as triton:
            address = triton.grpc if triton else options.grpc_url or ""
            made = engine_answers(address, prompts, tokenizer, batch, options.output_len)
            sides[ENGINE] = asyncio.run(made)
    if options.test_hf or not options.test_trt_llm:
        dtype = DTYPES.get(options.data_type, options.data_type)
        reference = Reference(files.model_dir, tokenizer, dtype, options.output_len)
        sides[HUGGING_FACE] = reference.answers(prompts, batch)
    if options.output_dir is not None:
        _write_outputs(options.output_dir, pairs, sides)
    found = {name: figures(answers, pairs, reference) for name, answers in sides.items()}
    agreed = agreement(sides[ENGINE], sides[HUGGING_FACE]) if len(sides) == 2 else None
    return {
        "model": options.hf_model_dir,
        "data": str(options.dataset_dir or task.hub[0]),
        **circumstances(settings),
        "examples": len(pairs),
        **{name: found.get(name) for name in (ENGINE, HUGGING_FACE)},
        "agreement": agreed,
        "failures": failures(options, found.get(ENGINE), agreed),
    }


def _write_outputs(
    directory: Path, pairs: Sequence[tuple[str, str]], sides: Mapping[str, Sequence[Answer]]
) -> None:
    """Write a line for each prompt, with its reference and the outputs of the sides."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "outputs.jsonl").open("w", encoding="utf-8") as file:
        for number, (prompt, expected) in enumerate(pairs):
            outputs = {name: answers[number]._asdict() for name, answers in sides.items()}
            row = {"prompt": prompt, "reference": expected, **outputs}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _check(options: Options) -> None:
    """Refuse options that contradict each other, or that cannot be compared."""
    if options.grpc_url and (options.engine_dir or options.settings):
        raise ConfigurationError("--engine_dir and --settings start an engine; --grpc-url has one")
    if options.check_accuracy and options.test_hf and not options.test_trt_llm:
        raise ConfigurationError("--check_accuracy tests an engine; give --test_trt_llm as well")
    if options.leading_threshold is not None and options.test_hf != options.test_trt_llm:
        raise ConfigurationError("--leading_threshold wants both --test_trt_llm and --test_hf")


def figures(
    answers: Sequence[Answer], pairs: Sequence[tuple[str, str]], reference: Reference | None
) -> dict[str, Any]:
    """Return ROUGE's mean F-measures, times 100, and the mean log probability by Hugging Face's model.

    ROUGE is without stemming, on the letters a to z and digits, in lower case. Anything else separates
    words, so a text without them scores 0.
    """
    scorer = RougeScorer(list(ROUGE), use_stemmer=False)
    scores, values = [], []
    for (prompt, expected), answer in zip(pairs, answers, strict=True):
        scores.append(scorer.score(expected, answer.text))
        values += reference.log_probs(prompt, answer.ids) if reference else []
    return {
        **{name: 100 * fmean(score[name].fmeasure for score in scores) for name in ROUGE},
        "log_prob_per_token": fmean(values) if values else None,
        "output_tokens": sum(len(answer.ids) for answer in answers),
    }


def agreement(first: Sequence[Answer], second: Sequence[Answer]) -> dict[str, Any]:
    """Return how far two sides' outputs are equal.

    ``leading_tokens`` are those before a first difference, ``tokens`` those of the longer output.
    """
    pairs = list(zip(first, second, strict=True))
    leading = sum(_leading_tokens(a.ids, b.ids) for a, b in pairs)
    tokens = sum(max(len(a.ids), len(b.ids)) for a, b in pairs)
    return {
        "outputs": len(pairs),
        "same_ids": sum(a.ids == b.ids for a, b in pairs),
        "same_texts": sum(a.text == b.text for a, b in pairs),
        "leading_tokens": leading,
        "tokens": tokens,
        "leading_share": leading / tokens if tokens else 1.0,
    }


def _leading_tokens(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many ids are equal before the first difference."""
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count


def failures(options: Options, engine: Any, agreed: Any) -> list[str]:
    """Return the reasons why the engine is not good enough; empty if it is."""
    found = []
    least = options.tensorrt_llm_rouge1_threshold
    share = options.leading_threshold
    if options.check_accuracy and not engine["rouge1"] > least:
        found.append(f"ROUGE-1 of the engine is {engine['rouge1']:.2f}, not greater than {least:g}")
    if share is not None and agreed["leading_share"] < share:
        text = f"the share of equal leading tokens is {agreed['leading_share']:.4f}"
        found.append(f"{text}, less than {share:g}")
    return found


def table(found: Mapping[str, Any]) -> str:
    """Return a report, to be read."""
    lines = [f"{found['examples']} examples", f"{'':18}{'engine':>14}{'Hugging Face':>14}"]
    for key in (*ROUGE, "log_prob_per_token", "output_tokens"):
        cells = [_cell(found[side], key) for side in (ENGINE, HUGGING_FACE)]
        lines.append(f"{key:18}" + "".join(cells))
    if agreed := found["agreement"]:
        lines.append(
            f"same token ids: {agreed['same_ids']} of {agreed['outputs']} outputs, same text: "
            f"{agreed['same_texts']}; equal leading tokens: {agreed['leading_tokens']} of "
            f"{agreed['tokens']} ({100 * agreed['leading_share']:.2f} %)"
        )
    return "\n".join(lines)


def _cell(side: Mapping[str, Any] | None, key: str) -> str:
    """Return a cell of the table: a figure of a side, or a dash for a side that was not tested."""
    value = None if side is None else side[key]
    text = "-" if value is None else format(value, ".5g")
    return f"{text:>14}"
