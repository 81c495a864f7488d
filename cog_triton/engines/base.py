"""The interface of engines: requests of token ids in, steps of token ids out, never text."""

import asyncio
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass, field
from pkgutil import resolve_name

import uvloop

from cog_triton.errors import LONGEST, file_problem, shortened
from cog_triton.errors import EngineError as EngineError
from cog_triton.errors import EngineUnavailable as EngineUnavailable
from cog_triton.protocol.log_probs import TokenLogProb as TokenLogProb
from cog_triton.request.guide import Guide

logger = logging.getLogger(__name__)

LEAST_LOG_PROB = -9999.0  # stands for the logarithm of 0, which JSON has no number for

_ENGINES = {  # imported only when chosen: not all of their libraries need be installed
    "llmapi": "cog_triton.engines.llm_api:TensorrtLlmEngine",
    "simulated": "cog_triton.engines.simulated:SimulatedEngine.from_parameters",
    "transformers": "cog_triton.engines.transformers_start:create_transformers_engine",
    "vllm": "cog_triton.engines.vllm:VllmEngine",
}


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of sampling, as TensorRT-LLM's: with neither ``top_k`` nor ``top_p`` it is greedy."""

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 is no limit
    top_p: float = 0.0  # 1 is no limit
    min_p: float = 0.0  # least probability of a sampled token, as a share of the likeliest one's
    # The noise is a function of it and the position. None: of an engine's choice, 0 or anything.
    seed: int | None = None
    repetition_penalty: float = 1.0  # on tokens of prompt and output
    presence_penalty: float = 0.0  # on tokens of the output
    frequency_penalty: float = 0.0  # once per occurrence in the output
    min_tokens: int = 0  # no end token is chosen before
    bad_words: tuple[tuple[int, ...], ...] = ()  # the last token is not chosen after the others

    @property
    def greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1 or (self.top_k == 0 and self.top_p == 0)

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
    """One sequence to generate."""

    key: str  # unique among all requests of the engine
    input_ids: list[int]  # the prompt's, at least one
    max_tokens: int  # of the output, at least one
    end_id: int | None = None  # ends the output, and is part of it
    other_end_ids: tuple[int, ...] = ()  # do the same, beside an end_id
    stop_words: tuple[tuple[int, ...], ...] = ()  # end the output, and stay part of it
    sampling: SamplingParams = field(default_factory=SamplingParams)
    return_log_probs: bool = False
    top_log_probs: int = 0  # most likely tokens to return at each place
    prompt_log_probs: bool = False
    continued: int = 0  # of the last input_ids, which are output of an earlier attempt
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # of tokens; added to the logits
    allowed_ids: tuple[int, ...] = ()  # the only tokens that are chosen; empty for all
    guide: Guide | None = None
    lora_task_id: int = 0  # the LoRA adapter; 0 for none

    @property
    def end_ids(self) -> tuple[int, ...]:
        """All tokens that end the output."""
        return self.other_end_ids if self.end_id is None else (self.end_id, *self.other_end_ids)


@dataclass
class Step:
    """The next tokens of one sequence. Log probabilities are under the model's unchanged distribution."""

    ids: list[int] = field(default_factory=list)  # may be empty in the last step
    log_probs: list[TokenLogProb] = field(default_factory=list)  # one for each id, if asked for
    finished: bool = False
    error: EngineError | None = None  # the sequence failed, and is finished
    # Of the prompt's tokens, with the first ids, if asked for. The first token's is 0.
    prompt_log_probs: list[TokenLogProb] = field(default_factory=list)


Sink = Callable[[Step], None]  # called from the engine's thread; must not block
Steps = AsyncGenerator[Step, None]


class Engine(ABC):
    """Generates many sequences at once. Methods may be called from any thread."""

    context_length: int  # most tokens that prompt and output may have together
    running: Mapping[str, object]  # the requests that hold a slot or wait for one, by their keys
    features: frozenset[str] = frozenset()  # the inputs it honours that not every engine does
    on_death: Callable[[], object] = staticmethod(lambda: None)  # after it has ended by itself

    @abstractmethod
    def submit(self, request: GenerationRequest, sink: Sink) -> None:
        """Start a request, or raise EngineError; ``sink`` gets its steps until one is finished."""

    @abstractmethod
    def abort(self, key: str) -> None:
        """Drop a request, unless it has finished; soon its sink is not called any more."""

    @abstractmethod
    def close(self) -> None:
        """End the engine; running requests are dropped."""


