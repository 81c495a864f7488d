"""Replicate's HTTP API for the one model that runs here, as Replicate's clients use it.

A prediction is read from Cog's server as a stream of events, and kept for a while after its end.
"""

from __future__ import annotations

import asyncio
import base64
import email
import json
import re
import uuid
from collections.abc import AsyncIterator
from datetime import datetime, timezone
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import orjson
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from cog_triton.faces.cog.predictions import Passage, fields_of, invalid
from cog_triton.web import Refusal

if TYPE_CHECKING:
    from cog_triton.faces.cog.front import Front

KEPT = 1000  # predictions
KEPT_BYTES = 64 << 20  # of their inputs and outputs
STOPPED = "E2105 TritonUnavailable: the server is being stopped"
_WAIT_SECONDS = 60.0  # of `Prefer: wait`, as Replicate's
_CANCEL_SECONDS = 1.0  # in which a cancelled prediction ends
_MODEL = "cog-triton/model"  # of a request that names a version only
_VERSION = "hidden"  # as of Replicate's official models, which have one version
_READ_AHEAD = 1 << 30  # an event is a line
_EVENTS = [(b"content-type", b"application/json"), (b"accept", b"text/event-stream")]
_DATA_URL = re.compile(r"data:[\w.+/-]*(?:;[\w.+-]+=[\w.+-]+)*;base64,")
_UNSET = ("description", "github_url", "paper_url", "license_url", "cover_image_url")


class Prediction:
    """A prediction, with its fields in Replicate's form."""

    task: asyncio.Task[None]  # reads its events

    def __init__(self, model: str, version: str, inputs: dict[str, Any], size: int) -> None:
        self.id, self.ended = uuid.uuid4().hex, False
        self.size = size  # bytes of its input and output
        self.fields: dict[str, Any] = (
            {"id": self.id, "model": model, "version": version, "input": inputs}
            | {"status": "starting", "output": None, "logs": "", "error": None, "metrics": {}}
            | {"created_at": now(), "started_at": None, "completed_at": None}
        )
        self.accepted = asyncio.get_running_loop().create_future()  # by Cog's server
        self.changed = asyncio.Event()  # set when something has come, and replaced

    async def read(self, body: asyncio.StreamReader) -> None:
        """Read Cog's server-sent events."""
        name, fields = b"", self.fields
        async for line in body:
            key, _, text = line.partition(b": ")
            if key == b"event":
                name = text.strip()
            if key != b"data" or not line.endswith(b"\n"):
                continue
            given = orjson.loads(text)
            if name == b"start":
                fields.update(status="processing", started_at=now())
            elif name == b"output":
                fields["output"] = fields["output"] or []
                fields["output"].append(given["chunk"])
                self.size += len(str(given["chunk"]))
            elif name == b"log":
                fields["logs"] += given["data"]
            elif name == b"completed":
                self.end(given["status"], given.get("error"), given.get("metrics"))
            self.changed.set()
            self.changed = asyncio.Event()

    def end(self, status: str, error: str | None = None, metrics: Any = None) -> None:
        self.fields.update(status=status, error=error, metrics=metrics or {}, completed_at=now())
        self.ended = True
        self.changed.set()

    def view(self, request: Request) -> dict[str, Any]:
        url = f"{base_url(request)}/v1/predictions/{self.id}"
        urls = {"get": url, "cancel": f"{url}/cancel", "stream": f"{url}/stream"}
        return {**self.fields, "urls": urls}

    async def events(self) -> AsyncIterator[str]:
        """Yield it as Replicate's server-sent events, from its beginning."""
        sent, ended = 0, False
        while not ended:
            changed, ended = self.changed, self.ended
            for chunk in (self.fields["output"] or [])[sent:]:
                sent += 1
                yield event("output", sent, chunk)
            if not ended:
                await changed.wait()
        if self.fields["error"] is not None:
            yield event("error", sent + 1, self.fields["error"])
        reason = {"failed": "error", "canceled": "canceled"}.get(self.fields["status"])
        yield event("done", sent + 2, json.dumps({"reason": reason} if reason else {}))


