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
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from datetime import datetime, timezone
from typing import Any, NamedTuple

import orjson
import uvloop
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Message, Receive, Scope, Send

from cog_triton.faces.cog import rules
from cog_triton.faces.cog.predictions import Predictions
from cog_triton.faces.cog.replicate import Replicate, problem_of
from cog_triton.settings import Settings
from cog_triton.web import HEAD_END, Limits, Refusal, head_bytes
from cog_triton.web.server import BACKLOG, Config, LimitedProtocol, Server

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
_PIECE_BYTES = 1 << 16
_ERROR_EVENT = f"event: error\ndata: {json.dumps({'error': STOPPED})}\n\n".encode()
_NOT_PASSED_ON = frozenset(
    b"connection content-length expect keep-alive proxy-connection te transfer-encoding".split()
)
_NOT_RELAYED = (b"connection", b"date")  # uvicorn writes its own


class Connection(LimitedProtocol):
    """A client's connection. One that only receives any more gets its answers, but for predictions.

    Such a client cannot be told from one that has gone.
    """

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["connection"] = self  # type: ignore[typeddict-unknown-key]

    def write_chunk(self, data: bytes) -> None:
        """Write a piece of the response past uvicorn, which takes three times as long."""
        if not self.transport.is_closing():
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def eof_received(self) -> bool:  # type: ignore[override]
        cycle = self.cycle  # of the last request
        if cycle is None or cycle.response_complete or cycle.scope["method"] != "GET":
            return False
        cycle.keep_alive = False
        return True


