"""An engine that makes tokens at a set pace without a model, for tests and for sizing a deployment.

``Schedule`` computes which tokens are due when; ``SimulatedEngine`` adds the thread and the clock.
docs/sizing.md has what the costs stand for on a real engine. The tokens are those of a text, from a place
that depends on the prompt: the same prompt always gives the same tokens.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from random import Random
from typing import Any, Literal, cast, get_args

from cog_triton.engines.base import (
    LEAST_LOG_PROB,
    Engine,
    EngineUnavailable,
    GenerationRequest,
    Sink,
    Step,
    TokenLogProb,
    stopped_text,
)

DEFAULT_CONTEXT_LENGTH = 131_072
TICK = 0.0005  # seconds; what is due within one is served together, by one wake-up of the thread
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

    prefill: float = (
        0.0  # seconds from the end of a prompt's prefill to its first token; they overlap
    )
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


def _prompt(request: GenerationRequest) -> list[int]:
    return request.input_ids[: len(request.input_ids) - request.continued]


@dataclass(eq=False)
class _Sequence:
    request: GenerationRequest
    sink: Sink
    failure: Failure | None
    start: int  # place in the text
    since: float  # when it came; from its start on, when it got its slot
    generated: int = 0
    aborted: bool = False


class Schedule:
    """The times at which sequences get their tokens, in seconds from any origin.

    What happens late happens as if it had been on time: the next token, the next prompt and the next
    request in the queue follow from when it was due.
    """

    def __init__(self, token_ids: list[int], costs: Costs) -> None:
        """Start with no request; ``token_ids`` is generated again and again."""
        self._costs = costs
        self._length = len(token_ids)
        # So that any BURST tokens are one slice.
        self._text = [token_ids[i % self._length] for i in range(self._length + BURST)]
        self._waiting: dict[str, _Sequence] = {}  # for a slot, first come, first served
        self._running: dict[str, _Sequence] = {}  # with a slot
        self._prompts: dict[str, _Sequence] = {}  # of those, in prefill (the first) or before it
        # The next event of a running sequence, at most one entry each; equal times keep their order.
        self._due: list[tuple[float, int, _Sequence]] = []
        self._serial = itertools.count()

    def __len__(self) -> int:
        return len(self._running) + len(self._waiting)

    def add(
        self, request: GenerationRequest, sink: Sink, failure: Failure | None, now: float
    ) -> None:
        """Start a request, or queue it for a slot."""
        place = (sum(_prompt(request)) + request.continued) % self._length
        sequence = _Sequence(request, sink, failure, start=place, since=now)
        if 0 < self._costs.max_batch <= len(self._running):
            self._waiting[request.key] = sequence
        else:
            self._start(sequence, now)

    def remove(self, key: str, now: float) -> None:
        """Remove a request; an unknown one is not an error."""
        if self._waiting.pop(key, None) is None and key in self._running:
            sequence = self._running[key]
            sequence.aborted = True
            self._leave(sequence, now)

    def next_due(self) -> float | None:
        """Return the time of the next event, None without one."""
        while self._due and self._due[0][2].aborted:
            heappop(self._due)
        return self._due[0][0] if self._due else None

    def step(self, now: float) -> list[tuple[Sink, Step]]:
        """Do all that is due by ``now``, or a tick later: each sequence at most one burst."""
        limit = now + TICK
        due = []
        while self._due and self._due[0][0] <= limit:
            due.append(heappop(self._due))
        responses = []
        for at, _, sequence in due:
            if sequence.aborted:
                continue
            if sequence.request.key in self._prompts:
                self._end_prefill(sequence, at)
            elif sequence.failure is not None and sequence.generated == sequence.failure.after:
                responses += self._fail(sequence, at)
            else:
                responses.append((sequence.sink, self._generate(sequence, at, limit)))
        return responses

    def _start(self, sequence: _Sequence, at: float) -> None:
        sequence.since = at
        self._running[sequence.request.key] = sequence
        if not self._costs.prefill_rate:
            self._enter(sequence, at + self._costs.prefill)
            return
        self._prompts[sequence.request.key] = sequence
        if len(self._prompts) == 1:
            self._prefill_next(at)

    def _prefill_next(self, at: float) -> None:
        sequence = next(iter(self._prompts.values()), None)
        if sequence is not None:
            seconds = len(sequence.request.input_ids) / self._costs.prefill_rate
            self._enter(sequence, max(at, sequence.since) + seconds)

    def _end_prefill(self, sequence: _Sequence, at: float) -> None:
        del self._prompts[sequence.request.key]
        self._enter(sequence, at + self._costs.prefill)
        self._prefill_next(at)

    def _generate(self, sequence: _Sequence, at: float, limit: float) -> Step:
        request, pace = sequence.request, self._costs.inter_token
        end = sequence.failure.after if sequence.failure else request.max_tokens
        # Without a pace, twice as many each time: the first token comes alone and at once.
        due = 1 + int((limit - at) / pace) if pace else max(1, sequence.generated)
        place = (sequence.start + sequence.generated) % self._length
        ids = self._text[place : place + min(due, end - sequence.generated, BURST)]
        if request.end_id is not None and request.end_id in ids:
            ids = ids[: ids.index(request.end_id) + 1]
        sequence.generated += len(ids)
        finished = sequence.generated == request.max_tokens or ids[-1] == request.end_id
        if finished:
            self._leave(sequence, at + (len(ids) - 1) * pace)
        else:
            self._enter(sequence, at + len(ids) * pace)
        asked, count = request.return_log_probs, request.top_log_probs
        log_probs = [TokenLogProb(i, 0.0, _top(i, count)) for i in ids] if asked else []
        return Step(ids, log_probs, finished)

    def _fail(self, sequence: _Sequence, at: float) -> list[tuple[Sink, Step]]:
        assert sequence.failure is not None
        if sequence.failure.kind == "stall":  # nothing will be due any more, and the slot is kept
            return []
        self._leave(sequence, at)
        error = f"a simulated failure after {sequence.generated} tokens (simulated_failure_rate)"
        return [(sequence.sink, Step([], finished=True, error=error))]

    def _leave(self, sequence: _Sequence, at: float) -> None:
        """Free the sequence's slot, and its place among the prompts."""
        key = sequence.request.key
        del self._running[key]
        if key in self._prompts:
            was_first = next(iter(self._prompts)) == key
            del self._prompts[key]
            if was_first:
                self._prefill_next(at)
        if self._waiting:
            first = self._waiting.pop(next(iter(self._waiting)))
            self._start(first, max(at, first.since))

    def _enter(self, sequence: _Sequence, at: float) -> None:
        heappush(self._due, (at, next(self._serial), sequence))


