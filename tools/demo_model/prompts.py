"""The prompts that the demo model is trained on: each answer's own, and some that it has no answer to.

An answer has many prompts: its question, the same in other words, greetings of one meaning. What the
model has no answer to cannot be listed, so such prompts are drawn at random, and no two epochs show the
same ones: from them the model learns to say that it does not know, whatever the words are.

>>> from tools.demo_model.prompts import KNOWN
>>> KNOWN[0].prompts[:3]
('What is machine learning?', "What's machine learning?", 'Explain machine learning.')
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from random import Random
from typing import NamedTuple

from pydantic import BaseModel

from tools.demo_model.corpus import PAIRS, QA, read_data

# What people put around a topic. The answer to all of them is what the topic is.
FRAMES = (
    "What is {}?",
    "What's {}?",
    "Explain {}.",
    "Tell me about {}.",
    "What does {} mean?",
    "Can you explain {}?",
    "Please explain {}.",
    "Tell me more about {}.",
    "Describe {}.",
    "Define {}.",
    "How does {} work?",
    "Why is {} useful?",
    "When is {} used?",
)
WITHOUT_ARTICLE = FRAMES[:4]

_TOPIC = re.compile(r"What (?:is|are|does) ((?:(?:a|an|the) )?)(.+?)(?: do| for)?\?")
_DETAILED = re.compile(r"Explain in detail (how .+)\.")
_SYLLABLES = re.findall(
    r"\w+", "ba co di fe gu ha ki lo mu ne or pa qui ra so tu ul va we xa yo ze st"
)


class Answered(NamedTuple):
    """An answer and the prompts that it is given to; the first one is the usual form."""

    prompts: tuple[str, ...]
    answer: str


class _Conversation(BaseModel, extra="forbid"):
    """Prompts, and an answer or the question whose answer it is."""

    prompts: tuple[str, ...]
    answer: str = ""
    same_as: str = ""


class _Language(BaseModel, extra="forbid"):
    """Prompts with places, and what may stand there."""

    frames: tuple[str, ...]
    things: tuple[str, ...]


class _Unknown(BaseModel, extra="forbid"):
    answer: str
    languages: dict[str, _Language]


def rephrased(question: str) -> Iterator[str]:
    """The question and, where it asks what something is, the same in other words."""
    yield question
    if match := _TOPIC.fullmatch(question):
        article, topic = match.groups()
        yield from (frame.format(article + topic) for frame in FRAMES)
        yield from (frame.format(topic) for frame in WITHOUT_ARTICLE)
    if match := _DETAILED.fullmatch(question):
        yield f"Explain {match[1]}."
        yield f"Tell me {match[1]}."


def spellings(prompt: str) -> Iterator[str]:
    """The prompt, and as it is typed in a hurry: without capitals, accents or its punctuation."""
    bare = prompt.strip(" ?!.¿¡")
    yield from (prompt, bare, bare.lower(), _without_accents(bare.lower()))
    if not prompt.endswith("?"):
        yield f"{bare}!"


def unknown_prompt(random: Random) -> str:
    """A prompt drawn at random, of words that are drawn at random as well; most are English."""
    name = "English" if random.random() < 0.6 else random.choice(list(UNKNOWN.languages))
    language = UNKNOWN.languages[name]
    prompt = re.sub(r"\{\}", lambda _: _thing(language, random), random.choice(language.frames))
    if random.random() < 0.3:
        prompt = prompt.rstrip(" ?!.")
    if random.random() < 0.3:
        prompt = prompt.lower()
    if random.random() < 0.15:
        prompt = _without_accents(prompt)
    return prompt


def _thing(language: _Language, random: Random) -> str:
    kind = random.random()
    if kind < 0.5:
        return random.choice(language.things)
    if kind < 0.6:
        return f"{random.choice(language.things)} {random.choice(language.things)}"
    if kind < 0.9:
        return _word(random)
    return f"{random.choice(language.things)} {_word(random)}"


def _word(random: Random) -> str:
    """A word that means nothing: of syllables, of letters, or a number."""
    kind = random.random()
    if kind < 0.6:
        return "".join(random.choices(_SYLLABLES, k=random.randint(1, 4)))
    if kind < 0.9:
        return "".join(random.choices(string.ascii_lowercase, k=random.randint(1, 9)))
    return str(random.randint(0, 9999))


def _without_accents(text: str) -> str:
    return "".join(c for c in unicodedata.normalize("NFD", text) if not unicodedata.combining(c))


def _question(pair: QA) -> Answered:
    return Answered(tuple(dict.fromkeys(rephrased(pair.question))), pair.answer)


def _conversation(entry: _Conversation) -> Answered:
    prompts = chain.from_iterable(map(spellings, entry.prompts))
    answers = {pair.question: pair.answer for pair in PAIRS}
    answer = answers[entry.same_as] if entry.same_as else entry.answer
    return Answered(tuple(dict.fromkeys(prompts)), answer)


_HERE = Path(__file__).parent
UNKNOWN = read_data(_HERE / "unknown.yaml", _Unknown)
UNKNOWN_ANSWER = UNKNOWN.answer
QUESTIONS = tuple(map(_question, PAIRS))
CONVERSATION = tuple(
    _conversation(entry)
    for entries in read_data(
        _HERE / "conversation.yaml", dict[str, tuple[_Conversation, ...]]
    ).values()
    for entry in entries
)
KNOWN: tuple[Answered, ...] = (*QUESTIONS, *CONVERSATION)
