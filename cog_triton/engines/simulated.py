"""An engine that makes tokens at a set pace without a model, for tests and for sizing a deployment.

docs/sizing.md has what the costs stand for on a real engine. The tokens are those of a text, from a place
that depends on the prompt: the same prompt always gives the same tokens, and every token is certain.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any, Literal, cast, get_args

from cog_triton.engines.base import (
    LEAST_LOG_PROB,
    EngineUnavailable,
    EventLoopEngine,
    GenerationRequest,
    Step,
    Steps,
    TokenLogProb,
)

DEFAULT_CONTEXT_LENGTH = 131_072
TICK = 0.0005  # seconds; the loop's timers are rounded to 0.001
BURST = 32  # most tokens of one sequence in one step, so that the others get theirs in between
SPARED_TOKENS = 2  # a request for so few never fails: the warm-up of a setup is one

TEXT = (
    "A simulated engine needs no model and no GPU. It reads these sentences again and again, at the "
    "pace it was told, so that everything around an engine can be measured: the ensemble, the "
    "network, the predictor. Il sait même écrire en français, auf Deutsch mit ä, ö und ü, 和中文,"
    "日本語も、and with emoji 🚀🙂. "
)

FailureKind = Literal["error", "stall", "refuse"]


@dataclass(frozen=True)
class Costs:
    """Costs of requests; none by default."""

    prefill: float = 0.0  # seconds from a prompt's prefill to its first token; they overlap
    prefill_rate: float = 0.0  # prompt tokens a second, one prompt after another; 0 is no limit
    inter_token: float = 0.0  # seconds between two tokens of a request
    max_batch: int = 0  # requests that run at once, others wait for a slot; 0 is no limit


@dataclass(frozen=True)
class Failure:
    kind: FailureKind
    after: int  # tokens


@dataclass(frozen=True)
class Failures:
    """The share of requests that fail, each in one of some ways.

    ``error`` ends a request with an error, ``stall`` makes no more tokens until it is aborted, ``refuse``
    never starts it.
    """

    rate: float = 0.0
    kinds: tuple[FailureKind, ...] = ("error",)

    def __post_init__(self) -> None:
        known = get_args(FailureKind)
        for kind in self.kinds:
            if kind not in known:
                raise ValueError(f"unknown failure {kind!r}; known are {', '.join(known)}")

    def of(self, request: GenerationRequest) -> Failure | None:
        """Return the failure of a request: a function of its prompt, seed and number of tokens."""
        max_tokens = request.max_tokens + request.continued
        if not self.rate or max_tokens <= SPARED_TOKENS:
            return None
        draw = Random(f"{request.sampling.seed} {_prompt(request)}").random
        if draw() >= self.rate:
            return None
        kind = self.kinds[int(draw() * len(self.kinds))]
        after = 1 + int(draw() * (max_tokens - 1))
        return Failure(kind, after=max(0, after - request.continued))


class _Slots:
    """Slots, first come, first served. Each is free from when its last user was due to leave it."""

    def __init__(self, count: int) -> None:
        self._semaphore = asyncio.Semaphore(count)
        self._free: deque[float] = deque()  # the times from which on slots are free, if not always

    async def acquire(self, at: float) -> float:
        """Wait for a slot; return the time from which on it is the caller's, who wants it at ``at``."""
        await self._semaphore.acquire()
        return max(at, self._free.popleft() if self._free else 0.0)

    def release(self, at: float) -> None:
        self._free.append(min(at, monotonic()))
        self._semaphore.release()


