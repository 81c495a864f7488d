"""/v1/responses: responses that are kept, continued from, run in the background and picked up again.

A background response is its records: the chunks, as they were written, and an end. Its events follow from
these, so that every process has the same ones under the same numbers.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import logging
import re
import time
from collections import namedtuple
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import yaml
from fastapi import APIRouter, Depends
from fastapi import Request as HttpRequest
from pydantic import TypeAdapter
from starlette.responses import JSONResponse, Response, StreamingResponse

from cog_triton.errors import CogTritonError, JournalUnavailable, TritonOverloaded, shown
from cog_triton.faces.openai import exchange, responses, turns
from cog_triton.faces.openai.errors import TABLES, ApiError, invalid
from cog_triton.faces.openai.journal import Schema
from cog_triton.faces.openai.keys import ANYBODY, Key
from cog_triton.faces.openai.responses import InputItem, ResponsesBody, ResponseWriter
from cog_triton.faces.openai.served import CURRENT, Call, Served, current
from cog_triton.generation import Chunk
from cog_triton.request.request import Request
from cog_triton.wire import TokenLogProb

logger = logging.getLogger(__name__)
router = APIRouter(route_class=exchange.BodyRoute)
SQL: Any = yaml.safe_load(Path(__file__).with_name("store.yaml").read_text(encoding="utf-8"))
SCHEMA = Schema(SQL["tables"], SQL["expiry"])
TICK_SECONDS = 1.0  # between two looks for what other processes have left, or cancelled
POLL_SECONDS = 0.1  # between two looks for the records of another process
_REQUEST = TypeAdapter(Request)
Row = namedtuple("Row", "id owner model created runner first body request input response records")


class Run:
    """A background response: its records, and the events that follow from them."""

    def __init__(self, response: dict[str, Any], turn: turns.Turn, served: Served) -> None:
        self.id, self.response, self.request = response["id"], response, turn.request
        texts = (f"{self.id} {n}".encode() for n in itertools.count())
        letters = (hashlib.blake2b(text, digest_size=12).hexdigest() for text in texts).__next__
        parser, tokenizer = turn.parser(letters=letters), served.backend.tokenizer
        self._writer = ResponseWriter(response, parser, tokenizer, letters)
        self.records, self.ids, self.events = list[Any](), list[int](), list[bytes]()
        self._take(self._writer.queued())
        self.shown = len(self.events)  # those that are written
        self.task: asyncio.Task[None] | None = None  # once it is written
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

    def show(self, count: int, problem: Exception | None = None) -> None:
        """Let so many events be sent; with a problem of the journal, end."""
        if problem is None:
            self.shown = max(self.shown, count)
        elif self.task is not None:
            self.task.cancel()
        self.changed.set()
        self.changed = asyncio.Event()

    def _take(self, events: Iterator[bytes]) -> None:
        self.events += (b"id: %d\n%b" % own for own in enumerate(events, len(self.events)))


class Store:
    """The responses of one application; those of the key that asks."""

    def __init__(self, served: Served, ended: Callable[[Call], object]) -> None:
        self.served, self._runs, self._ended = served, dict[str, Run](), ended
        self._places = max(1, served.backend.admission.max_running // 2)
        self._free = asyncio.Semaphore(self._places)
        self.journal: Any = served.journal

    async def work(self) -> None:
        """Continue what other processes have left, until cancelled."""
        while self.journal is not None and not self.served.draining:
            with contextlib.suppress(JournalUnavailable):
                await self._look_around()
            await asyncio.sleep(TICK_SECONDS)

    async def stop(self) -> None:
        """End what runs; the next start continues with it."""
        tasks = [run.task for run in self._runs.values() if run.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look_around(self) -> None:
        journal, own = self.journal, self.journal.worker
        await journal.write(SQL["delete"], "")  # opens the file, for ``alive``
        running = dict(await journal.read(SQL["running"], self.served.models[0]))
        for run in self._runs.values():
            if run.task is not None and running.get(run.id) != own:  # cancelled or deleted
                run.task.cancel()
        for id, runner in running.items():
            if id in self._runs or (runner != own and journal.alive(runner)):
                continue
            if len(self._runs) < self._places and await journal.write(SQL["take"], own, id, runner):
                await self._continue(id)

    async def _continue(self, id: str) -> None:
        """Go on with what another process has begun; it fails if its request cannot be made here."""
        for row in await self._rows(id):
            try:
                run = await self._run_of(row)
            except (ApiError, CogTritonError) as error:
                told = {"code": "server_error", "message": error.message}
                response = {**json.loads(row.response), "status": "failed", "error": told}
                await self.journal.write(SQL["end"], exchange.dumps(response), b"[]", id)
            else:
                self._begin(run, row.owner)

    def _begin(self, run: Run, owner: str) -> None:
        self._runs[run.id], keys = run, self.served.keys
        run.task = asyncio.create_task(
            self._answer(run, keys.named(owner) or Key(owner, b"") if keys else ANYBODY)
        )

    async def _answer(self, run: Run, key: Key) -> None:
        served = self.served
        call = Call(run.id, "/v1/responses", key, status=200)
        CURRENT.set(call)
        try:
            async with self._free:
                await self.journal.write(SQL["begin"], run.id)
                with served.answering():
                    await self._generate(run)
            await self._end(run)
        except Exception as error:  # of the journal, or the server stops
            logger.warning("background response %s is left for later: %s", run.id, error)
        finally:
            del self._runs[run.id]
            run.show(0)
            served.quotas.spend(key, call.input_tokens + call.output_tokens)
            served.figures.ended(call)
            self._ended(call)

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
            self.journal.log(run.records[-1], partial(run.show, len(run.events)))

    async def _end(self, run: Run) -> None:
        response, records = exchange.dumps(run.response), exchange.dumps(run.records)
        if await self.journal.write(SQL["end"], response, records, run.id):
            run.show(len(run.events))

    async def _rows(self, id: str) -> list[Any]:
        rows = self.journal and await self.journal.read(SQL["found"], id)
        return [Row(*row) for row in rows or ()]

    async def _run_of(self, row: Any) -> Run:
        """Return a background response as it is written, or raise an error of its request."""
        body = ResponsesBody.model_validate(json.loads(row.body))
        turn = await asyncio.to_thread(
            lambda: turns.chat_turn(responses.chat_body(body), self.served)
        )
        turn = replace(turn, request=_REQUEST.validate_json(row.request))
        begun: Any = {"output": [], "usage": None, "error": None, "incomplete_details": None}
        run = Run(json.loads(row.response) | begun, turn, self.served)
        await self._catch_up(run, row)
        return run

    async def _catch_up(self, run: Run, row: Any) -> None:
        log = [(row.records,)] if row.records else []
        if not log and row.first is not None:
            log = await self.journal.read(SQL["log"], row.first)
        records = [own for (text,) in log for own in json.loads(text) if own[0] == row.id]
        for record in records[len(run.records) :]:
            run.feed(*record)
        run.show(len(run.events))

    async def found(self, id: str) -> Any:
        """Return the row of a response, or raise 404."""
        for row in await self._rows(id):
            if row.owner == current().key.name:
                return row
        raise ApiError(404, f"Response with id '{shown(id)}' not found.")

    async def with_earlier(self, body: ResponsesBody) -> ResponsesBody:
        """Return a body with the conversation before it."""
        if not (id := body.previous_response_id):
            return body
        try:
            row = await self.found(id)
        except ApiError as error:
            text, code = f"Previous r{error.message[1:]}", "previous_response_not_found"
            raise invalid(text, "previous_response_id", code) from None
        if row.runner is not None:
            raise invalid("the previous response has not ended", "previous_response_id")
        earlier = [*json.loads(row.input), *json.loads(row.response)["output"]]
        items = [
            InputItem.model_validate(item) for item in [*earlier, *responses.input_items(body)]
        ]
        return body.model_copy(update={"input": items})

    async def keep(self, body: ResponsesBody, response: dict[str, Any]) -> None:
        """Keep a response that has ended."""
        try:
            await self.journal.write(SQL["insert"], *self._row(body, response))
        except JournalUnavailable as error:
            if body.store:
                raise
            response["store"] = False
            logger.warning("response %s is not kept: %s", response["id"], error)

    async def begin(self, body: ResponsesBody, run: Run) -> None:
        """Write a background response and start it, or raise 429 if there are too many."""
        most, journal = self.served.settings.store_background, self.journal
        asked = exchange.dumps(body.model_dump(by_alias=True, exclude_none=True))
        row = self._row(body, run.response)._replace(
            runner=journal.worker, body=asked, request=_REQUEST.dump_json(run.request)
        )

        self._runs[run.id] = run
        try:
            if not await journal.write(SQL["insert_few"], *row, most):
                text = f"{most} background responses wait or run; more may not"
                raise ApiError(429, text, "requests", code="rate_limit_exceeded")
        except BaseException:
            del self._runs[run.id]
            raise
        self._begin(run, row.owner)

    def _row(self, body: ResponsesBody, response: dict[str, Any]) -> Any:
        whose = response["id"], current().key.name, self.served.models[0], time.time()
        contents = exchange.dumps(responses.input_items(body)), exchange.dumps(response)
        return Row(*whose, None, None, b"", None, *contents, None)

    async def cancel(self, row: Any) -> None:
        """End a background response that runs, here or elsewhere."""
        if (local := self._runs.get(row.id)) and local.task:
            local.task.cancel()
            await asyncio.wait([local.task])
        run = await self._run_of(await self.found(row.id))
        run.feed(row.id)
        await self._end(run)  # unless it has ended meanwhile

    async def events(self, id: str, after: int, *, here: bool) -> AsyncIterator[bytes]:
        """Yield the events behind a number as they are written, here or by another process."""
        run: Any = None
        while True:
            local = self._runs.get(id) if here else None
            if local is None:
                if not (rows := await self._rows(id)):
                    return
                run = run or await self._run_of(rows[0])
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
            "background responses are kept: not with store false or STORE=0", "background"
        )
    body = await store.with_earlier(body)
    turn = await exchange.off_loop(lambda: turns.chat_turn(responses.chat_body(body), served))
    response = responses.response_fields(body, int(time.time())) | {"store": kept}
    if body.background:
        with served.answering():
            await store.begin(body, run := Run(response, turn, served))
        return _streamed(store, run.id, -1, here=True) if body.stream else JSONResponse(response)
    writer = ResponseWriter(response, turn.parser(), served.backend.tokenizer)
    ended = partial(store.keep, body, response) if kept else None
    return exchange.Answering(served, body, writer, [turn.request], ended=ended)


@router.get("/v1/responses/{id}", responses=exchange.STREAMED)
async def retrieve(id: str, store: FromApp, request: HttpRequest) -> Response:
    """A response; of one in the background the events, behind ``starting_after`` or ``Last-Event-ID``."""
    row, last = await store.found(id), request.headers.get("last-event-id")
    if last is None and request.query_params.get("stream") != "true":
        return JSONResponse(_object(row))
    if row.request is None:
        raise invalid("only a background response is streamed again", "stream")
    after = request.query_params.get("starting_after", last) or "-1"
    if not re.fullmatch(r"-1|\d{1,9}", after):
        raise invalid("starting_after must be the number of an event", "starting_after")
    return _streamed(store, id, int(after), here=row.runner == store.journal.worker)


@router.delete("/v1/responses/{id}")
async def delete(id: str, store: FromApp) -> dict[str, Any]:
    """Away with it."""
    await store.journal.write(SQL["delete"], (await store.found(id)).id)  # what runs ends soon
    return {"id": id, "object": "response", "deleted": True}


@router.post("/v1/responses/{id}/cancel")
async def cancel(id: str, store: FromApp) -> JSONResponse:
    """A background response ends; one that has ended stays as it is."""
    row = await store.found(id)
    if row.request is None:
        raise invalid("Cannot cancel a synchronous response.")
    if row.runner is not None:
        await store.cancel(row)
    return JSONResponse(_object(await store.found(id)))


@router.get("/v1/responses/{id}/input_items")
async def list_input(
    id: str, store: FromApp, limit: int = 20, order: str = "desc", after: str = ""
) -> dict[str, Any]:
    """The items of its input, those of the responses before among them."""
    items = json.loads((await store.found(id)).input)
    if order != "asc":
        items.reverse()
    places = [place for place, item in enumerate(items, 1) if item["id"] == after]
    items = items[places[0] if places else 0 :]
    page = items[: max(1, min(limit, 100))]
    first, last = (page[place]["id"] if page else None for place in (0, -1))
    more = len(items) > len(page)
    return {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": more}


def _object(row: Any) -> dict[str, Any]:
    response: dict[str, Any] = json.loads(row.response)
    if row.runner is not None and row.first is not None:
        response["status"] = "in_progress"
    return response


def _streamed(store: Store, id: str, after: int, *, here: bool) -> Response:
    return StreamingResponse(store.events(id, after, here=here), headers=TABLES["event_stream"])
