"""An engine that makes tokens at a set pace without a model, for tests and for sizing a deployment.

docs/measuring.md has what the costs stand for on a real engine. The tokens are those of a text, from a
place that depends on the prompt: the same prompt always gives the same tokens, and every token is certain.
"""

import asyncio
import sys
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any, Literal, cast, get_args

import tokenizers

from cog_triton.engines import base
from cog_triton.engines.base import GenerationRequest, Step
from cog_triton.engines.event_loop import EventLoopEngine, Steps
from cog_triton.errors import EngineUnavailable
from cog_triton.text.tokenizer import load_tokenizer

DEFAULT_CONTEXT_LENGTH = 131_072
TICK = 0.0005  # seconds; the loop's timers are rounded to 0.001
BURST = 32  # most tokens of one sequence in one step, so that the others get theirs in between
VOCABULARY_TOKENS = 256  # that are repeated where the tokenizer does not know the text
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
    prefill: float = 0.0  # seconds from a prompt's prefill to its first token; they overlap
    prefill_rate: float = 0.0  # prompt tokens a second, one prompt after another; 0 is no limit
    inter_token: float = 0.0  # seconds between two tokens of a request
    max_batch: int = 0  # requests that run at once, others wait for a slot; 0 is no limit
    steps: bool = True  # all running requests get their tokens at the same moments


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
        for kind in set(self.kinds).difference(known):
            raise ValueError(f"unknown failure {kind!r}; known are {', '.join(known)}")

    def of(self, request: GenerationRequest) -> Failure | None:
        """Return the failure of a request: a function of its prompt, seed and number of tokens."""
        max_tokens = request.max_tokens + request.continued
        draw = Random(f"{request.sampling.seed or 0} {_prompt(request)}").random
        if max_tokens <= SPARED_TOKENS or draw() >= self.rate:
            return None
        kind = self.kinds[int(draw() * len(self.kinds))]
        return Failure(kind, max(0, 1 + int(draw() * (max_tokens - 1)) - request.continued))


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
    """Makes tokens by the clock; one that is late counts as on time for those after it."""

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
        self._costs, self._failures, self._length = costs, failures, len(token_ids)
        # So that any BURST tokens are one slice.
        self._text = [token_ids[i % self._length] for i in range(self._length + BURST)]
        self._origin, self._decoding = 0.0, 0  # of the steps; the requests that share them
        self._slots = _Slots(costs.max_batch or sys.maxsize)
        self._prefills = _Slots(1)
        super().__init__("simulated-engine")

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str]) -> "SimulatedEngine":
        """Build it from the tensorrt_llm model's parameters; a ValueError says what is wrong with them."""

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
        length = int(parameters.get("max_seq_len", DEFAULT_CONTEXT_LENGTH))
        return cls(_text_ids(parameters), costs, failures, context_length=length)

    def steps(self, request: GenerationRequest) -> Steps:
        failure = self._failures.of(request) if self._failures.rate else None
        if failure is not None and failure.kind == "refuse":
            # TensorRT-LLM's wording, which clients know.
            text = "Maximum queue size of 0 has been reached, please try again later"
            raise EngineUnavailable(f"{text} (simulated_failure_rate)")
        return self._generate(request, failure, monotonic())

    async def _generate(
        self, request: GenerationRequest, failure: Failure | None, arrival: float
    ) -> Steps:
        at, decoding = await self._slots.acquire(arrival), 0  # when the next event is due
        try:
            if rate := self._costs.prefill_rate:
                at = await self._prefills.acquire(at)
                try:
                    at += len(request.input_ids) / rate
                    await _sleep_until(at)
                finally:
                    self._prefills.release(at)
            at, decoding = self._joined(at + self._costs.prefill), 1
            place = sum(_prompt(request)) + request.continued
            end = request.max_tokens if failure is None else failure.after
            made, finished, pace = 0, False, self._costs.inter_token
            while not finished:
                await _sleep_until(at)
                if failure is not None and made == end:
                    if failure.kind == "stall":  # the slot is kept
                        await asyncio.get_running_loop().create_future()
                    text = f"a simulated failure after {made} tokens (simulated_failure_rate)"
                    yield Step(finished=True, error=EngineUnavailable(text))
                    return
                # Without a pace, twice as many each time: the first token comes alone and at once.
                due = 1 + int(max(0.0, monotonic() + TICK - at) / pace) if pace else max(1, made)
                begin = (place + made) % self._length
                ids = self._text[begin : begin + min(due, BURST, end - made)]
                ended = False
                for place_in_step, token in enumerate(ids):
                    counts = made + place_in_step >= request.sampling.min_tokens
                    if counts and token in request.end_ids:
                        ids = ids[: place_in_step + 1]
                        ended = True
                        break
                made += len(ids)
                finished = ended or made == request.max_tokens
                at += (len(ids) - finished) * pace
                asked, top = ids if request.return_log_probs else (), request.top_log_probs
                yield Step(ids, [base.TokenLogProb(i, 0.0, _top(i, top)) for i in asked], finished)
        finally:
            self._decoding -= decoding
            self._slots.release(at)

    def _joined(self, at: float) -> float:
        """Return when a request has its first token that is ready at ``at``: at the end of a step."""
        pace, self._decoding = self._costs.inter_token, self._decoding + 1
        if self._decoding == 1 or not (pace and self._costs.steps):
            self._origin = at
        return at - TICK + (self._origin - at + TICK) % pace if pace else at


