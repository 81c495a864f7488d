"""The routes that answer without an engine: models, health, the version, and the chat page."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse

import cog_triton
from cog_triton.faces.openai.errors import ApiError
from cog_triton.faces.openai.served import FromApp, Served

router = APIRouter()
page_router = APIRouter()


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


PAGE = Path(__file__).with_name("page.html").read_text(encoding="utf-8")


def policy(page: str) -> str:
    """Return the policy that lets a page run its own script and style, and ask its own server."""
    rules = []
    for tag in ("script", "style"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        rules.append(f"{tag}-src 'sha256-{digest}'")
    # No text becomes HTML: what could make it so is refused.
    trusted = "require-trusted-types-for 'script'; trusted-types 'none'"
    others = "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    return f"default-src 'none'; {'; '.join(rules)}; connect-src 'self'; img-src data:; {others}; {trusted}"


HEADERS = {
    "Content-Security-Policy": policy(PAGE),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@page_router.get("/", include_in_schema=False)
async def chat_page() -> HTMLResponse:
    return HTMLResponse(PAGE, headers=HEADERS)
