"""Runs batches in the places that other requests leave free; each line is answered once.

An answer is written with its count, under its line's number: what ran when everything was killed is asked
again by the next process, with the same seed.
"""

import asyncio
import itertools
import json
import logging
import sqlite3
import time
import zlib
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

import anyio
import httpx
import orjson
from starlette.types import ASGIApp, Receive, Scope, Send

from cog_triton.errors import JournalUnavailable
from cog_triton.faces.openai import exchange
from cog_triton.faces.openai.batches import MONTH_SECONDS, SQL, Checks, changed, lines_of
from cog_triton.faces.openai.errors import ApiError, invalid
from cog_triton.faces.openai.journal import LOOK_SECONDS, Jobs
from cog_triton.faces.openai.keys import Key
from cog_triton.faces.openai.served import BATCH_CALL, Call, Served

logger = logging.getLogger(__name__)
MOST = 8  # batches at once
ATTEMPTS = 5  # at a line, while the server is well
LONGEST_PAUSE = 30.0
JSON = {"content-type": "application/json"}


class Runner(Jobs):
    """The batches of one application."""

    def __init__(self, app: ASGIApp, served: Served) -> None:
        super().__init__(served.journal, SQL, served.models[0], MOST)
        self._app, self._served = app, served
        self._scopes: dict[str, anyio.CancelScope] = {}  # of what ends with a batch's time

    def look(self, rows: Sequence[Any]) -> None:
        now = self.journal.now()
        over = (own.id for own in rows if own.status == "cancelling" or own.expires <= now)
        for id in self._scopes.keys() & over:
            self._scopes[id].cancel()

    async def run(self, id: str) -> None:
        with anyio.CancelScope() as self._scopes[id]:
            try:
                await self._work(await self._batch(id))
            finally:
                del self._scopes[id]
        batch = await self._batch(id)
        if batch.status == "failed":
            return
        other = "failed" if batch.expires > self.journal.now() else "expired"  # its key was removed
        end = {"cancelling": "cancelled", "finalizing": "completed"}.get(batch.status, other)
        if end != "completed" and batch.total:
            error = SQL["ends"][end]
            lines = [row async for row in self._open_lines(batch)]
            records = ((line, record_of(json.loads(data), None, error)) for line, data in lines)
            await asyncio.gather(*(self._keep(batch, n, "error", own) for n, own in records))
        await self.journal.write(partial(_finish, batch, end))
        logger.info("batch %s: %s", batch.id, end)

    async def give_up(self, id: str, reason: str) -> None:
        error = {"code": "server_error", "message": reason, "param": None, "line": None}
        errors = {"object": "list", "data": [error]}
        batch = await self._batch(id)
        await self.journal.write(partial(_finish, batch, "failed", errors=errors))

    async def _batch(self, id: str) -> Any:
        return (await self.journal.read(SQL["batch"], id))[0]

    async def _change(self, batch: Any, status: str, **more: Any) -> None:
        change = partial(changed, name=batch.id, status=status, was=(batch.status,), **more)
        await self.journal.write(change)

    async def _work(self, batch: Any) -> None:
        """Check the input and answer its lines, as far as neither is done."""
        if batch.status == "validating":
            checks = Checks(batch.endpoint, self._served)
            async for rows in lines_of(self.journal, batch.input, "input"):
                if not await asyncio.to_thread(checks.read, rows):
                    break
            if not checks.total:
                checks.add("empty_file", "the input file has no requests")
            if checks.errors:
                errors = {"object": "list", "data": checks.errors}
                await self._change(batch, "failed", errors=errors)
                return
            await self.journal.write(SQL["total"], checks.total, batch.id)
            await self._change(batch, "in_progress")
            batch = await self._batch(batch.id)
        if batch.status == "in_progress":
            logger.info("batch %s runs", batch.id)
            # As many again as can run are being prepared or written.
            places = asyncio.Semaphore(2 * self._served.backend.admission.max_running)
            async with anyio.create_task_group() as lines:
                async for line, data in self._open_lines(batch):
                    if (key := self._served.key(batch.owner)) is None:
                        lines.cancel_scope.cancel()
                        return
                    await places.acquire()
                    lines.start_soon(self._line, batch, key, line, data, places)
            await self._change(batch, "finalizing")

    async def _open_lines(self, batch: Any) -> AsyncIterator[tuple[int, bytes]]:
        answered = {line for (line,) in await self.journal.read(SQL["answered"], batch.id)}
        async for rows in lines_of(self.journal, batch.input, "input"):
            for line, data in rows:
                if line not in answered and data.strip():
                    yield line, data

    async def _line(
        self, batch: Any, key: Key, line: int, data: bytes, places: asyncio.Semaphore
    ) -> None:
        large, call = len(data) > exchange.LARGE_BODY, Call("", batch.endpoint)
        value = await asyncio.to_thread(json.loads, data) if large else json.loads(data)
        try:
            body = body_of(value["body"], batch, line)
            call, status, content = await self._answer(batch.endpoint, key, body)
        except ApiError as error:
            status, content = error.status, exchange.dumps(error.body())
        answer = {"request_id": call.id, "body": orjson.Fragment(content)}
        record = record_of(value, {"status_code": status, **answer}, None)
        await self._keep(batch, line, "output" if status == 200 else "error", record, call)
        places.release()

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

    async def _keep(
        self, batch: Any, line: int, part: str, record: bytes, call: Call | None = None
    ) -> None:
        """Write an answer and count it, unless the line has one; wait while that cannot be done."""
        tokens = (call.input_tokens, call.output_tokens) if call else (0, 0)
        count = SQL["count"].format("completed" if part == "output" else "failed")

        def write(own: sqlite3.Connection) -> None:
            row = (batch.owner, batch.id, line, part, record)
            if own.execute(SQL["add_line"], row).rowcount == 1:
                own.execute(count, (*tokens, batch.id))

        while True:
            try:
                return await self.journal.write(write)  # type: ignore[no-any-return]
            except JournalUnavailable as error:
                logger.warning("batch %s waits: %s", batch.id, error)
                await asyncio.sleep(LONGEST_PAUSE)