async def _sleep_until(at: float) -> None:
    await asyncio.sleep(max(0.0, at - monotonic()))  # others get their turn in any case
    while (left := at - monotonic()) > TICK:
        await asyncio.sleep(left)


def _prompt(request: GenerationRequest) -> list[int]:
    return request.input_ids[: len(request.input_ids) - request.continued]


def _top(token: int, count: int) -> tuple[tuple[int, float], ...]:
    others = ((other, base.LEAST_LOG_PROB) for other in range(count) if other != token)
    return ((token, 0.0), *others)[:count]


def _text_ids(parameters: Mapping[str, str]) -> list[int]:
    name, text = parameters["tokenizer_dir"], parameters.get("simulated_text", TEXT)
    file, trusted = Path(name) / "tokenizer.json", parameters.get("trust_remote_code") == "true"
    tokenizer: Any
    if file.is_file():  # much faster to load than that of transformers, and the ids are the same
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    else:
        tokenizer = load_tokenizer(name, trust_remote_code=trusted)
    ids = _known_ids(tokenizer, text)
    if not ids and "simulated_text" not in parameters:
        ids = _ids_with_text(tokenizer)
    if not ids:
        # Triton's log may take nothing but ASCII.
        raise ValueError(
            f"simulated_text {text!a} has no tokens that make text in {name}; "
            "set SIMULATED_TEXT to words that its tokenizer knows"
        )
    return ids


def _known_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a text without those of what the tokenizer does not know; none without text."""
    try:
        ids = _encoded(tokenizer, text)
    except Exception:  # a tokenizer without an unknown token refuses a text with unknown words
        ids = []
        for word in text.split():
            with suppress(Exception):
                ids += _encoded(tokenizer, word)
    unknown = _unknown_id(tokenizer)
    known = [token for token in ids if token != unknown]
    return known if tokenizer.decode(known, skip_special_tokens=True).strip() else []


def _encoded(tokenizer: Any, text: str) -> list[int]:
    encoded = tokenizer.encode(text, add_special_tokens=False)
    return list(getattr(encoded, "ids", encoded))


def _unknown_id(tokenizer: Any) -> int | None:
    if not isinstance(tokenizer, tokenizers.Tokenizer):
        unknown: int | None = tokenizer.unk_token_id
        return unknown
    model: Any = tokenizer.model
    token = getattr(model, "unk_token", None)
    return getattr(model, "unk_id", None) if token is None else tokenizer.token_to_id(token)


def _ids_with_text(tokenizer: Any) -> list[int]:
    """Return the first tokens of a vocabulary that make text, for a tokenizer that does not know TEXT."""
    unknown = _unknown_id(tokenizer)
    found: list[int] = []
    for token in sorted(tokenizer.get_vocab().values()):
        makes_text = tokenizer.decode([token], skip_special_tokens=True).strip()
        if makes_text and token != unknown:
            found.append(token)
        if len(found) == VOCABULARY_TOKENS:
            break
    return found
