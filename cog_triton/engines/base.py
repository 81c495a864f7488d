"""The interface of engines: requests of token ids in, steps of token ids out, never text."""

from __future__ import annotations

import asyncio
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import chain
from pkgutil import resolve_name

from cog_triton.errors import EngineError as EngineError
from cog_triton.errors import EngineUnavailable as EngineUnavailable
from cog_triton.request.request import Guide
from cog_triton.wire import TokenLogProb as TokenLogProb

logger = logging.getLogger(__name__)

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

    ids: list[int] = field(default_factory=list)
    log_probs: list[TokenLogProb] = field(default_factory=list)
    finished: bool = False
    error: str | None = None
    refused: bool = False
    prompt_log_probs: list[TokenLogProb] = field(default_factory=list)


Sink = Callable[[Step], None]  # called from the engine's thread; must not block
Steps = AsyncGenerator[Step, None]


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


class EventLoopEngine(Engine):
    """Runs the ``steps`` of each request as a coroutine on an event loop, which has a thread of its own.

    The libraries that engines run promise to work on one loop only: their queues belong to the loop that
    they were made on, and their sockets to one thread at a time.

    The loop is uvloop's. On asyncio's own, vLLM's tokens came in pieces of 80 on two busy cores, the first
    after 1.2 s; on this one in pieces of 3, after 70 ms.
    """

    def __init__(self, thread: str) -> None:
        import uvloop

        self._lock = threading.Lock()  # guards the next two, and that the loop is open
        self._running: dict[str, tuple[Sink, Future[None]]] = {}
        self._stopped: str | None = None  # why no more requests are taken
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=thread, daemon=True)
        self._thread.start()

    @abstractmethod
    def steps(self, request: GenerationRequest) -> Steps:
        """Check a request at once, and return the generator of its steps, which runs on the loop.

        The last step is finished. When the generator is closed early, it drops the request.

        Raises:
            EngineError: the engine cannot serve such a request.
        """

    def failure(self, request: GenerationRequest, error: Exception) -> Step | None:  # noqa: ARG002
        """Return the last step of a request whose generator raised; None ends the engine."""
        return None

    def submit(self, request: GenerationRequest, sink: Sink) -> None:
        steps = self.steps(request)
        with self._lock:
            if self._stopped is not None:
                raise EngineUnavailable(stopped_text(self._stopped))
            task = asyncio.run_coroutine_threadsafe(self._forward(request, steps, sink), self._loop)
            self._running[request.key] = sink, task

    def abort(self, key: str) -> None:
        with self._lock:
            if running := self._running.pop(key, None):
                running[1].cancel()

    def active(self) -> int:
        return len(self._running)

    def close(self) -> None:
        with self._lock:
            self._stopped = self._stopped or "it was closed"
            self._running.clear()
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def die(self, reason: str) -> None:
        """End all requests, on the loop, after the library has died."""
        with self._lock:
            if self._stopped is not None:
                return
            self._stopped = reason
            ended = list(self._running.values())
            self._running.clear()
        logger.error(stopped_text(reason))
        for sink, task in ended:
            task.cancel()
            sink(Step(finished=True, error=stopped_text(reason)))

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.run_until_complete(self._drop_tasks())
        with self._lock:
            self._loop.close()

    async def _drop_tasks(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _forward(self, request: GenerationRequest, steps: Steps, sink: Sink) -> None:
        try:
            async with aclosing(steps):
                async for step in steps:
                    if not self._deliver(request.key, step, sink):
                        return
        except Exception as error:
            if last := self.failure(request, error):
                self._deliver(request.key, last, sink)
            else:
                self.die(str(error) or repr(error))

    def _deliver(self, key: str, step: Step, sink: Sink) -> bool:
        """Hand a step over, unless the request has been aborted or the engine has died."""
        with self._lock:
            running = self._running.pop(key, None) if step.finished else self._running.get(key)
        if running is not None:
            sink(step)
        return running is not None


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
