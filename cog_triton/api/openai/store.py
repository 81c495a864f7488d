"""/v1/responses: responses that are kept, continued from, run in the background and picked up again.

A background response is its records: the chunks, as they were written, and an end. Its events follow from
these, so that every process has the same ones under the same numbers.
"""

import asyncio
import contextlib
import hashlib
import itertools
import json
import logging
import math
import re
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from fastapi import Request as HttpRequest
from pydantic import TypeAdapter
from starlette.responses import JSONResponse, Response, StreamingResponse

from cog_triton.api.openai import exchange
from cog_triton.api.openai.chats import from_responses
from cog_triton.api.openai.chats.turn import Turn, chat_turn
from cog_triton.api.openai.errors import ApiError, invalid, table
from cog_triton.api.openai.journal import Counted, Jobs, NoRoom
from cog_triton.api.openai.keys import ANYBODY
from cog_triton.api.openai.paging import page_limit, page_order, unknown_cursor
from cog_triton.api.openai.protocol import events
from cog_triton.api.openai.protocol import responses as forms
from cog_triton.api.openai.protocol.responses import ResponseWriter
from cog_triton.api.openai.schemas.responses import ITEMS, ResponsesBody
from cog_triton.api.openai.served import CURRENT, Call, Served, current
from cog_triton.api.openai.storable import no_room, stored
from cog_triton.errors import JournalUnavailable, TritonOverloaded, UserError, shown
from cog_triton.generation import Chunk
from cog_triton.protocol.log_probs import TokenLogProb
from cog_triton.request.request import Request

logger = logging.getLogger(__name__)
router = APIRouter(route_class=exchange.BodyRoute)
# Of all keys, or of one.
_EXPIRE = """
    DELETE FROM responses WHERE id IN (SELECT id FROM responses
    WHERE created < :before AND runner IS NULL AND (:owner IS NULL OR owner = :owner)
    ORDER BY created LIMIT :most)
"""
# Never the last row, because numbers go on from it.
_EXPIRE_LOG = """
    DELETE FROM log WHERE id < (SELECT coalesce(min(first), (SELECT max(id) FROM log))
    FROM responses WHERE runner IS NOT NULL)
"""
_BLOBS = ("body", "request", "input", "response", "records")
_ROW_BYTES = 400  # beside the blobs
_COUNTED = Counted(
    table="responses",
    size=" + ".join([f"({_ROW_BYTES}", *(f"ifnull(length({{row}}.{own}), 0)" for own in _BLOBS)])
    + ")",
    columns=", ".join(_BLOBS),
)
# What can make room for a new response of its key.
_REMOVABLE = f"""
    SELECT count(*), ifnull(sum({_COUNTED.size.format(row="responses")}), 0) FROM responses
    WHERE owner = ? AND runner IS NULL
"""
SQL: Any = {**table("store.yaml"), "expiry": [_EXPIRE, _EXPIRE_LOG], "counted": [_COUNTED]}
POLL_SECONDS = 0.1  # between two looks for the records of another process
MOST_ITEMS = 100  # in a page
_REQUEST = TypeAdapter(Request)


