"""The front: an ASGI application on the public port, which passes on to Cog's server what may pass.

It runs on a thread of the process that runs Cog's server, whose own threads hold no lock of Python's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import orjson
import uvloop
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.routing import Route, Router
from starlette.types import Message, Receive, Scope, Send

from cog_triton.faces.cog import rules
from cog_triton.faces.cog.connections import Connection, Reply
from cog_triton.faces.cog.control import Control
from cog_triton.faces.cog.predictions import Predictions
from cog_triton.faces.cog.replicate import Replicate, problem_of
from cog_triton.settings import Settings
from cog_triton.web.limits import Limits, Refusal
from cog_triton.web.server import BACKLOG, Config, Server

EXIT_STATUS = 70
"""EX_SOFTWARE of sysexits.h: the worker has ended."""
STOPPED = "E2105 TritonUnavailable: the server is being stopped"
_POLL_SECONDS = 0.01
_WORKER_POLL_SECONDS = 0.1
_GRACE_SECONDS = 1.0  # a server that was told to stop ends by itself
_ASK_SECONDS = 4.0
_LAST_SECONDS = 1.0  # for the predictor to end with an error what runs
_CANCEL_SECONDS = 0.3  # for the worker to take in what was cancelled
_FLUSH_SECONDS = 2.0
_END_SECONDS = 4.0  # for all of that, and for Cog's server
_ERROR_EVENT = f"event: error\ndata: {json.dumps({'error': STOPPED})}\n\n".encode()


class Json(JSONResponse):
    """A body with blanks between its fields."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content).encode()


