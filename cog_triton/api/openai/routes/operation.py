"""Health, metrics and the version: what orchestrators, routers and Prometheus ask."""

from datetime import datetime, timezone
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.responses import Response

import cog_triton
from cog_triton.api.openai.errors import no_embeddings
from cog_triton.api.openai.served import FromApp

router = APIRouter()
METRICS = "/metrics"
LOADS = "/v1/loads"
HEALTH_PATHS = frozenset({"/ping", "/health", "/health/live", "/health/ready"})


@router.post("/v1/embeddings")
async def embeddings(_: Request) -> None:
    """Refused: engines of generative models give no embeddings."""
    raise no_embeddings()


@router.get(METRICS, include_in_schema=False)
def metrics(served: FromApp) -> Response:
    """All figures."""
    # FastAPI calls this in a thread, since it is no coroutine: it reads files.
    return Response(served.figures.text(), media_type=CONTENT_TYPE_LATEST)


@router.get(LOADS)
def loads(served: FromApp) -> dict[str, Any]:
    """Requests that run and that wait, by SGLang's names; of the KV cache this server knows nothing."""
    load = served.figures.load()
    rank = {
        "dp_rank": 0,
        "num_running_reqs": load.running,
        "num_waiting_reqs": load.waiting,
        "num_total_reqs": load.running + load.waiting,
        "max_running_requests": served.max_running,
        "utilization": load.running / served.max_running,
    }
    now = datetime.now(timezone.utc).isoformat()
    return {"timestamp": now, "dp_rank_count": 1, "loads": [rank]}


@router.get("/server_info")
@router.get("/get_server_info")
async def server_info(served: FromApp) -> dict[str, Any]:
    """The model and the bounds of this server, by SGLang's names."""
    return {
        "served_model_name": served.models[0],
        "context_length": served.backend.context_length,
        "max_running_requests": served.max_running,
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
    problem = served.problem()
    if problem is not None:
        return JSONResponse({"status": "unavailable", "detail": problem}, 503)
    return JSONResponse({"status": "ready"})


@router.get("/version")
async def version() -> dict[str, str]:
    """The version of this package."""
    return {"version": cog_triton.__version__}