class Replicate:
    """The routes of the API, and the predictions that began there."""

    def __init__(self, front: Front) -> None:
        self._front, self._began = front, now()
        self._predictions: dict[str, Prediction] = {}
        every, one, model = "/v1/predictions", "/v1/predictions/{id}", "/v1/models/{owner}/{name}"
        created = (every, f"{model}/predictions", "/v1/deployments/{owner}/{name}/predictions")
        self.routes = [
            *(Route(path, self._create, methods=["POST"]) for path in created),
            Route(every, self._list),
            Route(one, self._get),
            Route(f"{one}/stream", self._stream),
            Route(f"{one}/cancel", self._cancel, methods=["POST"]),
            Route(model, self._model),
            Route(f"{model}/versions", self._versions),
            Route(f"{model}/versions/{{id}}", self._versions),
            Route("/v1/files", self._file, methods=["POST"]),
        ]

    async def _create(self, request: Request) -> JSONResponse:
        body = await request.body()
        fields, path = fields_of(body), request.path_params
        model, _, version = str(fields.get("version") or "").rpartition(":")
        if "owner" in path:
            model = f"{path['owner']}/{path['name']}"
        elif "/" in version:
            model, version = version, ""
        given = fields.get("input") or {}
        if not isinstance(given, dict):
            raise invalid(["body", "input"], "must be an object", "type_error")
        inputs = {name: text_of_file(name, value) for name, value in given.items()}
        prediction = Prediction(model or _MODEL, version or _VERSION, inputs, len(body))
        passed = {name: value for name, value in fields.items() if name.startswith("webhook")}
        if hook := passed.pop("webhook_completed", None):
            passed = {"webhook": hook, "webhook_events_filter": ["completed"]}
        body = orjson.dumps({**passed, "input": inputs})
        passage = self._front.predictions.check("PUT", f"/predictions/{prediction.id}", body)
        prediction.task = task = asyncio.create_task(self._run(prediction, passage))
        await asyncio.wait([prediction.accepted, task], return_when=asyncio.FIRST_COMPLETED)
        if not prediction.accepted.done():
            await task  # raises the reason
        self._keep(prediction)
        if prefer := re.search(r"\bwait\b(?:=(\d+))?", request.headers.get("prefer", "")):
            await asyncio.wait([task], timeout=float(prefer[1] or _WAIT_SECONDS))
        # Replicate's client takes a prediction of any other status than "starting" for one that has ended.
        status = prediction.fields["status"] if prefer and prediction.ended else "starting"
        return JSONResponse({**prediction.view(request), "status": status}, 201)

    async def _run(self, prediction: Prediction, passage: Passage) -> None:
        try:
            async with self._front.exchange(passage, _EVENTS, _READ_AHEAD) as (status, _, answer):
                if status != 200:
                    problem = orjson.loads(await answer.read())
                    detail = problem.get("detail") or problem.get("error")
                    raise Refusal(status, detail, retry_after=1 if status == 409 else None)
                prediction.accepted.set_result(None)
                await prediction.read(answer)
        except (asyncio.CancelledError, OSError) as error:
            if isinstance(error, asyncio.CancelledError) and not self._front.predictions.draining:
                prediction.end("canceled")
        if not prediction.ended:
            prediction.end("failed", STOPPED)

    def _keep(self, prediction: Prediction) -> None:
        self._predictions[prediction.id] = prediction
        size = sum(kept.size for kept in self._predictions.values())
        for old in [kept for kept in self._predictions.values() if kept.ended]:
            if len(self._predictions) <= KEPT and size <= KEPT_BYTES:
                break
            size -= self._predictions.pop(old.id).size

    def _find(self, request: Request) -> Prediction:
        identifier = request.path_params["id"]
        if (prediction := self._predictions.get(identifier)) is None:
            raise Refusal(404, f"there is no prediction {identifier!r}, or not any more")
        return prediction

    async def _list(self, request: Request) -> JSONResponse:
        return page([one.view(request) for one in [*self._predictions.values()][:-101:-1]])

    async def _get(self, request: Request) -> JSONResponse:
        return JSONResponse(self._find(request).view(request))

    async def _stream(self, request: Request) -> StreamingResponse:
        headers = {"cache-control": "no-store", "content-type": "text/event-stream"}
        return StreamingResponse(self._find(request).events(), headers=headers)

    async def _cancel(self, request: Request) -> JSONResponse:
        prediction = self._find(request)
        if not prediction.ended:
            if not self._front.predictions.cancel(prediction.id):
                prediction.task.cancel()
            await asyncio.wait([prediction.task], timeout=_CANCEL_SECONDS)
        return JSONResponse(prediction.view(request))

    async def _model(self, request: Request) -> JSONResponse:
        names = request.path_params  # of the owner and the model
        url = f"{base_url(request)}/v1/models/{names['owner']}/{names['name']}"
        known = {"url": url, "visibility": "private", "run_count": len(self._predictions)}
        latest = {"default_example": None, "latest_version": await self._version(request)}
        return JSONResponse(dict.fromkeys(_UNSET) | names | known | latest)

    async def _versions(self, request: Request) -> JSONResponse:
        found = await self._version(request)
        return JSONResponse(found) if "id" in request.path_params else page([found])

    async def _version(self, request: Request) -> dict[str, Any]:
        made = {"id": request.path_params.get("id", _VERSION), "created_at": self._began}
        schema = await self._front.ask("GET", "/openapi.json")
        return {**made, "cog_version": version("cog"), "openapi_schema": schema}

    async def _file(self, request: Request) -> JSONResponse:
        """Answer with a data URL, which has the file: nothing is stored."""
        kind = f"Content-Type: {request.headers.get('content-type', '')}\r\n\r\n".encode()
        for part in email.message_from_bytes(kind + await request.body()).walk():
            if part.get_param("name", header="content-disposition") == "content":
                content, kind_of = part.get_payload(decode=True), part.get_content_type()
                assert isinstance(content, bytes)
                url = f"data:{kind_of};base64,{base64.b64encode(content).decode()}"
                name = {"id": uuid.uuid4().hex, "name": part.get_filename(), "etag": ""}
                about = {"content_type": kind_of, "size": len(content), "created_at": now()}
                rest = {"checksums": {}, "metadata": {}, "expires_at": None, "urls": {"get": url}}
                return JSONResponse(name | about | rest, 201)
        raise invalid(["body", "content"], "a file is required", "value_error.missing")