class SimulatedEngine(EventLoopEngine):
    """Makes tokens by the clock.

    What happens late happens as if it had been on time: the next token, the next prompt and the next
    request in the queue follow from when it was due.
    """

    features = frozenset({"min_p", "top_logprobs"})

    def __init__(
        self,
        token_ids: list[int],
        costs: Costs | None = None,
        failures: Failures | None = None,
        *,
        context_length: int = DEFAULT_CONTEXT_LENGTH,
    ) -> None:
        """Start the engine's thread; ``token_ids`` is generated again and again."""
        self.context_length = context_length
        self._costs = costs or Costs()
        self._failures = failures or Failures()
        self._length = len(token_ids)
        # So that any BURST tokens are one slice.
        self._text = [token_ids[i % self._length] for i in range(self._length + BURST)]
        self._slots = _Slots(self._costs.max_batch or sys.maxsize)
        self._prefills = _Slots(1)
        super().__init__("simulated-engine")

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str]) -> SimulatedEngine:
        """Build it from the tensorrt_llm model's parameters.

        Raises:
            ValueError: the text has no tokens, or a kind of failure is unknown.
        """

        def number(name: str) -> float:
            return float(parameters.get(f"simulated_{name}", 0))

        costs = Costs(
            prefill=number("prefill_ms") / 1000,
            prefill_rate=number("prefill_tokens_per_s"),
            inter_token=number("inter_token_ms") / 1000,
            max_batch=int(number("max_batch")),
        )
        kinds = tuple(parameters.get("simulated_failures", "error").split(","))
        failures = Failures(number("failure_rate"), cast("tuple[FailureKind, ...]", kinds))
        trusted = parameters.get("trust_remote_code") == "true"
        text = parameters.get("simulated_text", TEXT)
        ids = _encode(parameters["tokenizer_dir"], text, trust_remote_code=trusted)
        length = int(parameters.get("max_seq_len", DEFAULT_CONTEXT_LENGTH))
        return cls(ids, costs, failures, context_length=length)

    def steps(self, request: GenerationRequest) -> Steps:
        failure = self._failures.of(request)
        if failure is not None and failure.kind == "refuse":
            # TensorRT-LLM's wording, which clients know.
            raise EngineUnavailable(
                "Maximum queue size of 0 has been reached, please try again later "
                "(simulated_failure_rate)"
            )
        return self._generate(request, failure, monotonic())

    async def _generate(
        self, request: GenerationRequest, failure: Failure | None, arrival: float
    ) -> Steps:
        at = await self._slots.acquire(arrival)  # when the next event is due
        try:
            if self._costs.prefill_rate:
                at = await self._prefill(len(request.input_ids), at)
            at += self._costs.prefill
            place = sum(_prompt(request)) + request.continued
            made, finished = 0, False
            while not finished:
                await _sleep_until(at)
                if failure is not None and made == failure.after:
                    if failure.kind == "stall":  # the slot is kept
                        await asyncio.get_running_loop().create_future()
                    error = f"a simulated failure after {made} tokens (simulated_failure_rate)"
                    yield Step(finished=True, error=error)
                    return
                end = failure.after if failure is not None else request.max_tokens
                count = min(self._due(made, at), end - made)
                ids = self._ids((place + made) % self._length, count, request.end_id)
                made += len(ids)
                finished = made == request.max_tokens or ids[-1] == request.end_id
                at += (len(ids) - finished) * self._costs.inter_token
                asked, top = ids if request.return_log_probs else (), request.top_log_probs
                yield Step(ids, [TokenLogProb(i, 0.0, _top(i, top)) for i in asked], finished)
        finally:
            self._slots.release(at)

    async def _prefill(self, tokens: int, at: float) -> float:
        at = await self._prefills.acquire(at)
        try:
            at += tokens / self._costs.prefill_rate
            await _sleep_until(at)
        finally:
            self._prefills.release(at)
        return at

    def _due(self, made: int, at: float) -> int:
        if pace := self._costs.inter_token:
            return min(BURST, 1 + int(max(0.0, monotonic() + TICK - at) / pace))
        # Without a pace, twice as many each time: the first token comes alone and at once.
        return min(BURST, max(1, made))

    def _ids(self, place: int, count: int, end_id: int | None) -> list[int]:
        ids = self._text[place : place + count]
        return ids[: ids.index(end_id) + 1] if end_id in ids else ids


async def _sleep_until(at: float) -> None:
    await asyncio.sleep(max(0.0, at - monotonic()))  # others get their turn in any case
    while (left := at - monotonic()) > TICK:
        await asyncio.sleep(left)


def _prompt(request: GenerationRequest) -> list[int]:
    return request.input_ids[: len(request.input_ids) - request.continued]


def _top(token: int, count: int) -> tuple[tuple[int, float], ...]:
    """Return the most likely tokens where one is certain: that one, and any others."""
    others = ((other, LEAST_LOG_PROB) for other in range(count) if other != token)
    return ((token, 0.0), *others)[:count]


def _encode(tokenizer_dir: str, text: str, *, trust_remote_code: bool) -> list[int]:
    """Return the text's token ids. Raises ValueError if there are none, or they make no text."""
    file = Path(tokenizer_dir) / "tokenizer.json"
    tokenizer: Any
    if file.is_file():
        # Much faster to load than a transformers tokenizer, and the ids are the same.
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(file))
        ids = list(tokenizer.encode(text, add_special_tokens=False).ids)
    else:
        from cog_triton.text.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(tokenizer_dir, trust_remote_code=trust_remote_code)
        ids = list(tokenizer(text, add_special_tokens=False).input_ids)
    if not tokenizer.decode(ids, skip_special_tokens=True):
        raise ValueError(f"simulated_text {text!r} has no tokens that make text in {tokenizer_dir}")
    return ids
