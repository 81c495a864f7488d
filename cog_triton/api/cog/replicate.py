"""Replicate's HTTP API for the one model that runs here, as Replicate's clients use it.

A prediction is read from Cog's server as a stream of events, and kept for a while after its end.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import re
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import orjson
from pydantic import SecretStr
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from cog_triton.api.cog.predictions import Passage, fields_of, invalid
from cog_triton.web import Refusal
from cog_triton.web.bodies import BadBody, off_loop, parse_json
from cog_triton.web.forms import Part, read_form

if TYPE_CHECKING:
    from cog_triton.api.cog.front import Front

FILES_PATH = "/v1/files"  # takes forms; all other bodies are JSON
KEPT = 1000  # predictions
KEPT_BYTES = 64 << 20  # of their inputs and outputs
STOPPED = "E2105 TritonUnavailable: the server is being stopped"
_WAIT_SECONDS = 60.0  # the most of `Prefer: wait`, and without a number; as Replicate's
_WAIT = re.compile(r"\bwait\b(?:=([0-9]+))?")
_CANCEL_SECONDS = 1.0  # in which a cancelled prediction ends
_MODEL = "cog-triton/model"  # of a request that names a version only
_VERSION = "hidden"  # as of Replicate's official models, which have one version
_LISTED = 100  # at most
_SHOWN_BYTES = 500  # of an answer of Cog's server that is not JSON
_READ_AHEAD = 1 << 30  # an event is a line
_EVENTS = [(b"content-type", b"application/json"), (b"accept", b"text/event-stream")]
_DATA_URL = re.compile(r"data:[\w.+/-]*(?:;[\w.+-]+=[\w.+-]+)*;base64,")
_TITLES = {
    403: "Forbidden",
    404: "Not found",
    405: "Method not allowed",
    422: "Input validation failed",
}
_MEDIA_TYPE = re.compile(r"[\w.+-]+/[\w.+-]+", re.ASCII)
_UNSET = ("description", "github_url", "paper_url", "license_url", "cover_image_url")


class Prediction:
    """A prediction, with its fields in Replicate's form."""

    task: asyncio.Task[None]  # reads its events

    def __init__(self, identifier: str, creation: Creation, size: int) -> None:
        self.id = identifier
        self.ended = False
        self.size = size  # bytes of its input and output
        self.fields: dict[str, Any] = (
            {"id": identifier, "model": creation.model, "version": creation.version}
            | {"input": creation.inputs}
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
        sent = 0
        ended = False
        held = ""  # a carriage return at a chunk's end: with a line feed in the next it is one line's end
        while not ended:
            changed, ended = self.changed, self.ended
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
        reason = {"failed": "error", "canceled": "canceled"}.get(self.fields["status"])
        yield event("done", sent + 2, json.dumps({"reason": reason} if reason else {}))


@dataclass(frozen=True)
class Creation:
    """A request that begins a prediction, as it was read."""

    model: str
    version: str
    inputs: dict[str, Any]
    passage: Passage


class Replicate:
    """The routes of the API, the predictions that began there, and the files that were sent there."""

    def __init__(self, front: Front, list_token: SecretStr | None) -> None:
        self._front, self._began, self._list_token = front, now(), list_token
        self._predictions: dict[str, Prediction] = {}
        self._files: dict[str, dict[str, Any]] = {}
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
            Route(FILES_PATH, self._create_file, methods=["POST"]),
            Route(FILES_PATH, self._list_files),
            Route(f"{FILES_PATH}/{{id}}", self._get_file),
            Route(f"{FILES_PATH}/{{id}}", self._delete_file, methods=["DELETE"]),
        ]

    async def _create(self, request: Request) -> Response:
        body = await request.body()
        identifier = uuid.uuid4().hex
        creation = await off_loop(len(body), self._read, identifier, body, request.path_params)
        self._front.predictions.refuse_while_draining()
        prediction = Prediction(identifier, creation, len(body))
        prediction.task = task = asyncio.create_task(self._run(prediction, creation.passage))
        await asyncio.wait([prediction.accepted, task], return_when=asyncio.FIRST_COMPLETED)
        if not prediction.accepted.done():
            await task  # raises the reason
        self._keep(prediction)
        prefer = _WAIT.search(request.headers.get("prefer", ""))
        if prefer:
            await asyncio.wait([task], timeout=wait_seconds(prefer[1]))
        # Replicate's client takes a prediction of any other status than "starting" for one that has ended.
        status = prediction.fields["status"] if prefer and prediction.ended else "starting"
        view = {**prediction.view(request), "status": status}
        return await json_response(view, prediction.size, status=201)

    def _read(self, identifier: str, body: bytes, path: dict[str, str]) -> Creation:
        """Read the body of a new prediction, or raise Refusal. It may be called in a thread."""
        fields = fields_of(body)
        asked = fields.get("version")
        if asked is not None and not isinstance(asked, str):
            raise invalid(["body", "version"], "must be a string", "type_error")
        model, _, version = (asked or "").rpartition(":")
        if "owner" in path:
            model = f"{path['owner']}/{path['name']}"
        elif "/" in version:
            model, version = version, ""
        given = fields.get("input") or {}
        if not isinstance(given, dict):
            raise invalid(["body", "input"], "must be an object", "type_error")
        inputs = {name: text_of_file(name, value) for name, value in given.items()}
        passed = {name: value for name, value in fields.items() if name.startswith("webhook")}
        hook = passed.pop("webhook_completed", None)
        if hook:
            passed = {"webhook": hook, "webhook_events_filter": ["completed"]}
        sent = orjson.dumps({**passed, "input": inputs})
        passage = self._front.predictions.check("PUT", f"/predictions/{identifier}", sent)
        return Creation(model or _MODEL, version or _VERSION, inputs, passage)

    async def _run(self, prediction: Prediction, passage: Passage) -> None:
        try:
            async with self._front.exchange(passage, _EVENTS, _READ_AHEAD) as (status, _, answer):
                if status != 200:
                    detail = detail_of(await answer.read())
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
            raise Refusal(404, f"prediction {identifier!r} does not exist or has been deleted")
        return prediction

    def _check_list_token(self, request: Request) -> None:
        """Refuse to list what others have sent, unless the request has the token for it."""
        if self._list_token is None:
            text = "listing is disabled: set REPLICATE_LIST_TOKEN, and send it as the API token"
            raise Refusal(403, text)
        _, _, presented = request.headers.get("authorization", "").partition(" ")
        expected = self._list_token.get_secret_value().encode()
        if not hmac.compare_digest(presented.strip().encode(), expected):
            raise Refusal(403, "the API token does not match REPLICATE_LIST_TOKEN")

    async def _list(self, request: Request) -> Response:
        self._check_list_token(request)
        newest = [*self._predictions.values()][: -_LISTED - 1 : -1]
        size = sum(prediction.size for prediction in newest)
        return await json_response(page([one.view(request) for one in newest]), size)

    async def _get(self, request: Request) -> Response:
        prediction = self._find(request)
        return await json_response(prediction.view(request), prediction.size)

    async def _stream(self, request: Request) -> StreamingResponse:
        headers = {"cache-control": "no-store", "content-type": "text/event-stream"}
        return StreamingResponse(self._find(request).events(), headers=headers)

    async def _cancel(self, request: Request) -> Response:
        prediction = self._find(request)
        if not prediction.ended:
            if not self._front.predictions.cancel(prediction.id):
                prediction.task.cancel()
            await asyncio.wait([prediction.task], timeout=_CANCEL_SECONDS)
        return await json_response(prediction.view(request), prediction.size)

    async def _model(self, request: Request) -> JSONResponse:
        names = request.path_params  # of the owner and the model
        url = f"{base_url(request)}/v1/models/{names['owner']}/{names['name']}"
        known = {"url": url, "visibility": "private", "run_count": len(self._predictions)}
        latest = {"default_example": None, "latest_version": await self._version(request)}
        return JSONResponse(dict.fromkeys(_UNSET) | names | known | latest)

    async def _versions(self, request: Request) -> JSONResponse:
        found = await self._version(request)
        return JSONResponse(found if "id" in request.path_params else page([found]))

    async def _version(self, request: Request) -> dict[str, Any]:
        made = {"id": request.path_params.get("id", _VERSION), "created_at": self._began}
        schema = await self._front.ask("GET", "/openapi.json")
        return {**made, "cog_version": version("cog"), "openapi_schema": schema}

    async def _create_file(self, request: Request) -> Response:
        """Answer with a data URL, which has the file. It is kept in memory for a while."""
        kind = request.headers.get("content-type", "")
        try:
            async with read_form(request.stream(), kind) as parts:
                content = parts.get("content")
                if content is None:
                    where = ["body", "content"]
                    raise invalid(where, "a file is required", "value_error.missing")
                size = sum(part.size for part in parts.values())
                file = await off_loop(size, file_of, content, parts.get("metadata"))
        except BadBody as error:
            raise Refusal(400, f"the body {error}") from None
        self._files[file["id"]] = file
        kept_bytes = sum(kept["size"] for kept in self._files.values())
        for oldest in [*self._files]:
            if len(self._files) <= KEPT and kept_bytes <= KEPT_BYTES:
                break
            kept_bytes -= self._files.pop(oldest)["size"]
        return await json_response(file, file["size"], status=201)

    def _find_file(self, request: Request) -> dict[str, Any]:
        identifier = request.path_params["id"]
        if identifier not in self._files:
            raise Refusal(404, f"file {identifier!r} does not exist or has been deleted")
        return self._files[identifier]

    async def _list_files(self, request: Request) -> Response:
        self._check_list_token(request)
        newest = [*self._files.values()][: -_LISTED - 1 : -1]
        return await json_response(page(newest), sum(file["size"] for file in newest))

    async def _get_file(self, request: Request) -> Response:
        file = self._find_file(request)
        return await json_response(file, file["size"])

    async def _delete_file(self, request: Request) -> Response:
        del self._files[self._find_file(request)["id"]]
        return Response(status_code=204)


