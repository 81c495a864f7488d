"""Runs batches in the places that other requests leave free; each line is answered once.

An answer is written with its count, under its line's number: what ran when everything was killed is asked
again by the next process, with the same seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import sqlite3
import time
import zlib
from collections.abc import AsyncIterator, Iterable
from functools import partial
from typing import Any, NamedTuple

import httpx
import orjson
from starlette.types import ASGIApp, Receive, Scope, Send

from cog_triton.errors import JournalUnavailable
from cog_triton.faces.openai import exchange
from cog_triton.faces.openai.batches import MONTH_SECONDS, SQL, Checks, changed, lines_of
from cog_triton.faces.openai.errors import ApiError, invalid
from cog_triton.faces.openai.keys import Key
from cog_triton.faces.openai.served import BATCH_CALL, Call, Served

logger = logging.getLogger(__name__)
LOOK_SECONDS = 0.5
ATTEMPTS = 5  # at a line, while the server is well
LONGEST_PAUSE = 30.0
KEY_GONE = "failed"  # the end of a batch whose API key was removed
JSON = {"content-type": "application/json"}


class Batch(NamedTuple):
    """A batch's row."""

    name: str
    owner: str
    source: str
    endpoint: str
    status: str
    expires: int
    total: int


class Runner:
    """Takes up the batches of the journal that no other process runs."""

    def __init__(self, app: ASGIApp, served: Served) -> None:
        self._app, self._served = app, served
        self._journal: Any = served.journal
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._answering: set[str] = set()  # those that may be ended
        # As many again are being prepared or written.
        self._places = asyncio.Semaphore(2 * served.backend.admission.max_running)

    async def run(self) -> None:
        """Run batches until cancelled; what then runs is left to the next process."""
        try:
            while self._journal is not None:
                with contextlib.suppress(JournalUnavailable):
                    await self._look()
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            await ended(self._tasks.values())

    async def _look(self) -> None:
        for name, status, expires in await self._journal.read(SQL["active"]):
            if name in self._tasks:
                over = status == "cancelling" or expires <= time.time()
                if over and name in self._answering:  # it is taken up again, to be closed
                    self._tasks[name].cancel()
            elif await self._journal.write(partial(self._take, name)):
                task = self._tasks[name] = asyncio.create_task(self._run(name))
                task.add_done_callback(partial(self._ended, name))

    def _take(self, name: str, connection: sqlite3.Connection) -> bool:
        """Make a batch this process's, unless another one that lives has it."""
        own, row = self._journal.worker, connection.execute(SQL["runner"], (name,)).fetchone()
        if row is None or (row[0] not in (0, own) and self._journal.alive(row[0])):
            return False
        connection.execute(SQL["take"], (own, name))
        return True

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        del self._tasks[name]
        if not task.cancelled() and (error := task.exception()):
            logger.error("batch %s is taken up again: %s", name, error, exc_info=error)

    async def _run(self, name: str) -> None:
        batch = await self._batch(name)
        if batch.status == "validating" and batch.expires > time.time():
            await self._check(batch)
            batch = await self._batch(name)
        end = {"cancelling": "cancelled", "finalizing": "completed"}.get(batch.status, "expired")
        if batch.status == "in_progress" and batch.expires > time.time():
            logger.info("batch %s runs", name)
            self._answering.add(name)
            try:
                end = "completed" if await self._answer_all(batch) else KEY_GONE
            finally:
                self._answering.discard(name)
            if end == "completed" and not await self._change(batch, "finalizing"):
                return
            batch = await self._batch(name)
        if batch.status != "failed":
            await self._close(batch, end)

    async def _batch(self, name: str) -> Batch:
        return Batch(*(await self._journal.read(SQL["batch"], name))[0])

    async def _change(self, batch: Batch, status: str, **more: Any) -> Any:
        change = partial(changed, name=batch.name, status=status, was=(batch.status,), **more)
        return await self._journal.write(change)

    async def _check(self, batch: Batch) -> None:
        checks = Checks(batch.endpoint)
        async for rows in lines_of(self._journal, batch.source, "input"):
            if not await asyncio.to_thread(checks.read, rows):
                break
        if not checks.total:
            checks.add("empty_file")
        if checks.errors:
            errors = {"object": "list", "data": checks.errors}
            await self._change(batch, "failed", errors=errors)
        else:
            await self._journal.write(SQL["total"], checks.total, batch.name)
            await self._change(batch, "in_progress")

    async def _answer_all(self, batch: Batch) -> bool:
        """Answer the lines that have no answer; return whether the batch's key was there to the end."""
        tasks: set[asyncio.Task[None]] = set()

        def done(task: asyncio.Task[None]) -> None:
            self._places.release()
            if task.cancelled() or task.exception() is None:
                tasks.discard(task)

        try:
            async for line, data in self._open_lines(batch):
                if (key := self._key(batch.owner)) is None:
                    return False
                await self._places.acquire()
                task = asyncio.create_task(self._line(batch, key, line, data))
                tasks.add(task)
                task.add_done_callback(done)
            await asyncio.gather(*tasks)
        finally:
            await ended(tasks)
        return True

    async def _open_lines(self, batch: Batch) -> AsyncIterator[tuple[int, bytes]]:
        answered = {line for (line,) in await self._journal.read(SQL["answered"], batch.name)}
        async for rows in lines_of(self._journal, batch.source, "input"):
            for line, data in rows:
                if line not in answered and data.strip():
                    yield line, data

    def _key(self, owner: str) -> Key | None:
        keys = self._served.keys
        return Key(owner, b"") if keys is None else keys.named(owner)

    async def _line(self, batch: Batch, key: Key, line: int, data: bytes) -> None:
        large = len(data) > exchange.LARGE_BODY
        value = await asyncio.to_thread(json.loads, data) if large else json.loads(data)
        call = Call("", batch.endpoint)
        try:
            body = body_of(value["body"], batch, line)
            call, status, content = await self._answer(batch.endpoint, key, body)
        except ApiError as error:
            status, content = error.status, exchange.dumps(error.body())
        response = {"status_code": status, "request_id": call.id, "body": orjson.Fragment(content)}
        tokens = call.input_tokens, call.output_tokens
        part = "output" if status == 200 else "error"
        store = partial(_store, batch, line, part, record_of(value, response, None), tokens)
        while True:
            try:
                await self._journal.write(store)
                return
            except JournalUnavailable as error:
                logger.warning("batch %s waits: %s", batch.name, error)
                await asyncio.sleep(LONGEST_PAUSE)

    async def _answer(self, path: str, key: Key, body: bytes) -> tuple[Call, int, bytes]:
        """Ask until the answer does not say to ask again."""
        served = self._served
        for attempt in itertools.count(1):
            while seconds := served.quotas.spend(key, 0):
                await asyncio.sleep(min(seconds, LONGEST_PAUSE))
            call = Call(exchange.new_id("req_"), path, key, batch=True)
            reply = await ask(self._app, call, body)
            served.quotas.spend(key, call.input_tokens + call.output_tokens)
            if "retry-after" not in reply.headers or attempt == ATTEMPTS:
                break
            await asyncio.sleep(min(2.0**attempt, LONGEST_PAUSE))
            while not await served.backend.healthy():
                await asyncio.sleep(LOOK_SECONDS)
        return call, reply.status_code, reply.content

    async def _close(self, batch: Batch, end: str) -> None:
        """Give the lines without an answer their error, and the batch its files and last status."""
        if end != "completed" and batch.total:
            writes = []
            async for line, data in self._open_lines(batch):
                record = record_of(json.loads(data), None, SQL["ends"][end])
                store = partial(_store, batch, line, "error", record, (0, 0))
                writes.append(self._journal.write(store))
            await asyncio.gather(*writes)
        await self._journal.write(partial(_finish, batch, end))
        logger.info("batch %s: %s", batch.name, end)


