"""The front: listens on the public port, and passes on to Cog's server what may pass.

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
from collections.abc import Callable, Coroutine
from datetime import datetime, timezone
from typing import Any

import uvloop

from cog_triton.faces.cog.control import Control
from cog_triton.faces.front import health, rules
from cog_triton.faces.front.connection import Client, Upstream
from cog_triton.faces.front.predictions import Predictions
from cog_triton.faces.front.rules import Limits

_BACKLOG = 1024
_POLL_SECONDS = 0.01
_TICK_SECONDS = 1.0
_ASK_SECONDS = 4.0
_LAST_SECONDS = 1.0  # for the predictor to end with an error what runs
_CANCEL_SECONDS = 0.3  # that the worker gets to hear of what was cancelled
_LINGER_SECONDS = 1.0
_FLUSH_SECONDS = 2.0


class Front:
    """One front. Everything but ``run`` is called on its own thread."""

    def __init__(
        self,
        listener: socket.socket,
        limits: Limits,
        predictions: Predictions,
        worker_ended: Callable[[], bool],
        control: Control,
    ) -> None:
        """
        Args:
            listener: bound to the public address; listens from when Cog's server does.
            predictions: those that pass here.
            worker_ended: whether the predictor's process was there and is not any more.
            control: to the predictor, which may answer requests that do not pass here.
        """
        self.limits = limits
        self.clients: set[Client] = set()
        self.upstreams: set[Upstream] = set()  # those without a request
        self.draining = False
        self.retry_after = max(1, math.ceil(limits.drain_seconds))
        self._listener = listener
        self.predictions = predictions
        self.inputs: list[str] = []  # a prediction needs one of them
        self._worker_ended = worker_ended
        self._control = control
        self._others_run = False  # requests that did not pass here
        self._tasks: set[asyncio.Task[Any]] = set()
        self._progress = time.monotonic()
        self._busy_since: float | None = None
        self._idle = asyncio.Event()
        self._told = asyncio.Event()
        self.port = 0

    def run(self, port: Callable[[], int | None], stop: int) -> None:
        """Serves until the process ends.

        Args:
            port: that Cog's server listens on, at the loopback address; None if it does not yet.
            stop: a descriptor; when there is something to read from it, the process is to end.
        """
        loop = uvloop.new_event_loop()
        asyncio.set_event_loop(loop)
        loop.run_until_complete(self._serve(port, stop))

    async def _serve(self, port: Callable[[], int | None], stop: int) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(stop, self._stop_by_signal, stop)
        loop.add_reader(self._control.fileno(), self._receive)
        self.predictions.keep_sweeping()
        while not self.port:
            await asyncio.sleep(_POLL_SECONDS)
            self.port = port() or 0
        self._listen()
        await loop.create_server(lambda: Client(self), sock=self._listener, backlog=_BACKLOG)
        self.beside(self._tick())
        await self._told.wait()
        await self._drain()
        await asyncio.Event().wait()  # Cog's server ends the process

    def _listen(self) -> None:
        """Listens, or ends the process: two may bind an address, before one listens on it."""
        try:
            self._listener.listen(_BACKLOG)  # uvloop says nothing when it cannot
        except OSError as error:
            host, port = self._listener.getsockname()[:2]
            print(warning(f"{host}, port {port}: {error.strerror}"), file=sys.stderr, flush=True)
            os._exit(1)

    def stop(self) -> None:
        """Ends the process, once running predictions have had their time."""
        self._told.set()

    def _stop_by_signal(self, stop: int) -> None:
        os.read(stop, 64)
        if not self.port:
            os._exit(0)  # Cog's server does not serve yet, and would not hear of it
        self.stop()

    def beside(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Runs something beside the rest."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def connect(self) -> Upstream:
        """A new connection to Cog's server.

        Raises:
            OSError: it takes none.
        """
        loop = asyncio.get_running_loop()
        _, upstream = await loop.create_connection(lambda: Upstream(self), "127.0.0.1", self.port)
        return upstream

    def linger(self, client: Client) -> None:
        """Closes a connection once what was written has had time to be read.

        Closed at once, with something unread, the client's system would throw away the answer.
        """
        with contextlib.suppress(OSError, RuntimeError):
            client.transport.write_eof()
        asyncio.get_running_loop().call_later(_LINGER_SECONDS, client.close)

    def progressed(self) -> None:
        """A prediction began, or sent something."""
        self._progress = time.monotonic()

    def prediction_began(self, identifier: str) -> None:
        self.predictions.begin(identifier)

    def prediction_ended(self, identifier: str, status: int | None) -> None:
        self.predictions.end(identifier, status)
        self._progress = time.monotonic()
        self._note_idle()

    async def health(self, client: Client, path: str) -> None:
        """Answers a health route."""
        status = await self._status()
        now = time.monotonic()
        self._busy_since = health.busy_since(status or "", now, self._busy_since, self._progress)
        busy_for = 0.0 if self._busy_since is None else now - self._busy_since
        if path == rules.LIVE:
            client.answer(*health.live(status, self._worker_ended(), self.draining))
            return
        client.answer(*health.ready(status, busy_for, self.limits.busy_seconds, self.draining))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            now = time.monotonic()
            for client in list(self.clients):
                client.check_time(now)

    async def _drain(self) -> None:
        """Lets running predictions end, for a bounded time, and then Cog's server."""
        self.draining = True
        self._control.send("drain")
        await self._idle_within(self.limits.drain_seconds)
        if self._busy:
            self._warn(len(self.predictions.running) + len(self.predictions.background))
            self._control.send("stop")
            await self._idle_within(_LAST_SECONDS)
        if self.predictions.running:
            for client in list(self.clients):
                client.end_prediction("E2105 TritonUnavailable: the server is being stopped")
            await asyncio.sleep(_CANCEL_SECONDS)
        await self._flush()
        if await self._ask("POST", "/shutdown") is None:
            os._exit(0)  # it does not serve yet, or not any more

    @property
    def _busy(self) -> bool:
        """Whether predictions run, or what the predictor answers beside them."""
        predictions = self.predictions
        return bool(predictions.running or predictions.background) or self._others_run

    def _receive(self) -> None:
        for kind, *words in self._control.receive():
            if kind == "hello":
                self.predictions.listening, self.inputs = True, words
            elif kind in ("busy", "idle"):
                self._others_run = kind == "busy"
            elif kind == "ended":
                self.predictions.over(*words)
            else:
                asyncio.get_running_loop().remove_reader(self._control.fileno())
        self._note_idle()

    def _note_idle(self) -> None:
        if not self._busy:
            self._idle.set()

    async def _idle_within(self, seconds: float) -> None:
        """Waits until nothing runs, for a bounded time."""
        self._idle.clear()
        if self._busy:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._idle.wait(), seconds)

    def _warn(self, left: int) -> None:
        beside = ["requests of another face"] if self._others_run else []
        predictions = ["1 prediction" if left == 1 else f"{left} predictions"] if left else []
        what = " and ".join(predictions + beside)
        text = f"{what} did not end in {self.limits.drain_seconds:g} s: stopped at once"
        print(warning(text), file=sys.stderr, flush=True)

    async def _flush(self) -> None:
        """Waits until clients have what was written for them, for a short time."""
        deadline = time.monotonic() + _FLUSH_SECONDS
        while time.monotonic() < deadline and any(
            client.transport.get_write_buffer_size() for client in self.clients
        ):
            await asyncio.sleep(0.01)

    async def _status(self) -> str | None:
        """What Cog's server says of itself; None if it does not answer."""
        body = await self._ask("GET", "/health-check")
        try:
            return None if body is None else str(json.loads(body)["status"])
        except (ValueError, KeyError):
            return None

    async def _ask(self, method: str, path: str) -> bytes | None:
        """The body of a response of Cog's server; None if it does not answer."""
        try:
            return await asyncio.wait_for(self._exchange(method, path), _ASK_SECONDS)
        except (OSError, asyncio.TimeoutError):
            return None

    async def _exchange(self, method: str, path: str) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            head = f"{method} {path} HTTP/1.0\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"
            writer.write(head.encode())
            return (await reader.read()).partition(b"\r\n\r\n")[2]
        finally:
            writer.close()


def warning(text: str) -> str:
    """A line of the log, as Cog's server writes its own."""
    now = datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")
    fields = {"message": text}
    line = {"timestamp": now, "level": "WARN", "fields": fields, "target": "cog_triton.front"}
    return json.dumps(line)
