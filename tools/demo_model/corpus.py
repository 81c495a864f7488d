"""The answers that the demo model knows, and the prompts that each is given to."""

import re
import unicodedata
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped, unused-ignore]


def _read(name: str) -> Any:
    # The parser in C, where PyYAML has it, is eight times as fast.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(Path(__file__).with_name(name).read_text(encoding="utf-8"), Loader=loader)


FRAMES: list[str] = _read("frames.yaml")
_TOPIC = re.compile(r"What (?:is|are|does) ((?:(?:a|an|the) )?)(.+?)(?: do| for)?\?")
_DETAILED = re.compile(r"Explain in detail (how .+)\.")


class QA(NamedTuple):
    """A question and its answer, both plain text without surrounding white space."""

    question: str
    answer: str


class Answered(NamedTuple):
    """An answer and the prompts that it is given to; the first one is the usual form."""

    prompts: tuple[str, ...]
    answer: str


def rephrased(question: str) -> Iterator[str]:
    """Yield the question and, where it asks what something is, the same in other words."""
    yield question
    if match := _TOPIC.fullmatch(question):
        article, topic = match.groups()
        yield from (frame.format(article + topic) for frame in FRAMES)
        yield from (frame.format(topic) for frame in FRAMES[:4])
    if match := _DETAILED.fullmatch(question):
        yield f"Explain {match[1]}."
        yield f"Tell me {match[1]}."


def spellings(prompt: str) -> Iterator[str]:
    """Yield the prompt, and as it is typed in a hurry: without capitals, accents or punctuation."""
    bare = prompt.strip(" ?!.¿¡")
    yield from (prompt, bare, bare.lower(), without_accents(bare.lower()))
    if not prompt.endswith("?"):
        yield f"{bare}!"


def without_accents(text: str) -> str:
    return "".join(c for c in unicodedata.normalize("NFD", text) if not unicodedata.combining(c))


def _answered(prompts: Iterator[str], answer: str) -> Answered:
    return Answered(tuple(dict.fromkeys(prompts)), answer)


PAIRS = tuple(QA(**pair) for pair in chain.from_iterable(_read("corpus.yaml").values()))
QUESTIONS = tuple(_answered(rephrased(question), answer) for question, answer in PAIRS)
# An entry has an answer, or the question whose answer it is.
CONVERSATION = tuple(
    _answered(
        chain.from_iterable(map(spellings, entry["prompts"])),
        entry.get("answer") or dict(PAIRS)[entry["same_as"]],
    )
    for entry in chain.from_iterable(_read("conversation.yaml").values())
)
KNOWN = (*QUESTIONS, *CONVERSATION)
UNKNOWN: dict[str, Any] = _read("unknown.yaml")
"""The answer to what the model does not know; and by language, frames with places, and things for them."""
