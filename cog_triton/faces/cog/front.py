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
from starlette.types import Receive, Scope, Send

from cog_triton.faces.cog import rules
from cog_triton.faces.cog.connections import Connection, Reply
from cog_triton.faces.cog.control import Control
from cog_triton.faces.cog.predictions import Predictions
from cog_triton.faces.cog.replicate import REPLICATE_PATHS, Replicate
from cog_triton.settings import Settings
from cog_triton.web.limits import Limits, Refusal, head_bytes
from cog_triton.web.server import BACKLOG, Config, Server

EXIT_STATUS = 70
"""EX_SOFTWARE of sysexits.h: the worker has ended."""
_POLL_SECONDS = 0.01
_WORKER_POLL_SECONDS = 0.1
_GRACE_SECONDS = 1.0  # a server that was told to stop ends by itself
_ASK_SECONDS = 4.0
_LAST_SECONDS = 1.0  # for the predictor to end with an error what runs
_CANCEL_SECONDS = 0.3  # for the worker to take in what was cancelled
_FLUSH_SECONDS = 2.0
_END_SECONDS = 4.0  # for all of that, and for Cog's server
_STOPPED = "E2105 TritonUnavailable: the server is being stopped"
_ERROR_EVENT = f"event: error\ndata: {json.dumps({'error': _STOPPED})}\n\n".encode()
_OF_THE_CONNECTION = frozenset(
    b"connection content-length expect keep-alive proxy-connection te transfer-encoding".split()
)


