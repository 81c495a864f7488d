"""The application: OpenAI's routes, and errors in the form of its API."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

import cog_triton
from cog_triton.errors import CogTritonError, shown
from cog_triton.faces.openai import chat, completions, messages, metrics, responses, routes, tokens
from cog_triton.faces.openai.answers import ErrorResponse, client_error
from cog_triton.faces.openai.bodies import ERRORS, MESSAGE_ERRORS
from cog_triton.faces.openai.errors import ApiError
from cog_triton.faces.openai.operation import add_operation, id_headers
from cog_triton.faces.openai.served import Served

ROUTED = (chat, completions, responses, routes, tokens, metrics)
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
    for module in ROUTED:
        app.include_router(module.router, responses=ERRORS)
    app.include_router(messages.router, responses=MESSAGE_ERRORS)
    if served.settings.chat_page:
        app.include_router(routes.page_router)
    add_operation(app, served)
    app.add_exception_handler(HTTPException, _answer_bad_path)
    for kind in (ApiError, CogTritonError):
        app.add_exception_handler(kind, _answer_error)
    app.add_exception_handler(Exception, _answer_fault)
    return app


async def _answer_error(_: Request, error: Exception) -> Response:
    return ErrorResponse(client_error(error))


async def _answer_fault(request: Request, error: Exception) -> Response:
    fault = client_error(error)
    fault.headers.update(id_headers(request.scope))  # this goes past the middleware
    return ErrorResponse(fault)


async def _answer_bad_path(request: Request, error: Any) -> Response:
    where = f"{request.method} {shown(request.url.path)}"
    text = f"Invalid URL ({where})" if error.status_code == 404 else f"{error.detail} ({where})"
    code, headers = _PATH_CODES.get(error.status_code), dict(error.headers or {})
    return ErrorResponse(ApiError(error.status_code, text, code=code, headers=headers))
