"""Uploaded files, which are kept in memory for a while, and their routes."""

import base64
import re
import uuid
from dataclasses import dataclass
from typing import Any

from pydantic import SecretStr
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cog_triton.api.cog.lifetime import now
from cog_triton.api.cog.passage import invalid
from cog_triton.api.cog.replicate.kept import Kept
from cog_triton.api.cog.replicate.replies import (
    FILES_PATH,
    LISTED,
    check_list_token,
    json_response,
    page,
)
from cog_triton.web import Refusal
from cog_triton.web.bodies import BadBody, off_loop, parse_json
from cog_triton.web.forms import Part, read_form

_MEDIA_TYPE = re.compile(r"[\w.+-]+/[\w.+-]+", re.ASCII)
_UNKNOWN_MEDIA_TYPE = "application/octet-stream"


@dataclass(frozen=True)
class StoredFile:
    """A file in Replicate's form, whose address is a data URL with its content."""

    id: str
    size: int
    fields: dict[str, Any]
    can_go: bool = True


class Files:
    """The files that were sent here, and the routes by which that is done."""

    def __init__(self, list_token: SecretStr | None) -> None:
        self._list_token = list_token
        self._files: Kept[StoredFile] = Kept()
        self.routes = [
            Route(FILES_PATH, self._create, methods=["POST"]),
            Route(FILES_PATH, self._list),
            Route(f"{FILES_PATH}/{{id}}", self._get),
            Route(f"{FILES_PATH}/{{id}}", self._delete, methods=["DELETE"]),
        ]

    async def _create(self, request: Request) -> Response:
        content_type = request.headers.get("content-type", "")
        try:
            async with read_form(request.stream(), content_type) as parts:
                content = parts.get("content")
                if content is None:
                    place = ["body", "content"]
                    raise invalid(place, "a file is required", "value_error.missing")
                size = sum(part.size for part in parts.values())
                file = await off_loop(size, file_of, content, parts.get("metadata"))
        except BadBody as error:
            raise Refusal(400, f"the body {error}") from None
        self._files.add(file)
        return await json_response(file.fields, file.size, status=201)

    async def _list(self, request: Request) -> Response:
        check_list_token(request, self._list_token)
        newest = list(self._files.newest(LISTED))
        size = sum(file.size for file in newest)
        return await json_response(page([file.fields for file in newest]), size)

    async def _get(self, request: Request) -> Response:
        file = self._find(request)
        return await json_response(file.fields, file.size)

    async def _delete(self, request: Request) -> Response:
        self._files.remove(self._find(request).id)
        return Response(status_code=204)

    def _find(self, request: Request) -> StoredFile:
        identifier = request.path_params["id"]
        file = self._files.get(identifier)
        if file is None:
            raise Refusal(404, f"file {identifier!r} does not exist or has been deleted")
        return file


def file_of(content: Part, metadata: Part | None) -> StoredFile:
    """Read a form's file, or raise Refusal or BadBody. It may be called in a thread."""
    about: Any = {}
    if metadata is not None:
        text = metadata.text().encode()
        about = parse_json(text) if text else {}
        if not isinstance(about, dict):
            raise invalid(["body", "metadata"], "must be a JSON object", "type_error")
    media_type = content.content_type
    if not _MEDIA_TYPE.fullmatch(media_type):
        media_type = _UNKNOWN_MEDIA_TYPE
    identifier = uuid.uuid4().hex
    data = base64.b64encode(content.file.read()).decode()
    fields = {
        "id": identifier,
        "name": content.filename,
        "content_type": media_type,
        "size": content.size,
        "etag": "",
        "checksums": {},
        "metadata": about,
        "created_at": now(),
        "expires_at": None,
        "urls": {"get": f"data:{media_type};base64,{data}"},
    }
    return StoredFile(identifier, content.size, fields)
