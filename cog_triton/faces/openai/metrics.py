"""Metrics in Prometheus' format, by the names of vLLM, which dashboards know; and OpenTelemetry's spans.

Several processes write theirs to one directory, and any of them answers for all: the multiprocess mode of
prometheus_client, which the environment of ``workers`` turns on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import APIRouter, Request
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.multiprocess import MultiProcessCollector
from starlette.datastructures import Headers
from starlette.responses import Response

from cog_triton.deployment.deployment import Metrics
from cog_triton.faces.openai.served import Call
from cog_triton.request.admission import Admission

# The bounds of vLLM's buckets.
# fmt: off
FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160
)
GAPS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10
)
WHOLE = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
# fmt: on
TOKENS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))
KINDS = ("prompt", "generation")
TEXT = "As vLLM's of this name; see docs/openai.md."
REFRESH_SECONDS = 1.0
SERVICE = "cog-triton"
_OPERATIONS = {"/v1/completions": "text_completion"}
logger = logging.getLogger(__name__)
router = APIRouter()


@router.get("/metrics", include_in_schema=False)
def metrics(request: Request) -> Response:  # in a thread: it reads files
    """Return all figures."""
    figures: Figures = request.app.state.figures
    figures.refresh()
    return Response(figures.text(), media_type=CONTENT_TYPE_LATEST)


class Figures:
    """Figures of calls, labelled with the model's own name, whichever was asked for."""

    def __init__(self, model: str, admission: Admission, directory: str | None = None) -> None:
        queue = Metrics()
        admission.observers.append(queue.observe)
        self._registry, self._admission = queue.registry, admission
        self._model, self._directory = model, directory
        self.gap = self._histogram("inter_token_latency_seconds", GAPS).observe
        self._first_token = self._histogram("time_to_first_token_seconds", FIRST_TOKEN)
        self._whole = self._histogram("e2e_request_latency_seconds", WHOLE)
        self._queued = self._histogram("request_queue_time_seconds", WHOLE)
        self._sizes = [self._histogram(f"request_{kind}_tokens", TOKENS) for kind in KINDS]
        self._tokens = [self._vllm(Counter, f"{kind}_tokens") for kind in KINDS]
        self._running, self._waiting = (
            self._vllm(Gauge, f"num_requests_{state}", multiprocess_mode="livesum")
            for state in ("running", "waiting")
        )
        labels = ["model_name", "finished_reason"]
        self._success = Counter("vllm:request_success", TEXT, labels, registry=self._registry)
        text = "Requests that failed, by the response's status and the error's code."
        labels = ["status", "code"]
        self._errors = Counter("cog_triton_errors", text, labels, registry=self._registry)

    def _histogram(self, name: str, buckets: Sequence[float]) -> Any:
        return self._vllm(Histogram, name, buckets=buckets)

    def _vllm(self, kind: type[Any], name: str, **options: Any) -> Any:
        labels = ["model_name"]
        made = kind(f"vllm:{name}", TEXT, labels, registry=self._registry, **options)
        return made.labels(self._model)

    def refresh(self) -> None:
        self._running.set(self._admission.running)
        self._waiting.set(self._admission.waiting)

    async def keep_fresh(self) -> None:
        """Refresh until cancelled, for the processes that are asked in place of this one."""
        while True:
            self.refresh()
            await asyncio.sleep(REFRESH_SECONDS)

    def text(self) -> bytes:
        registry = self._registry
        if self._directory is not None:
            registry = CollectorRegistry()
            MultiProcessCollector(registry, self._directory)  # type: ignore[no-untyped-call]
        return generate_latest(registry)

    def ended(self, call: Call, _: Headers) -> None:
        """Count a call."""
        if call.status >= 400 or call.error:
            self._errors.labels(str(call.status), call.error).inc()
        if not call.finish_reasons:
            return
        for reason in call.finish_reasons:
            self._success.labels(self._model, reason).inc()
        for number, tokens in enumerate((call.input_tokens, call.output_tokens)):
            self._tokens[number].inc(tokens)
            self._sizes[number].observe(tokens)
        self._whole.observe(call.seconds())
        self._queued.observe(call.queued)
        if call.first_token is not None:
            self._first_token.observe(call.first_token)


def tracing(endpoint: str | None) -> Callable[[Call, Headers], object] | None:
    """Return the function that exports a call that has ended; None without a collector's endpoint.

    A call of a model becomes a span below the one in its client's ``traceparent``.
    """
    if not endpoint:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import SpanKind, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
    except ImportError as error:
        logger.warning("no traces: %s (pip install cog-triton[otel])", error)
        return None
    named = Resource({"service.name": SERVICE}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=named)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    tracer = provider.get_tracer("cog_triton")

    def export(call: Call, headers: Headers) -> None:
        if not call.model:
            return
        end, values = time.time_ns(), attributes(call)
        span = tracer.start_span(
            f"{values['gen_ai.operation.name']} {call.model}",
            context=TraceContextTextMapPropagator().extract(dict(headers)),
            kind=SpanKind.SERVER,
            attributes=values,
            start_time=end - int(call.seconds() * 1e9),
        )
        if "error.type" in values:
            span.set_status(StatusCode.ERROR)
        span.end(end)

    return export


def attributes(call: Call) -> dict[str, Any]:
    """Return a span's attributes."""
    values = {
        "gen_ai.operation.name": _OPERATIONS.get(call.path, "chat"),
        "gen_ai.provider.name": SERVICE,
        "gen_ai.request.model": call.model,
        "gen_ai.response.model": call.model,
        "gen_ai.response.finish_reasons": call.finish_reasons or None,
        "gen_ai.usage.input_tokens": call.input_tokens,
        "gen_ai.usage.output_tokens": call.output_tokens,
        "gen_ai.response.time_to_first_chunk": call.first_token,
        "error.type": call.error or (str(call.status) if call.status >= 400 else None),
        "http.response.status_code": call.status,
        "url.path": call.path,
        "cog_triton.request_id": call.id,
        "cog_triton.key": call.key.name or None,
    }
    return {name: value for name, value in values.items() if value is not None}