def file_of(content: Part, metadata: Part | None) -> dict[str, Any]:
    """Return a file in Replicate's form, or raise Refusal or BadBody. It may be called in a thread."""
    about: Any = {}
    if metadata is not None:
        text = metadata.text().encode()
        about = parse_json(text) if text else {}
        if not isinstance(about, dict):
            raise invalid(["body", "metadata"], "must be a JSON object", "type_error")
    kind = content.content_type
    if not _MEDIA_TYPE.fullmatch(kind):
        kind = "application/octet-stream"
    data = base64.b64encode(content.file.read()).decode()
    return {
        "id": uuid.uuid4().hex,
        "name": content.filename,
        "content_type": kind,
        "size": content.size,
        "etag": "",
        "checksums": {},
        "metadata": about,
        "created_at": now(),
        "expires_at": None,
        "urls": {"get": f"data:{kind};base64,{data}"},
    }


async def json_response(value: Any, size: int, *, status: int = 200) -> Response:
    """Return a response of JSON, whose text is made in a thread if it has about so many bytes."""
    text = await off_loop(size, orjson.dumps, value)
    return Response(text, status, media_type="application/json")


def wait_seconds(digits: str | None) -> float:
    """Return how long `Prefer: wait` waits."""
    return min(float(digits), _WAIT_SECONDS) if digits else _WAIT_SECONDS


