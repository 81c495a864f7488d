"""The front: an ASGI application on the public port, which passes on to Cog's server what may pass.

It runs on a thread of the process that runs Cog's server, whose own threads hold no lock of Python's.
"""

import asyncio
import contextlib
import json
import math
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, cast

import anyio
import orjson
from starlette.datastructures import Headers as HeaderMap
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.routing import Route, Router
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from cog_triton.api.cog.answer import Answer
from cog_triton.api.cog.inner_port import connect, random_source
from cog_triton.api.cog.predictions import Passage, Predictions
from cog_triton.api.cog.replicate import (
    FILES_PATH,
    STOPPED,
    Replicate,
    is_replicates,
    now,
    problem_of,
)
from cog_triton.errors import shown
from cog_triton.settings import Settings
from cog_triton.web import Refusal
from cog_triton.web.bodies import off_loop
from cog_triton.web.origin import access_rule, cors_options, is_json, origins_of
from cog_triton.web.server import BACKLOG, HEAD_END, Headers, Limits, Server, head_bytes

EXIT_STATUS = 70  # EX_SOFTWARE of sysexits.h: the worker has ended
_END_SECONDS = 4.0  # for what comes after DRAIN_SECONDS, with the end of Cog's server
_PIECE_BYTES = 1 << 16
_SILENT = "Cog's server is not responding"
_ERROR_EVENT = f"event: error\ndata: {json.dumps({'error': STOPPED})}\n\n".encode()
_NOT_PASSED_ON = frozenset(
    b"connection content-length expect keep-alive proxy-connection te transfer-encoding".split()
)
_NOT_RELAYED = (b"connection", b"date")  # uvicorn writes its own
Reply = tuple[int, list[tuple[bytes, bytes]], asyncio.StreamReader]  # status, headers and body


