"""/v1/files and /v1/batches: their routes, and the checks of input; ``batch_runner.py`` runs batches.

Files are in the journal line by line; batches.yaml has the tables.
"""

import asyncio
import json
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from operator import methodcaller
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends
from fastapi import Request as HttpRequest
from pydantic import Field, ValidationError
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response, StreamingResponse

from cog_triton.errors import is_unicode, shown
from cog_triton.faces.openai import exchange, fields
from cog_triton.faces.openai.errors import CLIENT_GONE, ApiError, invalid, no_embeddings, table
from cog_triton.faces.openai.journal import Journal
from cog_triton.faces.openai.paging import page_limit
from cog_triton.faces.openai.served import FromApp, Served, current
from cog_triton.faces.openai.storable import stored
from cog_triton.web.bodies import BadBody
from cog_triton.web.forms import Part, read_form

router = APIRouter(route_class=exchange.BodyRoute)
SQL: dict[str, Any] = table("batches.yaml")
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
ACTIVE = ("validating", "in_progress", "finalizing", "cancelling")
WINDOW_SECONDS, MONTH_SECONDS = 86400, 30 * 86400  # a batch's, and a file's time
UPLOAD_SECONDS = 3600  # after which one that came to no end is removed
PAGE_BYTES = 1 << 20  # written at once
MOST_LINES, MOST_ERRORS = 50_000, 100
MOST_NAME_CHARACTERS = 1024
_NO_JSON = "invalid_json_line", "This line is not parseable as a JSON object."
_AFTER = ("anchor", "seconds")
_View = Callable[[Any], dict[str, Any]]
_Pairs = dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]]


class ExpiresAfter(fields.Body):
    anchor: Literal["created_at"]
    seconds: int = Field(ge=3600, le=MONTH_SECONDS)


class BatchBody(fields.Body):
    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: Annotated[_Pairs, Field(max_length=16)] | None = None
    output_expires_after: ExpiresAfter | None = None


class LineBody(fields.Body):
    custom_id: str = Field(min_length=1, max_length=512)
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


class FileForm(fields.Body):
    purpose: Literal["batch"]
    expires_after: ExpiresAfter = ExpiresAfter(anchor="created_at", seconds=MONTH_SECONDS)


async def _journal(request: HttpRequest) -> Any:
    if (journal := request.app.state.served.journal) is None:
        raise ApiError(404, "nothing is kept here: STORE=0", code="unknown_url")
    return journal


FromJournal = Annotated[Journal, Depends(_journal)]


async def rows_of(
    journal: Journal, kind: str, name: str | None, query: Mapping[str, str] = {}, limit: int = 1
) -> list[Any]:
    """Return the key's files or batches as a query asks for them, or the one of a name, or raise 404."""
    asked = query.get("after"), query.get("purpose"), name, limit
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
        raise exchange.body_error(error, given) from None


async def _kept(journal: Journal, file: Part, seconds: int) -> dict[str, Any]:
    """Write the lines of an upload, and then that it is there."""
    owner, name, now, line = current().key.name, exchange.new_id("file-"), int(time.time()), 0
    named = file.size, file.filename or "upload.jsonl", "batch"
    row = (name, owner, "coming", name, "input", now, now + UPLOAD_SECONDS, *named)
    await journal.write(SQL["add_file"], *row)
    while page := await asyncio.to_thread(file.file.readlines, PAGE_BYTES):
        rows = [(owner, name, line + place, "input", data) for place, data in enumerate(page, 1)]
        await journal.write(methodcaller("executemany", SQL["add_line"], rows))
        line += len(page)
    await journal.write(SQL["arrived"], now + seconds, name)
    return await retrieve_file(name, journal)


async def lines_of(journal: Journal, source: str, part: str) -> AsyncIterator[list[Any]]:
    """Yield the lines of a file, a page at a time, each with its number."""
    last = 0
    while rows := await journal.read(SQL["lines"], source, last, part):
        yield rows
        last = rows[-1].line


@router.get("/v1/files/{name}/content", response_class=StreamingResponse)
async def content(name: str, journal: FromJournal) -> Response:
    """Its bytes."""
    (row,) = await rows_of(journal, "file", name)

    async def body() -> AsyncIterator[bytes]:
        async for rows in lines_of(journal, row.source, row.part):
            yield b"".join(data for _, data in rows)

    headers = {"Content-Length": str(row.bytes)}
    return StreamingResponse(body(), headers=headers, media_type="application/jsonl")


@router.delete("/v1/files/{name}")
async def delete_file(name: str, journal: FromJournal) -> dict[str, Any]:
    """Removes it, unless a batch is to read it."""
    await rows_of(journal, "file", name)
    if not await journal.write(lambda own: own.execute(SQL["gone"], (name,)).rowcount):
        raise ApiError(409, "a batch that has not ended reads this file", param="id")
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
    await journal.write(SQL["add_batch"], *row, now + WINDOW_SECONDS, text)
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
        for line, data in rows:
            if data.strip():
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
            raise invalid("This line has more bytes than a request may.", code="invalid_json_line")
        found: Any = exchange.validated(data, LineBody, self._served)
        if found.url != self._endpoint:
            raise invalid(f"url must be the batch's, {self._endpoint}", "url", "url_mismatch")
        if found.custom_id in self._seen:
            text = f"the custom_id {shown(found.custom_id)} is that of an earlier line"
            raise invalid(text, "custom_id", "duplicate_custom_id")
        self._seen.add(found.custom_id)
