"""The middleware around all routes: ids of requests, API keys, quotas, and a line of the log for each."""

import logging
import re
import secrets
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cog_triton.api.openai import pages
from cog_triton.api.openai.call import BATCH_CALL, CURRENT, Call
from cog_triton.api.openai.errors import MESSAGES_PATH, ApiError
from cog_triton.api.openai.keys import Key, Keys
from cog_triton.api.openai.protocol.error_response import client_error, error_response
from cog_triton.api.openai.routes.operation import HEALTH_PATHS, LOADS, METRICS
from cog_triton.api.openai.served import Served
from cog_triton.api.openai.spans import begin_span
from cog_triton.errors import shown

logger = logging.getLogger("cog_triton.api.openai.operation")  # as docs/openai.md shows its lines
MODELS_PATH = "/v1/models"
ANTHROPIC_VERSION = "anthropic-version"  # the header by which Anthropic's clients are known
_USABLE_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)
# Pages of this package, which show nothing of the model's. They ask for a key themselves.
_PAGES = frozenset({"/", pages.FORMULAS_PATH, pages.DOCS_PATH, pages.SCRIPT_PATH, pages.STYLE_PATH})
# Paths that need no key: the pages, and what orchestrators ask.
OPEN_PATHS = _PAGES | HEALTH_PATHS
# Paths that are asked every few seconds. Their requests are logged for debugging only.
_QUIET_PATHS = OPEN_PATHS | {METRICS, LOADS}
_NO_KEY = "You did not provide an API key: send it in the header Authorization, as Bearer YOUR_KEY"


class CallMiddleware:
    """Gives each request an id and a ``Call``, checks its key and quotas, and reports it at its end."""

    def __init__(self, app: ASGIApp, served: Served) -> None:
        self._app = app
        self._served = served
        self._open_paths = OPEN_PATHS
        if served.settings.open_metrics:
            self._open_paths = OPEN_PATHS | {METRICS}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        served = self._served
        headers = Headers(scope=scope)
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # uvicorn knows the method and sends no body
        request_id = _request_id(headers)
        # A line of a batch brings its call, whose key was checked and whose quotas are the batch's.
        batch_call: Call | None = scope.get(BATCH_CALL)
        call = batch_call or self._new_call(request_id, scope, headers)
        is_open = call.path in self._open_paths
        is_limited = scope["method"] == "POST" and not is_open and batch_call is None
        keys = None if is_open or batch_call is not None else served.keys
        is_counted = False

        def leave_quotas() -> None:
            """Charge the key for its request and free its place, once."""
            nonlocal is_counted
            if is_counted:
                is_counted = False
                served.quotas.leave(call.key, call.input_tokens + call.output_tokens)

        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                call.status = message["status"]
                message["headers"] = [
                    *message["headers"],
                    *_id_headers(request_id, call.path),
                    *(served.quotas.headers(call.key) if is_limited else ()),
                ]
            elif not message.get("more_body"):
                # A client that has its whole answer may send the next request at once.
                leave_quotas()
            await send(message)

        token = CURRENT.set(call)
        end_span = begin_span(served.tracer, headers)
        try:
            if keys is not None:
                call.key = _key(keys, headers)
            if is_limited:
                served.quotas.enter(call.key)
                is_counted = True
            await self._app(scope, receive, send_noted)
        except Exception as error:
            if call.status:  # the response has begun
                raise
            await error_response(client_error(error))(scope, receive, send_noted)
        finally:
            CURRENT.reset(token)
            leave_quotas()
            served.figures.on_end(call)
            log_call(call)
            end_span(call)

    def _new_call(self, request_id: str, scope: Scope, headers: Headers) -> Call:
        path: str = scope["path"]
        return Call(
            request_id,
            path,
            method=scope["method"],
            on_gap=self._served.figures.on_gap,
            anthropic=path.startswith(MODELS_PATH) and ANTHROPIC_VERSION in headers,
        )


def _request_id(headers: Headers) -> str:
    """Return the id that the client has chosen, if it can be used, or a new one."""
    chosen = headers.get("x-request-id", "")
    return chosen if _USABLE_ID.fullmatch(chosen) else secrets.token_hex(16)


def _id_headers(request_id: str, path: str) -> list[tuple[bytes, bytes]]:
    """Return the headers that have a request's id, by the names of OpenAI's API and Anthropic's."""
    headers = [(b"x-request-id", request_id.encode())]
    if path.startswith(MESSAGES_PATH):
        headers.append((b"request-id", request_id.encode()))
    return headers


def _key(keys: Keys, headers: Headers) -> Key:
    """Return the key of a request, by the header of OpenAI, Anthropic or Azure, or raise 401."""
    scheme, _, presented = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        presented = presented.strip()
    else:
        presented = headers.get("x-api-key") or headers.get("api-key", "")
    key = keys.find(presented) if presented else None
    if key is not None:
        return key
    raise ApiError(
        401,
        "Incorrect API key provided" if presented else _NO_KEY,
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def log_call(call: Call) -> None:
    """Log a line for a request, without anything of its text; for a refused one also the reason."""
    is_quiet = call.path in _QUIET_PATHS or call.batch
    parts = [
        call.id,
        shown(quote(call.path)),
        str(call.status),
        f"key={call.key.name or '-'}",
        f"model={call.model or '-'}",
        f"tokens={call.input_tokens}+{call.output_tokens}",
        f"{call.seconds() * 1000:.0f} ms",
    ]
    # The reason begins with the code that the client reads, which may be the same.
    if call.error and not call.reason.startswith(f"code={call.error} "):
        parts.append(call.error)
    if call.reason:
        parts.append(shown(call.method))
        parts.append(call.reason)
    logger.log(logging.DEBUG if is_quiet else logging.INFO, "%s", " ".join(parts))
