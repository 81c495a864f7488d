"""A span of OpenTelemetry for each request, where its packages are installed and a collector is named.

The names of attributes are those of OpenTelemetry's conventions for generative models. Everything else is
set by OpenTelemetry's own variables.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers

from cog_triton.faces.openai.calls import Call

logger = logging.getLogger(__name__)
SERVICE = "cog-triton"
_OPERATIONS = {"/v1/completions": "text_completion"}


def tracing(endpoint: str | None) -> Callable[[Call, Headers], object] | None:
    """What tells a collector of calls that have ended; None if there is none to be told.

    Args:
        endpoint: of the collector, which OpenTelemetry reads by itself.
    """
    if not endpoint:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        logger.warning("no traces: %s (pip install cog-triton[otel])", error)
        return None
    named = Resource({"service.name": SERVICE}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=named)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Spans(provider.get_tracer("cog_triton")).ended


class Spans:
    """Makes spans of calls."""

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer

    def ended(self, call: Call, headers: Headers) -> None:
        """A span of a call of a model, below the one that its client names in ``traceparent``."""
        if not call.model:
            return
        from opentelemetry.trace import SpanKind, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        end = time.time_ns()
        span = self._tracer.start_span(
            f"{operation(call)} {call.model}",
            context=TraceContextTextMapPropagator().extract(dict(headers)),
            kind=SpanKind.SERVER,
            attributes=attributes(call),
            start_time=end - int(call.seconds() * 1e9),
        )
        if call.status >= 400 or call.error:
            span.set_status(StatusCode.ERROR)
        span.end(end)


def operation(call: Call) -> str:
    """What a call asks for, in OpenTelemetry's words."""
    return _OPERATIONS.get(call.path, "chat")


def attributes(call: Call) -> dict[str, Any]:
    """What a span says of a call."""
    values = {
        "gen_ai.operation.name": operation(call),
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
