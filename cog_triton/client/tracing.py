"""Spans of requests, by OpenTelemetry: none without OTEL_EXPORTER_OTLP_ENDPOINT and the extra otel.

A request has the span of its API. Below it each answer has one, ``generate``, with its steps:
``admission``, the wait in the queue, and ``triton``, which Triton continues with spans of its own.
"""

import contextlib
import logging
from collections.abc import Mapping
from typing import Any

from cog_triton.protocol.names import TRACEPARENT

SERVICE = "cog-triton"
_tracer: Any = None
logger = logging.getLogger(__name__)


def tracer(endpoint: str | None) -> Any:
    """Return the tracer of this process, or None where there are no spans. The first call makes it."""
    global _tracer
    if _tracer is not None or not endpoint:
        return _tracer
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        logger.warning("tracing is off: %s (pip install cog-triton[otel])", error)
        return None
    provider: Any = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider):
        # Cog's worker has Cog's provider.
        named = Resource({"service.name": SERVICE}).merge(OTELResourceDetector().detect())
        provider = TracerProvider(resource=named)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    _tracer = provider.get_tracer("cog_triton")
    return _tracer


def go_below(headers: Mapping[str, str]) -> None:
    """Put the spans that this task begins below the one that a ``traceparent`` names."""
    if _tracer is not None:
        from opentelemetry import context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        context.attach(TraceContextTextMapPropagator().extract(dict(headers)))


class Steps(contextlib.AbstractAsyncContextManager["Steps"]):
    """The span of an answer and that of its present step; as a context, it ends both."""

    def __init__(self, first: str) -> None:
        self._spans = [] if _tracer is None else [_tracer.start_span("generate")]
        self.begin(first)

    def begin(self, name: str) -> dict[str, str]:
        """End the step before and begin one; return the parameter by which Triton continues it."""
        if not self._spans:
            return {}
        from opentelemetry import trace

        if len(self._spans) > 1:
            self._spans.pop().end()
        step = _tracer.start_span(name, trace.set_span_in_context(self._spans[0]))
        self._spans.append(step)
        context = step.get_span_context()
        if not context.trace_flags.sampled:
            return {}
        return {TRACEPARENT: f"00-{context.trace_id:032x}-{context.span_id:016x}-01"}

    def event(self, name: str) -> None:
        for step in self._spans[1:]:
            step.add_event(name)

    async def __aexit__(self, *_: object) -> None:
        for span in reversed(self._spans):
            span.end()