class Run:
    """A background response: its records, and the events that follow from them."""

    def __init__(self, response: dict[str, Any], turn: Turn, served: Served) -> None:
        self.id, self.response, self.request = response["id"], response, turn.request
        texts = (f"{self.id} {n}".encode() for n in itertools.count())
        letters = (hashlib.blake2b(text, digest_size=12).hexdigest() for text in texts).__next__
        parser, tokenizer = turn.parser(draw=letters), served.backend.tokenizer
        self._writer = ResponseWriter(response, parser, tokenizer, letters)
        self.records, self.ids, self.events = list[Any](), list[int](), list[bytes]()
        self._take(self._writer.queued())
        self.shown = len(self.events)  # those that are written
        self.row = 0  # of the log, up to which it has been read
        self.task: asyncio.Task[Any] | None = None  # if it runs here
        self.error: BaseException | None = None  # of a write, which has ended the task
        self.changed = asyncio.Event()

    @property
    def ended(self) -> bool:
        return self.response["status"] not in ("queued", "in_progress")

    def feed(self, *record: Any) -> None:
        """Take a record: id, and nothing for a cancel; status, code and text of an error; or a chunk."""
        self.records.append(record)
        if len(record) == 1:
            self._take(self._writer.cancelled())
        elif len(record) == 4:
            self._take(self._writer.failed(ApiError(record[1], record[3], code=record[2])))
        else:
            _, text, count, prompt, reason, ids, log_probs = record
            tokens = (t if isinstance(t, TokenLogProb) else TokenLogProb(**t) for t in log_probs)
            self.ids += ids
            chunk = Chunk(text, count, prompt, reason, ids=ids, log_probs=tuple(tokens))
            self._take(self._writer.events(0, chunk))

    def read(self, log: Sequence[Any]) -> None:
        """Take its records in the log's rows behind ``row``."""
        for self.row, records in log:
            for own in json.loads(records):
                if own[0] == self.id:
                    self.feed(*own)

    def take_records(self, records: bytes) -> None:
        """Take the rest of the records of a response that has ended."""
        for record in json.loads(records)[len(self.records) :]:
            self.feed(*record)

    def write_end(self, journal: sqlite3.Connection) -> int:
        """Write the end in a transaction: its own, or a cancel behind all that any process has written."""
        if not self.ended:
            self.read(journal.execute(SQL["log"], (self.row, self.id)).fetchall())
        if not self.ended:
            self.feed(self.id)
        values = exchange.dumps(self.response), exchange.dumps(self.records), self.id
        return journal.execute(SQL["end"], values).rowcount

    def show(self, count: int, mine: asyncio.Future[int] | None = None) -> None:
        """Let so many events be sent; end where the journal fails, or another process has ended this."""
        if mine is None or (mine.exception() is None and mine.result()):
            self.shown = max(self.shown, count)
        elif self.task is not None:
            self.error = mine.exception()
            self.task.cancel()
        self.changed.set()
        self.changed = asyncio.Event()

    def _take(self, events: Iterator[bytes]) -> None:
        self.events += (b"id: %d\n%b" % own for own in enumerate(events, len(self.events)))


