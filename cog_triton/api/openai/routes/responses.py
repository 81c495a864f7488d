"""The routes of /v1/responses: responses that are kept, continued from, and run in the background."""

import asyncio
import json
import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from fastapi import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse

from cog_triton.api.openai.background import REQUEST, BackgroundResponses
from cog_triton.api.openai.body_route import LARGE_BODY, BodyRoute, off_loop
from cog_triton.api.openai.call import current
from cog_triton.api.openai.chats import from_responses
from cog_triton.api.openai.chats.turn import Turn, chat_turn
from cog_triton.api.openai.errors import ApiError, invalid
from cog_triton.api.openai.paging import PageQuery, unknown_cursor
from cog_triton.api.openai.protocol import events
from cog_triton.api.openai.protocol.answering import Answering
from cog_triton.api.openai.protocol.events import dumps
from cog_triton.api.openai.protocol.openapi import STREAMED
from cog_triton.api.openai.protocol.responses import ResponseWriter, input_items, response_fields
from cog_triton.api.openai.schemas.responses import ITEMS, ResponsesBody
from cog_triton.api.openai.served import FromApp, Served
from cog_triton.api.openai.storable import no_room, stored
from cog_triton.api.openai.storage.limits import NoRoom
from cog_triton.api.openai.storage.responses import (
    NewResponse,
    StoredResponse,
    TooManyInBackground,
)
from cog_triton.api.openai.storage.schema import RESPONSE_ROW_BYTES
from cog_triton.api.openai.storage.storage import Storage
from cog_triton.errors import JournalUnavailable, shown
from cog_triton.request.request import Request

logger = logging.getLogger(__name__)
router = APIRouter(route_class=BodyRoute)
DEFAULT_ITEMS = 20  # items in a page
MAX_ITEMS = 100


async def _background_of(request: HttpRequest) -> Any:
    return request.app.state.background


BackgroundFromApp = Annotated[BackgroundResponses | None, Depends(_background_of)]


@router.post("/v1/responses", responses=STREAMED)
async def create(body: ResponsesBody, served: FromApp, background: BackgroundFromApp) -> Response:
    """An answer, kept unless ``store`` is false; of one in the background, its beginning."""
    storage = served.storage if body.store is not False else None
    if body.background and storage is None:
        raise invalid(
            "background requires store: it cannot be combined with store=false or STORE=0",
            "background",
        )
    body = await with_earlier(served, body)

    prepared = await off_loop(partial(prepare, body, served, is_kept=storage is not None))
    turn = prepared.turn
    response = prepared.response
    items = prepared.items
    if body.background and storage is not None and background is not None:
        with served.answering():
            await add_to_background(served, storage, body, response, turn.request, items)
        background.wake.set()
        if body.stream:
            return _streamed(background, response["id"], warning=body.warning())
        return JSONResponse(response, headers=body.warning())
    ended = None
    if storage is not None:
        if body.store:
            await check_room(storage, items)
        ended = partial(keep, served, storage, body, response, items)
    writer = ResponseWriter(response, turn.parser(), served.backend.tokenizer)
    return Answering(served, body, writer, [turn.request], ended=ended)


@router.get("/v1/responses/{id}", responses=STREAMED)
async def retrieve(
    id: str, served: FromApp, background: BackgroundFromApp, request: HttpRequest
) -> Response:
    """A response; of one in the background the events, behind ``starting_after`` or ``Last-Event-ID``."""
    row = await found(served, id)
    last_event_id = request.headers.get("last-event-id")
    if last_event_id is None and request.query_params.get("stream") != "true":
        return await _response_of(row)
    if background is None or not row.is_background:
        raise invalid("only background responses can be streamed again", "stream")
    after = request.query_params.get("starting_after", last_event_id) or "-1"
    if not re.fullmatch(r"-1|[0-9]{1,9}", after):
        raise invalid("starting_after must be the number of an event", "starting_after")
    return _streamed(background, id, after=int(after))


@router.delete("/v1/responses/{id}")
async def delete(id: str, served: FromApp) -> dict[str, Any]:
    """Deletes a response; one that runs ends soon."""
    row = await found(served, id)
    if served.storage is not None:
        await served.storage.responses.delete(row.id)
    return {"id": id, "object": "response", "deleted": True}


@router.post("/v1/responses/{id}/cancel")
async def cancel(id: str, served: FromApp, background: BackgroundFromApp) -> Response:
    """Ends a background response; one that has ended stays as it is."""
    row = await found(served, id)
    if background is None or not row.is_background:
        raise invalid("Cannot cancel a synchronous response.")
    if not row.has_ended:
        await background.cancel(id)
    return await _response_of(await found(served, id))


@router.get("/v1/responses/{id}/input_items")
async def list_input(id: str, served: FromApp, request: HttpRequest) -> Response:
    """The items of its input, those of the responses before among them; ``limit`` is of a page."""
    query = PageQuery.read(request.query_params, default=DEFAULT_ITEMS, maximum=MAX_ITEMS)
    row = await found(served, id)
    content = await asyncio.to_thread(_page_of_items, row.input, query)
    return Response(content, media_type="application/json")


