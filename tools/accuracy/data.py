"""Texts with their references: from a JSONL or Parquet file, a directory of them, or Hugging Face's hub."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATASETS = "datasets>=5.2,<6"


class DataError(Exception):
    """There are no texts to compare on; the text says why."""


@dataclass(frozen=True)
class Example:
    """A text that the model completes, and what a good completion reads like."""

    text: str
    reference: str


@dataclass(frozen=True)
class Task:
    """A task given to the model.

    Attributes:
        input_key, output_key: columns of the text and of its reference.
        suffix: what follows the text in the prompt.
        hub: id of the data set on Hugging Face's hub, if there is one.
        hub_config, hub_split: which part of it.
    """

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
    """The examples of a file, or of a directory's files in the order of their names.

    Args:
        source: ``*.jsonl``, ``*.json`` with one object a line, or ``*.parquet``.

    Raises:
        DataError: there is nothing to read, or something is not as it should be; naming the place.
    """
    for file in _files(source):
        rows = _parquet(file, task) if file.suffix == ".parquet" else _jsonl(file)
        for place, row in rows:
            yield Example(_column(row, task.input_key, place), _column(row, task.output_key, place))


def hub_examples(task: Task, cache: Path | None, seed: int) -> Iterator[Example]:
    """The examples of the task's data set on the hub, in an order that the seed decides.

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
    try:
        rows = datasets.load_dataset(
            task.hub,
            task.hub_config,
            split=task.hub_split,
            cache_dir=None if cache is None else str(cache),
        ).shuffle(seed=seed)
    except (
        Exception
    ) as error:  # the library's, huggingface_hub's and the network's are of many kinds
        raise DataError(
            f"{task.hub} cannot be had from the hub ({type(error).__name__}: {error}); give a JSONL or "
            "Parquet file with --dataset_dir instead"
        ) from error
    for row in rows:
        yield Example(
            _column(row, task.input_key, task.hub), _column(row, task.output_key, task.hub)
        )


def _files(source: Path) -> list[Path]:
    if source.is_file():
        if source.suffix not in (".jsonl", ".json", ".parquet"):
            raise DataError(f"{source}: neither .jsonl, .json nor .parquet")
        return [source]
    if not source.is_dir():
        raise DataError(f"{source}: there is no such file or directory")
    files = sorted(f for f in source.iterdir() if f.suffix in (".jsonl", ".json", ".parquet"))
    if not files:
        raise DataError(f"{source}: no .jsonl, .json or .parquet file in it")
    return files


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
        there = table.schema_arrow.names
        # A column that is missing is missed when it is looked up in a row, with the others' names.
        wanted = {task.input_key, task.output_key}
        columns = sorted(wanted) if wanted <= set(there) else there
        rows = (row for batch in table.iter_batches(columns=columns) for row in batch.to_pylist())
        for number, row in enumerate(rows, 1):
            yield f"{file}, row {number}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file}: no Parquet file: {error}") from None


def _column(row: Mapping[str, Any], key: str, place: str) -> str:
    if key not in row:
        raise DataError(
            f"{place}: no column {key!r}, but {', '.join(sorted(row))}; see --input_key and --output_key"
        )
    if not isinstance(row[key], str):
        raise DataError(f"{place}: {key} is no text")
    value: str = row[key]
    return value
