"""The routes of predictions and models."""

import asyncio
import re
import time
import uuid
from functools import partial
from importlib.metadata import version
from typing import Any

import orjson
from pydantic import SecretStr
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from cog_triton.api.cog.cog_server import STOPPED, CogServer
from cog_triton.api.cog.lifetime import log, now
from cog_triton.api.cog.passage import Passage
from cog_triton.api.cog.predictions import Predictions
from cog_triton.api.cog.replicate.creation import VERSION, read_creation
from cog_triton.api.cog.replicate.files import Files
from cog_triton.api.cog.replicate.kept import Kept
from cog_triton.api.cog.replicate.prediction import Prediction
from cog_triton.api.cog.replicate.replies import (
    LISTED,
    base_url,
    check_list_token,
    json_response,
    page,
)
from cog_triton.web import Refusal
from cog_triton.web.bodies import off_loop

UNREADABLE = "E2104 TritonMalformedEvent: Cog's server sent an event that cannot be read"
_ALL = "/v1/predictions"
_ONE = "/v1/predictions/{id}"
_MODEL = "/v1/models/{owner}/{name}"
_DEPLOYMENT = "/v1/deployments/{owner}/{name}"
_PREFER_WAIT = re.compile(r"\bwait\b(?:=([0-9]+))?")
# What `Prefer: wait` waits at most, and without a number; as Replicate's.
_WAIT_SECONDS = 60.0
# In which a cancelled prediction ends.
_CANCEL_SECONDS = 1.0
# Of an answer of Cog's server that is not JSON.
_SHOWN_BYTES = 500
# An event is a line, however long it is.
_READ_AHEAD_BYTES = 1 << 30
_EVENT_HEADERS = [(b"content-type", b"application/json"), (b"accept", b"text/event-stream")]
# Fields of a model that nothing here has a value for.
_UNSET = ("description", "github_url", "paper_url", "license_url", "cover_image_url")


class Replicate:
    """The routes of the API, and the predictions that began there."""

    def __init__(
        self, cog_server: CogServer, predictions: Predictions, list_token: SecretStr | None
    ) -> None:
        self._cog_server = cog_server
        self._predictions = predictions
        self._list_token = list_token
        self._began = now()
        self._kept: Kept[Prediction] = Kept()
        self.routes = [
            Route(_ALL, self._create, methods=["POST"]),
            Route(f"{_MODEL}/predictions", self._create, methods=["POST"]),
            Route(f"{_DEPLOYMENT}/predictions", self._create, methods=["POST"]),
            Route(_ALL, self._list),
            Route(_ONE, self._get),
            Route(f"{_ONE}/stream", self._stream),
            Route(f"{_ONE}/cancel", self._cancel, methods=["POST"]),
            Route(_MODEL, self._model),
            Route(f"{_MODEL}/versions", self._versions),
            Route(f"{_MODEL}/versions/{{id}}", self._versions),
            *Files(list_token).routes,
        ]

    # Predictions

    async def _create(self, request: Request) -> Response:
        body = await request.body()
        began = time.monotonic()
        identifier = uuid.uuid4().hex
        read = partial(
            read_creation,
            body,
            identifier=identifier,
            path=request.path_params,
            predictions=self._predictions,
        )
        creation = await off_loop(len(body), read)
        self._predictions.refuse_while_draining()
        prediction = Prediction(identifier, creation, len(body))
        task = asyncio.create_task(self._run(prediction, creation.passage))
        prediction.task = task
        await asyncio.wait([prediction.accepted, task], return_when=asyncio.FIRST_COMPLETED)
        if not prediction.accepted.done():
            # Raises the reason.
            await task
        self._kept.add(prediction)
        prefer_wait = _PREFER_WAIT.search(request.headers.get("prefer", ""))
        if prefer_wait:
            # From its arrival on: Replicate's client gives up half a second after that time.
            end = began + wait_seconds(prefer_wait[1])
            await asyncio.wait([task], timeout=max(0.0, end - time.monotonic()))
        # Replicate's client takes a prediction of any other status than "starting" for one that has ended.
        shows_end = bool(prefer_wait) and prediction.ended
        status = prediction.fields["status"] if shows_end else "starting"
        view = {**prediction.view(request), "status": status}
        return await json_response(view, prediction.size, status=201)

    async def _run(self, prediction: Prediction, passage: Passage) -> None:
        """Read a prediction to its end, which has a status, however it came."""
        try:
            async with self._cog_server.exchange(
                passage, _EVENT_HEADERS, _READ_AHEAD_BYTES
            ) as reply:
                if reply.status != 200:
                    detail = detail_of(await reply.body.read())
                    retry_after = 1 if reply.status == 409 else None
                    raise Refusal(reply.status, detail, retry_after=retry_after)
                prediction.accepted.set_result(None)
                await prediction.read(reply.body)
        except asyncio.CancelledError:
            if not self._predictions.draining:
                prediction.end("canceled")
        except OSError:
            # The connection broke off.
            prediction.end("failed", STOPPED)
        except Exception as error:
            if not prediction.accepted.done():
                # For the request that creates it, which waits.
                raise
            log(
                "ERROR",
                f"prediction {prediction.id} could not be read from Cog's server: {error!r}",
            )
            prediction.end("failed", UNREADABLE)
        if not prediction.ended:
            prediction.end("failed", STOPPED)

    async def _list(self, request: Request) -> Response:
        check_list_token(request, self._list_token)
        newest = list(self._kept.newest(LISTED))
        size = sum(prediction.size for prediction in newest)
        return await json_response(page([each.view(request) for each in newest]), size)

    async def _get(self, request: Request) -> Response:
        prediction = self._find(request)
        return await json_response(prediction.view(request), prediction.size)

    async def _stream(self, request: Request) -> StreamingResponse:
        headers = {"cache-control": "no-store", "content-type": "text/event-stream"}
        return StreamingResponse(self._find(request).events(), headers=headers)

    async def _cancel(self, request: Request) -> Response:
        prediction = self._find(request)
        if not prediction.ended:
            if not self._predictions.cancel(prediction.id):
                prediction.task.cancel()
            await asyncio.wait([prediction.task], timeout=_CANCEL_SECONDS)
        return await json_response(prediction.view(request), prediction.size)

    def _find(self, request: Request) -> Prediction:
        identifier = request.path_params["id"]
        prediction = self._kept.get(identifier)
        if prediction is None:
            raise Refusal(404, f"prediction {identifier!r} does not exist or has been deleted")
        return prediction

    # The model

    async def _model(self, request: Request) -> JSONResponse:
        owner = request.path_params["owner"]
        name = request.path_params["name"]
        fields = {
            "owner": owner,
            "name": name,
            "url": f"{base_url(request)}/v1/models/{owner}/{name}",
            "visibility": "private",
            "run_count": len(self._kept),
            "default_example": None,
            "latest_version": await self._version(VERSION),
        }
        return JSONResponse({**dict.fromkeys(_UNSET), **fields})

    async def _versions(self, request: Request) -> JSONResponse:
        identifier = request.path_params.get("id")
        if identifier is not None:
            return JSONResponse(await self._version(identifier))
        return JSONResponse(page([await self._version(VERSION)]))

    async def _version(self, identifier: str) -> dict[str, Any]:
        return {
            "id": identifier,
            "created_at": self._began,
            "cog_version": version("cog"),
            "openapi_schema": await self._cog_server.ask("GET", "/openapi.json"),
        }


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
