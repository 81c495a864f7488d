"""The face beside Cog's, in the predictor: its deployment, its queue, its event loop and its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import uvicorn

from cog_triton.errors import ConfigurationError
from cog_triton.faces.openai.app import create_app
from cog_triton.faces.openai.served import Backend, Served
from cog_triton.faces.openai.serving import (
    BACKLOG,
    OPTIONS,
    Address,
    Server,
    bound,
    model_names,
)
from cog_triton.settings import Settings

logger = logging.getLogger(__name__)


class Beside:
    """One that starts and stops nothing but itself: it goes with its process."""

    def __init__(self, settings: Settings, port: int, busy: Callable[[bool], object]) -> None:
        """Takes the port, before anything slow is begun, and does not answer yet.

        Args:
            busy: is told whether requests run, each time that changes.

        Raises:
            ConfigurationError: the port is taken.
        """
        self._models = model_names(settings)
        self._busy = busy
        try:
            self._listener = bound(Address(settings.openai_host, port))
        except ConfigurationError as error:
            raise ConfigurationError(f"OPENAI_PORT: {error.message}") from None

    def serve(self, backend: Backend) -> None:
        """Answers from now on.

        Raises:
            ConfigurationError: another has taken the port meanwhile.
        """
        host, port = self._listener.getsockname()[:2]
        try:
            self._listener.listen(BACKLOG)
        except OSError as error:
            raise ConfigurationError(
                f"OPENAI_PORT: {host}, port {port}: {error.strerror}"
            ) from None
        self._served = Served(backend, self._models, busy=self._busy)
        server = Server(uvicorn.Config(create_app(self._served), **OPTIONS))
        self._running = asyncio.create_task(server.serve(sockets=[self._listener]))
        logger.info("OpenAI's API: %s", Address(host, port).url)

    def drain(self) -> None:
        """Takes no new requests; those that run go on."""
        self._served.draining = True
