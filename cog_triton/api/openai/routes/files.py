"""The routes of /v1/files."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from typing import IO, Annotated, Any

from fastapi import APIRouter, Depends
from fastapi import Request as HttpRequest
from pydantic import ValidationError
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response, StreamingResponse

from cog_triton.api.openai.body_route import BodyRoute
from cog_triton.api.openai.call import current
from cog_triton.api.openai.errors import CLIENT_GONE, ApiError, invalid
from cog_triton.api.openai.paging import PageQuery, page_response, unknown_cursor
from cog_triton.api.openai.protocol.events import new_id
from cog_triton.api.openai.schemas.files_and_batches import FileForm
from cog_triton.api.openai.storable import no_room
from cog_triton.api.openai.storage.files import (
    CHUNK_BYTES,
    INPUT,
    UPLOAD_SECONDS,
    FileRow,
    FileStore,
    NewFile,
    UploadChunk,
)
from cog_triton.api.openai.storage.limits import NoRoom
from cog_triton.api.openai.storage.storage import Storage
from cog_triton.api.openai.validation import body_error
from cog_triton.errors import is_unicode, shown
from cog_triton.web.bodies import BadBody
from cog_triton.web.forms import Part, read_form

router = APIRouter(route_class=BodyRoute)
CHUNKS_AT_ONCE = 16  # chunks of an upload that are written together
MAX_FILES = 10_000  # files in a page
MAX_NAME_CHARACTERS = 1024
DEFAULT_NAME = "upload.jsonl"
_EXPIRY_FIELDS = ("anchor", "seconds")


async def _storage_of(request: HttpRequest) -> Any:
    storage = request.app.state.served.storage
    if storage is None:
        raise ApiError(404, "this server stores nothing: STORE=0", code="unknown_url")
    return storage


FromStorage = Annotated[Storage, Depends(_storage_of)]


@router.post("/v1/files")
async def create_file(request: HttpRequest, storage: FromStorage) -> Response:
    """Keeps a file for a batch; the form has file, purpose and expires_after."""
    content_type = request.headers.get("content-type", "")
    try:
        async with read_form(request.stream(), content_type) as parts:
            file = parts.get("file")
            if file is None or file.filename is None or not file.size:
                raise invalid("file must be given, in a body of multipart/form-data", "file")
            check_filename(file.filename)
            row = await keep_upload(storage, file, seconds=_seconds_of(parts))
            return JSONResponse(file_view(row))
    except ClientDisconnect:
        return Response(status_code=CLIENT_GONE)
    except BadBody as error:
        raise invalid(f"the body {error}", "file") from None


@router.get("/v1/files")
async def list_files(request: HttpRequest, storage: FromStorage) -> Response:
    """Those of the key, newest first."""
    page = PageQuery.read(request.query_params, default=MAX_FILES, maximum=MAX_FILES)
    owner = current().key.name
    if page.after is not None and await storage.files.find(owner, page.after) is None:
        raise unknown_cursor(page.after)
    rows = await storage.files.page(
        owner,
        limit=page.limit + 1,
        after=page.after,
        purpose=request.query_params.get("purpose"),
        oldest_first=page.oldest_first,
    )
    return await page_response(rows, page.limit, file_view)


@router.get("/v1/files/{name}")
async def retrieve_file(name: str, storage: FromStorage) -> dict[str, Any]:
    """One of them."""
    return file_view(await found_file(storage.files, name))


@router.get("/v1/files/{name}/content", response_class=StreamingResponse)
async def content(name: str, storage: FromStorage) -> Response:
    """Its bytes."""
    file = await found_file(storage.files, name)

    async def body() -> AsyncIterator[bytes]:
        async for rows in storage.files.rows(file.source, file.part):
            yield b"".join(row.data for row in rows)

    headers = {"Content-Length": str(file.bytes)}
    return StreamingResponse(body(), headers=headers, media_type="application/jsonl")


@router.delete("/v1/files/{name}")
async def delete_file(name: str, storage: FromStorage) -> dict[str, Any]:
    """Removes it, unless a batch is to read it."""
    await found_file(storage.files, name)
    if not await storage.files.delete(name):
        raise ApiError(409, "this file is the input of a batch that has not ended", param="id")
    return {"id": name, "object": "file", "deleted": True}


async def found_file(files: FileStore, id: str) -> FileRow:
    """Return a file of the key that asks, or raise 404."""
    file = await files.find(current().key.name, id)
    if file is None:
        raise ApiError(404, f"No such File object: {shown(id)}", param="id")
    return file


def file_view(file: FileRow) -> dict[str, Any]:
    """Return a file as a client reads it."""
    return {
        "object": "file",
        "id": file.id,
        "created_at": file.created,
        "expires_at": file.expires,
        "bytes": file.bytes,
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def check_filename(name: str) -> None:
    if len(name) > MAX_NAME_CHARACTERS:
        text = f"the file's name may have at most {MAX_NAME_CHARACTERS} characters"
        raise invalid(text, "file", "invalid_value")
    if not is_unicode(name):
        raise invalid("the file's name is not Unicode", "file", "invalid_value")


def _seconds_of(parts: Mapping[str, Part]) -> int:
    """Return the seconds that a file is kept, by the fields of its form, or raise ApiError."""
    form: dict[str, Any] = {}
    if "purpose" in parts:
        form["purpose"] = parts["purpose"].text()
    expiry: dict[str, str] = {}
    for name in _EXPIRY_FIELDS:
        part = parts.get(f"expires_after[{name}]")
        if part is not None and part.size:
            expiry[name] = part.text()
    if expiry:
        form["expires_after"] = expiry
    try:
        return FileForm.model_validate(form, strict=False).expires_after.seconds
    except ValidationError as error:
        raise body_error(error, form) from None


async def keep_upload(storage: Storage, part: Part, *, seconds: int) -> FileRow:
    """Write the lines of an upload, and then that it is there."""
    id = new_id("file-")
    now = int(time.time())
    file = NewFile(
        id=id,
        owner=current().key.name,
        state="coming",
        source=id,
        part=INPUT,
        created=now,
        expires=now + UPLOAD_SECONDS,
        bytes=part.size,
        name=part.filename or DEFAULT_NAME,
        purpose="batch",
    )
    try:
        await storage.files.begin_upload(file)
    except NoRoom:
        raise no_room(storage.journal.limits, part.size) from None
    try:
        await _write_lines(storage.files, file, part.file)
        if not await storage.files.finish_upload(id, expires=now + seconds):
            raise ApiError(408, f"the upload took longer than {UPLOAD_SECONDS} s")
    except BaseException:
        storage.files.abandon_upload(id)
        raise
    return await found_file(storage.files, id)


async def _write_lines(files: FileStore, file: NewFile, source: IO[bytes]) -> None:
    first_line = 1
    while True:
        chunks = await asyncio.to_thread(read_chunks, source, first_line)
        if not chunks:
            return
        await files.append_chunks(file, chunks)
        first_line = chunks[-1].next_line


def read_chunks(file: IO[bytes], first_line: int) -> list[UploadChunk]:
    """Read the next chunks of a file; none at its end."""
    chunks: list[UploadChunk] = []
    while len(chunks) < CHUNKS_AT_ONCE:
        data = file.read(CHUNK_BYTES)
        if not data:
            break
        if not data.endswith(b"\n"):
            data += file.readline()
        chunk = UploadChunk(first_line, data)
        chunks.append(chunk)
        first_line = chunk.next_line
    return chunks
