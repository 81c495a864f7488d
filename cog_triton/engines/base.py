"""The interface of engines: requests of token ids in, steps of token ids out, never text."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pkgutil import resolve_name

from cog_triton.errors import LONGEST, file_problem, shortened
from cog_triton.errors import EngineError as EngineError
from cog_triton.errors import EngineUnavailable as EngineUnavailable
from cog_triton.protocol.log_probs import TokenLogProb as TokenLogProb
from cog_triton.request.guide import Guide

logger = logging.getLogger(__name__)

# Stands for the logarithm of 0, which JSON has no number for.
LEAST_LOG_PROB = -9999.0

# An engine is imported only when it is chosen: its library may not be installed.
_ENGINES = {
    "llmapi": "cog_triton.engines.llm_api:TensorrtLlmEngine",
    "simulated": "cog_triton.engines.simulated:SimulatedEngine.from_parameters",
    "transformers": "cog_triton.engines.transformers_start:create_transformers_engine",
    "vllm": "cog_triton.engines.vllm:VllmEngine",
}
# Engines whose instances can share one engine core. The model tensorrt_llm adds the parameter ``shared``
# if it has more than one instance.
_SHARED = ("vllm", "simulated")
# The values with which a penalty changes nothing.
_NEUTRAL_PENALTIES = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of sampling, as TensorRT-LLM's: with neither ``top_k`` nor ``top_p`` it is greedy.

    Attributes:
        temperature: 0 is greedy.
        top_k: sample from the k most likely tokens; 0 is no limit.
        top_p: sample from the most likely tokens whose probabilities add up to this; 1 is no limit.
        min_p: the least probability of a sampled token, as a share of the most likely one's.
        seed: the noise is a function of the seed and the position. None leaves it to the engine.
        repetition_penalty: divides the logits of tokens in the prompt and the output.
        presence_penalty: is subtracted from the logits of tokens in the output.
        frequency_penalty: the same, once for each occurrence.
        min_tokens: no end token is chosen before this many.
        bad_words: the last token of each is not chosen after the others.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1 or (self.top_k == 0 and self.top_p == 0)

    @property
    def penalties(self) -> dict[str, float]:
        """The penalties that change something, by name."""
        penalties = {}
        for name, neutral in _NEUTRAL_PENALTIES.items():
            value: float = getattr(self, name)
            if value != neutral:
                penalties[name] = value
        return penalties

    @property
    def plain(self) -> bool:
        """True if only temperature, top_k, top_p and min_p apply."""
        return not (self.penalties or self.min_tokens or self.bad_words)


@dataclass(frozen=True)
class GenerationRequest:
    """One sequence to generate.

    Attributes:
        key: unique among all requests of the engine.
        input_ids: the ids of the prompt, at least one.
        max_tokens: the limit of the output, at least one.
        end_id: ends the output, and is part of it.
        other_end_ids: do the same, beside an ``end_id``.
        stop_words: end the output, and stay part of it.
        top_log_probs: the number of most likely tokens to return at each place.
        continued: how many of the last ``input_ids`` are output of an earlier attempt.
        logit_bias: is added to the logits of these tokens.
        allowed_ids: the only tokens that are chosen; empty for all.
        lora_task_id: the number of the LoRA adapter; 0 for none.
    """

    key: str
    input_ids: list[int]
    max_tokens: int
    end_id: int | None = None
    other_end_ids: tuple[int, ...] = ()
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

    @property
    def end_ids(self) -> tuple[int, ...]:
        """All tokens that end the output."""
        return self.other_end_ids if self.end_id is None else (self.end_id, *self.other_end_ids)


@dataclass
class Step:
    """The next tokens of one sequence. Log probabilities are under the model's unchanged distribution.

    Attributes:
        ids: may be empty in the last step.
        log_probs: one for each id, if the request asks for them.
        finished: this is the last step.
        error: why the sequence failed; then it is finished.
        prompt_log_probs: one for each token of the prompt, with the first ids, if the request asks for
            them. The first token's is 0.
    """

    ids: list[int] = field(default_factory=list)
    log_probs: list[TokenLogProb] = field(default_factory=list)
    finished: bool = False
    error: EngineError | None = None
    prompt_log_probs: list[TokenLogProb] = field(default_factory=list)


# Called from the engine's thread; must not block.
Sink = Callable[[Step], None]


class Engine(ABC):
    """Generates many sequences at once. Methods may be called from any thread.

    Attributes:
        context_length: the limit of prompt and output together, in tokens.
        running: the requests that hold a slot or wait for one, by their keys.
        features: the inputs that this engine supports and not every engine does.
        on_death: called after the engine has ended by itself.
    """

    context_length: int
    running: Mapping[str, object]
    features: frozenset[str] = frozenset()
    on_death: Callable[[], object] = staticmethod(lambda: None)

    @abstractmethod
    def submit(self, request: GenerationRequest, sink: Sink) -> None:
        """Start a request, or raise EngineError; ``sink`` gets its steps until one is finished."""

    @abstractmethod
    def abort(self, key: str) -> None:
        """Drop a request, unless it has finished; soon its sink is not called any more."""

    @abstractmethod
    def close(self) -> None:
        """End the engine; running requests are dropped."""


def create_engine(parameters: Mapping[str, str]) -> Engine:
    """Create the engine that the model's parameters describe; whatever a library raises comes through."""
    name = parameters.get("engine", "transformers")
    if name not in _ENGINES:
        raise ValueError(f"unknown engine {name!r}; the known ones are {', '.join(_ENGINES)}")
    if "shared" in parameters and name not in _SHARED:
        raise ValueError(f"tensorrt_llm_instance_count must be 1 with the engine {name}")
    engine: Engine = resolve_name(_ENGINES[name])(parameters)
    return engine


def check_ids(request: GenerationRequest, vocabulary: int) -> None:
    """Raise EngineError for token ids that a model does not have: they would end the engine."""
    for end_id in request.end_ids:
        if end_id >= vocabulary:
            # TensorRT-LLM's wording, which clients know.
            raise EngineError(
                f"EndId ({end_id}) is not within acceptable range [-1, {vocabulary})."
            )
    ids = [*request.input_ids, *request.logit_bias, *request.allowed_ids]
    for word in request.sampling.bad_words:
        ids += word
    if min(ids) < 0 or max(ids) >= vocabulary:
        raise EngineError(f"token ids must be between 0 and {vocabulary - 1}")


def failed_request(error: Exception, request: GenerationRequest) -> EngineError:
    """Return an exception as the error of the one request that it ended; log one that nobody expected."""
    if isinstance(error, EngineError):
        return error
    logger.error("request %s failed in the engine", request.key, exc_info=error)
    reason = file_problem(error) if isinstance(error, OSError) else str(error)
    reason = shortened(" ".join(reason.split()) or repr(error), LONGEST)
    return EngineUnavailable(f"the engine failed a request: {type(error).__name__}: {reason}")


def stopped(reason: object = None) -> EngineUnavailable:
    """Return the error of requests to an engine that has ended; clients know its beginning."""
    return EngineUnavailable(f"the engine has stopped: {reason or 'it was closed'}")
