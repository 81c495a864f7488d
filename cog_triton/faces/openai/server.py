"""The lifecycle of a face: a socket, a server in this process, and its end by a signal.

``workers.Workers`` is a server in several processes.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Callable
from typing import Any, Protocol

from cog_triton.errors import ConfigurationError
from cog_triton.faces.openai.app import create_app
from cog_triton.faces.openai.errors import MESSAGES_PATH, ApiError, message_error
from cog_triton.faces.openai.served import Served
from cog_triton.faces.terminal import end_at_once_on_signals
from cog_triton.web import Limits, Refusal
from cog_triton.web import server as web

logger = logging.getLogger(__name__)
_REFUSAL_CODES = {413: "request_too_large", 415: "unsupported_content_encoding"}


class Server(Protocol):
    async def run(self, ready: Callable[[], object]) -> None:
        """Serve until stopped; call ``ready`` once requests can come."""

    def drain(self) -> None:
        """Refuse new requests."""

    def stop(self) -> None:
        """Drain, let requests end for DRAIN_SECONDS, end the others, and make ``run`` return."""


class InProcess:
    """A server on the event loop of its caller, of a socket that listens by the time of ``run``."""

    def __init__(self, served: Served, listener: socket.socket) -> None:
        settings = served.settings
        app = create_app(served)
        limits = Limits(settings.max_request_bytes, request_seconds=settings.receive_timeout)
        self._server = web.Server(web.Config(app, limits, refusal_body))
        self._served, self._listener, self._figures = served, listener, app.state.figures

    async def run(self, ready: Callable[[], object]) -> None:
        refreshing = asyncio.create_task(self._figures.keep_fresh())
        serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        ready()
        await serving
        refreshing.cancel()

    def drain(self) -> None:
        self._served.draining = True

    def stop(self) -> None:
        logger.info("stopping: %d requests run", self._served.running)
        self._stopping = asyncio.create_task(self._stop())

    async def _stop(self) -> None:
        await self._served.drain()
        self._server.should_exit = True


def refusal_body(refusal: Refusal, target: str) -> dict[str, Any]:
    """Return the body of the response to a request that never reached the application."""
    error = ApiError(refusal.status, refusal.detail, code=_REFUSAL_CODES.get(refusal.status))
    return message_error(error) if target.startswith(MESSAGES_PATH) else error.body()


async def run_until_signal(
    server: Server, listener: socket.socket, ready: Callable[[], object]
) -> int:
    """Run a server until a signal comes; return the exit status.

    That is 0 after SIGTERM, 130 after Ctrl-C, and 1 if the server ended by itself. A second signal
    ends the process at once.
    """
    gc.collect()
    gc.freeze()  # what is alive now stays so: full collections need not go through it
    loop = asyncio.get_running_loop()
    received: list[int] = []

    def handle(number: int) -> None:
        received.append(number)
        for name in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(name)
        end_at_once_on_signals()
        server.stop()

    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, handle, name)
    try:
        listen(listener)
        await server.run(ready)
    finally:
        end_at_once_on_signals()
    if not received:
        return 1
    return 128 + signal.SIGINT if received[0] == signal.SIGINT else 0


def bind(host: str, port: int, setting: str = "") -> socket.socket:
    """Return a socket that does not listen yet; the text of an error begins with ``setting``."""
    try:
        return web.bound(host, port)
    except OSError as error:
        raise ConfigurationError(f"{setting}{error.strerror}") from None


def listen(listener: socket.socket, setting: str = "") -> None:
    try:
        listener.listen(web.BACKLOG)
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise ConfigurationError(f"{setting}{host}, port {port}: {error.strerror}") from None