class Json(JSONResponse):
    """A body with blanks between its fields."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content).encode()


class Front:
    """One front. Everything but ``run`` is called on its own thread.

    Args:
        listener: bound to the public address; listens from when Cog's server does.
        control: to the predictor, which may answer requests that do not pass here.
    """

    def __init__(self, listener: socket.socket, settings: Settings, control: Control) -> None:
        self.port = 0
        self.draining = False
        self.predictions = Predictions(control.send)
        self._listener = listener
        self._settings = settings
        self._worker_ended = False
        self._control = control
        self._inputs: list[str] = []  # a prediction needs one of them
        self._others_run = False  # requests that did not pass here
        self.progress = time.monotonic()
        """When a prediction last began, sent something or ended."""
        self._busy_since: float | None = None
        self._stop, self._changed = asyncio.Event(), asyncio.Event()
        self._streams: set[asyncio.Task[Any]] = set()  # of predictions
        self._replicate = Replicate(self)
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
        loop = asyncio.get_running_loop()
        loop.add_reader(stop, self._stop_by_signal, stop)
        loop.add_reader(self._control.fileno(), self._receive)
        self.predictions.keep_sweeping()
        watching = asyncio.create_task(self._end_with_worker())
        while not self.port:
            await asyncio.sleep(_POLL_SECONDS)
            self.port = port() or 0
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
        if not self.port or await self._status() != "SETUP_FAILED":
            with contextlib.suppress(OSError):
                text = "the predictor's process has ended, and Cog's server with it"
                print(text, file=sys.stderr, flush=True)  # plain, as the reason of the end
            os._exit(EXIT_STATUS)

    def _stop_by_signal(self, stop: int) -> None:
        os.read(stop, 64)
        if not self.port:
            os._exit(0)  # Cog's server does not serve yet, and would take no notice
        self._stop.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self._answer(scope, receive, send)
        except ClientDisconnect:
            return
        except Refusal as refusal:
            response = refused(refusal)
        if response is not None:
            if self.draining:
                response.headers["connection"] = "close"
            await response(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> Json | None:
        """Return the response, if it was not sent as it came."""
        method, path = scope["method"], scope["path"]
        if path in ("/health/live", "/health/ready") and method in ("GET", "HEAD"):
            return await self._health(path)
        if path == "/shutdown" and method == "POST":
            self._stop.set()
            return Json({})
        if path.startswith(REPLICATE_PATHS):
            await self._replicate(scope, receive, send)
            return None
        request = Request(scope, receive)
        body = await request.body()
        if body and "json" not in request.headers.get("content-type", ""):
            raise Refusal(415, "the body must be sent with Content-Type: application/json")
        query = scope["query_string"]
        target = (scope["raw_path"] + (b"?" + query if query else b"")).decode("latin-1")
        passage = self.check(method, target, body)
        if passage.cancels is not None and self.predictions.listening:
            # Passed on, it could find a prediction that has come meanwhile, and be dropped there.
            return Json({}, 200 if self.predictions.cancel(passage.cancels) else 404)
        await self._relay(passage, scope, receive, send)
        return None

    def check(self, method: str, target: str, body: bytes) -> rules.Passage:
        return rules.check(method, target, body, draining=self.draining, inputs=self._inputs)

    async def _relay(
        self, passage: rules.Passage, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answer with the response of Cog's server, as it comes."""
        watching, task = None, asyncio.current_task()
        if passage.starts is not None and task is not None:
            watching = asyncio.create_task(
                self._watch(passage.starts, receive, task, scope["connection"])
            )
        started, last, connection = False, b"", scope["connection"]

        def write(data: bytes) -> None:
            """Write an event past uvicorn, which takes three times as long."""
            nonlocal last
            self.progress, last = time.monotonic(), data or last
            if data and not connection.transport.is_closing():
                connection.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

        try:
            async with self.exchange(passage, scope["headers"]) as reply:
                start = {"type": "http.response.start", "status": reply.status}
                close = [(b"connection", b"close")] if self.draining else []
                await send({**start, "headers": reply.headers + close})
                started = True
                if any(name == b"content-length" for name, _ in reply.headers):
                    body = bytearray()
                    await reply.copy(body.extend)
                    await send({"type": "http.response.body", "body": bytes(body)})
                    return
                connection.source = reply.transport
                await reply.copy(write)
            await send({"type": "http.response.body"})
        except asyncio.CancelledError:
            if not started:
                raise Refusal(503, _STOPPED, retry_after=self._retry_after) from None
            event = _ERROR_EVENT if last.endswith(b"\n\n") else b""
            await send({"type": "http.response.body", "body": event})
        finally:
            connection.source = None
            if watching is not None:
                watching.cancel()

    async def _watch(
        self, prediction: str, receive: Receive, task: asyncio.Task[Any], connection: Connection
    ) -> None:
        """Cancel a prediction when its client disconnects; its end is awaited all the same."""
        while (await receive())["type"] != "http.disconnect":
            pass
        if not self.predictions.cancel(prediction):
            task.cancel()  # Cog's server cancels it as its connection ends
        elif connection.source is not None:
            connection.source.resume_reading()

    @contextlib.asynccontextmanager
    async def exchange(
        self, passage: rules.Passage, headers: Iterable[tuple[bytes, bytes]] = ()
    ) -> AsyncIterator[Reply]:
        """Send a request to Cog's server; the end of this is that of the prediction which it starts.

        Raises:
            Refusal: there is no response.
        """
        task, reply = asyncio.current_task(), None
        if passage.starts is not None and task is not None:
            self.predictions.begin(passage.starts)
            self._streams.add(task)
            self.progress = time.monotonic()
        try:
            loop = asyncio.get_running_loop()
            transport, reply = await loop.create_connection(Reply, "127.0.0.1", self.port)
            sent = [pair for pair in headers if pair[0] not in _OF_THE_CONNECTION]
            sent.append((b"content-length", b"%d" % len(passage.body)))
            target = passage.target.encode("latin-1")
            head = head_bytes(passage.method.encode(), target, b"1.0", sent)
            transport.write(head + passage.body)
            if not await reply.head:
                raise Refusal(502, "Cog's server closed the connection without an answer")
            yield reply
        except OSError:
            detail = "Cog's server takes no connection: it is stopping"
            raise Refusal(503, detail, retry_after=self._retry_after) from None
        finally:
            if reply is not None:
                reply.transport.abort()
            if passage.starts is not None and task is not None:
                self._streams.discard(task)
                status = reply.status if reply is not None and reply.ended.done() else None
                self.predictions.end(passage.starts, status)
                self.progress = time.monotonic()
                self._changed.set()

    async def ask(self, method: str, path: str) -> Any:
        """Return the JSON that Cog's server answers; None if it does not answer."""

        async def asked() -> Any:
            async with self.exchange(rules.Passage(method, path)) as reply:
                body = bytearray()
                await reply.copy(body.extend)
                return orjson.loads(body)

        with contextlib.suppress(OSError, ValueError, Refusal, asyncio.TimeoutError):
            return await asyncio.wait_for(asked(), _ASK_SECONDS)

    async def _health(self, path: str) -> Json:
        status = await self._status()
        now = time.monotonic()
        self._busy_since = max(self._busy_since or now, self.progress) if status == "BUSY" else None
        if path == "/health/live":
            problem = rules.liveness_problem(status, self._worker_ended, self.draining)
        else:
            busy_for = now - (self._busy_since or now)
            limit = self._settings.busy_timeout
            problem = rules.readiness_problem(status, busy_for, limit, self.draining)
        body = {"status": status or "UNKNOWN", **({"detail": problem} if problem else {})}
        return Json(body, 503 if problem else 200)

    async def _status(self) -> str | None:
        """Return the status of Cog's server; None if it does not answer."""
        health = await self.ask("GET", "/health-check")
        return health.get("status") if isinstance(health, dict) else None

    def _receive(self) -> None:
        """Read the predictor's messages."""
        for kind, *words in self._control.receive():
            if kind == "hello":
                self.predictions.listening, self._inputs = True, words
            elif kind in ("busy", "idle"):
                self._others_run = kind == "busy"
            elif kind == "ended":
                self.predictions.over(*words)
            else:
                asyncio.get_running_loop().remove_reader(self._control.fileno())
        self._changed.set()

    async def _drain(self) -> None:
        """Let running predictions end, for a bounded time, and then Cog's server."""
        self.draining = True
        self._control.send("drain")
        seconds, stop_seconds = self._settings.drain_seconds, self._settings.stop_timeout
        if left := self._left():
            text = f"waiting for {left}, at most {seconds:g} s (DRAIN_SECONDS)"
            log("INFO", text, stops_within=seconds + _END_SECONDS)
        else:
            text = f"waiting for Triton to stop, at most {stop_seconds:g} s (TRITON_STOP_TIMEOUT)"
            log("INFO", text, stops_within=stop_seconds)
        if not await self._idle_within(seconds):
            log("WARN", f"{self._left()} did not end in {seconds:g} s: stopped at once")
            self._control.send("stop")
            await self._idle_within(_LAST_SECONDS)
        if len(self.predictions):
            for task in list(self._streams):
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

    def _left(self) -> str:
        """Return what still runs, in words; empty for nothing."""
        count = len(self.predictions)
        left = [f"{count} prediction{'s' * (count > 1)}"] if count else []
        return " and ".join(left + ["requests of another face"] * self._others_run)

    async def _idle_within(self, seconds: float) -> bool:
        """Wait until nothing runs, for a bounded time; return whether that is so."""
        deadline = time.monotonic() + seconds
        while self._left():
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), deadline - time.monotonic())
            except asyncio.TimeoutError:
                return False
        return True

    @property
    def _retry_after(self) -> int:
        return max(1, math.ceil(self._settings.drain_seconds))


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


def refused(refusal: Refusal) -> Json:
    seconds = refusal.retry_after
    headers = {} if seconds is None else {"retry-after": str(seconds)}
    return Json({"detail": refusal.detail}, refusal.status, headers)


def log(level: str, text: str, **fields: Any) -> None:
    """Write a line of the log, as Cog's server writes its own."""
    now = datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")
    line = {"timestamp": now, "level": level, "fields": {"message": text, **fields}}
    with contextlib.suppress(OSError):  # the reader has ended
        print(json.dumps({**line, "target": __name__}), file=sys.stderr, flush=True)
