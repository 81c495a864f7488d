"""The face beside Cog's, in the predictor: its deployment, its queue, its event loop and its end.

With OPENAI_WORKERS above 1 it has processes of its own, which share its port and the predictor's Triton.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Callable, Coroutine

from cog_triton.deployment import Deployment
from cog_triton.errors import ConfigurationError
from cog_triton.faces.openai.app import create_app
from cog_triton.faces.openai.operation import configured_keys
from cog_triton.faces.openai.served import Served
from cog_triton.faces.openai.serving import (
    Address,
    bound,
    config_of,
    model_names,
)
from cog_triton.faces.openai.workers import Workers, worker_on
from cog_triton.settings import Settings
from cog_triton.web.server import BACKLOG, Server

logger = logging.getLogger(__name__)


class Beside:
    """One that starts and stops nothing but itself: it goes with its process."""

    def __init__(self, settings: Settings, port: int, busy: Callable[[bool], object]) -> None:
        """Takes the port, before anything slow is begun, and does not answer yet.

        Args:
            busy: is told whether requests run, each time that changes.

        Raises:
            ConfigurationError: the port is taken, or the API keys are wrong.
        """
        configured_keys(settings)
        self._models = model_names(settings)
        self._busy = busy
        try:
            self._listener = bound(Address(settings.openai_host, port))
        except ConfigurationError as error:
            raise ConfigurationError(f"OPENAI_PORT: {error.message}") from None

    def serve(self, deployment: Deployment) -> None:
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
        several = deployment.settings.openai_workers > 1
        run = self._in_workers(deployment) if several else self._here(deployment)
        self._running = asyncio.create_task(run)
        logger.info("OpenAI's API: %s", Address(host, port).url)

    def drain(self) -> None:
        """Takes no new requests; those that run go on."""
        self._drain()

    def _here(self, deployment: Deployment) -> Coroutine[None, None, None]:
        served = Served(deployment, self._models, busy=self._busy)

        def drain() -> None:
            served.draining = True

        self._drain = drain
        server = Server(config_of(create_app(served), served.settings))
        return server.serve(sockets=[self._listener])

    async def _in_workers(self, deployment: Deployment) -> None:
        """Counts as busy until they have ended: they end when nothing runs in them any more."""
        with tempfile.TemporaryDirectory(prefix="cog-triton-metrics-") as metrics:
            listener = self._listener.fileno()
            workers = Workers(worker_on(deployment, self._models, metrics, listener))
            self._drain = workers.stop
            self._busy(True)
            await workers.run(lambda: logger.info("OpenAI's API: its processes are ready"))
        self._listener.close()  # nobody answers there any more
        self._busy(False)
