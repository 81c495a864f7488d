"""Prompts with their references, from a JSONL or Parquet file, a directory of them, or the hub."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from cog_triton.errors import ConfigurationError
from cog_triton.text.tokenizer import Tokenizer

SUFFIXES = (".jsonl", ".json", ".parquet")


class Task(NamedTuple):
    """Columns of the text and of its reference, the prompt's suffix, and a data set on the hub."""

    input_key: str
    output_key: str
    suffix: str = ""
    hub: tuple[str, ...] = ()  # name and configuration


_TASKS = yaml.safe_load(Path(__file__).with_name("tasks.yaml").read_text(encoding="utf-8"))
TASKS = {name: Task(*columns) for name, columns in _TASKS.items()}


def examples(
    task: Task, source: Path | None, tokenizer: Tokenizer, longest: int
) -> Iterator[tuple[str, str]]:
    """Yield prompts, cut to ``longest`` tokens, and their references, from a file or the hub.

    As in TensorRT-LLM's summarize.py, prompts are stripped and ``n't`` joined. Both sides get text: an
    engine behind its tokenizer takes nothing else.
    """
    for row in file_rows(source) if source else _hub_rows(task):
        for key in (task.input_key, task.output_key):
            if not isinstance(row.get(key), str):
                there = ", ".join(sorted(row))
                raise ConfigurationError(f"no column {key!r} of text, but {there}; see --eval_task")
        text = (row[task.input_key] + task.suffix).strip().replace(" n't", "n't")
        if prompt := shortened(text, tokenizer, longest):
            yield prompt, row[task.output_key]


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


def file_rows(source: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a .jsonl, .json or .parquet file, or of a directory's files in order."""
    from pyarrow import ArrowException, json, parquet  # type: ignore[import-untyped, unused-ignore]

    files = sorted(source.iterdir()) if source.is_dir() else [source]
    files = [file for file in files if file.suffix in SUFFIXES]
    if not files:
        raise ConfigurationError(f"{source}: neither {', '.join(SUFFIXES)} nor a directory of them")
    for file in files:
        read = parquet.read_table if file.suffix == ".parquet" else json.read_json
        try:
            yield from read(file).to_pylist()
        except (ArrowException, OSError) as error:
            raise ConfigurationError(f"{file} cannot be read: {error}") from None


def _hub_rows(task: Task) -> Iterable[dict[str, Any]]:
    """Return the rows of the task's data set on the hub, in an order that is always the same."""
    if not task.hub:
        raise ConfigurationError("this task has no data set on the hub: give --dataset_dir")
    try:
        from datasets import load_dataset  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        text = f"{task.hub[0]} is read by pip install 'datasets>=5.2,<6'; or give --dataset_dir"
        raise ConfigurationError(text) from None
    rows: Iterable[dict[str, Any]] = load_dataset(*task.hub, split="test").shuffle(seed=0)
    return rows
