"""The state of an application: its figures, by the names of vLLM, and the record and span of each request.

The figures are in Prometheus' format. Several processes write theirs to one directory, and any of them
answers for all: the multiprocess mode of prometheus_client, which ``supervisor.Workers`` turns on.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Annotated, Any

import anyio
from fastapi import Depends
from fastapi import Request as HttpRequest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from starlette.datastructures import Headers

from cog_triton.adapters.directory import adapter_names
from cog_triton.api.openai.background_tasks import BackgroundTasks
from cog_triton.api.openai.errors import RETRY_SECONDS, ApiError
from cog_triton.api.openai.keys import ANYBODY, Key, Quotas, configured_keys
from cog_triton.api.openai.pacing import Rounds
from cog_triton.api.openai.storage.storage import Storage
from cog_triton.client.tracing import SERVICE, go_below, tracer
from cog_triton.deployment.deployment import Deployment, queue_metrics
from cog_triton.errors import CogTritonError, shown
from cog_triton.generation import Chunk
from cog_triton.request.admission import Admission, Tenant
from cog_triton.request.request import Request

Chunks = AsyncGenerator[Chunk, None]
EXPECTED_TOKENS = 256  # of an answer that may be longer, before its length is known
CHARACTERS_PER_TOKEN = 4
# Upper bounds of the histograms' buckets, by vLLM's names and with its values.
LATENCY_BUCKETS = (
    0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960,
)  # fmt: skip
TOKEN_BUCKETS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000, 500000,
)  # fmt: skip
HISTOGRAMS: dict[str, tuple[float, ...]] = {
    "inter_token_latency_seconds": (
        0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10,
    ),
    "time_to_first_token_seconds": (
        0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
        80, 160,
    ),
    "e2e_request_latency_seconds": LATENCY_BUCKETS,
    "request_queue_time_seconds": LATENCY_BUCKETS,
    "request_prompt_tokens": TOKEN_BUCKETS,
    "request_generation_tokens": TOKEN_BUCKETS,
}  # fmt: skip
TEXT = "Same as vLLM's metric of this name."
REFRESH_SECONDS = 1.0
logger = logging.getLogger(__name__)
LAST_SECONDS = 2.0  # for requests that were ended by force to send their clients the error
POLL_SECONDS = 0.05


@dataclass
class Call:
    """A request as its metrics, log line and trace have it."""

    id: str
    path: str
    key: Key = ANYBODY
    began: float = field(default_factory=time.monotonic)
    model: str = ""  # as the client names it, once it has named one that is served
    input_tokens: int = 0
    output_tokens: int = 0
    first_token: float | None = None  # seconds from the beginning
    queued: float = 0.0  # seconds that the longest of its answers waited in the queue
    finish_reasons: list[str] = field(default_factory=list)  # of its answers
    error: str = ""  # code of the error that ended it
    status: int = 0
    gap: Callable[[float], object] = lambda _: None  # gets the seconds between two chunks
    large: bool = False  # its body is prepared in a thread
    names: Mapping[str, str] = field(default_factory=dict)  # see ``Body.names``
    batch: bool = False  # it is a line of one
    method: str = ""
    anthropic: bool = False  # its client reads Anthropic's forms, at a path that both APIs have
    reason: str = ""  # of its refusal, as the log has it

    def seconds(self) -> float:
        return time.monotonic() - self.began

    def tenant(self, request: Request) -> Tenant:
        """Return the tenant of a request to the engine, with the tokens that it may take."""
        prompt = len(request.prompt_ids) or len(request.prompt) // CHARACTERS_PER_TOKEN
        expected = float(prompt + min(request.max_tokens, EXPECTED_TOKENS))
        return Tenant(self.key.name, self.key.weight, expected, request.priority, batch=self.batch)

    async def observed(self, chunks: Chunks) -> Chunks:
        """Yield the chunks of one answer, and note them."""
        last, chunk, reason = 0.0, None, "abort"
        try:
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    if chunk.ids or chunk.text:
                        now = time.monotonic()
                        if last:
                            self.gap(now - last)
                        elif self.first_token is None:
                            self.first_token = now - self.began
                        last = now
                    reason = chunk.finish_reason or reason
                    yield chunk
        except Exception as error:
            reason = "error"
            self.error = error.code if isinstance(error, CogTritonError) else "internal"
            raise
        finally:
            self.finish_reasons.append(reason)
            if chunk is not None:
                self.output_tokens += chunk.output_tokens
                self.input_tokens += chunk.input_tokens or 0
                self.queued = max(self.queued, chunk.queued)


BATCH_CALL = "cog_triton.batch_call"  # in the scope of a batch's request
CURRENT: ContextVar[Call | None] = ContextVar("call", default=None)


def current() -> Call:
    """Return the request that is being answered."""
    return CURRENT.get() or Call("", "")


class Figures:
    """Figures of calls, labelled with the model's own name, whichever was asked for."""

    def __init__(self, model: str, admission: Admission, processes: int = 1) -> None:
        self._registry = registry = queue_metrics(admission)
        self._admission, self._model, self._processes = admission, model, processes

        def vllm(kind: type[Any], name: str, **options: Any) -> Any:
            figure = kind(f"vllm:{name}", TEXT, ["model_name"], registry=registry, **options)
            return figure.labels(model)

        self._spread = {n: vllm(Histogram, n, buckets=own) for n, own in HISTOGRAMS.items()}
        self.gap = self._spread["inter_token_latency_seconds"].observe
        self._prompts = vllm(Counter, "prompt_tokens")
        self._outputs = vllm(Counter, "generation_tokens")
        self._running = vllm(Gauge, "num_requests_running", multiprocess_mode="livesum")
        self._waiting = vllm(Gauge, "num_requests_waiting", multiprocess_mode="livesum")
        labels = ["model_name", "finished_reason"]
        self._success = Counter("vllm:request_success", TEXT, labels, registry=registry)
        text = "Requests that failed, by the response's status and the error's code."
        self._errors = Counter("cog_triton_errors", text, ["status", "code"], registry=registry)

    def refresh(self) -> None:
        self._running.set(self._admission.running)
        self._waiting.set(self._admission.waiting)

    async def keep_fresh(self) -> None:
        """Refresh until cancelled, for the processes that are asked in place of this one."""
        while True:
            self.refresh()
            await asyncio.sleep(REFRESH_SECONDS)

    def text(self) -> bytes:
        return generate_latest(self._of_all_processes())

    def requests(self) -> tuple[int, int]:
        """Return how many requests run, and how many wait."""
        registry, labels = self._of_all_processes(), {"model_name": self._model}
        running = registry.get_sample_value("vllm:num_requests_running", labels)
        waiting = registry.get_sample_value("vllm:num_requests_waiting", labels)
        return int(running or 0), int(waiting or 0)

    def _of_all_processes(self) -> CollectorRegistry:
        self.refresh()
        if self._processes == 1:
            return self._registry
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return registry

    def ended(self, call: Call) -> None:
        if call.status >= 400 or call.error:
            self._errors.labels(str(call.status), call.error).inc()
        if not call.finish_reasons:
            return
        for reason in call.finish_reasons:
            self._success.labels(self._model, reason).inc()
        self._prompts.inc(call.input_tokens)
        self._outputs.inc(call.output_tokens)
        if call.batch:  # nobody waits for it
            return
        self._spread["request_prompt_tokens"].observe(call.input_tokens)
        self._spread["request_generation_tokens"].observe(call.output_tokens)
        self._spread["e2e_request_latency_seconds"].observe(call.seconds())
        self._spread["request_queue_time_seconds"].observe(call.queued)
        if call.first_token is not None:
            self._spread["time_to_first_token_seconds"].observe(call.first_token)