class Store(Jobs):
    """The responses of one application; those of the key that asks."""

    def __init__(self, served: Served, ended: Callable[[Call], object]) -> None:
        most = max(1, served.backend.admission.max_running // 2)
        super().__init__(served.journal, SQL, served.models[0], most)
        self.served, self._runs, self._ended_call = served, dict[str, Run](), ended

    def look(self, rows: Sequence[Any]) -> None:
        mine = {row.id for row in rows if row.runner == self.journal.worker}
        for id in self.tasks.keys() - mine:  # cancelled or deleted by another process
            self.tasks[id].cancel()

    async def run(self, id: str) -> None:
        """Answer in the background, from where another process has ended."""
        served, journal = self.served, self.journal
        await journal.write(SQL["begin"], id)
        for row in await self._rows(id):
            try:
                run = await self.run_of(row)
            except (ApiError, UserError) as error:  # its request cannot be made here
                await self.give_up(id, error.message)
                return
            call = Call(id, "/v1/responses", served.key(row.owner) or ANYBODY, status=200)
            CURRENT.set(call)
            self._runs[id], run.task = run, asyncio.current_task()
            try:
                with served.answering():
                    await self._generate(run)
                if await self.journal.write(run.write_end):
                    run.show(len(run.events))
            except asyncio.CancelledError:
                if run.error is not None:  # a write failed: the pause before the next attempt grows
                    raise run.error from None
                raise
            finally:
                del self._runs[id]
                run.show(0)
                served.quotas.spend(call.key, call.input_tokens + call.output_tokens)
                served.figures.ended(call)
                self._ended_call(call)

    async def give_up(self, id: str, reason: str) -> None:
        for row in await self._rows(id):
            error = {"code": "server_error", "message": reason}
            response = {**_loaded(row), "status": "failed", "error": error}
            records = [[id, 500, "server_error", reason]]  # of which its last events are made
            ended = exchange.dumps(response), exchange.dumps(records)
            await self.journal.write(SQL["end"], *ended, id)

    async def _generate(self, run: Run) -> None:
        """Log the rest of an answer, or its error; an engine's full queue is tried again."""
        while True:
            (chunks,) = self.served.generate([replace(run.request, continued_ids=tuple(run.ids))])
            try:
                async with contextlib.aclosing(chunks):
                    async for chunk in chunks:
                        counts = chunk.text, chunk.output_tokens, chunk.input_tokens
                        self._log(run, *counts, chunk.finish_reason, chunk.ids, chunk.log_probs)
                return
            except TritonOverloaded as error:
                await asyncio.sleep(error.retry_after)
            except Exception as error:
                if self.served.draining:  # the next start has it
                    raise
                failed = exchange.client_error(error)
                self._log(run, failed.status, failed.code, failed.message)
                return

    def _log(self, run: Run, *record: Any) -> None:
        run.feed(run.id, *record)
        if not run.ended:  # which it may have, cancelled elsewhere
            written = self.journal.log(run.records[-1], SQL["mine"], run.id, self.journal.worker)
            written.add_done_callback(partial(run.show, len(run.events)))

    async def _rows(self, id: str) -> list[Any]:
        return (self.journal and await self.journal.read(SQL["found"], id)) or []

    async def run_of(self, row: Any) -> Run:
        """Return a background response as it is written, or raise an error of its request."""

        def requested_turn() -> Turn:
            body = ResponsesBody.model_validate(json.loads(row.body))
            return chat_turn(from_responses.chat_body(body), self.served)

        turn = await asyncio.to_thread(requested_turn)
        turn = replace(turn, request=_REQUEST.validate_json(row.request))
        begun: Any = {"output": [], "usage": None, "error": None, "incomplete_details": None}
        run = Run(json.loads(row.response) | begun, turn, self.served)
        await self._catch_up(run, row)
        return run

    async def _catch_up(self, run: Run, row: Any) -> None:
        if row.records:
            await asyncio.to_thread(run.take_records, row.records)
        else:
            log = await self.journal.read(SQL["log"], run.row, run.id)
            if log:
                await asyncio.to_thread(run.read, log)
        run.show(len(run.events))

    async def found(self, id: str) -> Any:
        """Return the row of a response, or raise 404."""
        for row in await self._rows(id):
            if row.owner == current().key.name:
                return row
        raise ApiError(404, f"Response with id '{shown(id)}' not found.")

    async def with_earlier(self, body: ResponsesBody) -> ResponsesBody:
        """Return a body with the conversation before it."""
        id = body.previous_response_id
        if not id:
            return body
        try:
            row = await self.found(id)
        except ApiError as error:
            text, code = f"Previous r{error.message[1:]}", "previous_response_not_found"
            raise invalid(text, "previous_response_id", code) from None
        if row.runner is not None:
            raise invalid("the previous response has not ended", "previous_response_id")
        if len(row.input) + len(row.response) >= exchange.LARGE_BODY:
            current().large = True
        return await exchange.off_loop(_continued, body, row)

    async def keep(
        self, body: ResponsesBody, response: dict[str, Any], stored_input: bytes
    ) -> None:
        """Keep a response that has ended; the oldest of its key make room for it."""
        row = self._row(response, stored_input)
        try:
            await self.journal.write(partial(self._insert, row))
        except NoRoom:
            if body.store:
                raise no_room(self.journal) from None
            response["store"] = False
            logger.warning(
                "response %s is not kept: its API key has reached its storage limit", response["id"]
            )
        except JournalUnavailable as error:
            if body.store:
                raise
            response["store"] = False
            logger.warning("response %s is not kept: %s", response["id"], error)

    async def check_room(self, stored_input: bytes) -> None:
        """Raise 429 if a response with this input could not be kept, whatever makes room for it.

        That is known before the answer is made; its length is not.
        """
        size = _ROW_BYTES + len(stored_input)
        share = self.journal.share
        if size > self.journal.most_bytes():
            raise no_room(self.journal)
        if share is None:
            return
        owner = current().key.name
        usages = await self.journal.read(
            "SELECT bytes, row_count FROM usage WHERE owner = ?", owner
        )
        if not usages:
            return
        (usage,) = usages
        if usage.bytes + size <= share.bytes and usage.row_count < share.rows:
            return
        ((removable_rows, removable_bytes),) = await self.journal.read(_REMOVABLE, owner)
        if (
            usage.bytes - removable_bytes + size > share.bytes
            or usage.row_count - removable_rows >= share.rows
        ):
            raise no_room(self.journal)

    def _insert(self, row: dict[str, Any], connection: sqlite3.Connection) -> None:
        self._make_room(row, connection)
        connection.execute(SQL["insert"], row)

    def _make_room(self, row: dict[str, Any], connection: sqlite3.Connection) -> None:
        """Delete the oldest responses of a row's key until it may have the row, or raise NoRoom."""
        owner = row["owner"]
        size = _ROW_BYTES + sum(len(row.get(name) or b"") for name in _BLOBS)
        if size > self.journal.most_bytes():
            raise NoRoom
        oldest = """
            DELETE FROM responses WHERE id IN (SELECT id FROM responses
            WHERE owner = ? AND runner IS NULL ORDER BY created LIMIT 10)
        """
        while not self.journal.has_room(connection, owner, size):
            if not connection.execute(oldest, (owner,)).rowcount:
                raise NoRoom  # which brings back what was deleted

    async def add(
        self, body: ResponsesBody, response: dict[str, Any], request: Request, stored_input: bytes
    ) -> None:
        """Write a response that is to run in the background, or raise 429 if there are too many."""
        response["status"] = "queued"
        most = self.served.settings.store_background
        dumped = partial(body.model_dump, by_alias=True, exclude_none=True)
        asked = await exchange.off_loop(lambda: stored(dumped()))
        row = self._row(response, stored_input)
        row |= {"body": asked, "request": _REQUEST.dump_json(request)}
        try:
            refusal = await self.journal.write(partial(self._insert_background, row, most))
        except NoRoom:
            raise no_room(self.journal) from None
        if refusal is not None:
            raise ApiError(429, refusal, "requests", code="rate_limit_exceeded")
        self.wake.set()

    def _insert_background(
        self, row: dict[str, Any], most: int, connection: sqlite3.Connection
    ) -> str | None:
        """Insert a row that is to run, unless there are too many; return the reason why it may not."""
        count = "SELECT count(*), count(*) FILTER (WHERE owner = ?) FROM responses"
        count = f"{count} WHERE runner IS NOT NULL"
        every, of_key = connection.execute(count, (row["owner"],)).fetchone()
        if every >= most:
            return f"{most} background responses are waiting or running, which is the limit"
        most_of_key = most if self.journal.share is None else math.ceil(most / 2)
        if of_key >= most_of_key:
            return (
                f"{most_of_key} background responses of this API key are waiting or running, "
                "which is the limit"
            )
        self._make_room(row, connection)
        insert = """
            INSERT INTO responses
            (id, owner, model, created, runner, body, request, input, response)
            VALUES (:id, :owner, :model, :created, 0, :body, :request, :input, :response)
        """
        connection.execute(insert, row)
        return None

    def _row(self, response: dict[str, Any], stored_input: bytes) -> dict[str, Any]:
        return {
            "id": response["id"],
            "owner": current().key.name,
            "model": self.served.models[0],
            "created": self.journal.now(),
            "input": stored_input,
            "response": exchange.dumps(response),
        }

    async def events(self, id: str, after: int) -> AsyncIterator[bytes]:
        """Yield the events behind a number as they are written, here or by another process."""
        run: Any = None
        while True:
            if (local := self._runs.get(id)) is None:
                if not (rows := await self._rows(id)):
                    return
                run = run or await self.run_of(rows[0])
                await self._catch_up(run, rows[0])
            run = local or run
            changed = run.changed
            if after + 1 < run.shown:
                begin, after = after + 1, run.shown - 1
                yield b"".join(run.events[begin : run.shown])
            elif run.ended and run.shown == len(run.events):
                return
            elif local:
                await changed.wait()
                run = None  # what it has may not all be written
            elif self.served.draining:
                return
            else:
                await asyncio.sleep(POLL_SECONDS)


async def _store(request: HttpRequest) -> Any:
    return request.app.state.store


FromApp = Annotated[Store, Depends(_store)]


@router.post("/v1/responses", responses=exchange.STREAMED)
async def create(body: ResponsesBody, store: FromApp) -> Response:
    """An answer, kept unless ``store`` is false; of one in the background, its beginning."""
    served, kept = store.served, body.store is not False and store.journal is not None
    if body.background and not kept:
        raise invalid(
            "background requires store: it cannot be combined with store=false or STORE=0",
            "background",
        )
    body = await store.with_earlier(body)

    def prepared() -> tuple[Turn, dict[str, Any], bytes]:
        turn = chat_turn(from_responses.chat_body(body), served, from_responses.tool_places(body))
        response = forms.response_fields(body, turn.request, int(time.time())) | {"store": kept}
        # Before the answer is made, which would be lost if the input could not be stored.
        return turn, response, stored(forms.input_items(body)) if kept else b""

    turn, response, items = await exchange.off_loop(prepared)
    if body.store and kept and not body.background:
        await store.check_room(items)
    if body.background:
        with served.answering():
            await store.add(body, response, turn.request, items)
        return _streamed(store, response["id"]) if body.stream else JSONResponse(response)
    writer = ResponseWriter(response, turn.parser(), served.backend.tokenizer)
    ended = partial(store.keep, body, response, items) if kept else None
    return exchange.Answering(served, body, writer, [turn.request], ended=ended)


@router.get("/v1/responses/{id}", responses=exchange.STREAMED)
async def retrieve(id: str, store: FromApp, request: HttpRequest) -> Response:
    """A response; of one in the background the events, behind ``starting_after`` or ``Last-Event-ID``."""
    row, last = await store.found(id), request.headers.get("last-event-id")
    if last is None and request.query_params.get("stream") != "true":
        return await _response(row)
    if row.request is None:
        raise invalid("only background responses can be streamed again", "stream")
    after = request.query_params.get("starting_after", last) or "-1"
    if not re.fullmatch(r"-1|[0-9]{1,9}", after):
        raise invalid("starting_after must be the number of an event", "starting_after")
    return _streamed(store, id, int(after))


@router.delete("/v1/responses/{id}")
async def delete(id: str, store: FromApp) -> dict[str, Any]:
    """Deletes a response."""
    row = await store.found(id)
    await store.journal.write(SQL["delete"], row.id)  # what runs ends soon
    return {"id": id, "object": "response", "deleted": True}


@router.post("/v1/responses/{id}/cancel")
async def cancel(id: str, store: FromApp) -> Response:
    """Ends a background response; one that has ended stays as it is."""
    row = await store.found(id)
    if row.request is None:
        raise invalid("Cannot cancel a synchronous response.")
    if row.runner is not None:
        await store.journal.write((await store.run_of(row)).write_end)
        store.wake.set()  # it ends where it runs: here at once
    return await _response(await store.found(id))


@router.get("/v1/responses/{id}/input_items")
async def list_input(id: str, store: FromApp, request: HttpRequest) -> Response:
    """The items of its input, those of the responses before among them; ``limit`` is of a page."""
    limit = page_limit(request.query_params, 20, MOST_ITEMS)
    order = page_order(request.query_params)
    after = request.query_params.get("after")
    row = await store.found(id)

    def page_of_items() -> bytes:
        items = json.loads(row.input)
        if order != "asc":
            items.reverse()
        if after:
            ids = [item["id"] for item in items]
            if after not in ids:
                raise unknown_cursor(after)
            items = items[ids.index(after) + 1 :]
        page = items[:limit]
        return exchange.dumps(
            {
                "object": "list",
                "data": page,
                "first_id": page[0]["id"] if page else None,
                "last_id": page[-1]["id"] if page else None,
                "has_more": len(items) > len(page),
            }
        )

    content = await asyncio.to_thread(page_of_items)
    return Response(content, media_type="application/json")


def _continued(body: ResponsesBody, row: Any) -> ResponsesBody:
    """Return a body with the conversation of the row before it."""
    earlier = [*json.loads(row.input), *json.loads(row.response)["output"]]
    items = [*earlier, *forms.input_items(body)]
    return body.model_copy(update={"input": ITEMS.validate_python(items)})


def _loaded(row: Any) -> dict[str, Any]:
    """Return the response of a row, or what is left of one that is no longer JSON."""
    try:
        response: dict[str, Any] = json.loads(row.response)
    except (ValueError, TypeError):
        return {"id": row.id, "object": "response", "created_at": int(row.created), "output": []}
    return response


def _running(row: Any) -> dict[str, Any]:
    response: dict[str, Any] = json.loads(row.response)
    response["status"] = "in_progress"
    return response


async def _response(row: Any) -> Response:
    content = row.response
    if row.runner is not None and row.first is not None:  # it was stored as queued
        content = await asyncio.to_thread(lambda: exchange.dumps(_running(row)))
    return Response(content, media_type="application/json")


def _streamed(store: Store, id: str, after: int = -1) -> Response:
    return StreamingResponse(store.events(id, after), headers=events.HEADERS)
