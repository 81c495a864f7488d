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
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

import anyio
import httpx
import orjson
from starlette.types import ASGIApp, Receive, Scope, Send

from cog_triton.api.openai import exchange
from cog_triton.api.openai.batches import (
    ROW_BYTES,
    SQL,
    Checks,
    changed,
    lines_of,
)
from cog_triton.api.openai.errors import ApiError, invalid
from cog_triton.api.openai.journal import LOOK_SECONDS, Jobs, NoRoom
from cog_triton.api.openai.keys import Key
from cog_triton.api.openai.pacing import LoopPace
from cog_triton.api.openai.schemas.files_and_batches import MONTH_SECONDS
from cog_triton.api.openai.served import BATCH_CALL, Call, Served
from cog_triton.errors import JournalUnavailable

logger = logging.getLogger(__name__)
MOST = 8  # batches at once
MOST_OF_KEY = 4  # where there are several keys
ATTEMPTS = 5  # at a line, while the server is well
LONGEST_PAUSE = 30.0
ERRORS_AT_ONCE = 100  # that are written together, because other writes wait meanwhile
_STORAGE_ERROR = (
    "storage_limit_exceeded",
    "The API key of this batch has reached its storage limit. The answers stored so far are kept.",
)
JSON = {"content-type": "application/json"}


class Places:
    """Those of the shared places that the lines of one batch have; its end gives all of them back."""

    def __init__(self, shared: asyncio.Semaphore) -> None:
        self._shared = shared
        self._taken = 0

    def __enter__(self) -> "Places":
        return self

    def __exit__(self, *_: object) -> None:
        while self._taken:  # by lines that were cancelled
            self.release()

    async def acquire(self) -> None:
        await self._shared.acquire()
        self._taken += 1

    def release(self) -> None:
        self._taken -= 1
        self._shared.release()


