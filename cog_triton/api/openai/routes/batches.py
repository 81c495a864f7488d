"""The routes of /v1/batches; ``batch_runner.py`` runs the batches."""

import time
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from starlette.responses import Response

from cog_triton.api.openai.body_route import BodyRoute
from cog_triton.api.openai.call import current
from cog_triton.api.openai.errors import ApiError, invalid, no_embeddings
from cog_triton.api.openai.paging import PageQuery, page_response, unknown_cursor
from cog_triton.api.openai.protocol.events import new_id
from cog_triton.api.openai.routes.files import FromStorage, found_file
from cog_triton.api.openai.schemas.files_and_batches import BatchBody
from cog_triton.api.openai.served import FromApp
from cog_triton.api.openai.storable import no_room
from cog_triton.api.openai.storage.batches import (
    WINDOW_SECONDS,
    BatchObject,
    BatchStore,
    OutputExpiry,
    StoredBatch,
)
from cog_triton.api.openai.storage.limits import NoRoom
from cog_triton.errors import shown

router = APIRouter(route_class=BodyRoute)
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
DEFAULT_BATCHES = 20  # batches in a page
MAX_BATCHES = 100


@router.post("/v1/batches")
async def create_batch(body: BatchBody, storage: FromStorage, served: FromApp) -> dict[str, Any]:
    """Runs the requests of a file, each to the same endpoint."""
    if body.endpoint == "/v1/embeddings":
        raise no_embeddings()
    if body.endpoint not in ENDPOINTS:
        raise invalid(f"endpoint must be {' or '.join(ENDPOINTS)}", "endpoint", "invalid_value")
    await found_file(storage.files, body.input_file_id)
    now = int(time.time())
    expiry = None
    if body.output_expires_after is not None:
        expiry = OutputExpiry(
            anchor=body.output_expires_after.anchor, seconds=body.output_expires_after.seconds
        )
    batch = BatchObject(
        id=new_id("batch_"),
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        completion_window=body.completion_window,
        created_at=now,
        expires_at=now + WINDOW_SECONDS,
        metadata=body.metadata,
        output_expires_after=expiry,
    )
    try:
        await storage.batches.create(batch, current().key.name, served.models[0])
    except NoRoom:
        raise no_room(storage.journal.limits) from None
    return batch_view(await found_batch(storage.batches, batch.id))


@router.get("/v1/batches")
async def list_batches(request: HttpRequest, storage: FromStorage) -> Response:
    """Those of the key, newest first."""
    page = PageQuery.read(request.query_params, default=DEFAULT_BATCHES, maximum=MAX_BATCHES)
    owner = current().key.name
    if page.after is not None and await storage.batches.find(owner, page.after) is None:
        raise unknown_cursor(page.after)
    rows = await storage.batches.page(
        owner, limit=page.limit + 1, after=page.after, oldest_first=page.oldest_first
    )
    return await page_response(rows, page.limit, batch_view)


@router.get("/v1/batches/{name}")
async def retrieve_batch(name: str, storage: FromStorage) -> dict[str, Any]:
    """One of them."""
    return batch_view(await found_batch(storage.batches, name))


@router.post("/v1/batches/{name}/cancel")
async def cancel_batch(name: str, storage: FromStorage) -> dict[str, Any]:
    """Ends it; the answers that are there stay."""
    await found_batch(storage.batches, name)
    was_running = await storage.batches.change_status(
        name, "cancelling", was=("validating", "in_progress")
    )
    batch = batch_view(await found_batch(storage.batches, name))
    if not was_running and batch["status"] not in ("cancelling", "cancelled"):
        raise ApiError(409, f"Cannot cancel a batch with status '{batch['status']}'.")
    return batch


async def found_batch(batches: BatchStore, id: str) -> StoredBatch:
    """Return a batch of the key that asks, or raise 404."""
    batch = await batches.find(current().key.name, id)
    if batch is None:
        raise ApiError(404, f"No batch found with id '{shown(id)}'.", param="id")
    return batch


def batch_view(batch: StoredBatch) -> dict[str, Any]:
    """Return a batch as a client reads it."""
    return {
        **batch.parsed().model_dump(),
        "request_counts": {
            "total": batch.total,
            "completed": batch.completed,
            "failed": batch.failed,
        },
        "usage": {
            "input_tokens": batch.input_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": batch.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": batch.input_tokens + batch.output_tokens,
        },
    }