class Front:
    """The application and its end. Everything but ``run`` is called on its own thread.

    Args:
        listener: bound to the public address; listens from when Cog's server does.
        control: to the predictor, which may answer requests that do not pass here.
    """

    def __init__(self, listener: socket.socket, settings: Settings, control: Control) -> None:
        self.draining = False
        self.predictions = Predictions(control.send)
        self._port = 0
        self._listener, self._settings, self._control = listener, settings, control
        self._worker_ended = False
        self._busy_since: float | None = None
        self._stop = asyncio.Event()
        self._retry_after = max(1, math.ceil(settings.drain_seconds))
        own = [
            Route("/health/live", self._health),
            Route("/health/ready", self._health),
            Route("/shutdown", self._shutdown, methods=["POST"]),
        ]
        routes = [*own, *Replicate(self).routes]
        self._router = Router(routes, redirect_slashes=False, default=self._pass)
        limits = Limits(settings.max_request_bytes, request_seconds=settings.receive_timeout)
        config = Config(self, limits)
        config.http = Connection
        self._server = Server(config)

    def run(self, port: Callable[[], int | None], stop: int) -> None:
        """Serve until the process ends.

        Args:
            port: returns the one that Cog's server listens on; None if it does not yet.
            stop: a descriptor; when there is something to read from it, the process is to end.
        """
        uvloop.new_event_loop().run_until_complete(self._serve(port, stop))

    async def _serve(self, port: Callable[[], int | None], stop: int) -> None:
        def stop_by_signal() -> None:
            os.read(stop, 64)
            if not self._port:
                os._exit(0)  # Cog's server does not serve yet, and would take no notice
            self._stop.set()

        asyncio.get_running_loop().add_reader(stop, stop_by_signal)
        self._control.listen(self.predictions.receive)
        watching = asyncio.create_task(self._end_with_worker())
        while not self._port:
            await asyncio.sleep(_POLL_SECONDS)
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
        """End this process soon after its worker, in which the predictor runs.

        Measured with Cog 0.23.1: its server starts no other and does not end, so that what runs the
        container sees a process that runs. If the worker's setup failed, it says why to who asks.
        """
        while (worker := worker_pid()) is None:
            await asyncio.sleep(_WORKER_POLL_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            pidfd, ended = os.pidfd_open(worker), asyncio.Event()
            asyncio.get_running_loop().add_reader(pidfd, ended.set)
            await ended.wait()
            asyncio.get_running_loop().remove_reader(pidfd)
        self._worker_ended = True
        await asyncio.sleep(_GRACE_SECONDS)
        # Cog's server that lost its worker before it listens has no status, and may never have one.
        if not self._port or await self._status() != "SETUP_FAILED":
            with contextlib.suppress(OSError):
                text = "the predictor's process has ended, and Cog's server with it"
                print(text, file=sys.stderr, flush=True)  # plain, as the reason of the end
            os._exit(EXIT_STATUS)

    async def _drain(self) -> None:
        """Let running predictions end, for a bounded time, and then Cog's server."""
        self.draining, predictions = True, self.predictions
        self._control.send("drain")
        seconds, stop_seconds = self._settings.drain_seconds, self._settings.stop_timeout
        if left := predictions.left():
            text = f"waiting for {left}, at most {seconds:g} s (DRAIN_SECONDS)"
            log("INFO", text, stops_within=seconds + _END_SECONDS)
        else:
            text = f"waiting for Triton to stop, at most {stop_seconds:g} s (TRITON_STOP_TIMEOUT)"
            log("INFO", text, stops_within=stop_seconds)
        if not await predictions.idle_within(seconds):
            log("WARN", f"{predictions.left()} did not end in {seconds:g} s: stopped at once")
            self._control.send("stop")
            if not await predictions.idle_within(_LAST_SECONDS):
                for task in filter(None, list(predictions.tasks)):
                    task.cancel()
                await asyncio.sleep(_CANCEL_SECONDS)
        deadline = time.monotonic() + _FLUSH_SECONDS
        connections = self._server.server_state.connections
        while time.monotonic() < deadline and any(
            connection.transport.get_write_buffer_size() for connection in connections
        ):
            await asyncio.sleep(_POLL_SECONDS)
        if await self.ask("POST", "/shutdown") is None:
            os._exit(0)  # it does not serve yet, or not any more

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_last(message: Message) -> None:
            if self.draining and message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        try:
            await self._router(scope, receive, send_last)
        except ClientDisconnect:
            pass
        except Refusal as refusal:
            body: dict[str, Any] = {"detail": refusal.detail}
            if scope["path"].startswith("/v1/"):
                body = problem_of(refusal)
            after = refusal.retry_after
            headers = {} if after is None else {"retry-after": str(after)}
            await Json(body, refusal.status, headers)(scope, receive, send_last)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the response of Cog's server, as it comes."""
        request = Request(scope, receive)
        body = await request.body()
        if body and "json" not in request.headers.get("content-type", ""):
            raise Refusal(415, "the body must be sent with Content-Type: application/json")
        query = scope["query_string"]
        target = (scope["raw_path"] + (b"?" + query if query else b"")).decode("latin-1")
        passage = self.check(request.method, target, body)
        if passage.cancels is not None and self.predictions.listening:
            # Passed on, it could find a prediction that has come meanwhile, and be dropped there.
            cancelled = self.predictions.cancel(passage.cancels)
            await Json({}, 200 if cancelled else 404)(scope, receive, send)
            return
        if passage.starts is None:
            await self._relay(passage, scope, send)
            return
        starts, relaying, connection = passage.starts, asyncio.current_task(), scope["connection"]
        watches = starts in self.predictions.running  # one that another request has started

        async def cancel_if_disconnected() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            if watches or self.predictions.cancel(starts):
                connection.resume_writing()  # its end is awaited all the same
            elif relaying is not None:
                relaying.cancel()  # Cog's server cancels it as its connection ends

        watching = asyncio.create_task(cancel_if_disconnected())
        try:
            await self._relay(passage, scope, send)
        finally:
            watching.cancel()

    def check(self, method: str, target: str, body: bytes) -> rules.Passage:
        inputs = self.predictions.inputs
        return rules.check(method, target, body, draining=self.draining, inputs=inputs)

    async def _relay(self, passage: rules.Passage, scope: Scope, send: Send) -> None:
        started, last, connection = False, b"", scope["connection"]

        def write(data: bytes) -> None:
            nonlocal last
            self.predictions.progress = time.monotonic()
            if data:
                last = data
                connection.write_chunk(data)

        try:
            async with self.exchange(passage, scope["headers"]) as reply:
                head = {"type": "http.response.start", "status": reply.status}
                await send({**head, "headers": reply.headers})
                started, rest = True, b""
                if any(name == b"content-length" for name, _ in reply.headers):
                    rest = await reply.read()
                else:
                    connection.source = reply.transport
                    await reply.copy(write)
            await send({"type": "http.response.body", "body": rest})
        except asyncio.CancelledError:
            if not started:
                raise Refusal(503, STOPPED, retry_after=self._retry_after) from None
            event = _ERROR_EVENT if last.endswith(b"\n\n") else b""
            await send({"type": "http.response.body", "body": event})
        finally:
            connection.source = None

    @contextlib.asynccontextmanager
    async def exchange(
        self, passage: rules.Passage, headers: Iterable[tuple[bytes, bytes]] = ()
    ) -> AsyncIterator[Reply]:
        """Send a request to Cog's server; the end of this is that of the prediction which it starts.

        Raises:
            Refusal: there is no response.
        """
        reply, starts, task = Reply(), passage.starts, asyncio.current_task()
        if starts is not None:
            self.predictions.begin(starts, task)
        try:
            if not await reply.open(self._port, passage, headers):
                raise Refusal(502, "Cog's server closed the connection without an answer")
            yield reply
        except OSError:
            detail = "Cog's server takes no connection: it is stopping"
            raise Refusal(503, detail, retry_after=self._retry_after) from None
        finally:
            if reply.transport is not None:
                reply.transport.abort()
            if starts is not None:
                self.predictions.end(starts, task, reply.status if reply.ended.done() else None)

    async def ask(self, method: str, path: str) -> Any:
        """Return the JSON that Cog's server answers; None if it does not answer."""

        async def asked() -> Any:
            async with self.exchange(rules.Passage(method, path)) as reply:
                return orjson.loads(await reply.read())

        with contextlib.suppress(OSError, ValueError, Refusal, asyncio.TimeoutError):
            return await asyncio.wait_for(asked(), _ASK_SECONDS)

    async def _status(self) -> str | None:
        """Return the status of Cog's server; None if it does not answer."""
        health = await self.ask("GET", "/health-check")
        status: str | None = health.get("status") if isinstance(health, dict) else None
        self._busy_since = (self._busy_since or time.monotonic()) if status == "BUSY" else None
        return status

    async def _shutdown(self, _: Request) -> Json:
        self._stop.set()
        return Json({})

    async def _health(self, request: Request) -> Json:
        status, now, problem = await self._status(), time.monotonic(), None
        busy_for = now - max(self._busy_since or now, self.predictions.progress)
        if request.url.path == "/health/live":
            if self._worker_ended:
                problem = "the predictor's process has ended"
            # After a SIGINT, Cog's server takes no connection while it ends.
            elif status == "DEFUNCT" or (status is None and not self.draining):
                problem = "Cog's server does not answer"
        elif self.draining:
            problem = "the server is stopping"
        elif status is None:
            problem = "Cog's server does not answer"
        elif status == "BUSY" and busy_for > self._settings.busy_timeout:
            problem = f"all slots have been taken for {busy_for:.0f} s, and nothing comes of it"
        elif status not in ("READY", "BUSY"):
            problem = "Cog's server is not ready"
        body = {"status": status or "UNKNOWN", **({"detail": problem} if problem else {})}
        return Json(body, 503 if problem else 200)


def worker_pid() -> int | None:
    """Return the process id of the worker of Cog's server; None before there is one.

    A worker that was killed as it appeared stays a zombie, which has no command line.
    """
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # the thread or the child has ended
            for pid in Path("/proc/self/task", thread, "children").read_text().split():
                command = Path("/proc", pid, "cmdline").read_bytes()
                if not command or b"coglet.server._run_worker" in command:
                    return int(pid)
    return None


def log(level: str, text: str, **fields: Any) -> None:
    """Write a line of the log, as Cog's server writes its own."""
    now = datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")
    line = {"timestamp": now, "level": level, "fields": {"message": text, **fields}}
    with contextlib.suppress(OSError):  # the reader has ended
        print(json.dumps({**line, "target": __name__}), file=sys.stderr, flush=True)