class Runner(Jobs):
    """The batches of one application."""

    def __init__(self, app: ASGIApp, served: Served) -> None:
        super().__init__(served.journal, SQL, served.models[0], MOST, MOST_OF_KEY)
        self._app, self._served = app, served
        self._scopes: dict[str, anyio.CancelScope] = {}  # of what ends with a batch's time
        # As many lines again as can run are being prepared or written, of all batches together: what is
        # ready at the same moment keeps the event loop from other requests.
        self._shared_places = asyncio.Semaphore(2 * served.backend.admission.max_running)
        self._pace = LoopPace()  # of the lines that begin
        self._checking = asyncio.Lock()  # of the input of one batch after the other
        self._full: set[str] = set()  # batches whose keys have as much stored as they may

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
        if id in self._full:
            self._full.discard(id)
            await self._end(batch, *_STORAGE_ERROR)
            return
        if end != "completed" and batch.total:
            try:
                await self._end_open_lines(batch, SQL["ends"][end])
            except NoRoom:
                await self._end(batch, *_STORAGE_ERROR)
                return
        await self.journal.write(partial(_finish, batch, end))
        logger.info("batch %s: %s", batch.id, end)

    async def _end_open_lines(self, batch: Any, error: dict[str, str]) -> None:
        """Write an error for each line that has no answer yet, or raise NoRoom."""
        lines: list[tuple[int, bytes]] = []
        async for line in self._open_lines(batch):
            lines.append(line)
            if len(lines) == ERRORS_AT_ONCE:
                await self._write_errors(batch, lines, error)
                await self._pace.wait_for_turn()
                lines = []
        await self._write_errors(batch, lines, error)

    async def _write_errors(
        self, batch: Any, lines: Sequence[tuple[int, bytes]], error: dict[str, str]
    ) -> None:
        def records() -> list[tuple[int, bytes]]:
            return [(line, record_of(json.loads(data), None, error)) for line, data in lines]

        made = await asyncio.to_thread(records)

        def write(connection: sqlite3.Connection) -> None:
            for line, record in made:
                self._insert(batch, line, "error", record, (0, 0), connection)

        await self._written(batch, write)

    def _insert(
        self,
        batch: Any,
        line: int,
        part: str,
        record: bytes,
        tokens: tuple[int, int],
        connection: sqlite3.Connection,
    ) -> None:
        """Write an answer and count it, unless its line has one; raise NoRoom if the key has too much."""
        if not self.journal.has_room(connection, batch.owner, ROW_BYTES + len(record)):
            raise NoRoom
        row = (batch.owner, batch.id, line, part, record)
        if connection.execute(SQL["add_line"], row).rowcount == 1:
            count = SQL["count"].format("completed" if part == "output" else "failed")
            connection.execute(count, (*tokens, batch.id))

    async def _written(self, batch: Any, write: Callable[[sqlite3.Connection], None]) -> None:
        """Write in a transaction; wait while that cannot be done."""
        while True:
            try:
                await self.journal.write(write)
                return
            except JournalUnavailable as error:
                logger.warning("batch %s is waiting: %s", batch.id, error)
                await asyncio.sleep(LONGEST_PAUSE)

    async def _end(self, batch: Any, code: str, reason: str) -> None:
        """End a batch as failed, with a reason; the answers that are there stay."""
        error = {"code": code, "message": reason, "param": None, "line": None}
        errors = {"object": "list", "data": [error]}
        await self.journal.write(partial(_finish, batch, "failed", errors=errors))
        logger.warning("batch %s failed: %s", batch.id, reason)

    async def give_up(self, id: str, reason: str) -> None:
        await self._end(await self._batch(id), "server_error", reason)

    async def _batch(self, id: str) -> Any:
        return (await self.journal.read(SQL["batch"], id))[0]

    async def _change(self, batch: Any, status: str, **more: Any) -> None:
        change = partial(changed, name=batch.id, status=status, was=(batch.status,), **more)
        await self.journal.write(change)

    async def _work(self, batch: Any) -> None:
        """Check the input and answer its lines, as far as neither is done."""
        if batch.status == "validating":
            checks = Checks(batch.endpoint, self._served)
            async with self._checking:
                async for rows in lines_of(self.journal, batch.input):
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
            logger.info("batch %s is running", batch.id)
            with Places(self._shared_places) as places:
                async with anyio.create_task_group() as lines:
                    async for line, data in self._open_lines(batch):
                        key = self._served.key(batch.owner)
                        if key is None:
                            lines.cancel_scope.cancel()
                            return
                        await places.acquire()
                        await self._pace.wait_for_turn()
                        lines.start_soon(self._line, batch, key, line, data, places)
            await self._change(batch, "finalizing")

    async def _open_lines(self, batch: Any) -> AsyncIterator[tuple[int, bytes]]:
        answered = {line for (line,) in await self.journal.read(SQL["answered"], batch.id)}
        async for rows in lines_of(self.journal, batch.input):
            for line, data in rows:
                if line not in answered:
                    yield line, data

    async def _line(self, batch: Any, key: Key, line: int, data: bytes, places: "Places") -> None:
        large, call = len(data) > exchange.LARGE_BODY, Call("", batch.endpoint)
        value = await asyncio.to_thread(json.loads, data) if large else json.loads(data)
        try:
            body = body_of(value["body"], batch, line, self._served.backend.draws_seeds)
            call, status, content = await self._answer(batch.endpoint, key, body)
        except ApiError as error:
            status, content = error.status, exchange.dumps(error.body())
        answer = {"request_id": call.id, "body": orjson.Fragment(content)}
        record = record_of(value, {"status_code": status, **answer}, None)
        part = "output" if status == 200 else "error"
        tokens = call.input_tokens, call.output_tokens
        try:
            await self._written(batch, partial(self._insert, batch, line, part, record, tokens))
        except NoRoom:
            self._full.add(batch.id)
            self._scopes[batch.id].cancel()
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


def body_of(given: dict[str, Any], batch: Any, line: int, seeded: bool) -> bytes:
    """Return the body of a line's request, or raise ApiError.

    Args:
        seeded: give it a seed if it has none, the same each time.
    """
    for name in ("stream", "background"):
        if given.get(name):
            raise invalid(f"{name} is not supported in a batch", name, "unsupported_parameter")
    body = {"store": False, **given} if batch.endpoint == "/v1/responses" else {**given}
    if seeded and body.get("seed") in (None, -1):
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
        total = "SELECT SUM(LENGTH(data)) FROM lines WHERE source = ? AND part = ?"
        (size,) = connection.execute(total, (batch.id, part)).fetchone()
        if size:
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
