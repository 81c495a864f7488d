"""The middleware around all routes: ids of requests, API keys, quotas, and a line of the log for each."""

import logging
import re
import secrets
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cog_triton.api.openai import pages
from cog_triton.api.openai.errors import MESSAGES_PATH, ApiError
from cog_triton.api.openai.keys import Key, Keys
from cog_triton.api.openai.protocol.error_response import client_error, error_response
from cog_triton.api.openai.routes.operation import HEALTH_PATHS, LOADS, METRICS
from cog_triton.api.openai.served import BATCH_CALL, CURRENT, Call, Served, begin_span
from cog_triton.errors import shown

logger = logging.getLogger("cog_triton.api.openai.operation")  # as docs/openai.md shows its lines
MODELS_PATH = "/v1/models"
ANTHROPIC_VERSION = "anthropic-version"  # the header by which Anthropic's clients are known
_USABLE_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)
# Pages of this package, which have no content of the model's. They ask for a key themselves.
_PAGES = frozenset({"/", pages.FORMULAS_PATH, pages.DOCS_PATH, pages.SCRIPT_PATH, pages.STYLE_PATH})
# Paths that need no key: the pages, and what orchestrators ask.
OPEN = _PAGES | HEALTH_PATHS
_QUIET = OPEN | {METRICS, LOADS}  # asked every few seconds; logged for debugging only
_NO_KEY = "You did not provide an API key: send it in the header Authorization, as Bearer YOUR_KEY"


class Calls:
    """Give each request an id and a ``Call``, let in those with a key, and report each at its end."""

    def __init__(self, app: ASGIApp, served: Served) -> None:
        self._app, self._served, self._quotas = app, served, served.quotas
        self._open = OPEN | {METRICS} if served.settings.open_metrics else OPEN

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, served = Headers(scope=scope), self._served
        given = headers.get("x-request-id", "")
        name = given if _USABLE_ID.fullmatch(given) else secrets.token_hex(16)
        batched: Call | None = scope.get(BATCH_CALL)  # its key and quotas are the batch's
        limited = scope["method"] == "POST" and scope["path"] not in self._open and not batched
        if scope["method"] == "HEAD":  # uvicorn, which has the scope itself, sends no body
            scope = {**scope, "method": "GET"}
        call = batched or Call(name, scope["path"], gap=served.figures.gap, method=scope["method"])
        call.anthropic = call.path.startswith(MODELS_PATH) and ANTHROPIC_VERSION in headers

        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                call.status = message["status"]
                headers = [*message["headers"], (b"x-request-id", name.encode())]
                if call.path.startswith(MESSAGES_PATH):
                    headers.append((b"request-id", name.encode()))  # Anthropic's
                if limited:
                    headers += self._quotas.headers(call.key)
                message["headers"] = headers
            await send(message)

        token, entered = CURRENT.set(call), False
        end_span = begin_span(served.tracer, headers)
        try:
            if served.keys is not None and call.path not in self._open and not batched:
                call.key = _key(served.keys, headers)
            if limited:
                self._quotas.enter(call.key)
                entered = True
            await self._app(scope, receive, send_noted)
        except Exception as error:
            if call.status:  # the response has begun
                raise
            await error_response(client_error(error))(scope, receive, send_noted)
        finally:
            CURRENT.reset(token)
            if entered:
                self._quotas.leave(call.key, call.input_tokens + call.output_tokens)
            served.figures.ended(call)
            log_call(call)
            end_span(call)


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


def log_call(call: Call) -> None:
    """Log a line for a request, without anything of its text; of one that was refused, the reason."""
    level = logging.DEBUG if call.path in _QUIET or call.batch else logging.INFO
    tokens = f"{call.input_tokens}+{call.output_tokens}"
    names = f"key={call.key.name or '-'} model={call.model or '-'} tokens={tokens}"
    took = f"{call.seconds() * 1000:.0f} ms"
    parts = [call.id, shown(quote(call.path)), str(call.status), names, took]
    # The reason begins with the code that the client reads, which may be the same.
    if call.error and not call.reason.startswith(f"code={call.error} "):
        parts.append(call.error)
    if call.reason:
        parts += [shown(call.method), call.reason]
    logger.log(level, "%s", " ".join(parts))
