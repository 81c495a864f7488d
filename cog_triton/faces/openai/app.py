"""The application: OpenAI's routes, and errors in the form of its API."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

import cog_triton
from cog_triton.errors import CogTritonError, shown
from cog_triton.faces.openai import chat, completions, metrics, models, page, tokens
from cog_triton.faces.openai.answers import ErrorResponse, told
from cog_triton.faces.openai.errors import ApiError
from cog_triton.faces.openai.messages import route as messages
from cog_triton.faces.openai.openapi import ERRORS, MESSAGE_ERRORS
from cog_triton.faces.openai.operation import add_operation, id_headers
from cog_triton.faces.openai.responses import route as responses
from cog_triton.faces.openai.served import Served

ROUTERS = (
    chat.router,
    completions.router,
    responses.router,
    messages.router,
    models.router,
    tokens.router,
    metrics.router,
)


def create_app(served: Served) -> FastAPI:
    """Return the application; it starts and stops nothing."""
    app = FastAPI(
        title="cog-triton",
        version=cog_triton.__version__,
        redoc_url=None,
        redirect_slashes=False,  # it would name an address that clients behind a proxy cannot reach
    )
    app.state.served = served
    for router in ROUTERS:
        of_messages = router is messages.router
        app.include_router(router, responses=MESSAGE_ERRORS if of_messages else ERRORS)
    if served.settings.chat_page:
        app.include_router(page.router)
    add_operation(app, served)
    app.add_exception_handler(HTTPException, _answer_bad_path)
    for kind in (ApiError, CogTritonError):
        app.add_exception_handler(kind, _answer_error)
    app.add_exception_handler(Exception, _answer_fault)
    return app


# OpenAI's, of requests that reach no route.
_PATH_CODES = {404: "unknown_url", 405: "method_not_supported"}


async def _answer_error(_: Request, error: Exception) -> Response:
    return ErrorResponse(told(error))


async def _answer_fault(request: Request, error: Exception) -> Response:
    """The answer to what nobody foresaw, which goes past the middleware that says the request's id."""
    fault = told(error)
    fault.headers.update(id_headers(request.scope))
    return ErrorResponse(fault)


async def _answer_bad_path(request: Request, error: Any) -> Response:
    where = f"{request.method} {shown(request.url.path)}"
    code = _PATH_CODES.get(error.status_code)
    text = f"Invalid URL ({where})" if error.status_code == 404 else f"{error.detail} ({where})"
    return ErrorResponse(
        ApiError(error.status_code, text, code=code, headers=dict(error.headers or {}))
    )
