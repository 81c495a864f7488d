"""Routes of the models, of health, and of the version."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

import cog_triton
from cog_triton.faces.openai.errors import ApiError
from cog_triton.faces.openai.served import FromApp, Served

router = APIRouter()


@router.get("/v1/models")
async def models(served: FromApp) -> dict[str, Any]:
    """The names of the model, and those of its LoRA adapters."""
    names = (*served.models, *served.adapters)
    return {"object": "list", "data": [_card(served, name) for name in names]}


@router.get("/v1/models/{name:path}")
async def model(name: str, served: FromApp) -> dict[str, Any]:
    """One of them."""
    served.adapter(name)
    return _card(served, name)


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
