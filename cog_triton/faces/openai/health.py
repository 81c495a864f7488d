"""The routes of health, and the version."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse

import cog_triton
from cog_triton.faces.openai.dependencies import FromApp

router = APIRouter()


@router.get("/health/live")
async def live() -> dict[str, Any]:
    """Whether this process is of use, now or later."""
    return {"status": "live"}


@router.get("/health/ready")
@router.get("/health")
@router.get("/ping")
async def ready(served: FromApp) -> JSONResponse:
    """Whether requests may be sent here."""
    if served.draining:
        return JSONResponse({"status": "draining", "detail": "the server is stopping"}, 503)
    if not await served.backend.healthy():
        return JSONResponse({"status": "unavailable", "detail": "Triton does not answer"}, 503)
    return JSONResponse({"status": "ready"})


@router.get("/version")
async def version() -> dict[str, str]:
    """Of this package."""
    return {"version": cog_triton.__version__}