def begin_span(tracer: Any, headers: Headers) -> Callable[[Call], object]:
    """Begin a request's span, below its client's ``traceparent``; return the function that ends it."""
    if tracer is None:
        return lambda _: None
    from opentelemetry import context, trace

    go_below(headers)
    span = tracer.start_span("request", kind=trace.SpanKind.SERVER)
    context.attach(trace.set_span_in_context(span))  # of this request's task, which ends with it

    def end(call: Call) -> None:
        if not call.model:
            return  # what has not ended is not exported
        values = attributes(call)
        span.update_name(f"{values['gen_ai.operation.name']} {call.model}")
        span.set_attributes(values)
        if "error.type" in values:
            span.set_status(trace.StatusCode.ERROR)
        span.end()

    return end


def attributes(call: Call) -> dict[str, Any]:
    """Return the attributes of a request's span, by OpenTelemetry's conventions."""
    values = {
        "gen_ai.request.model": call.model,
        "gen_ai.response.model": call.model,
        "gen_ai.response.finish_reasons": call.finish_reasons,
        "gen_ai.usage.input_tokens": call.input_tokens,
        "gen_ai.usage.output_tokens": call.output_tokens,
        "gen_ai.response.time_to_first_chunk": call.first_token,
        "http.response.status_code": call.status,
        "url.path": call.path,
        "cog_triton.request_id": call.id,
        "gen_ai.operation.name": "text_completion" if call.path == "/v1/completions" else "chat",
        "gen_ai.provider.name": SERVICE,
        "error.type": call.error or (str(call.status) if call.status >= 400 else None),
        "cog_triton.key": call.key.name or None,
    }
    return {name: value for name, value in values.items() if value not in (None, [])}