class Reply(NamedTuple):
    """A response of Cog's server, in HTTP/1.0: its body ends with its connection."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: asyncio.StreamReader


class Front:
    """The application and its end. Everything but ``run`` is called on its own thread.

    Args:
        listener: bound to the public address; listens from when Cog's server does.
    """

    def __init__(self, listener: socket.socket, settings: Settings) -> None:
        self.draining = False
        self.predictions = Predictions()
        self._port = 0
        self._listener, self._settings = listener, settings
        self._worker_ended = False
        self._busy_since: float | None = None
        self._stop = asyncio.Event()
        self._retry_after = max(1, math.ceil(settings.drain_seconds))
        routes = [
            Route("/health/live", self._health),
            Route("/health/ready", self._health),
            Route("/shutdown", self._shutdown, methods=["POST"]),
            *Replicate(self).routes,
        ]
        self._router = Router(routes, redirect_slashes=False, default=self._pass)
        limits = Limits(settings.max_request_bytes, request_seconds=settings.receive_timeout)
        self._server = Server(Config(self, limits, protocol=Connection))

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
        self.predictions.listen()
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
        """End this process soon after its only child, the worker, in which the predictor runs.

        Measured with Cog 0.23.1: its server starts no other and does not end, so that what runs the
        container sees a process that runs. If the worker's setup failed, it says why to who asks.
        """
        seen = False
        while not self._worker_ended:
            await asyncio.sleep(_WORKER_POLL_SECONDS)
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                seen, self._worker_ended = True, ended is not None
            except ChildProcessError:  # Cog's server has not started it, or has waited for it
                self._worker_ended = seen
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
        predictions.send("drain")
        seconds, stop_seconds = self._settings.drain_seconds, self._settings.stop_timeout
        if left := predictions.left():
            text = f"waiting for {left}, at most {seconds:g} s (DRAIN_SECONDS)"
            log("INFO", text, stops_within=seconds + _END_SECONDS)
        else:
            text = f"waiting for Triton to stop, at most {stop_seconds:g} s (TRITON_STOP_TIMEOUT)"
            log("INFO", text, stops_within=stop_seconds)
        if not await predictions.idle_within(seconds):
            log("WARN", f"{predictions.left()} did not end in {seconds:g} s: stopped at once")
            predictions.send("stop")
            if not await predictions.idle_within(_LAST_SECONDS):
                predictions.cancel_relays()
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
            replicates = scope["path"].startswith("/v1/")
            body = problem_of(refusal) if replicates else {"detail": refusal.detail}
            after = refusal.retry_after
            headers = {} if after is None else {"retry-after": str(after)}
            await as_json(body, refusal.status, headers)(scope, receive, send_last)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the response of Cog's server, as it comes."""
        request, predictions = Request(scope, receive), self.predictions
        body = await request.body()
        if body and "json" not in request.headers.get("content-type", ""):
            raise Refusal(415, "the body must be sent with Content-Type: application/json")
        query = scope["query_string"]
        target = (scope["raw_path"] + (b"?" + query if query else b"")).decode("latin-1")
        passage = self.check(request.method, target, body)
        if passage.cancels is not None and predictions.listening:
            # Passed on, it could find a prediction that has come meanwhile, and be dropped there.
            cancelled = predictions.cancel(passage.cancels)
            await as_json({}, 200 if cancelled else 404)(scope, receive, send)
            return
        if passage.starts is None:
            await self._relay(passage, scope, send)
            return
        starts, relaying = passage.starts, asyncio.current_task()
        watches = predictions.runs(starts)  # one that another request has started

        async def cancel_if_disconnected() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            # The end of a prediction that the predictor cancels is awaited all the same.
            if not watches and not predictions.cancel(starts) and relaying is not None:
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
        try:
            async with self.exchange(passage, scope["headers"]) as reply:
                head = {"type": "http.response.start", "status": reply.status}
                await send({**head, "headers": reply.headers})
                started, rest = True, b""
                if any(name == b"content-length" for name, _ in reply.headers):
                    rest = await reply.body.read()
                else:
                    while data := await reply.body.read(_PIECE_BYTES):
                        last, self.predictions.progress = data, time.monotonic()
                        connection.write_chunk(data)
                        if connection.flow.write_paused:
                            await connection.flow.drain()
            await send({"type": "http.response.body", "body": rest})
        except (asyncio.CancelledError, OSError):
            if not started:
                raise Refusal(503, STOPPED, retry_after=self._retry_after) from None
            event = _ERROR_EVENT if last.endswith(b"\n\n") else b""
            await send({"type": "http.response.body", "body": event})

    @contextlib.asynccontextmanager
    async def exchange(
        self,
        passage: rules.Passage,
        headers: Iterable[tuple[bytes, bytes]] = (),
        limit: int = _PIECE_BYTES,
    ) -> AsyncIterator[Reply]:
        """Send a request to Cog's server; the end of this is that of the prediction which it starts.

        Args:
            limit: of the bytes that are read ahead.

        Raises:
            Refusal: there is no response.
        """
        status, writer = 0, None
        if passage.starts is not None:
            self.predictions.begin(passage.starts)
        try:
            try:
                body, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=limit)
                sent = [pair for pair in headers if pair[0] not in _NOT_PASSED_ON]
                sent.append((b"content-length", b"%d" % len(passage.body)))
                target = passage.target.encode("latin-1")
                head = head_bytes(passage.method.encode(), target, b"1.0", sent)
                writer.write(head + passage.body)
                first, *lines = (await body.readuntil(HEAD_END))[:-4].split(b"\r\n")
            except asyncio.IncompleteReadError:
                detail = "Cog's server closed the connection without an answer"
                raise Refusal(502, detail) from None
            except OSError:
                detail = "Cog's server takes no connection: it is stopping"
                raise Refusal(503, detail, retry_after=self._retry_after) from None
            status = int(first.split()[1])
            pairs = [(name, value) for name, _, value in (line.partition(b": ") for line in lines)]
            yield Reply(status, [pair for pair in pairs if pair[0] not in _NOT_RELAYED], body)
        finally:
            if writer is not None:
                writer.transport.abort()
            if passage.starts is not None:
                self.predictions.end(passage.starts, status)

    async def ask(self, method: str, path: str) -> Any:
        """Return the JSON that Cog's server answers; None if it does not answer."""

        async def asked() -> Any:
            async with self.exchange(rules.Passage(method, path)) as reply:
                return orjson.loads(await reply.body.read())

        with contextlib.suppress(OSError, ValueError, Refusal, asyncio.TimeoutError):
            return await asyncio.wait_for(asked(), _ASK_SECONDS)

    async def _status(self) -> str | None:
        """Return the status of Cog's server; None if it does not answer."""
        health = await self.ask("GET", "/health-check")
        status: str | None = health.get("status") if isinstance(health, dict) else None
        self._busy_since = (self._busy_since or time.monotonic()) if status == "BUSY" else None
        return status

    async def _shutdown(self, _: Request) -> Response:
        self._stop.set()
        return as_json({})

    async def _health(self, request: Request) -> Response:
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
        return as_json(body, 503 if problem else 200)


def as_json(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response with blanks between its fields."""
    return Response(json.dumps(content), status, headers, "application/json")


def log(level: str, text: str, **fields: Any) -> None:
    """Write a line of the log, as Cog's server writes its own."""
    now = datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")
    line = {"timestamp": now, "level": level, "fields": {"message": text, **fields}}
    with contextlib.suppress(OSError):  # the reader has ended
        print(json.dumps({**line, "target": __name__}), file=sys.stderr, flush=True)
