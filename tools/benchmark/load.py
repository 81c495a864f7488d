"""Requests and their times, decided before anything is measured: lengths, arrivals, prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

# Most are one or two tokens in any English vocabulary, so a prompt of n tokens is cut from n words.
_WORDS = (
    "the of and to in is that it was for on are with as his they be at one have this from or had "
    "by hot but some what there we can out other were all your when up use word how said an each "
    "she which do their time if will way about many then them would write like so these her long "
    "make thing see him two has look more day could go come did my sound no most number who over "
    "know water than call first people may down side been now find any new work part take get "
    "place made"
)
WORDS = _WORDS.split()


@dataclass(frozen=True)
class Length:
    """A normal distribution of lengths in tokens, cut at one."""

    mean: float
    stddev: float = 0.0

    def sample(self, count: int, random: np.random.Generator) -> list[int]:
        drawn = np.rint(random.normal(self.mean, self.stddev, count))
        return [max(1, int(length)) for length in drawn]


@dataclass(frozen=True)
class Load:
    """One load, closed (``concurrency``) or open (``request_rate``).

    Attributes:
        concurrency: streams, each of which sends its next request when its last has ended.
        request_rate: requests a second that arrive at random (Poisson); then concurrency is None.
        requests: measured ones; None for 100, or 4 a stream, or 10 seconds of the rate.
        warmup: requests that are sent before, unmeasured, of at most ``warmup_tokens``.
        input, output: lengths in tokens; the output's is forced on the engine.
        prompts: different ones; None for as many as requests.
        temperature: 0 is greedy.
        ignore_eos: no token ends an output, which costs the engine less than never choosing the one
            that does; Cog has no such input.
        rounds: turns of each target, each with other prompts.
        generators: processes that share the load.
        timeout: seconds after which a request has failed.
    """

    concurrency: int | None = 1
    request_rate: float | None = None
    requests: int | None = None
    warmup: int = 10
    warmup_tokens: int | None = None
    input: Length = Length(128)
    output: Length = Length(128)
    prompts: int | None = None
    temperature: float = 0.0
    ignore_eos: bool = False
    rounds: int = 1
    seed: int = 0
    generators: int = 1
    timeout: float = 300.0

    @property
    def count(self) -> int:
        if self.requests is not None:
            return self.requests
        return max(100, round(4 * (self.concurrency or 0) + 10 * (self.request_rate or 0)))

    @property
    def name(self) -> str:
        """``c=16`` or ``10/s``."""
        return f"c={self.concurrency}" if self.concurrency else f"{self.request_rate:g}/s"


@dataclass(frozen=True)
class Planned:
    """One request to send.

    Attributes:
        input_tokens: of the prompt, special tokens aside.
        output_tokens: exactly so many are asked for.
        at: seconds from the start at which it is sent; 0 in a closed loop.
    """

    prompt: str
    input_tokens: int
    output_tokens: int
    at: float = 0.0


@dataclass(frozen=True)
class Share:
    """One generator's part of a load: its requests, and its streams of a closed loop."""

    warmup: list[Planned]
    requests: list[Planned]
    concurrency: int | None


def plan(load: Load, tokenizer: Any, turn: int = 0) -> list[Share]:
    """Return the share of each generator. The same load gives the same requests.

    Args:
        tokenizer: a ``tokenizers.Tokenizer``.
        turn: another turn has other prompts, which no cache has seen.
    """
    random = np.random.default_rng([load.seed, turn])
    total = load.warmup + load.count
    at = np.zeros(total)
    if load.request_rate:
        at[load.warmup :] = np.cumsum(random.exponential(1 / load.request_rate, load.count))
    outputs = load.output.sample(total, random)
    distinct = min(load.prompts or total, total)
    prompts = synthetic_prompts(load.input.sample(distinct, random), tokenizer, random)
    most = load.warmup_tokens or max(outputs)
    warmup = [Planned(*prompts[i % distinct], min(outputs[i], most)) for i in range(load.warmup)]
    requests = [
        Planned(*prompts[i % distinct], outputs[i], float(at[i])) for i in range(load.warmup, total)
    ]
    count = min(load.generators, load.concurrency or load.generators)
    # One generator warms the server up for all of them.
    return [
        Share(
            warmup if part == 0 else [],
            requests[part::count],
            load.concurrency and len(range(part, load.concurrency, count)),
        )
        for part in range(count)
    ]


def synthetic_prompts(
    lengths: list[int], tokenizer: Any, random: np.random.Generator
) -> list[tuple[str, int]]:
    """Return different texts of random words, with their tokens: about the lengths asked for."""
    known = set(tokenizer.encode(" ".join(WORDS), add_special_tokens=False).ids)
    # To a vocabulary of made-up words all of these are one unknown token.
    vocabulary = tokenizer.get_vocab().items()
    words = (
        WORDS if len(known) > 1 else sorted(word for word, id_ in vocabulary if id_ not in known)
    )
    counts: dict[str, int] = {}
    for length in lengths:
        # One token has few different texts: a few tries, then a longer one.
        for attempt in range(100):
            tokens = length + attempt // 10
            text = " ".join(words[i] for i in random.integers(len(words), size=tokens))
            offsets = tokenizer.encode(text, add_special_tokens=False).offsets
            text = text[: offsets[min(tokens, len(offsets)) - 1][1]]
            if text not in counts:
                break
        counts[text] = len(tokenizer.encode(text, add_special_tokens=False).ids)
    texts = list(counts.items())
    return [texts[i % len(texts)] for i in range(len(lengths))]
