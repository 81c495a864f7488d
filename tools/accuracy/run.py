"""One comparison, in order: texts, the engine's outputs, Hugging Face's, figures."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from cog_triton.client.stream import TritonClient
from cog_triton.deployment.preparation import with_files
from cog_triton.errors import ConfigurationError
from cog_triton.settings import read_settings
from cog_triton.text.tokenizer import Tokenizer, load_tokenizer
from tools.accuracy.cli import Options
from tools.accuracy.data import DataError, Example, hub_examples, read_examples
from tools.accuracy.engine import (
    Answers,
    CogEngine,
    Completer,
    Progress,
    TritonEngine,
    answers,
    text_ids,
)
from tools.accuracy.metrics import agreement, rouge
from tools.accuracy.prompts import prepared
from tools.accuracy.report import ENGINE, HUGGING_FACE, Report, Side
from tools.benchmark.machine import machine, reported_settings, versions
from tools.benchmark.servers import triton_server

if TYPE_CHECKING:
    from tools.accuracy.reference import Reference

RESPONSE_SECONDS = 600.0


def compare(options: Options, environment: Mapping[str, str]) -> Report:
    """Runs a comparison.

    Args:
        environment: what an engine that is started gets, and the options of ours are added to.

    Raises:
        DataError, CogTritonError: there are no texts, or a side could not be set up or failed.
    """
    check_installed()
    model = model_directory(options.model, environment)
    tokenizer = load_tokenizer(options.tokenizer or model)
    end_id = tokenizer.eos_token_id if options.end_id is None else options.end_id
    examples = read(options, tokenizer)
    prompts = [example.text for example in examples]
    engine = engine_environment(options, model, environment)
    sides: dict[str, Answers] = {}
    if options.test_engine:
        # It ends before the other side is loaded: both may not fit on one machine at once.
        with engine_address(options, engine) as address, _bar(ENGINE, prompts) as bar:
            sides[ENGINE] = asyncio.run(
                _complete(options, address, tokenizer, end_id, prompts, bar)
            )
    reference = None
    if options.test_hf:
        from tools.accuracy.reference import Reference  # brings PyTorch

        reference = Reference(
            model, tokenizer, dtype=options.dtype, device=options.device, end_id=end_id
        )
        with _bar(HUGGING_FACE, prompts) as bar:
            sides[HUGGING_FACE] = reference.answers(
                prompts, options.batch_size, options.output_len, bar
            )
    if options.url is not None:  # of whose texts no other ids are known
        sides = {name: with_ids_of_texts(side, tokenizer) for name, side in sides.items()}
    if options.output_dir is not None:
        write_outputs(options.output_dir, examples, sides)
    means = log_probs(reference, prompts, sides)
    return report(options, examples, sides, means, engine)


def check_installed() -> None:
    """Finds a missing library before anything takes time.

    Raises:
        ConfigurationError: naming what to install.
    """
    if importlib.util.find_spec("rouge_score") is None:
        raise ConfigurationError("rouge-score is not installed: pip install 'cog-triton[eval]'")


def model_directory(name: str, environment: Mapping[str, str]) -> str:
    """The directory of a model, downloaded or unpacked if need be.

    Raises:
        ConfigurationError: it cannot be had.
    """
    others = {k: v for k, v in environment.items() if k not in ("COG_WEIGHTS", "ENGINE_DIR")}
    return with_files(read_settings({**others, "MODEL": name})).model_dir


def read(options: Options, tokenizer: Tokenizer) -> list[Example]:
    """The examples of the comparison, their texts made prompts.

    Raises:
        DataError: there are none.
    """
    if options.data is not None:
        source = read_examples(options.data, options.task)
    else:
        source = hub_examples(options.task, options.data_cache, options.seed)
    kept = prepared(
        source, options.task, tokenizer, longest=options.longest, shortest=options.shortest
    )
    if examples := list(islice(kept, options.examples)):
        return examples
    raise DataError(
        f"there is no text of more than {options.shortest} tokens in {options.data or options.task.hub}"
    )


@contextmanager
def engine_address(options: Options, environment: Mapping[str, str]) -> Iterator[Mapping[str, str]]:
    """Return the engine's ``url``, ``grpc`` or ``http`` address; start it if need be."""
    if not options.starts_engine:
        given = {"url": options.url, "grpc": options.grpc_url, "http": options.http_url}
        yield {name: address for name, address in given.items() if address}
        return
    with triton_server(environment) as running:
        yield {"grpc": running.grpc}


