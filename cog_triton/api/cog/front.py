"""The front: an ASGI application on the public port, which passes on to Cog's server what may pass.

It runs on a thread of the process that runs Cog's server, whose own threads hold no lock of Python's.

    client ──▶ uvicorn with limits ──▶ Front ──┬──▶ /health, /shutdown: answered here
                                               ├──▶ /v1/…: Replicate's API
                                               └──▶ Passage ──▶ CogServer ──▶ Answer ──▶ client
"""

import asyncio
import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, cast

from starlette.datastructures import Headers as HeaderMap
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.routing import Route, Router
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from cog_triton.api.cog.cog_server import READ_AHEAD_BYTES, STOPPED, CogServer, Reply
from cog_triton.api.cog.health import Health
from cog_triton.api.cog.lifetime import drain, log, within, worker_end
from cog_triton.api.cog.predictions import Predictions
from cog_triton.api.cog.replicate.replies import FILES_PATH, is_replicates, problem_of
from cog_triton.api.cog.replicate.routes import Replicate
from cog_triton.errors import shown
from cog_triton.settings import Settings
from cog_triton.web import Refusal
from cog_triton.web.bodies import off_loop
from cog_triton.web.origin import access_rule, cors_options, is_json, origins_of
from cog_triton.web.server import BACKLOG, Limits, Server

# EX_SOFTWARE of sysexits.h: the worker has ended.
EXIT_STATUS = 70
# How long Cog's server may take to end after its worker: when it cannot go on and says why, and when it was
# told to end. On a busy machine, the end of its process takes seconds.
_FAILURE_SECONDS = 1.0
_END_SECONDS = 30.0
# For clients to take what has been written to them.
_FLUSH_SECONDS = 2.0
_ERROR_EVENT = f"event: error\ndata: {json.dumps({'error': STOPPED})}\n\n".encode()


