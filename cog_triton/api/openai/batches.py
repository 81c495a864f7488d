"""/v1/files and /v1/batches: their routes, and the checks of input; ``batch_runner.py`` runs batches.

Files are in the journal line by line; batches.yaml has the tables.
"""

import asyncio
import json
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import methodcaller
from typing import IO, Annotated, Any

from fastapi import APIRouter, Depends
from fastapi import Request as HttpRequest
from pydantic import ValidationError
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response, StreamingResponse

from cog_triton.api.openai import exchange, validation
from cog_triton.api.openai.errors import CLIENT_GONE, ApiError, invalid, no_embeddings, table
from cog_triton.api.openai.journal import MOST_DELETED, Counted, Journal, NoRoom
from cog_triton.api.openai.pacing import ThreadPace
from cog_triton.api.openai.paging import page_limit, page_order, unknown_cursor
from cog_triton.api.openai.schemas.files_and_batches import BatchBody, FileForm, LineBody
from cog_triton.api.openai.served import FromApp, Served, current
from cog_triton.api.openai.storable import no_room, stored
from cog_triton.errors import is_unicode, shown
from cog_triton.web.bodies import BadBody
from cog_triton.web.forms import Part, read_form

router = APIRouter(route_class=exchange.BodyRoute)
# One file after the other, so that none is there in part; those that a batch is to read stay, and those
# that are still coming, until their time is over.
_EXPIRE_FILE = """
    UPDATE files SET state = 'gone' WHERE id IN (SELECT id FROM files
    WHERE ((state = 'there' AND created < :before) OR (state != 'gone' AND expires <= :now))
    AND (:owner IS NULL OR owner = :owner)
    AND NOT EXISTS (SELECT 1 FROM batches WHERE input = files.id AND active)
    ORDER BY created LIMIT 1)
    AND NOT EXISTS (SELECT 1 FROM files WHERE state = 'gone')
"""
_DELETE_LINES = """
    DELETE FROM lines WHERE rowid IN (SELECT lines.rowid FROM files JOIN lines USING (source, part)
    WHERE state = 'gone' LIMIT :most)
"""
_DELETE_FILES = """
    DELETE FROM files WHERE state = 'gone' AND NOT EXISTS (SELECT 1 FROM lines
    WHERE lines.source = files.source AND lines.part = files.part)
"""
_EXPIRE_BATCHES = """
    DELETE FROM batches WHERE number IN (SELECT number FROM batches WHERE NOT active
    AND expires - 86400 < :before AND (:owner IS NULL OR owner = :owner)
    ORDER BY number LIMIT :most)
"""
ROW_BYTES = 200  # of a row beside its data
BATCH_BYTES = 1500
_COUNTED = [
    # An upload counts as a whole from its beginning, and until the last of it is deleted.
    Counted(
        table="files",
        size=f"({ROW_BYTES} + length({{row}}.name)"
        " + CASE {row}.part WHEN 'input' THEN {row}.bytes ELSE 0 END)",
        columns="name, part, bytes",
    ),
    Counted(
        table="lines",
        size=f"({ROW_BYTES} + CASE {{row}}.part WHEN 'input' THEN 0 ELSE length({{row}}.data) END)",
        columns="part, data",
    ),
    Counted(
        table="batches",
        size=f"({BATCH_BYTES} + length({{row}}.object))",
        columns="object",
    ),
]
SQL: dict[str, Any] = {
    **table("batches.yaml"),
    "expiry": [_EXPIRE_FILE, _DELETE_LINES, _DELETE_FILES, _EXPIRE_BATCHES],
    "counted": _COUNTED,
}
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
ACTIVE = ("validating", "in_progress", "finalizing", "cancelling")
WINDOW_SECONDS = 86400  # a batch's time
UPLOAD_SECONDS = 3600  # after which one that came to no end is removed
CHUNK_BYTES = 1 << 16  # of an upload in one row, and the rest of its last line
CHUNKS_AT_ONCE = 16  # that are written or deleted together
READ_ROWS = 32  # at once
MOST_LINES, MOST_ERRORS = 50_000, 100
MOST_NAME_CHARACTERS = 1024
_NO_JSON = "invalid_json_line", "This line is not parseable as a JSON object."
_AFTER = ("anchor", "seconds")
_View = Callable[[Any], dict[str, Any]]


async def _journal(request: HttpRequest) -> Any:
    if (journal := request.app.state.served.journal) is None:
        raise ApiError(404, "this server stores nothing: STORE=0", code="unknown_url")
    return journal


