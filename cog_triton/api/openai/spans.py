"""The span of each request, for OpenTelemetry."""

from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers

from cog_triton.api.openai.call import Call
from cog_triton.client.tracing import SERVICE, go_below


def begin_span(tracer: Any, headers: Headers) -> Callable[[Call], object]:
    """Begin a request's span, below its client's ``traceparent``; return the function that ends it."""
    if tracer is None:
        return lambda _: None
    from opentelemetry import context, trace

    go_below(headers)
    span = tracer.start_span("request", kind=trace.SpanKind.SERVER)
    context.attach(trace.set_span_in_context(span))  # the context ends with the request's task

    def end(call: Call) -> None:
        if not call.model:
            return  # a span that does not end is not exported
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
