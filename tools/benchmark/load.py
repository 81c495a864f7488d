"""What is sent and when, decided before anything is measured: lengths, arrival times, prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

DEFAULT_REQUESTS = 100
REQUESTS_PER_STREAM = 4
SECONDS_OF_RATE = 10

# Common words: most are one or two tokens in any English vocabulary, so a prompt of n words, cut to n
# tokens, is quick to make.
_WORDS = (
    "the of and to in is that it was for on are with as his they be at one have this from or had by "
    "hot but some what there we can out other were all your when up use word how said an each she "
    "which do their time if will way about many then them would write like so these her long make "
    "thing see him two has look more day could go come did my sound no most number who over know "
    "water than call first people may down side been now find any new work part take get place made "
    "live where after back little only round man year came show every good me give our under name "
    "very through just form much great think say help low line before turn cause same mean differ "
    "move right boy old too does tell sentence set three want air well also play small end put home "
    "read hand port large spell add even land here must big high such follow act why ask men change"
)
WORDS = _WORDS.split()


@dataclass(frozen=True)
class Length:
    """A normal distribution of lengths in tokens, cut at one."""

    mean: float
    stddev: float = 0.0

    def sample(self, count: int, random: np.random.Generator) -> list[int]:
        """So many lengths, each at least 1."""
        drawn = np.rint(random.normal(self.mean, self.stddev, count))
        return [max(1, int(length)) for length in drawn]


@dataclass(frozen=True)
class Load:
    """One load. Either ``concurrency`` (closed loop) or ``request_rate`` (open loop) is set.

    Attributes:
        concurrency: so many streams, each of which sends its next request when its last has ended.
        request_rate: requests a second that arrive at random (Poisson), however many are unanswered.
        requests: how many are measured; None for ``default_requests``.
        warmup: how many are sent before, unmeasured.
        input, output: lengths in tokens; the output's is forced on the engine.
        prompts: how many different prompts there are; None for as many as requests.
        temperature: 0 is greedy.
        ignore_eos: no token ends an output, which takes less of the engine than not to choose the one
            that does; the Cog targets have no such input.
        rounds: how often each target has its turn, with other prompts each time.
        seed: of everything random.
        generators: load generator processes that share the load.
        timeout: seconds after which a request counts as failed.
        warmup_tokens: most output tokens of a request of the warm-up; None for no such limit.
    """

    concurrency: int | None = 1
    request_rate: float | None = None
    requests: int | None = None
    warmup: int = 10
    input: Length = Length(128)
    output: Length = Length(128)
    prompts: int | None = None
    temperature: float = 0.0
    ignore_eos: bool = False
    rounds: int = 1
    seed: int = 0
    generators: int = 1
    timeout: float = 300.0
    warmup_tokens: int | None = None

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.request_rate is None):
            raise ValueError("a load has a concurrency or a request rate, and not both")

    @property
    def count(self) -> int:
        """The number of measured requests."""
        if self.requests is not None:
            return self.requests
        return default_requests(self.concurrency, self.request_rate)


@dataclass(frozen=True)
class Planned:
    """One request to send.

    Attributes:
        prompt: its text.
        input_tokens: of the prompt, special tokens aside.
        output_tokens: exactly so many are asked for.
        at: when to send it, seconds from the start; 0 in a closed loop.
    """

    prompt: str
    input_tokens: int
    output_tokens: int
    at: float = 0.0


@dataclass(frozen=True)
class Share:
    """One generator's part of the requests and of a closed loop's streams."""

    requests: list[Planned]
    concurrency: int | None


def default_requests(concurrency: int | None, request_rate: float | None) -> int:
    """As many requests as give a p99, and several for each stream or for each second."""
    if concurrency is not None:
        return max(DEFAULT_REQUESTS, concurrency * REQUESTS_PER_STREAM)
    assert request_rate is not None
    return max(DEFAULT_REQUESTS, round(request_rate * SECONDS_OF_RATE))


def plan(load: Load, tokenizer: Any, turn: int = 0) -> tuple[list[Planned], list[Planned]]:
    """The requests of the warm-up and those to measure. The same load gives the same requests.

    Args:
        tokenizer: a ``tokenizers.Tokenizer``, see ``vocabulary``.
        turn: another turn has other prompts.
    """
    random = np.random.default_rng([load.seed, turn])
    total = load.warmup + load.count
    arrivals = [0.0] * total
    if load.request_rate is not None:
        arrivals[load.warmup :] = poisson_arrivals(load.request_rate, load.count, random)
    outputs = load.output.sample(total, random)
    distinct = min(load.prompts or total, total)
    prompts = synthetic_prompts(load.input.sample(distinct, random), tokenizer, random)
    requests = [
        Planned(*prompts[i % distinct], outputs[i], arrivals[i]) for i in range(load.warmup, total)
    ]
    # A warm-up does not use up the measured prompts while there are others: they could be cached.
    most = load.warmup_tokens or max(outputs)
    warmup = [Planned(*prompts[i % distinct], min(outputs[i], most)) for i in range(load.warmup)]
    return warmup, requests


def poisson_arrivals(rate: float, count: int, random: np.random.Generator) -> list[float]:
    """Arrival times in seconds from the start, ``rate`` a second on average, independent."""
    return [float(at) for at in np.cumsum(random.exponential(1 / rate, count))]


def synthetic_prompts(
    lengths: list[int], tokenizer: Any, random: np.random.Generator
) -> list[tuple[str, int]]:
    """Different texts of random words, and how many tokens each has: about the lengths asked for."""
    words = _words_of(tokenizer)
    counts: dict[str, int] = {}
    for length in lengths:
        # One token has few different texts; a few tries, then a longer one.
        for attempt in range(100):
            tokens = length + attempt // 10
            drawn = " ".join(words[i] for i in random.integers(len(words), size=tokens))
            text = _cut(drawn, tokens, tokenizer)
            if text not in counts:
                break
        counts[text] = _count(text, tokenizer)
    texts = list(counts.items())
    return [texts[i % len(texts)] for i in range(len(lengths))]


def shares(requests: list[Planned], load: Load) -> list[Share]:
    """The requests and streams of each generator; no generator is without a stream."""
    if load.concurrency is None:
        count = load.generators
        return [Share(requests[i::count], None) for i in range(count)]
    count = min(load.generators, load.concurrency)
    owners = [stream % count for stream in range(load.concurrency)]
    return [
        Share(
            [
                request
                for i, request in enumerate(requests)
                if owners[i % load.concurrency] == generator
            ],
            owners.count(generator),
        )
        for generator in range(count)
    ]


def _words_of(tokenizer: Any) -> list[str]:
    """The common words, or the tokenizer's own where all of those are one unknown token to it."""
    known = set(tokenizer.encode(" ".join(WORDS), add_special_tokens=False).ids)
    if len(known) > 1:
        return WORDS
    return sorted(word for word, token_id in tokenizer.get_vocab().items() if token_id not in known)


def _cut(text: str, tokens: int, tokenizer: Any) -> str:
    """The text up to the end of its token of that number."""
    offsets = tokenizer.encode(text, add_special_tokens=False).offsets
    return text[: offsets[min(tokens, len(offsets)) - 1][1]]


def _count(text: str, tokenizer: Any) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False).ids)