FromJournal = Annotated[Journal, Depends(_journal)]


async def rows_of(
    journal: Journal, kind: str, name: str | None, query: Mapping[str, str] = {}, limit: int = 1
) -> list[Any]:
    """Return the key's files or batches as a query asks for them, or the one of a name, or raise 404."""
    asked = query.get("after") or None, query.get("purpose"), name, limit
    values = current().key.name, *asked, journal.now()
    way = ("ASC", ">") if query.get("order") == "asc" else ("DESC", "<")
    rows: list[Any] = await journal.read(SQL["kinds"][kind]["list"].format(*way), *values)
    if name is not None and not rows:
        raise ApiError(404, SQL["kinds"][kind]["missing"].format(shown(name)), param="id")
    return rows


async def page_of(
    request: HttpRequest, journal: Journal, kind: str, view: Callable[[Any], dict[str, Any]]
) -> Response:
    """Return the objects of the key that a query asks for."""
    default, most = SQL["kinds"][kind]["limits"]
    limit = page_limit(request.query_params, default, most)
    page_order(request.query_params)
    after = request.query_params.get("after")
    if after:
        try:
            await rows_of(journal, kind, after)
        except ApiError:
            raise unknown_cursor(after) from None
    rows = await rows_of(journal, kind, None, request.query_params, limit + 1)

    def page() -> bytes:
        data = [view(row) for row in rows[:limit]]
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
        return exchange.dumps(
            {"object": "list", "data": data, **ends, "has_more": len(rows) > limit}
        )

    content = await asyncio.to_thread(page)  # which may have thousands of objects
    return Response(content, media_type="application/json")


def file_view(row: Any) -> dict[str, Any]:
    values = {name: own for name, own in row._asdict().items() if name not in ("source", "part")}
    return {"object": "file", **values, "status": "processed", "status_details": None}


@router.post("/v1/files")
async def create_file(request: HttpRequest, journal: FromJournal) -> Response:
    """Keeps a file for a batch; the form has file, purpose and expires_after."""
    kind = request.headers.get("content-type", "")
    try:
        async with read_form(request.stream(), kind) as parts:
            file = parts.get("file")
            if file is None or file.filename is None or not file.size:
                raise invalid("file must be given, in a body of multipart/form-data", "file")
            check_filename(file.filename)
            return JSONResponse(await _kept(journal, file, _seconds_of(parts)))
    except ClientDisconnect:
        return Response(status_code=CLIENT_GONE)
    except BadBody as error:
        raise invalid(f"the body {error}", "file") from None


def check_filename(name: str) -> None:
    if len(name) > MOST_NAME_CHARACTERS:
        text = f"the file's name may have at most {MOST_NAME_CHARACTERS} characters"
        raise invalid(text, "file", "invalid_value")
    if not is_unicode(name):
        raise invalid("the file's name is not Unicode", "file", "invalid_value")


def _seconds_of(parts: Mapping[str, Part]) -> int:
    """Return the seconds that a file is kept, by the fields of its form, or raise ApiError."""
    given: dict[str, Any] = {}
    if "purpose" in parts:
        given["purpose"] = parts["purpose"].text()
    after: dict[str, str] = {}
    for name in _AFTER:
        part = parts.get(f"expires_after[{name}]")
        if part is not None and part.size:
            after[name] = part.text()
    if after:
        given["expires_after"] = after
    try:
        return FileForm.model_validate(given, strict=False).expires_after.seconds
    except ValidationError as error:
        raise validation.body_error(error, given) from None


async def _kept(journal: Journal, file: Part, seconds: int) -> dict[str, Any]:
    """Write the lines of an upload, and then that it is there."""
    owner = current().key.name
    name = exchange.new_id("file-")
    now = int(time.time())
    named = file.size, file.filename or "upload.jsonl", "batch"
    row = (name, owner, "coming", name, "input", now, now + UPLOAD_SECONDS, *named)

    def begin(connection: sqlite3.Connection) -> None:
        size = file.size + 2 * ROW_BYTES
        rows = file.size // CHUNK_BYTES + 2
        if not journal.has_room(connection, owner, size, rows):
            raise NoRoom
        connection.execute(SQL["add_file"], row)

    try:
        await journal.write(begin)
    except NoRoom:
        raise no_room(journal, file.size) from None
    try:
        first_line = 1
        while True:
            chunks = await asyncio.to_thread(read_chunks, file.file, first_line)
            if not chunks:
                break
            rows = [(owner, name, chunk.first_line, "input", chunk.data) for chunk in chunks]
            await journal.write(methodcaller("executemany", SQL["add_line"], rows))
            first_line = chunks[-1].next_line
        arrived = "UPDATE files SET state = 'there', expires = ? WHERE id = ? AND state = 'coming'"
        if not await journal.write(arrived, now + seconds, name):
            raise ApiError(408, f"the upload took longer than {UPLOAD_SECONDS} s")
    except BaseException:
        journal.write("UPDATE files SET state = 'gone' WHERE id = ?", name)
        raise
    return await retrieve_file(name, journal)


