"""The application: its routes, its middleware, and answers that need no engine."""

import logging
import re
import secrets
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import cog_triton
from cog_triton.api.openai import batches, completions, messages, pages, store
from cog_triton.api.openai.errors import MESSAGES_PATH, ApiError, invalid, no_embeddings
from cog_triton.api.openai.exchange import ERRORS, MESSAGE_ERRORS, client_error, error_response
from cog_triton.api.openai.journal import Journal, Share
from cog_triton.api.openai.keys import Key, Keys
from cog_triton.api.openai.paging import page_limit
from cog_triton.api.openai.served import (
    BATCH_CALL,
    CURRENT,
    Call,
    FromApp,
    Served,
    begin_span,
    current,
)
from cog_triton.deployment.announcement import is_demo_model
from cog_triton.errors import CogTritonError, shown
from cog_triton.web.origin import cors_options, origins_of

router = APIRouter()
logger = logging.getLogger("cog_triton.api.openai.operation")  # as docs/openai.md shows its lines
_USABLE_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)
# Pages of this package, which have no content of the model's. They ask for a key themselves.
_PAGES = frozenset({"/", pages.FORMULAS_PATH, pages.DOCS_PATH, pages.SCRIPT_PATH, pages.STYLE_PATH})
# Paths that need no key: the pages, and what orchestrators ask.
OPEN = _PAGES | {"/ping", "/health", "/health/live", "/health/ready"}
MODELS_PATH, ANTHROPIC_VERSION = "/v1/models", "anthropic-version"
MOST_MODELS = 1000  # in a page of Anthropic's form
METRICS, LOADS = "/metrics", "/v1/loads"
_QUIET = OPEN | {METRICS, LOADS}  # asked every few seconds; logged for debugging only
_NO_KEY = "You did not provide an API key: send it in the header Authorization, as Bearer YOUR_KEY"
# OpenAI's, of requests that reach no route.
_PATH_CODES = {404: "unknown_url", 405: "method_not_supported"}


def create_app(served: Served) -> FastAPI:
    """Return the application; it starts and stops nothing."""
    app = FastAPI(
        title="cog-triton",
        version=cog_triton.__version__,
        docs_url=None,  # FastAPI's pages load their scripts from elsewhere: see pages.py
        redoc_url=None,
        redirect_slashes=False,  # it would name an address that clients behind a proxy cannot reach
    )
    settings = served.settings
    if (file := settings.store_file) is not None:
        served.journal = Journal(
            file,
            [store.SQL, batches.SQL],
            settings.store_max_bytes,
            settings.store_days,
            share_of_a_key(served),
        )
    app.state.served, app.state.store = served, store.Store(served, log_call)
    for own in (completions.router, store.router, batches.router, router):
        app.include_router(own, responses=ERRORS)
    app.include_router(messages.router, responses=MESSAGE_ERRORS)
    if served.settings.chat_page:
        pages.add_chat(app)
    pages.add_docs(app)
    app.add_middleware(Calls, served=served)
    origins = origins_of(settings.allowed_origins)
    if origins:
        app.add_middleware(CORSMiddleware, **cors_options(origins))
    for kind in (HTTPException, RequestValidationError, ApiError, CogTritonError):
        app.add_exception_handler(kind, _answer_error)
    return app


def share_of_a_key(served: Served) -> Share | None:
    """Return what one API key may have in the journal, if there may be several."""
    settings = served.settings
    if served.keys is None or not served.keys.several:
        return None
    most = int(settings.store_key_part * settings.store_max_bytes)
    return Share(bytes=most, rows=settings.store_key_rows)


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        where = f"{request.method} {shown(request.url.path)}"
        text = f"Invalid URL ({where})" if error.status_code == 404 else f"{error.detail} ({where})"
        code, headers = _PATH_CODES.get(error.status_code), dict(error.headers or {})
        error = ApiError(error.status_code, text, code=code, headers=headers)
    elif isinstance(error, RequestValidationError):
        error = _invalid_parameter(error)
    return error_response(client_error(error))


def _invalid_parameter(error: RequestValidationError) -> ApiError:
    """Return FastAPI's own refusal, of a parameter of the path or the query."""
    problem = error.errors()[0]
    name = str(problem["loc"][-1])
    return invalid(f"{shown(name)}: {problem['msg']}", name, "invalid_value")


