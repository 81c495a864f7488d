"""The application: its routes and its middleware."""

from fastapi import FastAPI, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

import cog_triton
from cog_triton.api.openai import pages
from cog_triton.api.openai.background import BackgroundResponses
from cog_triton.api.openai.errors import HANDLED
from cog_triton.api.openai.middleware import CallMiddleware, log_call
from cog_triton.api.openai.protocol.error_response import client_error, error_response
from cog_triton.api.openai.protocol.openapi import ERRORS, MESSAGE_ERRORS
from cog_triton.api.openai.routes import (
    batches,
    chat,
    completions,
    files,
    messages,
    models,
    operation,
    responses,
    tokens,
)
from cog_triton.api.openai.served import Served
from cog_triton.api.openai.storage.limits import Share, StorageLimits
from cog_triton.api.openai.storage.storage import Storage
from cog_triton.errors import shown
from cog_triton.web.origin import cors_options, origins_of

# Routes whose errors have the form of OpenAI's.
OPENAI_ROUTERS = (
    chat.router,
    completions.router,
    tokens.router,
    responses.router,
    files.router,
    batches.router,
    models.router,
    operation.router,
)


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
    app.state.served = served
    app.state.background = None
    if settings.store_file is not None:
        limits = StorageLimits(
            max_bytes=settings.store_max_bytes,
            days=settings.store_days,
            share=share_of_a_key(served),
        )
        served.storage = Storage.at(settings.store_file, limits)
        app.state.background = BackgroundResponses(served, served.storage, log_call)
    for router in OPENAI_ROUTERS:
        app.include_router(router, responses=ERRORS)
    app.include_router(messages.router, responses=MESSAGE_ERRORS)
    if served.settings.chat_page:
        pages.add_chat(app)
    pages.add_docs(app)
    app.add_middleware(CallMiddleware, served=served)
    origins = origins_of(settings.allowed_origins)
    if origins:
        app.add_middleware(CORSMiddleware, **cors_options(origins))
    for kind in HANDLED:
        app.add_exception_handler(kind, _answer_error)
    return app


def share_of_a_key(served: Served) -> Share | None:
    """Return what one API key may have in the journal, if there may be several."""
    settings = served.settings
    if served.keys is None or not served.keys.several:
        return None
    share_bytes = int(settings.store_key_part * settings.store_max_bytes)
    return Share(bytes=share_bytes, rows=settings.store_key_rows)


async def _answer_error(request: Request, error: Exception) -> Response:
    route = f"{request.method} {shown(request.url.path)}"
    return error_response(client_error(error, route))
