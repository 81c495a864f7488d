"""An engine that generates tokens at a set pace without a model, for tests and for sizing a deployment.

docs/measuring.md explains what the costs correspond to on a real engine. The tokens are those of a text,
from a place that depends on the prompt: the same prompt always gives the same tokens, and every token is
certain.
"""

import asyncio
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from time import monotonic
from typing import Literal, cast, get_args

from cog_triton.engines.base import LEAST_LOG_PROB, GenerationRequest, Step, TokenLogProb
from cog_triton.engines.event_loop import EventLoopEngine, Steps
from cog_triton.engines.simulated_text import text_ids
from cog_triton.errors import EngineUnavailable

DEFAULT_CONTEXT_LENGTH = 131_072
# Seconds by which an event may be early: the loop's timers are rounded to a millisecond.
TICK = 0.0005
# The limit of tokens of one sequence in one step, so that the others get their tokens in between.
BURST = 32
# A request for at most this many tokens never fails: the warm-up of a setup is one.
SPARED_TOKENS = 2

FailureKind = Literal["error", "stall", "refuse"]


@dataclass(frozen=True)
class Costs:
    """What a request costs.

    Attributes:
        prefill: seconds from a prompt's prefill to its first token; these times overlap.
        prefill_rate: prompt tokens a second, one prompt after another; 0 is no limit.
        inter_token: seconds between two tokens of a request.
        max_batch: the number of requests that run at once, while others wait; 0 is no limit.
        steps: all running requests get their tokens at the same moments.
    """

    prefill: float = 0.0
    prefill_rate: float = 0.0
    inter_token: float = 0.0
    max_batch: int = 0
    steps: bool = True


@dataclass(frozen=True)
class Failure:
    """How a request fails, and after how many tokens."""

    kind: FailureKind
    after: int


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
        for kind in set(self.kinds).difference(known):
            raise ValueError(f"unknown failure {kind!r}; the known ones are {', '.join(known)}")

    def of(self, request: GenerationRequest) -> Failure | None:
        """Return the failure of a request: a function of its prompt, seed and number of tokens."""
        max_tokens = request.max_tokens + request.continued
        draw = Random(f"{request.sampling.seed or 0} {_prompt(request)}").random
        if max_tokens <= SPARED_TOKENS or draw() >= self.rate:
            return None
        kind = self.kinds[int(draw() * len(self.kinds))]
        after = 1 + int(draw() * (max_tokens - 1))
        return Failure(kind, max(0, after - request.continued))


class _Slots:
    """Slots, first come, first served. A slot becomes free when its user was due to leave it."""

    def __init__(self, count: int) -> None:
        self._semaphore = asyncio.Semaphore(count)
        # When each slot that was used became free.
        self._free: deque[float] = deque()

    async def acquire(self, at: float) -> float:
        """Wait for a slot that is wanted from the time ``at`` on; return the time when it is free."""
        await self._semaphore.acquire()
        return max(at, self._free.popleft() if self._free else 0.0)

    def release(self, at: float) -> None:
        """Leave a slot that is free from the time ``at`` on, or from now on if that is earlier."""
        self._free.append(min(at, monotonic()))
        self._semaphore.release()


@dataclass
class _Schedule:
    """When the next event of a request is due, by the monotonic clock."""

    due: float


