"""Texts with their references, from a JSONL or Parquet file, a directory of them, or the hub."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cog_triton.text.tokenizer import Tokenizer

DATASETS = "datasets>=5.2,<6"
SUFFIXES = (".jsonl", ".json", ".parquet")


class DataError(Exception):
    """There are no texts to compare on; the text says why."""


class Example(NamedTuple):
    """A text that the model completes, and a good completion."""

    text: str
    reference: str


class Task(NamedTuple):
    """Columns of the text and of its reference, the prompt's suffix, and a data set on the hub."""

    input_key: str
    output_key: str
    suffix: str = ""
    hub: str | None = None
    hub_config: str | None = None
    hub_split: str = "test"


# The first two are those of TensorRT-LLM's summarize.py.
TASKS: Mapping[str, Task] = {
    "summarize": Task("article", "highlights", " TL;DR: ", "abisee/cnn_dailymail", "3.0.0"),
    "code_completion": Task("prompt", "canonical_solution", hub="openai/openai_humaneval"),
    "question_answering": Task("question", "answer"),
}


def read_examples(source: Path, task: Task) -> Iterator[Example]:
    """Yield the examples of a file, or of a directory's files in the order of their names.

    Args:
        source: ``*.jsonl``, ``*.json`` with one object a line, or ``*.parquet``.

    Raises:
        DataError: there is nothing to read, or something is not as it should be; naming the place.
    """
    files = [source] if source.is_file() else []
    if source.is_dir():
        files = sorted(file for file in source.iterdir() if file.suffix in SUFFIXES)
    elif not files:
        raise DataError(f"{source}: there is no such file or directory")
    if not files or files[0].suffix not in SUFFIXES:
        raise DataError(f"{source}: neither .jsonl, .json nor .parquet")
    for file in files:
        rows = _parquet(file, task) if file.suffix == ".parquet" else _jsonl(file)
        for place, row in rows:
            yield _example(row, task, place)


def hub_examples(task: Task, cache: Path | None, seed: int) -> Iterator[Example]:
    """Yield the examples of the task's data set on the hub, in an order that the seed decides.

    Raises:
        DataError: the task has none, the library is missing, or the hub cannot be reached.
    """
    if task.hub is None:
        raise DataError("this task has no data set on the hub: give a file with --dataset_dir")
    try:
        import datasets  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise DataError(
            f"{task.hub} is read by the library `datasets`: pip install '{DATASETS}', or give a "
            "JSONL or Parquet file with --dataset_dir"
        ) from None
    place = {"split": task.hub_split, "cache_dir": None if cache is None else str(cache)}
    try:
        rows = datasets.load_dataset(task.hub, task.hub_config, **place).shuffle(seed=seed)
    except Exception as error:  # the library's, the hub's and the network's are of many kinds
        raise DataError(
            f"{task.hub} cannot be had from the hub ({type(error).__name__}: {error}); give a "
            "JSONL or Parquet file with --dataset_dir instead"
        ) from error
    for row in rows:
        yield _example(row, task, task.hub)


def prepared(
    examples: Iterable[Example], task: Task, tokenizer: Tokenizer, *, longest: int, shortest: int
) -> Iterator[Example]:
    """Yield the examples with prompts for texts, cut to ``longest`` tokens.

    As in TensorRT-LLM's summarize.py, prompts are stripped and ``n't`` joined. Those of no more than
    ``shortest`` tokens are left out. Both sides get text, since an engine behind its tokenizer takes
    nothing else.
    """
    for example in examples:
        prompt = (example.text + task.suffix).strip().replace(" n't", "n't")
        prompt = shortened(prompt, tokenizer, longest)
        if prompt and len(tokenizer(prompt).input_ids) > shortest:
            yield Example(prompt, example.reference)


def shortened(text: str, tokenizer: Tokenizer, limit: int) -> str:
    """Return the beginning of a text that has at most ``limit`` tokens, special tokens included.

    The beginning of the token ids need not be the ids of the text that they decode to, so one more is
    dropped until they are no more than the limit.
    """
    ids = tokenizer(text).input_ids
    for kept in range(limit, 0, -1):
        if len(ids) <= limit:
            return text
        # A character whose bytes are cut through decodes to U+FFFD.
        text = tokenizer.decode(ids[:kept], skip_special_tokens=True).rstrip("\ufffd")
        ids = tokenizer(text).input_ids
    return text


def _jsonl(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            place = f"{file}, line {number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{place}: no JSON: {error}") from None
            if not isinstance(row, dict):
                raise DataError(f"{place}: no JSON object")
            yield place, row


def _parquet(file: Path, task: Task) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        import pyarrow  # type: ignore[import-untyped, unused-ignore]
        from pyarrow.parquet import ParquetFile  # type: ignore[import-untyped, unused-ignore]
    except ImportError as error:
        raise DataError(
            f"{file}: Parquet needs pyarrow (pip install 'cog-triton[eval]'): {error}"
        ) from None
    try:
        table = ParquetFile(file)
        there, wanted = table.schema_arrow.names, {task.input_key, task.output_key}
        # A column that is missing is missed when it is looked up in a row, with the others' names.
        columns = sorted(wanted) if wanted <= set(there) else there
        rows = (row for batch in table.iter_batches(columns=columns) for row in batch.to_pylist())
        for number, row in enumerate(rows, 1):
            yield f"{file}, row {number}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file}: no Parquet file: {error}") from None


def _example(row: Mapping[str, Any], task: Task, place: str) -> Example:
    for key in (task.input_key, task.output_key):
        if key not in row:
            there = ", ".join(sorted(row))
            raise DataError(
                f"{place}: no column {key!r}, but {there}; see --input_key and --output_key"
            )
        if not isinstance(row[key], str):
            raise DataError(f"{place}: {key} is no text")
    return Example(row[task.input_key], row[task.output_key])