@dataclass(frozen=True)
class Prepared:
    """What a body asks for, before the answer is made.

    Attributes:
        response: the fields of the response as they are at first.
        items: JSON of the input as it is kept.
    """

    turn: Turn
    response: dict[str, Any]
    items: bytes


def prepare(body: ResponsesBody, served: Served, *, is_kept: bool) -> Prepared:
    """Return what a body asks for, or raise ApiError.

    The input is encoded now: if it could not be stored, the answer would be lost.
    """
    turn = chat_turn(from_responses.chat_body(body), served, from_responses.tool_places(body))
    response = response_fields(body, turn.request, int(time.time()))
    response["store"] = is_kept
    items = stored(input_items(body)) if is_kept else b""
    return Prepared(turn, response, items)


async def found(served: Served, id: str) -> StoredResponse:
    """Return a response of the key that asks, or raise 404."""
    if served.storage is not None:
        row = await served.storage.responses.find(id)
        if row is not None and row.owner == current().key.name:
            return row
    raise ApiError(404, f"Response with id '{shown(id)}' not found.")


async def with_earlier(served: Served, body: ResponsesBody) -> ResponsesBody:
    """Return a body with the conversation before it."""
    id = body.previous_response_id
    if not id:
        return body
    try:
        row = await found(served, id)
    except ApiError:
        text = f"Previous response with id '{shown(id)}' not found."
        code = "previous_response_not_found"
        raise invalid(text, "previous_response_id", code) from None
    if not row.has_ended:
        raise invalid("the previous response has not ended", "previous_response_id")
    if len(row.input) + len(row.response) >= LARGE_BODY:
        current().large = True
    return await off_loop(_continued, body, row)


async def check_room(storage: Storage, items: bytes) -> None:
    """Raise 429 if a response with this input could not be kept, whatever makes room for it.

    That is known before the answer is made; its length is not.
    """
    size = RESPONSE_ROW_BYTES + len(items)
    if not await storage.responses.could_insert(current().key.name, size):
        raise no_room(storage.journal.limits)


async def keep(
    served: Served, storage: Storage, body: ResponsesBody, response: dict[str, Any], items: bytes
) -> None:
    """Keep a response that has ended; if that fails, only a client that asked for it gets an error."""
    try:
        await storage.responses.insert(_row(served, storage, response, items))
    except NoRoom:
        if body.store:
            raise no_room(storage.journal.limits) from None
        response["store"] = False
        logger.warning(
            "response %s is not kept: its API key has reached its storage limit", response["id"]
        )
    except JournalUnavailable as error:
        if body.store:
            raise
        response["store"] = False
        logger.warning("response %s is not kept: %s", response["id"], error)


async def add_to_background(
    served: Served,
    storage: Storage,
    body: ResponsesBody,
    response: dict[str, Any],
    request: Request,
    items: bytes,
) -> None:
    """Keep a response that is to run in the background, or raise 429 if there are too many."""
    response["status"] = "queued"
    stored_body = await off_loop(lambda: stored(body.model_dump(by_alias=True, exclude_none=True)))
    row = _row(served, storage, response, items)
    try:
        await storage.responses.insert_background(
            row,
            body=stored_body,
            request=REQUEST.dump_json(request),
            limit=served.settings.store_background,
        )
    except NoRoom:
        raise no_room(storage.journal.limits) from None
    except TooManyInBackground as refusal:
        whose = " of this API key" if refusal.of_key else ""
        text = (
            f"{refusal.limit} background responses{whose} are waiting or running, "
            "which is the limit"
        )
        raise ApiError(429, text, "requests", code="rate_limit_exceeded") from None


def _row(served: Served, storage: Storage, response: dict[str, Any], items: bytes) -> NewResponse:
    return NewResponse(
        id=response["id"],
        owner=current().key.name,
        model=served.models[0],
        created=storage.journal.now(),
        input=items,
        response=dumps(response),
    )


def _continued(body: ResponsesBody, row: StoredResponse) -> ResponsesBody:
    """Return a body with the conversation of the row before it."""
    earlier = [*json.loads(row.input), *json.loads(row.response)["output"]]
    items = [*earlier, *input_items(body)]
    return body.model_copy(update={"input": ITEMS.validate_python(items)})


async def _response_of(row: StoredResponse) -> Response:
    content = row.response
    if not row.has_ended and row.started is not None:  # it was stored as queued
        content = await asyncio.to_thread(_as_running, row.response)
    return Response(content, media_type="application/json")


def _as_running(response: bytes) -> bytes:
    return dumps({**json.loads(response), "status": "in_progress"})


def _page_of_items(stored_items: bytes, query: PageQuery) -> bytes:
    items = json.loads(stored_items)
    if not query.oldest_first:
        items.reverse()
    if query.after is not None:
        ids = [item["id"] for item in items]
        if query.after not in ids:
            raise unknown_cursor(query.after)
        items = items[ids.index(query.after) + 1 :]
    page = items[: query.limit]
    value = {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > len(page),
    }
    return dumps(value)


def _streamed(
    background: BackgroundResponses,
    id: str,
    *,
    after: int = -1,
    warning: Mapping[str, str] = MappingProxyType({}),
) -> Response:
    headers = {**events.HEADERS, **warning}
    return StreamingResponse(background.events(id, after), headers=headers)