def engine_environment(
    options: Options, model: str, environment: Mapping[str, str]
) -> dict[str, str]:
    """The environment of an engine that is started; ``--settings`` have the last word."""
    named = {
        "MODEL": model,
        "TOKENIZER": options.tokenizer or "",
        "ENGINE_DIR": str(options.engine_dir or ""),
    }
    given = dict(item.partition("=")[::2] for item in options.settings)
    return {**environment, **{name: text for name, text in named.items() if text}, **given}


def with_ids_of_texts(side: Answers, tokenizer: Tokenizer) -> Answers:
    """A side's answers with the ids of their texts, instead of those that the texts were made of."""
    return replace(
        side,
        answers=tuple(
            replace(answer, ids=text_ids(answer.text, tokenizer)) for answer in side.answers
        ),
    )


def log_probs(
    reference: Reference | None, prompts: Sequence[str], sides: Mapping[str, Answers]
) -> dict[str, float | None]:
    """The mean log probability per token of each side, as the Hugging Face model sees it."""
    if reference is None:
        return dict.fromkeys(sides)
    means: dict[str, float | None] = {}
    known: dict[tuple[str, tuple[int, ...]], list[float]] = {}
    for name, side in sides.items():
        values: list[float] = []
        for prompt, answer in zip(prompts, side.answers, strict=True):
            key = (prompt, answer.ids)
            if key not in known:
                known[key] = reference.log_probs(prompt, answer.ids)
            values += known[key]
        means[name] = fmean(values) if values else None
    return means


def report(
    options: Options,
    examples: Sequence[Example],
    sides: Mapping[str, Answers],
    means: Mapping[str, float | None],
    engine: Mapping[str, str],
) -> Report:
    """The figures of both sides' answers.

    Args:
        sides: the answers, by the name of the side.
        means: log probabilities per token, by the name of the side.
        engine: the environment of an engine that is started.
    """
    references = [example.reference for example in examples]
    texts = {name: [answer.text for answer in side.answers] for name, side in sides.items()}
    ids = {name: [answer.ids for answer in side.answers] for name, side in sides.items()}
    both = len(sides) == 2
    return Report(
        examples=len(examples),
        sides={
            name: Side(rouge(texts[name], references), side.tokens, side.seconds, means[name])
            for name, side in sides.items()
        },
        agreement=agreement(ids[ENGINE], ids[HUGGING_FACE], texts[ENGINE], texts[HUGGING_FACE])
        if both
        else None,
        ids_of_text=options.url is not None,
        limits=options.limits,
        details=details(options, engine),
    )


def details(options: Options, engine: Mapping[str, str]) -> dict[str, Any]:
    """Return the subject and place of the comparison.

    Args:
        engine: the environment of an engine that is started.
    """
    return {
        "endpoint": options.url or options.grpc_url or options.http_url,
        "settings": reported_settings(engine) if options.starts_engine else None,
        "task": options.task_name,
        "data": str(options.data or options.task.hub),
        "model": options.model,
        "data_type": options.dtype,
        "batch_size": options.batch_size,
        "output_len": options.output_len,
        "max_input_length": options.longest,
        "machine": machine(),
        "versions": versions(),
    }


def write_outputs(
    directory: Path, examples: Sequence[Example], sides: Mapping[str, Answers]
) -> None:
    """Writes ``outputs.jsonl``: an object for each example, with the text and ids of each side."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "outputs.jsonl").open("w", encoding="utf-8") as file:
        for position, example in enumerate(examples):
            row: dict[str, Any] = {"prompt": example.text, "reference": example.reference}
            for name, key in ((ENGINE, "engine"), (HUGGING_FACE, "hugging_face")):
                if name in sides:
                    answer = sides[name].answers[position]
                    row |= {key: answer.text, f"{key}_ids": answer.ids}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


async def _complete(
    options: Options,
    address: Mapping[str, str],
    tokenizer: Tokenizer,
    end_id: int | None,
    prompts: Sequence[str],
    progress: Progress,
) -> Answers:
    engine: Completer
    if "url" in address:
        engine = CogEngine(address["url"], tokenizer, max_tokens=options.output_len)
    else:
        engine = TritonEngine(
            _client(address), tokenizer, max_tokens=options.output_len, end_id=end_id
        )
    return await answers(engine, prompts, options.batch_size, progress)


def _client(address: Mapping[str, str]) -> TritonClient:
    if "http" in address:
        from cog_triton.client.http_transport import HttpClient

        return HttpClient(address["http"], response_timeout=RESPONSE_SECONDS)
    from cog_triton.client.grpc_transport import GrpcClient

    return GrpcClient(address["grpc"], response_timeout=RESPONSE_SECONDS)


@contextmanager
def _bar(name: str, prompts: Sequence[str]) -> Iterator[Progress]:
    with tqdm(total=len(prompts), desc=name, unit="text") as bar:
        yield bar.update
