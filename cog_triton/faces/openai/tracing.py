"""A span of OpenTelemetry for each request, by its conventions for generative models.

Its own variables set everything but whether there are any.
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
    """Return the function that exports a call that has ended; None without a collector's endpoint."""
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
    tracer = provider.get_tracer("cog_triton")
    return lambda call, headers: export(tracer, call, headers)


def export(tracer: Any, call: Call, headers: Headers) -> None:
    """Export a call of a model as a span below the one in its client's ``traceparent``."""
    if not call.model:
        return
    from opentelemetry.trace import SpanKind, StatusCode
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    end = time.time_ns()
    values = attributes(call)
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
