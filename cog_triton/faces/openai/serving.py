"""One process that serves, from its start to its end; with several, the first runs Triton."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cog_triton.errors import ConfigurationError
from cog_triton.faces.openai.app import create_app
from cog_triton.faces.openai.errors import MESSAGES_PATH, ApiError, message_error
from cog_triton.faces.openai.served import ALONE, Backend, Part, Served
from cog_triton.faces.terminal.interrupt import end_at_once_on_signals
from cog_triton.settings import Settings
from cog_triton.web import server as web
from cog_triton.web.limits import Limits, Refusal
from cog_triton.web.server import Config

logger = logging.getLogger(__name__)

_ENDING = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class Address:
    """Where a face listens."""

    host: str
    port: int

    @property
    def url(self) -> str:
        host = self.host.replace("0.0.0.0", "127.0.0.1")
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


def model_names(settings: Settings) -> tuple[str, ...]:
    """The name of the model of these settings: a hub's id as it is, a directory by its last part."""
    source = settings.weights or settings.model
    if settings.engine_dir is not None and not settings.weights:
        source = str(settings.engine_dir)
    local = Path(source).exists() or "://" in source or source.startswith(("/", "."))
    return (Path(source.rstrip("/")).name.split(".tar")[0] if local else source,)


def bound(address: Address) -> socket.socket:
    """A socket at an address, which does not listen yet.

    Raises:
        ConfigurationError: it is taken, or not this machine's.
    """
    try:
        return web.bound(address.host, address.port)
    except OSError as error:
        raise ConfigurationError(str(error.strerror)) from None


async def serve(
    start: Callable[[], Awaitable[Backend]],
    models: tuple[str, ...],
    listener: socket.socket,
    ready: Callable[[], object],
    part: Part = ALONE,
) -> int:
    """Serves until a signal comes: those that run get their time then, and no more are taken.

    Returns the exit status, 130 after Ctrl-C.

    A signal before all has started, or a second one, ends all at once.

    Args:
        start: what is to be served.
        ready: is called when requests can come.

    Raises:
        ConfigurationError: it could not be started, or nothing can listen.
    """
    backend = await start()
    try:
        served = Served(backend, models, part=part)
        app = create_app(served)
        # What is alive now stays so: a full collection would go through all of it.
        gc.collect()
        gc.freeze()
        server = web.Server(config_of(app, served.settings))
        with told_to_end() as told:
            listener.listen(web.BACKLOG)
            running = asyncio.create_task(server.serve(sockets=[listener]))
            refreshing = asyncio.create_task(app.state.figures.keep_fresh())
            ready()
            first: list[asyncio.Future[Any]] = [running, told]
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if told.done():
                logger.info("stopping: %d requests run", served.running)
                await served.drain()
            server.should_exit = True
            await running
            refreshing.cancel()
            return exit_status(told)
    finally:
        await backend.stop()


def config_of(app: Any, settings: Settings) -> Config:
    """Uvicorn's configuration for an application of these settings."""
    limits = Limits(settings.max_request_bytes, request_seconds=settings.receive_timeout)
    return Config(app, limits, refusal_body)


def refusal_body(refusal: Refusal, target: str) -> dict[str, Any]:
    """The body of a request that never reached the application."""
    error = ApiError(refusal.status, refusal.detail, code=_REFUSAL_CODES.get(refusal.status))
    return message_error(error) if target.startswith(MESSAGES_PATH) else error.body()


_REFUSAL_CODES = {413: "request_too_large", 415: "unsupported_content_encoding"}


@contextlib.contextmanager
def told_to_end() -> Iterator[asyncio.Future[int]]:
    """What is done with the number of the first signal; a second one ends the process at once."""
    loop = asyncio.get_running_loop()
    told: asyncio.Future[int] = loop.create_future()

    def tell(number: int) -> None:
        told.set_result(number)
        for number in _ENDING:
            loop.remove_signal_handler(number)
        end_at_once_on_signals()

    for number in _ENDING:
        loop.add_signal_handler(number, tell, number)
    try:
        yield told
    finally:
        end_at_once_on_signals()


def exit_status(told: asyncio.Future[int]) -> int:
    """0 after SIGTERM, 130 after Ctrl-C, 1 if nobody asked for the end."""
    if not told.done():
        return 1
    return 128 + signal.SIGINT if told.result() == signal.SIGINT else 0