@router.get("/v1/models")
async def models(request: Request, served: FromApp) -> dict[str, Any]:
    """The names of the model, and those of its LoRA adapters; in Anthropic's form for its clients."""
    if current().anthropic:
        return _anthropic_page(served, request.query_params)
    return {"object": "list", "data": [_card(served, name) for name in served.names]}


@router.get("/v1/models/{name:path}")
async def model(name: str, served: FromApp) -> dict[str, Any]:
    """One of them."""
    served.adapter(name)
    return _anthropic_card(served, name) if current().anthropic else _card(served, name)


def _anthropic_page(served: Served, query: Mapping[str, str]) -> dict[str, Any]:
    """Return the models that a query asks for, in Anthropic's form, or raise ApiError."""
    limit = page_limit(query, MOST_MODELS, MOST_MODELS)
    names = served.names
    for cursor in ("after_id", "before_id"):
        if query.get(cursor, names[0]) not in names:
            raise invalid(f"{cursor}: the model {shown(query[cursor])} does not exist", cursor)
    first = names.index(query["after_id"]) + 1 if "after_id" in query else 0
    end = names.index(query["before_id"]) if "before_id" in query else len(names)
    there = names[first:end]
    goes_back = "before_id" in query and "after_id" not in query
    page = there[-limit:] if goes_back else there[:limit]
    return {
        "data": [_anthropic_card(served, name) for name in page],
        "has_more": len(page) < len(there),
        "first_id": page[0] if page else None,
        "last_id": page[-1] if page else None,
    }


def _anthropic_card(served: Served, name: str) -> dict[str, Any]:
    created = datetime.fromtimestamp(served.created, timezone.utc)
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def _card(served: Served, name: str) -> dict[str, Any]:
    own = name in served.models
    card = {
        "id": name,
        "object": "model",
        "created": served.created,
        "owned_by": "cog-triton",
        "root": served.models[0] if own else name,
        "parent": None if own else served.models[0],
        "max_model_len": served.backend.context_length,
    }
    if is_demo_model(Path(served.settings.tokenizer_dir)):
        card["toy"] = True  # for the chat page
    return card


@router.post("/v1/embeddings")
async def embeddings(_: Request) -> None:
    """Refused: engines of generative models give no embeddings."""
    raise no_embeddings()


@router.get(METRICS, include_in_schema=False)
def metrics(served: FromApp) -> Response:  # in a thread: it reads files
    """All figures."""
    return Response(served.figures.text(), media_type=CONTENT_TYPE_LATEST)


@router.get(LOADS)
def loads(served: FromApp) -> dict[str, Any]:
    """Requests that run and that wait, by SGLang's names; of the KV cache this server knows nothing."""
    running, waiting = served.figures.requests()
    load = {
        "dp_rank": 0,
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_total_reqs": running + waiting,
        "max_running_requests": served.most_running,
        "utilization": running / served.most_running,
    }
    now = datetime.now(timezone.utc).isoformat()
    return {"timestamp": now, "dp_rank_count": 1, "loads": [load]}


@router.get("/server_info")
@router.get("/get_server_info")
async def server_info(served: FromApp) -> dict[str, Any]:
    """The model and the bounds of this server, by SGLang's names."""
    return {
        "served_model_name": served.models[0],
        "context_length": served.backend.context_length,
        "max_running_requests": served.most_running,
        "version": cog_triton.__version__,
    }


@router.get("/health/live")
async def live() -> dict[str, Any]:
    """The process runs."""
    return {"status": "live"}


@router.get("/health/ready")
@router.get("/health")
@router.get("/ping")
async def ready(served: FromApp) -> JSONResponse:
    """Requests may be sent here, or 503."""
    if served.draining:
        return JSONResponse({"status": "draining", "detail": "the server is stopping"}, 503)
    if not await served.backend.healthy():
        return JSONResponse({"status": "unavailable", "detail": "Triton is not responding"}, 503)
    if served.journal and (problem := served.journal.problem()):
        return JSONResponse({"status": "unavailable", "detail": problem}, 503)
    return JSONResponse({"status": "ready"})


@router.get("/version")
async def version() -> dict[str, str]:
    """The version of this package."""
    return {"version": cog_triton.__version__}


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