class EventLoopEngine(Engine):
    """Runs the ``steps`` of each request on an event loop, which has a thread of its own.

    The libraries that engines run guarantee to work on one loop only. It is uvloop's; the measurements
    are in tools/benchmark/notes.md.
    """

    def __init__(self, thread: str) -> None:
        self._lock = threading.Lock()  # guards the next three
        self.running: dict[str, tuple[Sink, asyncio.Task[None] | None]] = {}
        self._arrived: list[tuple[GenerationRequest, Steps, Sink]] = []
        self._stopped: str | None = None  # why no more requests are taken
        started: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = threading.Thread(
            target=lambda: uvloop.run(self._run(started)), name=thread, daemon=True
        )
        self._thread.start()
        self._loop = started.result()

    @abstractmethod
    def steps(self, request: GenerationRequest) -> Steps:
        """Check a request at once, and return the generator of its steps, which runs on the loop.

        The last step is finished. When the generator is closed early, it drops the request.
        """

    def failure(self, error: Exception, request: GenerationRequest) -> EngineError | None:
        """Return what a request's generator raised as the request's error; None ends the engine."""
        return failed_request(error, request)

    def submit(self, request: GenerationRequest, sink: Sink) -> None:
        steps = self.steps(request)
        with self._lock:
            if self._stopped is not None:
                raise stopped(self._stopped)
            self.running[request.key] = sink, None
            self._arrived.append((request, steps, sink))
            if len(self._arrived) == 1:  # the loop is woken once for all that arrive together
                self._loop.call_soon_threadsafe(self._begin)

    def abort(self, key: str) -> None:
        with self._lock:
            _, task = self.running.pop(key, (None, None))
            if task is not None:
                self._loop.call_soon_threadsafe(task.cancel)

    def close(self) -> None:
        with self._lock:
            self._stopped = self._stopped or "it was closed"
            self.running.clear()
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closed.set)
            self._thread.join()

    def die(self, reason: str) -> None:
        """End all requests, on the loop, after the library has died."""
        with self._lock:
            if self._stopped is not None:
                return
            self._stopped = reason
            ended = list(self.running.values())
            self.running.clear()
        error = stopped(reason)
        logger.error(error)
        for sink, task in ended:
            if task is not None:
                task.cancel()
            self._loop.call_soon(sink, Step(finished=True, error=error))
        self._loop.call_soon(self.on_death)

    async def _run(self, started: Future[asyncio.AbstractEventLoop]) -> None:
        self._closed = asyncio.Event()
        started.set_result(asyncio.get_running_loop())
        await self._closed.wait()

    def _begin(self) -> None:
        with self._lock:
            arrived, self._arrived = self._arrived, []
            for request, steps, sink in arrived:
                if request.key in self.running:  # else it was aborted
                    task = self._loop.create_task(self._forward(request, steps, sink))
                    self.running[request.key] = sink, task

    async def _forward(self, request: GenerationRequest, steps: Steps, sink: Sink) -> None:
        try:
            async with aclosing(steps):
                async for step in steps:
                    self._deliver(request.key, step, sink)
            self._fail_unfinished(request, sink, "it made no last step")
        except asyncio.CancelledError:
            # ``abort``, ``close`` and ``die`` have taken the request out of ``running`` before.
            self._fail_unfinished(request, sink, "it was cancelled")
            raise
        except Exception as error:
            if failed := self.failure(error, request):
                self._deliver(request.key, Step(finished=True, error=failed), sink)
            else:
                self.die(str(error) or repr(error))

    def _fail_unfinished(self, request: GenerationRequest, sink: Sink, reason: str) -> None:
        """End a request whose generator has ended before its last step, unless it was dropped."""
        if request.key in self.running:
            error = EngineUnavailable(f"the engine failed a request: {reason}")
            self._deliver(request.key, Step(finished=True, error=error), sink)

    def _deliver(self, key: str, step: Step, sink: Sink) -> None:
        if step.finished:
            with self._lock:
                self.running.pop(key, None)
        # Next turn, all of this turn's together: that wakes delivery's thread once a step.
        self._loop.call_soon(sink, step)


def create_engine(parameters: Mapping[str, str]) -> Engine:
    """Create the engine that the model's parameters describe; whatever a library raises comes through."""
    if (name := parameters.get("engine", "transformers")) not in _ENGINES:
        raise ValueError(f"unknown engine {name!r}; known are {', '.join(_ENGINES)}")
    if "shared" in parameters and name not in ("vllm", "simulated"):
        raise ValueError(f"tensorrt_llm_instance_count must be 1 with the engine {name}")
    engine: Engine = resolve_name(_ENGINES[name])(parameters)
    return engine


def check_ids(request: GenerationRequest, vocabulary: int) -> None:
    """Raise EngineError for token ids that a model does not have: they would end the engine."""
    for end_id in request.end_ids:
        if end_id >= vocabulary:
            # TensorRT-LLM's wording, which clients know.
            text = f"EndId ({end_id}) is not within acceptable range [-1, {vocabulary})."
            raise EngineError(text)
    ids = [*request.input_ids, *request.logit_bias, *request.allowed_ids]
    ids += [token for word in request.sampling.bad_words for token in word]
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