def body_of(given: dict[str, Any], batch: Any, line: int) -> bytes:
    """Return the body of a line's request, whose seed is the same each time; or raise ApiError."""
    for name in ("stream", "background"):
        if given.get(name):
            raise invalid(f"{name} is not supported in a batch", name, "unsupported_parameter")
    body = {"store": False, **given} if batch.endpoint == "/v1/responses" else {**given}
    if body.get("seed") in (None, -1):
        body["seed"] = zlib.crc32(f"{batch.id} {line}".encode())
    return json.dumps(body).encode()


def record_of(value: dict[str, Any], response: Any, error: Any) -> bytes:
    """Return a line of an output or error file."""
    record = {"id": exchange.new_id("batch_req_"), "custom_id": value["custom_id"]}
    return exchange.dumps({**record, "response": response, "error": error}) + b"\n"


def _finish(batch: Any, end: str, connection: sqlite3.Connection, **more: Any) -> None:
    """Give a batch its last status, and its files."""
    now, rows, names = int(time.time()), list[tuple[Any, ...]](), dict[str, str]()
    given = json.loads(connection.execute(SQL["status"], (batch.id,)).fetchone()[0])
    seconds = (given["output_expires_after"] or {"seconds": MONTH_SECONDS})["seconds"]
    for part in ("output", "error"):
        if size := connection.execute(SQL["size"], (batch.id, part)).fetchone()[0]:
            name = names[f"{part}_file_id"] = exchange.new_id("file-")
            row = (name, batch.owner, "there", batch.id, part, now, now + seconds, size)
            rows.append((*row, f"{batch.id}_{part}.jsonl", "batch_output"))
    if changed(connection, batch.id, end, (batch.status,), **names, **more):
        connection.executemany(SQL["add_file"], rows)


async def ask(app: ASGIApp, call: Call, body: bytes) -> httpx.Response:
    """Send a batch's request to the application, and return the whole response."""

    async def inside(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, BATCH_CALL: call}, receive, send)

    request = httpx.Request("POST", f"http://batch{call.path}", content=body, headers=JSON)
    reply = await httpx.ASGITransport(inside).handle_async_request(request)
    await reply.aread()
    return reply
