"""A request's body in: read, then parsed and validated, off the event loop where it is large."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request as HttpRequest
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from cog_triton.api.openai.call import current
from cog_triton.api.openai.errors import CLIENT_GONE, ApiError, invalid
from cog_triton.api.openai.validation import NEEDS_OBJECT, validated
from cog_triton.errors import shown
from cog_triton.web import bodies
from cog_triton.web.origin import is_json

LARGE_BODY = bodies.LARGE_BYTES
_T = TypeVar("_T")


class BodyRoute(APIRoute):
    """A route whose body is validated before FastAPI's own reader, which blocks the event loop."""

    def get_route_handler(self) -> Callable[[HttpRequest], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        if self.body_field is None:
            return handler
        model: Any = self.body_field.field_info.annotation

        async def handle(request: HttpRequest) -> Response:
            try:
                raw = await request.body()
            except ClientDisconnect:
                return Response(status_code=CLIENT_GONE)  # only the log sees it
            kind = request.headers.get("content-type")
            if not kind:
                raise invalid(NEEDS_OBJECT)
            if not is_json(kind):
                text = f"the body must have Content-Type: application/json, not {shown(kind)}"
                raise ApiError(415, text, code="unsupported_content_type")
            current().large = len(raw) >= LARGE_BODY
            served = request.app.state.served
            body = await bodies.off_loop(len(raw), validated, raw, model, served)
            current().names = body.names()
            request._json = body  # FastAPI reads this, and pydantic takes an instance as it is
            return await handler(request)

        return handle


async def off_loop(function: Callable[..., _T], *args: Any) -> _T:
    """Call a function that prepares the current request, in a thread if its body is large."""
    if current().large:
        return await asyncio.to_thread(function, *args)
    return function(*args)
