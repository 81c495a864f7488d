"""The interface of engines: requests of token ids in, steps of token ids out, never text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pkgutil import resolve_name

from cog_triton.errors import EngineError as EngineError
from cog_triton.errors import EngineUnavailable as EngineUnavailable
from cog_triton.request.request import Guide
from cog_triton.wire import TokenLogProb as TokenLogProb

LEAST_LOG_PROB = -9999.0
"""Stands for the logarithm of 0, which JSON has no number for."""

_ENGINES = {  # imported only when chosen: not all of their libraries need be installed
    "llmapi": "cog_triton.engines.llm_api:TensorrtLlmEngine",
    "simulated": "cog_triton.engines.simulated:SimulatedEngine.from_parameters",
    "transformers": "cog_triton.engines.transformers:TransformersEngine.from_parameters",
    "vllm": "cog_triton.engines.vllm:VllmEngine",
}


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of sampling; names and meanings are TensorRT-LLM's.

    With neither ``top_k`` nor ``top_p``, decoding is greedy. ``bad_words`` are sequences of token ids whose
    last token is not chosen after the others.
    """

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 is no limit
    top_p: float = 0.0  # 1 is no limit
    min_p: float = 0.0  # least probability of a sampled token, as a share of the likeliest one's
    seed: int = 0  # the noise is a function of it and the position
    repetition_penalty: float = 1.0  # on tokens of prompt and output
    presence_penalty: float = 0.0  # on tokens of the output
    frequency_penalty: float = 0.0  # once per occurrence in the output
    min_tokens: int = 0  # the end token is not chosen before
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
    def penalties(self) -> dict[str, float]:
        """The penalties that change something, by name."""
        neutral = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        return {n: getattr(self, n) for n, value in neutral.items() if getattr(self, n) != value}

    @property
    def plain(self) -> bool:
        """True if only temperature, top_k, top_p and min_p apply."""
        return not (self.penalties or self.min_tokens or self.bad_words)


@dataclass(frozen=True)
class GenerationRequest:
    """One sequence to generate.

    Attributes:
        key: unique among all requests of the engine.
        input_ids: the prompt's token ids, at least one.
        max_tokens: of the output, at least one.
        end_id: the token that ends the output and is part of it.
        stop_words: sequences of token ids that end the output and stay part of it.
        top_log_probs: number of the most likely tokens to return at each place.
        continued: number of the last ``input_ids`` that are output of an earlier attempt.
        logit_bias: is added to the logits of these tokens.
        allowed_ids: the only tokens that are chosen; empty for all.
        lora_task_id: the LoRA adapter; 0 for none.
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
class Step:
    """The next tokens of one sequence.

    Attributes:
        ids: new token ids; may be empty when ``finished``.
        log_probs: each id's under the model's unchanged distribution; empty unless asked for.
        error: why the sequence failed; it is finished then.
        refused: the error is the request's fault.
        prompt_log_probs: of the prompt's tokens, with the first ids, if asked for. The first token's is 0.
    """

    ids: list[int]
    log_probs: list[TokenLogProb] = field(default_factory=list)
    finished: bool = False
    error: str | None = None
    refused: bool = False
    prompt_log_probs: list[TokenLogProb] = field(default_factory=list)


Sink = Callable[[Step], None]  # called from the engine's thread; must not block


class Engine(ABC):
    """Generates many sequences at once. Methods may be called from any thread.

    Attributes:
        context_length: most tokens that prompt and output may have together.
        features: the inputs that it honours beyond those that every engine does.
    """

    context_length: int
    features: frozenset[str] = frozenset()

    @abstractmethod
    def submit(self, request: GenerationRequest, sink: Sink) -> None:
        """Start a request; ``sink`` gets its steps in order until one is finished.

        Raises:
            EngineError: the engine has stopped, or cannot serve such a request.
        """

    @abstractmethod
    def abort(self, key: str) -> None:
        """Drop a request, unless it has finished; soon its sink is not called any more."""

    @abstractmethod
    def active(self) -> int:
        """Return the number of requests that hold a slot or wait for one."""

    def on_death(self, then: Callable[[], object]) -> None:  # noqa: B027  (most have nothing to watch)
        """Call ``then`` when a process of the engine's has ended by itself."""

    @abstractmethod
    def close(self) -> None:
        """End the engine; running requests are dropped."""


def create_engine(parameters: Mapping[str, str]) -> Engine:
    """Create the engine that the tensorrt_llm model's parameters describe.

    Raises:
        ValueError: the engine is unknown, or a parameter is not valid.
    """
    name = parameters.get("engine", "transformers")
    if name not in _ENGINES:
        raise ValueError(f"unknown engine {name!r}; known are {', '.join(_ENGINES)}")
    engine: Engine = resolve_name(_ENGINES[name])(parameters)
    return engine


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
    given = request.input_ids, request.logit_bias, request.allowed_ids, *request.sampling.bad_words
    ids = list(chain(*given))
    if min(ids) < 0 or max(ids) >= vocabulary:
        raise EngineError(f"token ids must be between 0 and {vocabulary - 1}")


def stopped_text(reason: object) -> str:
    """Return the error of requests to an engine that has ended; clients know its beginning."""
    return f"the engine has stopped: {reason or 'it was closed'}"
