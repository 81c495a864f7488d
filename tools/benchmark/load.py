"""The requests of a load, decided before anything is measured; and what came of each."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tools.server_sent_events import Part

# Most are one or two tokens in any English vocabulary, so a prompt of n tokens is cut from n words.
WORDS = Path(__file__).with_name("words.txt").read_text(encoding="utf-8").split()
WARMUP_TOKENS = 8  # of an answer
# A text has about as many tokens as it was made of: fewer than this share is an answer cut short.
UNCOUNTED_SHARE = 0.8


@dataclass(frozen=True)
class Load:
    """One load: streams, each of which sends its next request when its last has ended."""

    concurrency: int = 1
    requests: int | None = None  # measured ones; None for 100, or 4 a stream
    warmup: int = 10  # requests that are sent before, unmeasured
    input_tokens: int = 128
    output_tokens: int = 128  # forced on the engine
    output_stddev: float = 0.0  # of a normal distribution of the outputs' lengths
    rounds: int = 1  # turns of each target, each with other prompts
    seed: int = 0


def loads_of(options: argparse.Namespace, streams: Sequence[int]) -> list[Load]:
    """Return a load for each number of streams; options of the names of its fields are its values."""
    names = {one.name for one in fields(Load)}
    given = {name: value for name, value in vars(options).items() if name in names}
    return [Load(**{**given, "concurrency": number}) for number in streams]


@dataclass
class Record:
    """One request. Times are seconds of ``time.perf_counter``, which all processes share."""

    prompt: str
    asked: int  # tokens of the answer
    start: float = 0.0
    end: float = 0.0
    error: str | None = None  # None if it answered as it was asked to
    parts: list[tuple[float, Part]] = field(default_factory=list)  # until they are counted
    chunks: list[tuple[float, int]] = field(default_factory=list)  # tokens of parts with content
    output_tokens: int = 0

    @property
    def ttft(self) -> float:
        return self.chunks[0][0] - self.start

    def count(self, tokenizer: Any) -> None:
        """Count the tokens of each chunk. An answer that is too short is an error."""
        shown = [(at, part) for at, part in self.parts if part.text or part.ids]
        total = max((part.tokens for _, part in self.parts), default=0)
        # The server counts all tokens so far, so that a chunk has those since the one before it.
        counts = [0, *(part.tokens for _, part in shown)]
        sizes = [after - before for before, after in pairwise(counts)]
        if not any(counts):  # the server counts them at the end, or not at all
            texts = tokenizer.encode_batch([p.text for _, p in shown], add_special_tokens=False)
            sizes = [len(text.ids) for text in texts]
        self.parts = []
        self.output_tokens = total or sum(sizes)
        least = self.asked * (1 if total else UNCOUNTED_SHARE)
        if self.error is None and (not sizes or self.output_tokens < least):
            self.error = "short answer"
        self.chunks = [(at, size) for (at, _), size in zip(shown, sizes, strict=True)]


def plan(load: Load, tokenizer: Any, turn: int = 0) -> tuple[list[Record], list[Record]]:
    """Return the requests of the warm-up and of the load, the same for the same load and turn.

    Another turn has other prompts, which no cache has seen. The tokenizer is of the package ``tokenizers``.
    """
    random = np.random.default_rng([load.seed, turn])
    known = set(tokenizer.encode(" ".join(WORDS), add_special_tokens=False).ids)
    words = WORDS
    if len(known) == 1:  # to a vocabulary of made-up words all of these are one unknown token
        words = sorted(word for word, id_ in tokenizer.get_vocab().items() if id_ not in known)

    def request(asked: int = 0) -> Record:
        text = " ".join(words[i] for i in random.integers(len(words), size=load.input_tokens))
        offsets = tokenizer.encode(text, add_special_tokens=False).offsets[: load.input_tokens]
        drawn = max(1, round(random.normal(load.output_tokens, load.output_stddev)))
        return Record(text[: offsets[-1][1]], asked or drawn)

    count = load.requests or max(100, 4 * load.concurrency)
    warmup = [request(WARMUP_TOKENS) for _ in range(load.warmup)]
    return warmup, [request() for _ in range(count)]