async def ended(tasks: Iterable[asyncio.Task[Any]]) -> None:
    own = [*tasks]
    for task in own:
        task.cancel()
    await asyncio.gather(*own, return_exceptions=True)


def body_of(given: dict[str, Any], batch: Batch, line: int) -> bytes:
    """Return the body of a line's request, whose seed is the same each time; or raise ApiError."""
    for name in ("stream", "background"):
        if given.get(name):
            raise invalid(f"{name} is not supported in a batch", name, "unsupported_parameter")
    body = {"store": False, **given} if batch.endpoint == "/v1/responses" else {**given}
    if body.get("seed") in (None, -1):
        body["seed"] = zlib.crc32(f"{batch.name} {line}".encode())
    return json.dumps(body).encode()


def record_of(value: dict[str, Any], response: Any, error: Any) -> bytes:
    """Return a line of an output or error file; a custom_id may be text that is no Unicode."""
    name = orjson.Fragment(json.dumps(value["custom_id"]))
    record = {"id": exchange.new_id("batch_req_"), "custom_id": name, "response": response}
    return exchange.dumps({**record, "error": error}) + b"\n"


def _store(
    batch: Batch,
    line: int,
    part: str,
    record: bytes,
    tokens: tuple[int, int],
    connection: sqlite3.Connection,
) -> None:
    """Write an answer and count it, unless the line has one."""
    row = (batch.owner, batch.name, line, part, record)
    if connection.execute(SQL["add_line"], row).rowcount == 1:
        count = SQL["count"].format("completed" if part == "output" else "failed")
        connection.execute(count, (*tokens, batch.name))


def _finish(batch: Batch, end: str, connection: sqlite3.Connection) -> None:
    """Give a batch its last status, and its files."""
    now, rows, names = int(time.time()), list[tuple[Any, ...]](), dict[str, str]()
    given = json.loads(connection.execute(SQL["status"], (batch.name,)).fetchone()[0])
    seconds = (given["output_expires_after"] or {"seconds": MONTH_SECONDS})["seconds"]
    for part in ("output", "error"):
        if size := connection.execute(SQL["size"], (batch.name, part)).fetchone()[0]:
            name = names[f"{part}_file_id"] = exchange.new_id("file-")
            row = (name, batch.owner, "there", batch.name, part, now, now + seconds, size)
            rows.append((*row, f"{batch.name}_{part}.jsonl", "batch_output"))
    if changed(connection, batch.name, end, (batch.status,), **names):
        connection.executemany(SQL["add_file"], rows)


async def ask(app: ASGIApp, call: Call, body: bytes) -> httpx.Response:
    """Send a batch's request to the application, and return the whole response."""

    async def inside(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, BATCH_CALL: call}, receive, send)

    request = httpx.Request("POST", f"http://batch{call.path}", content=body, headers=JSON)
    reply = await httpx.ASGITransport(inside).handle_async_request(request)
    await reply.aread()
    return reply