class SimulatedEngine(EventLoopEngine):
    """Generates tokens by the clock. A late token counts as on time for those after it."""

    features = frozenset({"min_p", "top_logprobs"})

    def __init__(
        self,
        token_ids: list[int],
        costs: Costs = Costs(),
        failures: Failures = Failures(),
        *,
        context_length: int = DEFAULT_CONTEXT_LENGTH,
    ) -> None:
        """Start the engine's thread; ``token_ids`` is generated again and again."""
        self.context_length = context_length
        self._costs = costs
        self._failures = failures
        self._length = len(token_ids)
        # Extended, so that any BURST tokens are one slice.
        self._text = [token_ids[i % self._length] for i in range(self._length + BURST)]
        # Requests that get their tokens with the same steps: their number, and the time of a step.
        self._decoding = 0
        self._origin = 0.0
        self._slots = _Slots(costs.max_batch or sys.maxsize)
        self._prefills = _Slots(1)
        super().__init__("simulated-engine")

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str]) -> "SimulatedEngine":
        """Build it from the parameters of the model tensorrt_llm; raise ValueError for wrong ones."""

        def number(name: str) -> float:
            return float(parameters.get(f"simulated_{name}", 0))

        costs = Costs(
            prefill=number("prefill_ms") / 1000,
            prefill_rate=number("prefill_tokens_per_s"),
            inter_token=number("inter_token_ms") / 1000,
            max_batch=int(number("max_batch")),
            steps=parameters.get("simulated_steps") != "false",
        )
        kinds = tuple(parameters.get("simulated_failures", "error").split(","))
        failures = Failures(number("failure_rate"), cast("tuple[FailureKind, ...]", kinds))
        return cls(
            text_ids(parameters),
            costs,
            failures,
            context_length=int(parameters.get("max_seq_len", DEFAULT_CONTEXT_LENGTH)),
        )

    def steps(self, request: GenerationRequest) -> Steps:
        failure = self._failures.of(request) if self._failures.rate else None
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
        """Wait for a slot, for the prefill, and then for each step of the tokens."""
        schedule = _Schedule(await self._slots.acquire(arrival))
        decodes = False
        try:
            await self._prefill(request, schedule)
            self._join_steps(schedule)
            decodes = True
            place = sum(_prompt(request)) + request.continued
            limit = request.max_tokens if failure is None else failure.after
            made = 0
            finished = False
            while not finished:
                await _sleep_until(schedule.due)
                if failure is not None and made == limit:
                    if failure.kind == "stall":
                        # The slot is kept.
                        await asyncio.get_running_loop().create_future()
                    yield Step(finished=True, error=_simulated_failure(made))
                    return
                count = min(self._tokens_due(made, schedule.due), BURST, limit - made)
                begin = (place + made) % self._length
                ids = self._text[begin : begin + count]
                end = _end_among(ids, request, made)
                if end is not None:
                    ids = ids[: end + 1]
                made += len(ids)
                finished = end is not None or made == request.max_tokens
                passed = len(ids) - 1 if finished else len(ids)
                schedule.due += passed * self._costs.inter_token
                yield Step(ids, _log_probs(ids, request), finished)
        finally:
            if decodes:
                self._decoding -= 1
            self._slots.release(schedule.due)

    async def _prefill(self, request: GenerationRequest, schedule: _Schedule) -> None:
        """Wait until the prompt has gone through; one prompt after another, if their rate is limited."""
        rate = self._costs.prefill_rate
        if rate:
            schedule.due = await self._prefills.acquire(schedule.due)
            try:
                schedule.due += len(request.input_ids) / rate
                await _sleep_until(schedule.due)
            finally:
                self._prefills.release(schedule.due)
        schedule.due += self._costs.prefill

    def _join_steps(self, schedule: _Schedule) -> None:
        """Have a request's first token leave at the end of a step of the others."""
        pace = self._costs.inter_token
        self._decoding += 1
        if self._decoding == 1 or not (pace and self._costs.steps):
            self._origin = schedule.due
        if pace:
            # The next end of a step, and steps end at the origin plus multiples of the pace. One that
            # ends within a tick counts as one that ends now.
            early = schedule.due - TICK
            seconds_to_end = (self._origin - early) % pace
            schedule.due = early + seconds_to_end

    def _tokens_due(self, made: int, due: float) -> int:
        """Return how many tokens are due now, the next of them since the time ``due``.

        Without a pace, each step has twice as many: the first token comes alone and at once.
        """
        pace = self._costs.inter_token
        if not pace:
            return max(1, made)
        return 1 + int(max(0.0, monotonic() + TICK - due) / pace)


async def _sleep_until(at: float) -> None:
    """Sleep until a time, and at least for one turn of the loop, which is for the others."""
    await asyncio.sleep(max(0.0, at - monotonic()))
    while True:
        left = at - monotonic()
        if left <= TICK:
            return
        await asyncio.sleep(left)


def _prompt(request: GenerationRequest) -> list[int]:
    """Return the ids of the prompt without the output of an earlier attempt."""
    return request.input_ids[: len(request.input_ids) - request.continued]


def _end_among(ids: list[int], request: GenerationRequest, made: int) -> int | None:
    """Return the place of the first end token that may end the output; None without one.

    Args:
        made: the number of tokens before ``ids``.
    """
    end_ids = request.end_ids
    if not end_ids:
        return None
    for place, token in enumerate(ids):
        if token in end_ids and made + place >= request.sampling.min_tokens:
            return place
    return None


def _log_probs(ids: list[int], request: GenerationRequest) -> list[TokenLogProb]:
    if not request.return_log_probs:
        return []
    count = request.top_log_probs
    return [TokenLogProb(token, 0.0, _most_likely(token, count)) for token in ids]


def _most_likely(token: int, count: int) -> tuple[tuple[int, float], ...]:
    """Return ``count`` ids with their log probabilities: the token is certain."""
    others = ((other, LEAST_LOG_PROB) for other in range(count) if other != token)
    return ((token, 0.0), *others)[:count]


def _simulated_failure(tokens: int) -> EngineUnavailable:
    return EngineUnavailable(f"a simulated failure after {tokens} tokens (simulated_failure_rate)")
