"""The id of every request. Plain ASGI, without tasks."""

from __future__ import annotations

import re
import secrets
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cog_triton.faces.openai.errors import MESSAGES_PATH

REQUEST_ID = "x-request-id"
ANTHROPICS_REQUEST_ID = "request-id"
_USABLE = re.compile(rb"[\w.:/+=@-]{1,128}")


class RequestIds:
    """Gives each request the id that its client gave it, or a new one, and says it in the response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = header(scope, REQUEST_ID.encode())
        name = given if given and _USABLE.fullmatch(given) else secrets.token_hex(16).encode()
        scope.setdefault("state", {})["request_id"] = name.decode()
        if scope["method"] == "HEAD":  # uvicorn, which has the scope itself, sends no body
            scope = {**scope, "method": "GET"}

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                said = [(key.encode(), value.encode()) for key, value in id_headers(scope).items()]
                message["headers"] = [*message["headers"], *said]
            await send(message)

        await self._app(scope, receive, send_with_id)


def id_headers(scope: Scope) -> dict[str, str]:
    """The headers of a response that say the id of its request."""
    name = scope["state"]["request_id"]
    headers = {REQUEST_ID: name}
    if scope["path"].startswith(MESSAGES_PATH):
        headers[ANTHROPICS_REQUEST_ID] = name
    return headers


def header(scope: Any, name: bytes) -> bytes | None:
    """A header of a request, None without it."""
    return next((value for key, value in scope["headers"] if key == name), None)
