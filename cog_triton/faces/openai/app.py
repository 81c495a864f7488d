"""The application: its routes, errors in the form of OpenAI's API, and answers without an engine."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.exceptions import HTTPException
from starlette.responses import Response

import cog_triton
from cog_triton.errors import CogTritonError, shown
from cog_triton.faces.openai import completions, messages, metrics, responses, tokens
from cog_triton.faces.openai.answers import ErrorResponse, client_error
from cog_triton.faces.openai.bodies import ERRORS, MESSAGE_ERRORS
from cog_triton.faces.openai.errors import ApiError
from cog_triton.faces.openai.operation import add_operation
from cog_triton.faces.openai.served import FromApp, Served

router, page_router = APIRouter(), APIRouter()
# OpenAI's, of requests that reach no route.
_PATH_CODES = {404: "unknown_url", 405: "method_not_supported"}


def create_app(served: Served) -> FastAPI:
    """Return the application; it starts and stops nothing."""
    app = FastAPI(
        title="cog-triton",
        version=cog_triton.__version__,
        redoc_url=None,
        redirect_slashes=False,  # it would name an address that clients behind a proxy cannot reach
    )
    app.state.served = served
    for module in (completions, responses, tokens, metrics):
        app.include_router(module.router, responses=ERRORS)
    app.include_router(router, responses=ERRORS)
    app.include_router(messages.router, responses=MESSAGE_ERRORS)
    if served.settings.chat_page:
        app.include_router(page_router)
    add_operation(app, served)
    for kind in (HTTPException, ApiError, CogTritonError):
        app.add_exception_handler(kind, _answer_error)
    return app


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        where = f"{request.method} {shown(request.url.path)}"
        text = f"Invalid URL ({where})" if error.status_code == 404 else f"{error.detail} ({where})"
        code, headers = _PATH_CODES.get(error.status_code), dict(error.headers or {})
        error = ApiError(error.status_code, text, code=code, headers=headers)
    return ErrorResponse(client_error(error))


@router.get("/v1/models")
async def models(served: FromApp) -> dict[str, Any]:
    """The names of the model, and those of its LoRA adapters."""
    return {"object": "list", "data": [_card(served, name) for name in served.names]}


@router.get("/v1/models/{name:path}")
async def model(name: str, served: FromApp) -> dict[str, Any]:
    """One of them."""
    served.adapter(name)
    return _card(served, name)


def _card(served: Served, name: str) -> dict[str, Any]:
    own = name in served.models
    return {
        "id": name,
        "object": "model",
        "created": served.created,
        "owned_by": "cog-triton",
        "root": served.models[0] if own else name,
        "parent": None if own else served.models[0],
        "max_model_len": served.backend.context_length,
    }


@router.post("/v1/embeddings")
async def embeddings(_: Request) -> None:
    """Refused: engines of generative models give no embeddings."""
    text = "embeddings are not served: the models here generate text, and engines give no vectors"
    raise ApiError(404, text, code="unknown_url")  # clients would send a 501 again


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
        return JSONResponse({"status": "unavailable", "detail": "Triton does not answer"}, 503)
    return JSONResponse({"status": "ready"})


@router.get("/version")
async def version() -> dict[str, str]:
    """The version of this package."""
    return {"version": cog_triton.__version__}


def page_policy(page: str) -> str:
    """Return the policy that lets a page run its own script and style, and ask its own server."""
    rules = ["default-src 'none'", "connect-src 'self'", "img-src data:"]
    for tag in ("script", "style"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        rules.append(f"{tag}-src 'sha256-{digest}'")
    rules += ["base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"]
    # No text becomes HTML: what could make it so is refused.
    return "; ".join([*rules, "require-trusted-types-for 'script'", "trusted-types 'none'"])


PAGE = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
PAGE_HEADERS = {
    "Content-Security-Policy": page_policy(PAGE),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@page_router.get("/", include_in_schema=False)
async def chat_page() -> HTMLResponse:
    return HTMLResponse(PAGE, headers=PAGE_HEADERS)