class Front:
    """The application, its start and its end."""

    def __init__(
        self, listener: socket.socket, settings: Settings, predictions: Predictions | None = None
    ) -> None:
        """Prepare to serve.

        Args:
            listener: bound to the public address; it does not listen yet.
        """
        self.predictions = predictions or Predictions()
        self.cog_server = CogServer(self.predictions, drain_seconds=settings.drain_seconds)
        self.health = Health(self.cog_server, self.predictions, busy_timeout=settings.busy_timeout)
        self._listener = listener
        self._settings = settings
        self._stop = asyncio.Event()
        # Cog's server has been told to end, and ends its worker first.
        self._told_to_end = False
        replicate = Replicate(self.cog_server, self.predictions, settings.replicate_list_token)
        routes = [*self.front_routes(), *replicate.routes]
        self._router = Router(routes, redirect_slashes=False, default=self._pass)
        self._server = self._make_server()

    def _make_server(self) -> Server:
        settings = self._settings
        origins = origins_of(settings.cog_allowed_origins)
        access = access_rule(
            self._listener,
            hosts=settings.allowed_hosts,
            origins=settings.cog_allowed_origins,
            origins_setting="COG_ALLOWED_ORIGINS",
        )
        application = CORSMiddleware(self, **cors_options(origins)) if origins else self
        limits = Limits(settings.max_request_bytes, request_seconds=settings.receive_timeout)
        return Server(application, limits, access, refusal_body)

    def front_routes(self) -> list[Route]:
        """Return the routes that are neither Replicate's nor passed on to Cog's server."""
        return [
            Route("/health/live", self._answer_live),
            Route("/health/ready", self._answer_ready),
            Route("/shutdown", self._answer_shutdown, methods=["POST"]),
        ]

    # Start and end

    async def serve(self, inner_port: Callable[[], int | None], stop: int) -> None:
        """Serve until told to stop.

        Args:
            inner_port: returns the port of Cog's server once that listens; None before. Nothing is served
                until then.
            stop: a descriptor that becomes readable when the front is to stop.
        """

        def stop_by_signal() -> None:
            os.read(stop, 64)
            if not self.cog_server.port:
                # Cog's server does not serve yet, and would take no notice.
                os._exit(0)
            self._stop.set()

        asyncio.get_running_loop().add_reader(stop, stop_by_signal)
        self.predictions.listen()
        watching = asyncio.create_task(self._end_with_worker())
        while not self.cog_server.port:
            await asyncio.sleep(0.01)
            self.cog_server.port = inner_port() or 0
        try:
            # Two may bind an address, before one listens on it.
            self._listener.listen(BACKLOG)
        except OSError as error:
            host, taken = self._listener.getsockname()[:2]
            log("WARN", f"{host}, port {taken}: {error.strerror}")
            os._exit(1)
        serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        await self._wait_for_stop(serving, watching)
        await self._end()
        # Cog's server ends the process.
        await asyncio.gather(serving, watching)

    async def _wait_for_stop(
        self, serving: asyncio.Task[None], watching: asyncio.Task[None]
    ) -> None:
        """Wait until the front is to stop, or raise: without either task the server would be no use."""
        stopping = asyncio.create_task(self._stop.wait())
        waited_for: set[asyncio.Task[Any]] = {stopping, serving, watching}
        while not self._stop.is_set():
            done, waited_for = await asyncio.wait(waited_for, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            if serving in done and not self._stop.is_set():
                raise RuntimeError("it does not listen any more")

    async def _end_with_worker(self) -> None:
        """End this process soon after its worker.

        Cog's server would run on without it (0.23.1). After a setup that failed it may: it says why.
        """
        await worker_end()
        self.health.worker_ended = True
        if self._told_to_end:
            await asyncio.sleep(_END_SECONDS)
            log("WARN", f"Cog's server did not end within {_END_SECONDS:g} s after its worker")
            self._exit_without_cog()
        await asyncio.sleep(_FAILURE_SECONDS)
        # Cog's server that lost its worker before it listens has no status, and may never have one.
        if self.cog_server.port and await self.cog_server.status() == "SETUP_FAILED":
            return
        with contextlib.suppress(OSError):
            # Plain, as the reason of the end.
            text = "the predictor's process ended unexpectedly; stopping Cog's server"
            print(text, file=sys.stderr, flush=True)
        os._exit(EXIT_STATUS)

    async def _end(self) -> None:
        """Let running predictions end, for a bounded time, and then Cog's server."""
        await drain(self.predictions, self._settings)
        connections = self._server.server_state.connections
        await within(
            _FLUSH_SECONDS,
            lambda: any(each.transport.get_write_buffer_size() for each in connections),
        )
        self._told_to_end = True
        if await self.cog_server.ask("POST", "/shutdown") is None:
            # It does not serve yet, or not any more.
            self._exit_without_cog()

    def _exit_without_cog(self) -> None:
        """End this process, which was told to stop, without Cog's server."""
        self.predictions.files.remove_all()
        os._exit(0)

    # Requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_last(message: Message) -> None:
            if self.predictions.draining and message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        # With an application in the scope, routes raise HTTPException in place of answering with a text.
        scope["app"] = self
        with contextlib.suppress(ClientDisconnect):
            try:
                check_content_type(scope)
                await self._router(scope, receive, send_last)
            except (Refusal, HTTPException) as error:
                await _refusal_response(error, scope["path"])(scope, receive, send_last)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to Cog's server, and its response to the client."""
        request = Request(scope, receive)
        predictions = self.predictions
        # Read first, so that its sender is held to the limits of requests.
        body = await request.body()
        if is_replicates(scope["path"]):
            raise Refusal(404, f"unknown route: {request.method} {shown(scope['path'])}")
        target = _target_of(scope)
        passage = await off_loop(len(body), predictions.check, request.method, target, body)
        if passage.starts is not None:
            # Draining may have begun meanwhile.
            predictions.refuse_while_draining()
        if passage.cancels is not None and predictions.listening:
            # Passed on, it could find a prediction that has come meanwhile, and be dropped there.
            cancelled = predictions.cancel(passage.cancels)
            await JSONResponse({}, 200 if cancelled else 404)(scope, receive, send)
            return
        # Another request may have started the prediction, and this one only watches it.
        begun_here = None if predictions.runs(passage.starts) else passage.starts
        relaying = cast(asyncio.Task[None], asyncio.current_task())

        async def cancel_if_disconnected() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            # The end of a prediction that the predictor cancels is awaited all the same.
            if begun_here is not None and not predictions.cancel(begun_here):
                # Cog's server cancels it as its connection ends.
                relaying.cancel()

        watching = asyncio.create_task(cancel_if_disconnected())
        try:
            async with self.cog_server.exchange(passage, scope["headers"]) as reply:
                await self._relay(reply, _cycle_of(receive), send)
        finally:
            watching.cancel()

    async def _relay(self, reply: Reply, cycle: RequestResponseCycle, send: Send) -> None:
        """Send a reply to the client; a stream of events that breaks off ends with an error event."""
        start = {"type": "http.response.start", "status": reply.status, "headers": reply.headers}
        await send(start)
        last = b""
        rest = b""
        try:
            if reply.has_length:
                rest = await reply.body.read()
            else:
                while True:
                    data = await reply.body.read(READ_AHEAD_BYTES)
                    if not data:
                        break
                    last = data
                    self.predictions.progress = time.monotonic()
                    await _write_chunk(cycle, data)
        except (asyncio.CancelledError, OSError):
            rest = _ERROR_EVENT if last.endswith(b"\n\n") else b""
        await send({"type": "http.response.body", "body": rest})

    async def _answer_shutdown(self, _: Request) -> JSONResponse:
        self._stop.set()
        return JSONResponse({})

    async def _answer_live(self, _: Request) -> JSONResponse:
        status = await self.health.status()
        return _health_response(status, self.health.problem_with_life(status))

    async def _answer_ready(self, _: Request) -> JSONResponse:
        status = await self.health.status()
        return _health_response(status, self.health.problem_with_readiness(status))


def check_content_type(scope: Scope) -> None:
    """Refuse a body that is not JSON with 415; only uploads are forms.

    A page may send forms and plain text to any server, but JSON only to one that allows it.
    """
    headers = HeaderMap(scope=scope)
    has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    is_upload = scope["path"] == FILES_PATH
    if has_body and not is_upload and not is_json(headers.get("content-type", "")):
        raise Refusal(415, "the body must be sent with Content-Type: application/json")


def refusal_body(refusal: Refusal, target: str) -> dict[str, Any]:
    """Return the body of a refusal, in the form of the API whose route is asked."""
    return problem_of(refusal) if is_replicates(target) else {"detail": refusal.detail}


def _refusal_response(error: Refusal | HTTPException, path: str) -> JSONResponse:
    headers = dict(getattr(error, "headers", None) or {})
    if isinstance(error, HTTPException):
        error = Refusal(error.status_code, error.detail)
    if error.retry_after:
        headers["retry-after"] = str(error.retry_after)
    return JSONResponse(refusal_body(error, path), error.status, headers)


def _health_response(status: str | None, problem: str) -> JSONResponse:
    body = {"status": status or "UNKNOWN"}
    if problem:
        body["detail"] = problem
    return JSONResponse(body, 503 if problem else 200)


def _target_of(scope: Scope) -> str:
    """Return the path and the query as they came."""
    target: bytes = scope["raw_path"]
    if scope["query_string"]:
        target += b"?" + scope["query_string"]
    return target.decode("latin-1")


def _cycle_of(receive: Receive) -> RequestResponseCycle:
    """Return uvicorn's object for a request and its response."""
    cycle: RequestResponseCycle = cast(Any, receive).__self__
    return cycle


async def _write_chunk(cycle: RequestResponseCycle, data: bytes) -> None:
    """Write a chunk of a response past uvicorn, which takes three times as long."""
    if not cycle.transport.is_closing():
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
    if cycle.flow.write_paused:
        await cycle.flow.drain()