@dataclass(frozen=True)
class Chunk:
    """Some whole lines of an upload, one row of it."""

    first_line: int
    data: bytes

    @property
    def next_line(self) -> int:
        return self.first_line + self.data.count(b"\n")


def read_chunks(file: IO[bytes], first_line: int) -> list[Chunk]:
    """Read the next chunks of a file; none at its end."""
    chunks: list[Chunk] = []
    while len(chunks) < CHUNKS_AT_ONCE:
        data = file.read(CHUNK_BYTES)
        if not data:
            break
        if not data.endswith(b"\n"):
            data += file.readline()
        chunk = Chunk(first_line, data)
        chunks.append(chunk)
        first_line = chunk.next_line
    return chunks


async def rows_of_file(journal: Journal, source: str, part: str) -> AsyncIterator[list[Any]]:
    """Yield the rows of a file, some at a time: each its data and the number of its first line."""
    sql = """
        SELECT line, data FROM lines WHERE source = ? AND line > ? AND part = ?
        ORDER BY line LIMIT ?
    """
    last = 0
    while True:
        rows = await journal.read(sql, source, last, part, READ_ROWS)
        if not rows:
            return
        yield rows
        last = rows[-1].line


async def lines_of(journal: Journal, source: str) -> AsyncIterator[list[tuple[int, bytes]]]:
    """Yield the lines of an upload that are not blank, some at a time, each with its number."""
    async for rows in rows_of_file(journal, source, "input"):
        yield await asyncio.to_thread(split_lines, rows)


