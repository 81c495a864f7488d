"""What a soak does, decided before anything is started: its phases, and the requests that it draws from."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from cog_triton.request.request import Request
from tools.benchmark.load import WORDS

ENGINES = ("simulated", "transformers")
TRANSPORTS = ("grpc", "http")
KINDS = {"deployment": TRANSPORTS, "cog": TRANSPORTS, "openai": ("grpc",), "attached": ("grpc",)}
"""The servers, and how each can reach Triton: processes that share one do so over gRPC."""
SHORTEST_PHASE = 30.0  # seconds: a kill in a phase is to be recovered from before its end
JUDGED_PHASE = 65.0  # seconds, in which a leak of memory shows as well
POOL = 64
MOST_TOKENS = 160


@dataclass(frozen=True)
class Case:
    """One request of the pool, of which the answer is known.

    Attributes:
        temperature: 0 in half of them.
    """

    key: int
    prompt: str
    seed: int
    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float = 0.95
    presence_penalty: float = 0.2

    @property
    def inputs(self) -> dict[str, Any]:
        """The inputs of Cog's API."""
        names = ("prompt", "seed", "max_tokens", "min_tokens", "temperature", "top_p")
        return {
            **{name: getattr(self, name) for name in names},
            "presence_penalty": self.presence_penalty,
        }

    @property
    def request(self) -> Request:
        return Request(**self.inputs)


def pool(count: int, seed: int) -> list[Case]:
    """So many cases of random lengths; the same for the same seed."""
    random = Random(seed)
    return [_case(key, random) for key in range(count)]


def _case(key: int, random: Random) -> Case:
    tokens = random.randint(1, MOST_TOKENS)
    return Case(
        key,
        # The number keeps the prompts apart, and with them the simulated engine's answers.
        prompt=f"{key} {' '.join(random.choices(WORDS, k=random.randint(1, 60)))}",
        seed=random.getrandbits(31),
        max_tokens=tokens,
        min_tokens=random.randint(0, tokens),
        temperature=0.0 if key % 2 else 1.0,
    )


@dataclass(frozen=True)
class Phase:
    """One server, and the load on it.

    Attributes:
        kind: ``deployment`` for generate() in the worker, ``cog`` for Cog's server, the OpenAI face beside
            it and the Triton in it, ``openai`` for that face in several processes with a Triton of its own,
            ``attached`` for several on the Triton of another.
        seconds: for which new requests are sent; 0 if ``kills`` ends it.
        kills: after so many; None for none of a set number.
    """

    engine: str
    kind: str
    transport: str
    seconds: float = 0.0
    kills: int | None = None

    def __str__(self) -> str:
        return f"{self.engine}, {self.kind}, {self.transport}"


def phases(
    engines: Sequence[str], kinds: Sequence[str], seconds: float, kills: int | None = None
) -> list[Phase]:
    """Plan the phases: as many servers as have time enough, with equal times.

    The first few take turns with the engines, so that a short soak has all kinds and engines.
    """
    all_of_them = list(_combinations(engines, kinds))
    briefly = min(len(kinds), int(seconds // SHORTEST_PHASE))
    most = max(1, briefly, int(seconds // JUDGED_PHASE))
    if kills is not None:
        most = len(all_of_them)
    chosen = all_of_them[: min(most, len(all_of_them), kills or len(all_of_them))]
    count = len(chosen)
    if kills is None:
        return [Phase(*names, seconds=seconds / count) for names in chosen]
    shares = [kills // count + (number < kills % count) for number in range(count)]
    return [Phase(*names, kills=share) for names, share in zip(chosen, shares, strict=True)]


def _combinations(engines: Sequence[str], kinds: Sequence[str]) -> Iterable[tuple[str, str, str]]:
    for transport in range(len(TRANSPORTS)):
        for turn in range(len(engines)):
            for place, kind in enumerate(kinds):
                if transport < len(transports := KINDS[kind]):
                    chosen = transports[(transport + turn + place) % len(transports)]
                    yield engines[(turn + place) % len(engines)], kind, chosen


def engines_here() -> list[str]:
    """The engines that this machine has without an engine directory to be named."""
    here = list(ENGINES)
    if importlib.util.find_spec("tensorrt_llm") is not None:
        here.append("llmapi")
    return here
