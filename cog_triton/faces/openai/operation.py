"""The middleware around the routes: ids of requests, API keys and their limits, metrics, log, traces."""

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
from cog_triton.faces.openai.answers import ErrorResponse, client_error
from cog_triton.faces.openai.errors import MESSAGES_PATH, ApiError
from cog_triton.faces.openai.keys import Key, Keys, Quotas, keys_of
from cog_triton.faces.openai.metrics import Figures, tracing
from cog_triton.faces.openai.served import CURRENT, Call, Served
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
    figures = Figures(served.models[0], served.backend.admission, served.metrics_directory)
    app.state.figures = figures
    ended = filter(None, [figures.ended, log_call, tracing(settings.otel_endpoint)])
    app.add_middleware(
        Calls,
        keys=configured_keys(settings),
        quotas=Quotas(served.processes),
        open_paths=OPEN | {METRICS} if settings.open_metrics else OPEN,
        gap=figures.gap,
        ended=list(ended),
    )
    if origins := settings.allowed_origins.replace(",", " ").split():
        every = ["*"]
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=every,
            allow_headers=every,
            expose_headers=every,
        )


def configured_keys(settings: Settings) -> Keys | None:
    """Return the API keys of the settings; None if there are none."""
    listed = settings.openai_api_keys.get_secret_value() if settings.openai_api_keys else ""
    return keys_of(listed, settings.openai_api_keys_file)


class Calls:
    """Give each request an id and a ``Call``, let in those with a key, and report each at its end."""

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys | None,
        quotas: Quotas,
        open_paths: frozenset[str],
        gap: Callable[[float], object],
        ended: Sequence[Callable[[Call, Headers], object]],
    ) -> None:
        self._app, self._keys, self._quotas, self._open = app, keys, quotas, open_paths
        self._gap, self._ended = gap, ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get(REQUEST_ID, "")
        name = given if _USABLE_ID.fullmatch(given) else secrets.token_hex(16)
        scope.setdefault("state", {})["request_id"] = name
        limited = scope["method"] == "POST" and scope["path"] not in self._open
        if scope["method"] == "HEAD":  # uvicorn, which has the scope itself, sends no body
            scope = {**scope, "method": "GET"}
        call = Call(name, scope["path"], gap=self._gap)

        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                call.status = message["status"]
                own = [(REQUEST_ID.encode(), name.encode())]
                if call.path.startswith(MESSAGES_PATH):
                    own.append((ANTHROPICS_REQUEST_ID.encode(), name.encode()))
                limits = self._quotas.headers(call.key) if limited else []
                message["headers"] = [*message["headers"], *own, *limits]
            await send(message)

        token, entered = CURRENT.set(call), False
        try:
            if self._keys is not None and call.path not in self._open:
                call.key = _key(self._keys, headers)
            if limited:
                self._quotas.enter(call.key)
                entered = True
            await self._app(scope, receive, send_noted)
        except Exception as error:
            if call.status:  # the response has begun
                raise
            await ErrorResponse(client_error(error))(scope, receive, send_noted)
        finally:
            CURRENT.reset(token)
            if entered:
                self._quotas.leave(call.key, call.input_tokens + call.output_tokens)
            for report in self._ended:
                report(call, headers)


def _key(keys: Keys, headers: Headers) -> Key:
    """Return the key of a request, by the header of OpenAI, Anthropic or Azure."""
    scheme, _, presented = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        presented = presented.strip()
    else:
        presented = headers.get("x-api-key") or headers.get("api-key", "")
    if presented and (key := keys.find(presented)):
        return key
    text = "Incorrect API key provided" if presented else _NO_KEY
    raise ApiError(401, text, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def log_call(call: Call, _: Headers) -> None:
    """Log a line for a request, without anything of its text."""
    level = logging.DEBUG if call.path in OPEN or call.path == METRICS else logging.INFO
    tokens = f"{call.input_tokens}+{call.output_tokens}"
    names = f"key={call.key.name or '-'} model={call.model or '-'} tokens={tokens}"
    took, error = f"{call.seconds() * 1000:.0f} ms", call.error and f" {call.error}"
    path = shown(quote(call.path))
    logger.log(level, "%s %s %d %s %s%s", call.id, path, call.status, names, took, error)