class Front:
    """The application and its end, on a thread of its own; the listener is bound to the public address."""

    def __init__(self, listener: socket.socket, settings: Settings) -> None:
        self.predictions = Predictions()
        self.source = random_source()  # of connections to Cog's server
        self._port = 0  # of Cog's server, once it listens
        self._listener = listener
        self._settings = settings
        self._worker_ended = False
        self._busy_since: float | None = None
        self._stop = asyncio.Event()
        routes = [*self.own_routes(), *Replicate(self, settings.replicate_list_token).routes]
        self._router = Router(routes, redirect_slashes=False, default=self._pass)
        limits = Limits(settings.max_request_bytes, request_seconds=settings.receive_timeout)
        origins = origins_of(settings.cog_allowed_origins)
        application = CORSMiddleware(self, **cors_options(origins)) if origins else self
        access = access_rule(
            listener,
            hosts=settings.allowed_hosts,
            origins=settings.cog_allowed_origins,
            origins_setting="COG_ALLOWED_ORIGINS",
        )
        self._server = Server(application, limits, access, refusal_body)

    def own_routes(self) -> list[Route]:
        """Return the routes that are neither Replicate's nor passed on to Cog's server."""
        return [
            Route("/health/live", self._health),
            Route("/health/ready", self._health),
            Route("/shutdown", self._shutdown, methods=["POST"]),
        ]

    async def serve(self, port: Callable[[], int | None], stop: int) -> None:
        """Serve on ``port()``, once Cog's server listens there, until ``stop`` is readable."""

        def stop_by_signal() -> None:
            os.read(stop, 64)
            if not self._port:
                os._exit(0)  # Cog's server does not serve yet, and would take no notice
            self._stop.set()

        asyncio.get_running_loop().add_reader(stop, stop_by_signal)
        self.predictions.listen()
        watching = asyncio.create_task(self._end_with_worker())
        while not self._port:
            await asyncio.sleep(0.01)
            self._port = port() or 0
        try:
            self._listener.listen(BACKLOG)  # two may bind an address, before one listens on it
        except OSError as error:
            host, taken = self._listener.getsockname()[:2]
            log("WARN", f"{host}, port {taken}: {error.strerror}")
            os._exit(1)
        serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        await self._stop.wait()
        await self._drain()
        await asyncio.gather(serving, watching)  # Cog's server ends the process

    async def _end_with_worker(self) -> None:
        """End this process soon after its only child, the worker, in which the predictor runs.

        Cog's server would run on without it (0.23.1). After a setup that failed it may: it says why.
        """
        has_started = False
        while not self._worker_ended:
            await asyncio.sleep(0.1)
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                has_started = True
                self._worker_ended = ended is not None
            except ChildProcessError:  # Cog's server has not started it, or has waited for it
                self._worker_ended = has_started
        await asyncio.sleep(1.0)  # a server that was told to stop ends by itself
        # Cog's server that lost its worker before it listens has no status, and may never have one.
        if not self._port or await self._status() != "SETUP_FAILED":
            with contextlib.suppress(OSError):
                text = "the predictor's process ended unexpectedly; stopping Cog's server"
                print(text, file=sys.stderr, flush=True)  # plain, as the reason of the end
            os._exit(EXIT_STATUS)

    async def _drain(self) -> None:
        """Let running predictions end, for a bounded time, and then Cog's server."""
        predictions = self.predictions
        predictions.draining = True
        predictions.send("drain")
        seconds = self._settings.drain_seconds
        stop_seconds = self._settings.stop_timeout
        left = predictions.left()
        if left:
            text = f"waiting for {left}, at most {seconds:g} s (DRAIN_SECONDS)"
            log("INFO", text, stops_within=seconds + _END_SECONDS)
        else:
            text = f"waiting for Triton to stop, at most {stop_seconds:g} s (TRITON_STOP_TIMEOUT)"
            log("INFO", text, stops_within=stop_seconds)
        left = await within(seconds, predictions.left)
        if left:
            log("WARN", f"{left} did not finish within {seconds:g} s (DRAIN_SECONDS): stopping now")
            predictions.send("stop")
            if await within(1.0, predictions.left):
                predictions.cancel_relays()
                await asyncio.sleep(0.3)  # for the worker to take in what was cancelled
        connections = self._server.server_state.connections
        await within(2.0, lambda: any(c.transport.get_write_buffer_size() for c in connections))
        if await self.ask("POST", "/shutdown") is None:
            os._exit(0)  # it does not serve yet, or not any more

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
        request = Request(scope, receive)
        predictions = self.predictions
        body = await request.body()  # first, so that its sender is held to the limits of requests
        if is_replicates(scope["path"]):
            raise Refusal(404, f"unknown route: {request.method} {shown(scope['path'])}")
        query = scope["query_string"]
        target = (scope["raw_path"] + (b"?" + query if query else b"")).decode("latin-1")
        passage = await off_loop(len(body), predictions.check, request.method, target, body)
        if passage.starts is not None:
            predictions.refuse_while_draining()  # it may have begun meanwhile
        if passage.cancels is not None and predictions.listening:
            # Passed on, it could find a prediction that has come meanwhile, and be dropped there.
            cancelled = predictions.cancel(passage.cancels)
            await JSONResponse({}, 200 if cancelled else 404)(scope, receive, send)
            return
        # Another request may have started it, and this one only watches.
        ours = passage.starts if not predictions.runs(passage.starts) else None
        relaying = cast(asyncio.Task[None], asyncio.current_task())

        async def cancel_if_disconnected() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            # The end of a prediction that the predictor cancels is awaited all the same.
            if ours and not predictions.cancel(ours):
                relaying.cancel()  # Cog's server cancels it as its connection ends

        watching = asyncio.create_task(cancel_if_disconnected())
        try:
            async with self.exchange(passage, scope["headers"]) as reply:
                await self._relay(reply, cast(Any, receive).__self__, send)
        finally:
            watching.cancel()

    async def _relay(self, reply: Reply, cycle: RequestResponseCycle, send: Send) -> None:
        status, headers, body = reply
        await send({"type": "http.response.start", "status": status, "headers": headers})
        last = rest = b""
        try:
            if any(name == b"content-length" for name, _ in headers):
                rest = await body.read()
            else:
                while data := await body.read(_PIECE_BYTES):
                    last, self.predictions.progress = data, time.monotonic()
                    # Past uvicorn, which takes three times as long.
                    if not cycle.transport.is_closing():
                        cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
                    if cycle.flow.write_paused:
                        await cycle.flow.drain()
        except (asyncio.CancelledError, OSError):
            rest = _ERROR_EVENT if last.endswith(b"\n\n") else b""
        await send({"type": "http.response.body", "body": rest})

    @contextlib.asynccontextmanager
    async def exchange(
        self, passage: Passage, headers: Headers = (), limit: int = _PIECE_BYTES
    ) -> AsyncIterator[Reply]:
        """Send a request to Cog's server, or raise Refusal; its end is that of the prediction it starts.

        In HTTP/1.0: the response ends with its connection. ``limit`` bytes are read ahead.
        """
        status, transport, answer = 0, None, Answer(limit, headers)
        unsafe = ""
        if passage.starts is not None:
            unsafe = self.predictions.begin(passage.starts, answer.show, hooked=passage.hooked)
        try:
            if unsafe:
                raise Refusal(503, f"cannot create files for this prediction: {unsafe}")
            try:
                transport, _ = await asyncio.get_running_loop().create_connection(
                    partial(asyncio.StreamReaderProtocol, answer),
                    sock=await connect(self.source, self._port),
                )
                sent = [pair for pair in headers if pair[0] not in _NOT_PASSED_ON]
                sent.append((b"content-length", b"%d" % len(passage.body)))
                target = passage.target.encode("latin-1")
                head = head_bytes(passage.method.encode(), target, b"1.0", sent)
                transport.write(head + passage.body)
                first, *lines = (await answer.readuntil(HEAD_END))[:-4].split(b"\r\n")
            except asyncio.IncompleteReadError:
                raise Refusal(502, "Cog's server closed the connection without an answer") from None
            except (asyncio.CancelledError, OSError) as error:
                stopping = "Cog's server is stopping and accepts no connections"
                text = stopping if isinstance(error, OSError) else STOPPED
                after = max(1, math.ceil(self._settings.drain_seconds))
                raise Refusal(503, text, retry_after=after) from None
            status = int(first.split()[1])
            pairs = [(name, value) for name, _, value in (line.partition(b": ") for line in lines)]
            yield status, [pair for pair in pairs if pair[0] not in _NOT_RELAYED], answer
        finally:
            if transport is not None:
                transport.abort()
            if passage.starts is not None:
                self.predictions.end(passage.starts, status)

    async def ask(self, method: str, path: str) -> Any:
        """Return the JSON that Cog's server answers; None if it does not answer."""
        with contextlib.suppress(OSError, ValueError, Refusal), anyio.move_on_after(4.0):
            async with self.exchange(Passage(method, path)) as (_, _, body):
                return orjson.loads(await body.read())
        return None

    async def _status(self) -> str | None:
        answer = await self.ask("GET", "/health-check") or {}
        status: str | None = answer.get("status")
        if status != "BUSY":
            self._busy_since = None
        elif self._busy_since is None:
            self._busy_since = time.monotonic()
        return status

    async def _shutdown(self, _: Request) -> JSONResponse:
        self._stop.set()
        return JSONResponse({})

    async def _health(self, request: Request) -> JSONResponse:
        status = await self._status()
        if request.url.path == "/health/live":
            problem = self._problem_with_life(status)
        else:
            problem = self._problem_with_readiness(status)
        body = {"status": status or "UNKNOWN"}
        if problem:
            body["detail"] = problem
        return JSONResponse(body, 503 if problem else 200)

    def _problem_with_life(self, status: str | None) -> str:
        """Return why the server should be started again; empty if it lives."""
        if self._worker_ended:
            return "the predictor's process has ended"
        # After a SIGINT, Cog's server takes no connection while it ends.
        if status == "DEFUNCT" or (status is None and not self.predictions.draining):
            return _SILENT
        return ""

    def _problem_with_readiness(self, status: str | None) -> str:
        """Return why requests should go elsewhere; empty if they may come."""
        if self.predictions.draining:
            return "the server is stopping"
        if status is None:
            return _SILENT
        now = time.monotonic()
        busy_for = now - max(self._busy_since or now, self.predictions.progress)
        if status == "BUSY" and busy_for > self._settings.busy_timeout:
            return f"all slots have been busy for {busy_for:.0f} s without any progress"
        if status not in ("READY", "BUSY"):
            return "Cog's server is not ready"
        return ""


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


async def within(seconds: float, left: Callable[[], Any]) -> Any:
    """Wait until nothing is left, for a bounded time; return what is."""
    deadline = time.monotonic() + seconds
    while True:
        found = left()
        if not found or time.monotonic() >= deadline:
            return found
        await asyncio.sleep(0.01)


def log(level: str, text: str, **fields: Any) -> None:
    """Log in the form of Cog's server."""
    line = {"timestamp": now(), "level": level, "fields": {"message": text, **fields}}
    with contextlib.suppress(OSError):  # the reader has ended
        print(json.dumps({**line, "target": __name__}), file=sys.stderr, flush=True)