def page(results: list[dict[str, Any]]) -> JSONResponse:
    return JSONResponse({"previous": None, "next": None, "results": results})


def problem_of(refusal: Refusal) -> dict[str, Any]:
    """Return an error in Replicate's form."""
    detail = refusal.detail
    if isinstance(detail, list):
        detail = "; ".join(f"{'.'.join(one['loc'][1:])}: {one['msg']}" for one in detail)
    title = "Input validation failed" if refusal.status == 422 else "Request failed"
    return {"title": title, "detail": detail, "status": refusal.status}


def text_of_file(name: str, value: Any) -> Any:
    """Return the text of a file that came as a data URL, and any other value as it is."""
    if not isinstance(value, str) or not (start := _DATA_URL.match(value)):
        return value
    try:
        return base64.b64decode(value[start.end() :], validate=True).decode()
    except ValueError:
        text = "the file must be text in UTF-8"
        raise invalid(["body", "input", name], text, "value_error") from None


def event(name: str, number: int, text: str) -> str:
    lines = "".join(f"data: {line}\n" for line in re.split(r"\r\n|\r|\n", text))
    return f"event: {name}\nid: {number}\n{lines}\n"


def base_url(request: Request) -> str:
    scheme = request.headers.get("x-forwarded-proto", "http")
    return f"{scheme}://{request.headers.get('host', 'localhost')}"


def now() -> str:
    return datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")