@dataclass
class Served:
    """The state of one application."""

    backend: Deployment
    models: Sequence[str]  # names of the model in requests; the first is its own
    busy: Callable[[bool], object] = lambda _: None  # gets True when requests run, then False
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False  # new requests are refused
    running: int = 0
    storage: Storage | None = None  # None with STORE=0
    tasks: BackgroundTasks = field(default_factory=BackgroundTasks)
    rounds: Rounds = field(default_factory=Rounds)  # of answers with log probabilities

    def __post_init__(self) -> None:
        self.settings, processes = self.backend.settings, self.backend.settings.openai_workers
        self.keys, self.quotas = configured_keys(self.settings), Quotas(processes)
        self.figures = Figures(self.models[0], self.backend.admission, processes)
        self.tracer = tracer(self.settings.otel_endpoint)
        self.most_running = self.backend.admission.max_running * processes  # in all of them

    def generate(self, requests: Sequence[Request]) -> list[Chunks]:
        """Start requests, under ids in Triton that begin with the client's, which may come again."""
        call, nonce, start = current(), secrets.token_hex(4), self.backend.generate
        answers: list[Chunks] = []
        for number, own in enumerate(requests):
            chunks = call.observed(start(own, f"{call.id}-{nonce}-{number}", call.tenant(own)))
            answers.append(chunks if own.log_probs is None else self._by_turns(chunks))
        return answers

    async def _by_turns(self, chunks: Chunks) -> Chunks:
        """Yield the chunks of an answer with log probabilities, those of one answer in a round of the loop.

        Each token may have dozens of values, which take a hundred times as long as its text.
        """
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                await self.rounds.wait_for_turn()
                yield chunk

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the model, and of the LoRA adapters that are there now."""
        return (*self.models, *adapter_names(self.settings.lora_dir))

    def adapter(self, name: str) -> str:
        """Return the adapter of a model's name, empty for the model itself, or raise 404."""
        if name in (names := self.names):
            current().model = name
            return "" if name in self.models else name
        text = f"The model `{shown(name)}` does not exist; available: {', '.join(names)}"
        raise ApiError(404, text, param="model", code="model_not_found")

    def only_model(self) -> str:
        """Return the model for a request that names none; where there are adapters, it has to."""
        if (names := self.names) == tuple(self.models):
            return self.models[0]
        text = f"you must provide model: one of {', '.join(names)}"
        raise ApiError(400, text, param="model", code="missing_required_parameter")

    def problem(self) -> str | None:
        """Return why the server is not ready, other than its engine; None if it is."""
        if self.storage is not None and self.storage.journal.problem() is not None:
            return self.storage.journal.problem()
        return self.tasks.problem()

    def key(self, name: str) -> Key | None:
        """Return the key of a name, if it is still there."""
        return Key(name, b"") if self.keys is None else self.keys.named(name)

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Count a request as running, or raise 503 while the server stops."""
        if self.draining:
            text, retry = "the server is stopping and takes no new requests", str(RETRY_SECONDS)
            raise ApiError(503, text, "server_error", headers={"Retry-After": retry})
        self.running += 1
        if self.running == 1:
            self.busy(True)
        try:
            yield
        finally:
            self.running -= 1
            if not self.running:
                self.busy(False)

    async def drain(self) -> None:
        """Let requests end for DRAIN_SECONDS; then end them with an error."""
        self.draining = True
        for seconds in (self.settings.drain_seconds, LAST_SECONDS):
            with anyio.move_on_after(seconds):
                while self.running:
                    await asyncio.sleep(POLL_SECONDS)
            self.backend.close()


async def _served(request: HttpRequest) -> Any:
    return request.app.state.served


FromApp = Annotated[Served, Depends(_served)]
