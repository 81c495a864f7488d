"""A prediction, with its fields in Replicate's form."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import orjson
from starlette.requests import Request

from cog_triton.api.cog.lifetime import now
from cog_triton.api.cog.replicate.creation import Creation
from cog_triton.api.cog.replicate.replies import base_url

_LINE_END = re.compile(r"\r\n|\r|\n")
# Reasons of an end, by statuses. One that succeeded has none.
_REASONS = {"failed": "error", "canceled": "canceled"}


class Prediction:
    """A prediction that is read from Cog's server, and shown to as many readers as ask for it."""

    # Reads its events.
    task: asyncio.Task[None]

    def __init__(self, identifier: str, creation: Creation, size: int) -> None:
        """Begin with its inputs, of so many bytes."""
        self.id = identifier
        self.ended = False
        # Bytes of its input and output.
        self.size = size
        self.fields: dict[str, Any] = {
            "id": identifier,
            "model": creation.model,
            "version": creation.version,
            "input": creation.inputs,
            "status": "starting",
            "output": None,
            "logs": "",
            "error": None,
            "metrics": {},
            "created_at": now(),
            "started_at": None,
            "completed_at": None,
        }
        # Done when Cog's server has accepted it.
        self.accepted = asyncio.get_running_loop().create_future()
        # Set when something has come, and replaced then.
        self.changed = asyncio.Event()

    @property
    def can_go(self) -> bool:
        return self.ended

    async def read(self, body: asyncio.StreamReader) -> None:
        """Read the events of Cog's server to their end.

        An event has a line with its name, and then one with its data.
        """
        name = b""
        async for line in body:
            key, _, text = line.partition(b": ")
            if key == b"event":
                name = text.strip()
            is_complete = line.endswith(b"\n")
            if key == b"data" and is_complete:
                self._take(name, orjson.loads(text))

    def _take(self, name: bytes, data: dict[str, Any]) -> None:
        """Take an event."""
        fields = self.fields
        if name == b"start":
            fields.update(status="processing", started_at=now())
        elif name == b"output":
            fields["output"] = fields["output"] or []
            fields["output"].append(data["chunk"])
            self.size += len(str(data["chunk"]))
        elif name == b"log":
            fields["logs"] += data["data"]
        elif name == b"completed":
            self.end(data["status"], data.get("error"), data.get("metrics"))
        self.changed.set()
        self.changed = asyncio.Event()

    def end(self, status: str, error: str | None = None, metrics: Any = None) -> None:
        self.fields.update(status=status, error=error, metrics=metrics or {}, completed_at=now())
        self.ended = True
        self.changed.set()

    def view(self, request: Request) -> dict[str, Any]:
        """Return its fields, with the addresses by which this client reaches it."""
        url = f"{base_url(request)}/v1/predictions/{self.id}"
        urls = {"get": url, "cancel": f"{url}/cancel", "stream": f"{url}/stream"}
        return {**self.fields, "urls": urls}

    async def events(self) -> AsyncIterator[str]:
        """Yield it as Replicate's server-sent events, from its beginning."""
        sent = 0
        ended = False
        # A carriage return at a chunk's end: with a line feed in the next, it is one line's end.
        held = ""
        while not ended:
            changed = self.changed
            ended = self.ended
            for chunk in (self.fields["output"] or [])[sent:]:
                sent += 1
                text = held + chunk
                held = "\r" if text.endswith("\r") else ""
                text = text[: len(text) - len(held)]
                if text:
                    yield event("output", sent, text)
            if not ended:
                await changed.wait()
        if held:
            yield event("output", sent, held)
        if self.fields["error"] is not None:
            yield event("error", sent + 1, self.fields["error"])
        reason = _REASONS.get(self.fields["status"])
        yield event("done", sent + 2, json.dumps({"reason": reason} if reason else {}))


def event(name: str, number: int, text: str) -> str:
    """Return a server-sent event; each line of its text is a line of data."""
    lines = "".join(f"data: {line}\n" for line in _LINE_END.split(text))
    return f"event: {name}\nid: {number}\n{lines}\n"