def detail_of(body: bytes) -> Any:
    """Return the reason that Cog's server has for a refusal."""
    try:
        problem = orjson.loads(body)
        return problem.get("detail") or problem.get("error")
    except (orjson.JSONDecodeError, AttributeError):
        return body[:_SHOWN_BYTES].decode(errors="replace")


def page(results: list[dict[str, Any]]) -> dict[str, Any]:
    return {"previous": None, "next": None, "results": results}


def is_replicates(target: str) -> bool:
    """Tell whether a path, or a request's target, is one of this API's."""
    path = target.partition("?")[0]
    return path == "/v1" or path.startswith("/v1/")


def problem_of(refusal: Refusal) -> dict[str, Any]:
    """Return an error in Replicate's form."""
    detail = refusal.detail
    if isinstance(detail, list):
        detail = "; ".join(f"{'.'.join(one['loc'][1:])}: {one['msg']}" for one in detail)
    title = _TITLES.get(refusal.status, "Request failed")
    return {"title": title, "detail": detail, "status": refusal.status}


def text_of_file(name: str, value: Any) -> Any:
    """Return the text of a file that came as a data URL, and any other value as it is."""
    if not isinstance(value, str) or not (start := _DATA_URL.match(value)):
        return value
    try:
        return base64.b64decode(value[start.end() :], validate=True).decode()
    except ValueError:
        text = "the file must be UTF-8 text"
        raise invalid(["body", "input", name], text, "value_error") from None


def event(name: str, number: int, text: str) -> str:
    lines = "".join(f"data: {line}\n" for line in re.split(r"\r\n|\r|\n", text))
    return f"event: {name}\nid: {number}\n{lines}\n"


def base_url(request: Request) -> str:
    forwarded = request.headers.get("x-forwarded-proto", "").strip().lower()
    scheme = forwarded if forwarded in ("http", "https") else "http"
    return f"{scheme}://{request.headers.get('host', 'localhost')}"


def now() -> str:
    return datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")