def split_lines(rows: Iterable[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    lines: list[tuple[int, bytes]] = []
    for first_line, data in rows:
        if data.strip():
            numbered = enumerate(data.split(b"\n"), first_line)
            lines += [(number, line) for number, line in numbered if line.strip()]
    return lines


@router.get("/v1/files/{name}/content", response_class=StreamingResponse)
async def content(name: str, journal: FromJournal) -> Response:
    """Its bytes."""
    (row,) = await rows_of(journal, "file", name)

    async def body() -> AsyncIterator[bytes]:
        async for rows in rows_of_file(journal, row.source, row.part):
            yield b"".join(data for _, data in rows)

    headers = {"Content-Length": str(row.bytes)}
    return StreamingResponse(body(), headers=headers, media_type="application/jsonl")


@router.delete("/v1/files/{name}")
async def delete_file(name: str, journal: FromJournal) -> dict[str, Any]:
    """Removes it, unless a batch is to read it."""
    await rows_of(journal, "file", name)
    gone = """
        UPDATE files SET state = 'gone' WHERE id = :name
        AND NOT EXISTS (SELECT 1 FROM batches WHERE input = :name AND active)
    """
    if not await journal.write(gone, name=name):
        raise ApiError(409, "this file is the input of a batch that has not ended", param="id")
    while await journal.write(_DELETE_LINES, most=MOST_DELETED):
        pass  # its space is free when this returns
    await journal.write(_DELETE_FILES)
    return {"id": name, "object": "file", "deleted": True}


@router.post("/v1/batches")
async def create_batch(body: BatchBody, journal: FromJournal, served: FromApp) -> dict[str, Any]:
    """Runs the requests of a file, each to the same endpoint."""
    if body.endpoint == "/v1/embeddings":
        raise no_embeddings()
    if body.endpoint not in ENDPOINTS:
        raise invalid(f"endpoint must be {' or '.join(ENDPOINTS)}", "endpoint", "invalid_value")
    await rows_of(journal, "file", body.input_file_id)
    now, name, own = int(time.time()), exchange.new_id("batch_"), set(BatchBody.model_fields)
    given = {**body.model_dump(include=own), "created_at": now, "expires_at": now + WINDOW_SECONDS}
    text = stored({"id": name, **SQL["new_batch"], **given}).decode()
    owner, model = current().key.name, served.models[0]
    row = (name, owner, model, body.input_file_id, body.endpoint, "validating")

    def add(connection: sqlite3.Connection) -> None:
        if not journal.has_room(connection, owner, BATCH_BYTES + len(text)):
            raise NoRoom
        connection.execute(SQL["add_batch"], (*row, now + WINDOW_SECONDS, text))

    try:
        await journal.write(add)
    except NoRoom:
        raise no_room(journal) from None
    return await batch(name, journal)


def batch_view(row: Any) -> dict[str, Any]:
    counts = {name: getattr(row, name) for name in ("total", "completed", "failed")}
    taken, made = row.input_tokens, row.output_tokens
    usage = {"input_tokens": taken, "output_tokens": made, "total_tokens": taken + made}
    return {**json.loads(row.object), "request_counts": counts, "usage": {**SQL["usage"], **usage}}


def add_routes(kind: str, path: str, view: _View) -> Callable[..., Awaitable[dict[str, Any]]]:
    """Add the routes that show files or batches; return the one of a single object."""

    @router.get(path, name=path.rpartition("/")[2])
    async def every(request: HttpRequest, journal: FromJournal) -> Response:
        """Those of the key, newest first."""
        return await page_of(request, journal, kind, view)

    @router.get(f"{path}/{{name}}", name=f"retrieve {kind}")
    async def one(name: str, journal: FromJournal) -> dict[str, Any]:
        """One of them."""
        return view((await rows_of(journal, kind, name))[0])

    return one


retrieve_file = add_routes("file", "/v1/files", file_view)
batch = add_routes("batch", "/v1/batches", batch_view)


@router.post("/v1/batches/{name}/cancel")
async def cancel_batch(name: str, journal: FromJournal) -> dict[str, Any]:
    """Ends it; the answers that are there stay."""
    await rows_of(journal, "batch", name)
    was = ("validating", "in_progress")
    done = await journal.write(partial(changed, name=name, status="cancelling", was=was))
    now = await batch(name, journal)
    if not done and now["status"] not in ("cancelling", "cancelled"):
        raise ApiError(409, f"Cannot cancel a batch with status '{now['status']}'.")
    return now


def changed(
    connection: sqlite3.Connection, name: str, status: str, was: Sequence[str], **more: Any
) -> bool:
    """Give a batch another status, unless it has meanwhile got one that it may not follow, or is gone."""
    row = connection.execute(SQL["status"], (name,)).fetchone()
    if row is None:
        return False
    text, before = row
    if before not in was:
        return False
    value = {**json.loads(text), "status": status, f"{status}_at": int(time.time()), **more}
    connection.execute(SQL["change"], (json.dumps(value), status, status in ACTIVE, name))
    return True


class Checks:
    """The errors of an input file, and the number of its requests."""

    def __init__(self, endpoint: str, served: Served) -> None:
        self.errors, self.total = list[dict[str, Any]](), 0
        self._endpoint, self._served, self._seen = endpoint, served, set[str]()

    def read(self, rows: Sequence[tuple[int, bytes]]) -> bool:
        """Check some lines; return whether more may follow."""
        pace = ThreadPace()
        for line, data in rows:
            pace.rest_if_due()
            self.total += 1
            try:
                self._check(data)
            except ApiError as error:
                found = (error.code, error.message) if error.code else _NO_JSON
                self.add(*found, error.param, line)
        if self.total > MOST_LINES:
            self.add("too_many_tasks", f"a batch may have at most {MOST_LINES} requests")
        return self.total <= MOST_LINES and len(self.errors) < MOST_ERRORS

    def add(self, code: str, text: str, param: str | None = None, line: int | None = None) -> None:
        self.errors += [{"code": code, "message": text, "param": param, "line": line}]

    def _check(self, data: bytes) -> None:
        if len(data) > self._served.settings.max_request_bytes:
            raise invalid(
                "This line is larger than the maximum size of a request.", code="invalid_json_line"
            )
        found = validation.validated(data, LineBody, self._served)
        if found.url != self._endpoint:
            raise invalid(
                f"url must be the batch's endpoint, {self._endpoint}", "url", "url_mismatch"
            )
        if found.custom_id in self._seen:
            text = f"the custom_id {shown(found.custom_id)} is already used by an earlier line"
            raise invalid(text, "custom_id", "duplicate_custom_id")
        self._seen.add(found.custom_id)