class SimulatedEngine(Engine):
    """Runs a schedule by the clock. Every token is certain."""

    features = frozenset({"min_p", "top_logprobs"})

    def __init__(
        self,
        token_ids: list[int],
        costs: Costs | None = None,
        failures: Failures | None = None,
        *,
        context_length: int = DEFAULT_CONTEXT_LENGTH,
    ) -> None:
        """Start the stepping thread; ``token_ids`` is generated again and again."""
        self.context_length = context_length
        self._schedule = Schedule(token_ids, costs or Costs())
        self._failures = failures or Failures()
        self._ending = 0  # have left the schedule, but their last tokens are not handed over yet
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="simulated-engine", daemon=True)
        self._thread.start()

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

    def submit(self, request: GenerationRequest, sink: Sink) -> None:
        failure = self._failures.of(request)
        with self._changed:
            if self._closed:
                raise EngineUnavailable(stopped_text(None))
            if failure is not None and failure.kind == "refuse":
                # TensorRT-LLM's wording, which clients know.
                raise EngineUnavailable(
                    "Maximum queue size of 0 has been reached, please try again later "
                    "(simulated_failure_rate)"
                )
            self._schedule.add(request, sink, failure, time.perf_counter())
            self._changed.notify()

    def abort(self, key: str) -> None:
        with self._changed:
            self._schedule.remove(key, time.perf_counter())
            self._changed.notify()

    def active(self) -> int:
        with self._changed:
            return len(self._schedule) + self._ending

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._wait_until_due():
                    return
                responses = self._schedule.step(time.perf_counter())
                self._ending = sum(tokens.finished for _, tokens in responses)
            for sink, tokens in responses:
                self._ending -= tokens.finished
                sink(tokens)

    def _wait_until_due(self) -> bool:
        """Wait for the next event; return False if the engine was closed instead."""
        while not self._closed:
            due = self._schedule.next_due()
            wait = None if due is None else due - time.perf_counter()
            if wait is not None and wait <= 0:
                return True
            self._changed.wait(wait)
        return False


def _top(token: int, count: int) -> tuple[tuple[int, float], ...]:
    """The most likely tokens where the engine makes one for certain: that one, and any others."""
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
