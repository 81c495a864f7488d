"""The interface of engines: requests of token ids in, batches of token ids out, never text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain

from cog_triton.errors import EngineError as EngineError
from cog_triton.errors import EngineUnavailable as EngineUnavailable
from cog_triton.request.guide import Guide

LEAST_LOG_PROB = -9999.0
"""Stands for the logarithm of 0, which JSON has no number for."""

TopLogProbs = tuple[tuple[int, float], ...]
"""The most likely tokens at one place and their log probabilities, the most likely first."""


def stopped_text(reason: object) -> str:
    """Return the error of requests to an engine that has ended; clients know its beginning."""
    return f"the engine has stopped: {reason or 'it was closed'}"


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of sampling; names and meanings are TensorRT-LLM's.

    Attributes:
        temperature: divides the logits; 0 is greedy.
        top_k: sample among the k most likely tokens; 0 is no limit.
        top_p: sample among the most likely tokens that reach this probability together; 1 is no
            limit. With neither top_k nor top_p given, TensorRT-LLM decodes greedily.
        min_p: tokens whose probability is below this share of the likeliest one's are not sampled.
        seed: the sampling noise is a function of seed and position alone.
        repetition_penalty: divides positive logits of tokens of the prompt and the output, and
            multiplies negative ones; 1 is none.
        presence_penalty: subtracted from the logits of tokens in the output; 0 is none.
        frequency_penalty: subtracted once per occurrence in the output; 0 is none.
        min_tokens: the end token is not chosen before so many tokens.
        bad_words: sequences of token ids whose last token is not chosen after the others.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()

    @property
    def greedy(self) -> bool:
        """True if the most likely token is always taken."""
        return self.temperature == 0 or self.top_k == 1 or (self.top_k == 0 and self.top_p == 0)

    @property
    def limited(self) -> bool:
        """True if top_k or top_p excludes tokens."""
        return self.top_k > 0 or 0 < self.top_p < 1

    @property
    def plain(self) -> bool:
        """True if only temperature, top_k and top_p apply."""
        return (
            self.repetition_penalty == 1
            and self.presence_penalty == 0
            and self.frequency_penalty == 0
            and self.min_tokens == 0
            and not self.bad_words
        )

    @property
    def unusual(self) -> dict[str, float]:
        """The penalties and the minimum length that change something, by name."""
        neutral = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        values = {n: getattr(self, n) for n, value in neutral.items() if getattr(self, n) != value}
        return {**values, **({"min_tokens": self.min_tokens} if self.min_tokens > 0 else {})}


@dataclass(frozen=True)
class GenerationRequest:
    """One sequence to generate.

    Attributes:
        key: unique among all requests of the engine.
        input_ids: the prompt's token ids, at least one.
        max_tokens: at most so many output tokens, at least one.
        end_id: the token that ends the output and is part of it; None for none.
        stop_words: sequences of token ids that end the output and stay part of it.
        continued: so many of ``input_ids``, the last, are output of an earlier attempt at the request.
        top_log_probs: how many of the most likely tokens are told at each place.
        prompt_log_probs: whether those of the prompt's tokens are told as well.
        logit_bias: is added to the logits of these tokens.
        allowed_ids: the only tokens that are chosen; empty for all.
        guide: what the output has to be; None for anything.
        lora_task_id: the adapter that the model is changed by; 0 for none.
    """

    key: str
    input_ids: list[int]
    max_tokens: int
    end_id: int | None = None
    stop_words: tuple[tuple[int, ...], ...] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    return_log_probs: bool = False
    top_log_probs: int = 0
    prompt_log_probs: bool = False
    continued: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_ids: tuple[int, ...] = ()
    guide: Guide | None = None
    lora_task_id: int = 0


@dataclass(frozen=True)
class Tokens:
    """The next tokens of one sequence.

    Attributes:
        ids: new token ids; may be empty when ``finished``.
        log_probs: natural logarithm of each id's probability under the model's unchanged
            distribution; empty unless asked for.
        finished: whether these are the last.
        error: why the sequence failed; it is finished then.
        refused: whether that is the request's fault.
        top_log_probs: at each id's place the most likely tokens under that distribution, as many as were
            asked for; empty unless asked for.
        prompt_log_probs: with the first tokens, if asked for: at each of the prompt's places its own token,
            and then the most likely ones. The first place has its token alone, with 0.
    """

    ids: list[int]
    log_probs: list[float] = field(default_factory=list)
    finished: bool = False
    error: str | None = None
    refused: bool = False
    top_log_probs: list[TopLogProbs] = field(default_factory=list)
    prompt_log_probs: list[TopLogProbs] = field(default_factory=list)


def check_ids(request: GenerationRequest, vocabulary: int) -> None:
    """Refuse token ids that a model does not have: they would end the engine, not the request.

    Raises:
        EngineError: there is such an id.
    """
    if request.end_id is not None and request.end_id >= vocabulary:
        # TensorRT-LLM's wording, which clients know.
        raise EngineError(
            f"EndId ({request.end_id}) is not within acceptable range [-1, {vocabulary})."
        )
    ids = list(
        chain(
            request.input_ids, request.logit_bias, request.allowed_ids, *request.sampling.bad_words
        )
    )
    if min(ids) < 0 or max(ids) >= vocabulary:
        raise EngineError(f"token ids must be between 0 and {vocabulary - 1}")


Sink = Callable[[Tokens], None]  # called from the engine's thread; must not block


class Engine(ABC):
    """Generates many sequences at once. Methods may be called from any thread.

    Attributes:
        features: the inputs that it honours beyond those that every engine does.
    """

    features: frozenset[str] = frozenset()

    @property
    @abstractmethod
    def context_length(self) -> int:
        """Most tokens that prompt and output may have together."""

    @abstractmethod
    def submit(self, request: GenerationRequest, sink: Sink) -> None:
        """Start a request. ``sink`` gets its tokens as they are made, in order, until finished.

        Raises:
            EngineError: the engine has stopped, or cannot serve such a request.
        """

    @abstractmethod
    def abort(self, key: str) -> None:
        """Drop a running request and free its slot; soon its sink is not called any more.

        An unknown key is no error: the request may just have finished.
        """

    @abstractmethod
    def active(self) -> int:
        """Return the number of requests that hold a slot or wait for one."""

    def on_death(self, then: Callable[[], object]) -> None:  # noqa: B027  (most have nothing to watch)
        """Call ``then`` when a process of the engine's has ended by itself."""

    @abstractmethod
    def close(self) -> None:
        """End the engine; running requests are dropped."""
