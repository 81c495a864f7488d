"""Middleware around the routes: ids of requests, API keys and their limits, metrics, log, traces.

Plain ASGI, without tasks. ``Calls`` is around ``Access``, so that refusals are counted as well.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable, Sequence
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cog_triton.errors import shown
from cog_triton.faces.openai.answers import ErrorResponse
from cog_triton.faces.openai.errors import MESSAGES_PATH, ApiError
from cog_triton.faces.openai.keys import Key, Keys, Quotas, keys_of
from cog_triton.faces.openai.metrics import Figures, tracing
from cog_triton.faces.openai.served import CURRENT, Call, Served, current
from cog_triton.settings import Settings

logger = logging.getLogger(__name__)
REQUEST_ID, ANTHROPICS_REQUEST_ID = "x-request-id", "request-id"
_USABLE_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)
OPEN = frozenset({"/", "/ping", "/health", "/health/live", "/health/ready"})
"""Paths that need no key: a page without any content of the model's, and what orchestrators ask."""
METRICS = "/metrics"
_NO_KEY = (
    "You did not provide an API key: it goes into the header Authorization, as Bearer YOUR_KEY"
)


def add_operation(app: Starlette, served: Served) -> None:
    """Add the middleware that the settings ask for."""
    settings = served.settings
    if (keys := configured_keys(settings)) is not None:
        quotas = Quotas(served.processes)
        app.add_middleware(Access, keys=keys, quotas=quotas, open_metrics=settings.open_metrics)
    if origins := settings.allowed_origins.replace(",", " ").split():
        every = ["*"]
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=every,
            allow_headers=every,
            expose_headers=every,
        )
    figures = Figures(served.models[0], served.backend.admission, served.metrics_directory)
    app.state.figures = figures
    ended = filter(None, [figures.ended, log_call, tracing(settings.otel_endpoint)])
    app.add_middleware(Calls, gap=figures.gap, ended=list(ended))


def configured_keys(settings: Settings) -> Keys | None:
    """Return the API keys of the settings; None if there are none."""
    listed = settings.openai_api_keys.get_secret_value() if settings.openai_api_keys else ""
    return keys_of(listed, settings.openai_api_keys_file)


class Calls:
    """Give each request an id and a ``Call``, and report it with its headers at its end."""

    def __init__(
        self,
        app: ASGIApp,
        gap: Callable[[float], object],
        ended: Sequence[Callable[[Call, Headers], object]],
    ) -> None:
        self._app, self._gap, self._ended = app, gap, ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get(REQUEST_ID, "")
        name = given if _USABLE_ID.fullmatch(given) else secrets.token_hex(16)
        scope.setdefault("state", {})["request_id"] = name
        if scope["method"] == "HEAD":  # uvicorn, which has the scope itself, sends no body
            scope = {**scope, "method": "GET"}
        call = Call(name, scope["path"], gap=self._gap)

        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                call.status = message["status"]
                ids = [(key.encode(), value.encode()) for key, value in id_headers(scope).items()]
                message["headers"] = [*message["headers"], *ids]
            await send(message)

        token = CURRENT.set(call)
        try:
            await self._app(scope, receive, send_noted)
        except Exception:
            call.status = call.status or 500
            raise
        finally:
            CURRENT.reset(token)
            for report in self._ended:
                report(call, headers)


def id_headers(scope: Scope) -> dict[str, str]:
    """Return the headers of a response that name its request's id."""
    name = scope["state"]["request_id"]
    of_messages = scope["path"].startswith(MESSAGES_PATH)
    return {REQUEST_ID: name, **({ANTHROPICS_REQUEST_ID: name} if of_messages else {})}


class Access:
    """Let in requests with a key, within the key's limits."""

    def __init__(self, app: ASGIApp, keys: Keys, quotas: Quotas, *, open_metrics: bool) -> None:
        self._app, self._keys, self._quotas = app, keys, quotas
        self._open = OPEN | {METRICS} if open_metrics else OPEN

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open:
            await self._app(scope, receive, send)
            return
        call = current()

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                limits = self._quotas.headers(call.key)
                message["headers"] = [*message["headers"], *limits]
            await send(message)

        limited, answer = scope["method"] == "POST", send
        try:
            call.key = self._key(Headers(scope=scope))
            if limited:
                answer = send_with_limits
                self._quotas.enter(call.key)
        except ApiError as error:
            await ErrorResponse(error)(scope, receive, answer)
            return
        try:
            await self._app(scope, receive, answer)
        finally:
            if limited:
                self._quotas.leave(call.key, call.input_tokens + call.output_tokens)

    def _key(self, headers: Headers) -> Key:
        """Return the key of a request, by the header of OpenAI, Anthropic or Azure."""
        scheme, _, presented = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            presented = presented.strip()
        else:
            presented = headers.get("x-api-key") or headers.get("api-key", "")
        key = self._keys.find(presented) if presented else None
        if key is not None:
            return key
        text = "Incorrect API key provided" if presented else _NO_KEY
        challenge = {"WWW-Authenticate": "Bearer"}
        raise ApiError(401, text, code="invalid_api_key", headers=challenge)


def log_call(call: Call, _: Headers) -> None:
    """Log a line for a request, without anything of its text."""
    level = logging.DEBUG if call.path in OPEN or call.path == METRICS else logging.INFO
    tokens = f"{call.input_tokens}+{call.output_tokens}"
    names = f"key={call.key.name or '-'} model={call.model or '-'} tokens={tokens}"
    took, error = f"{call.seconds() * 1000:.0f} ms", call.error and f" {call.error}"
    path = shown(quote(call.path))
    logger.log(level, "%s %s %d %s %s%s", call.id, path, call.status, names, took, error)
