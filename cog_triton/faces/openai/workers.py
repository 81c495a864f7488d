"""Processes that share a socket and answer: what each is told, and another in place of one that ends."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from prometheus_client.multiprocess import mark_process_dead

from cog_triton.deployment import Deployment
from cog_triton.errors import ConfigurationError
from cog_triton.settings import Settings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Worker:
    """What one of several processes is told.

    Attributes:
        models: names in requests.
        endpoint: host:port of Triton's gRPC.
        triton_model: of that Triton, where it has no ensemble that returns ids.
        metrics: directory for the figures of all.
        settings: those that differ from the environment's.
        listener: descriptor of the socket that they share.
        ready: descriptor to write to when requests can come.
    """

    models: tuple[str, ...]
    endpoint: str
    triton_model: str
    context_length: int | None
    processes: int
    metrics: str
    settings: Mapping[str, object]
    listener: int = -1
    ready: int = -1


def share(settings: Settings, processes: int) -> dict[str, object]:
    """The settings of each process: the queue is shared out among them."""
    file = settings.openai_api_keys_file
    return {
        "max_running": -(-settings.max_running // processes),
        "max_waiting": -(-settings.max_waiting // processes),
        "tokenizer": settings.tokenizer_dir,
        "allowed_origins": settings.allowed_origins,
        "openai_api_keys_file": str(file) if file else None,
    }


def worker_on(
    deployment: Deployment, models: tuple[str, ...], metrics: str, listener: int
) -> Worker:
    """A worker on the Triton of a deployment, whose gRPC port is the same in all of its lives."""
    settings = deployment.settings
    return Worker(
        models=models,
        endpoint=f"{settings.host.replace('0.0.0.0', '127.0.0.1')}:{settings.grpc_port}",
        triton_model="ensemble",
        context_length=deployment.context_length,
        processes=settings.openai_workers,
        metrics=metrics,
        settings=share(settings, settings.openai_workers),
        listener=listener,
    )


def with_one_port(settings: Settings) -> Settings:
    """The settings with a gRPC port for all lives of Triton: workers are not told of another."""
    port = settings.grpc_port or _free_port(settings.host)
    return settings.model_copy(update={"grpc_port": port})


def _free_port(host: str) -> int:
    with socket.socket() as listener:
        try:
            listener.bind((host, 0))
        except OSError as error:
            raise ConfigurationError(f"TRITON_HOST={host}: {error.strerror}") from None
        return int(listener.getsockname()[1])


class Workers:
    """As many processes as a worker is told that there are, from ``run`` to their end."""

    def __init__(self, worker: Worker) -> None:
        """Starts nothing yet."""
        self._places = [_Place(worker) for _ in range(worker.processes)]

    async def run(self, ready: Callable[[], object]) -> None:
        """Returns when all have been told to end and did, or when one cannot start.

        Args:
            ready: is called when every one is.
        """
        running = [asyncio.create_task(place.run()) for place in self._places]
        telling = asyncio.create_task(self._tell(ready))
        try:
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            self.stop()
            await asyncio.gather(*running)
        finally:
            telling.cancel()

    def stop(self) -> None:
        """Tells them to let what runs end, and then to end."""
        for place in self._places:
            place.stop()

    def kill(self) -> None:
        """Ends them at once."""
        for place in self._places:
            place.kill()

    async def _tell(self, ready: Callable[[], object]) -> None:
        for place in self._places:
            await place.ready.wait()
        ready()


class _Place:
    """Where a worker runs, and another after it."""

    def __init__(self, worker: Worker) -> None:
        self.ready = asyncio.Event()
        self._worker = worker
        self._stopping = False
        self._process: asyncio.subprocess.Process | None = None

    async def run(self) -> None:
        """Runs one after the other; returns after one that was told to end, or cannot start."""
        while not self._stopping:
            await self._run_one()
            if self._stopping:
                return
            if not self.ready.is_set():
                logger.error("a worker ended before it was ready: all are stopped")
                return
            logger.error("a worker ended: another takes its place")

    def stop(self) -> None:
        if not self._stopping:  # a second signal would end what runs at once
            self._stopping = True
            self._terminate()

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def _terminate(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()

    async def _run_one(self) -> None:
        """Runs a worker to its end."""
        said, say = os.pipe()
        try:
            self._process = process = await _spawn(dataclasses.replace(self._worker, ready=say))
        finally:
            os.close(say)
        if self._stopping:  # meanwhile
            self._terminate()
        if await _first_byte(said):
            self.ready.set()
        await process.wait()
        # Else its figures of what runs and waits would be added to the others' for good.
        mark_process_dead(process.pid, self._worker.metrics)  # type: ignore[no-untyped-call]


async def _first_byte(descriptor: int) -> bytes:
    """What comes first from a pipe; nothing if it is closed before. Closes it."""
    reader = asyncio.StreamReader()
    with os.fdopen(descriptor, "rb") as pipe:
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        with contextlib.closing(transport):
            return await reader.read(1)


async def _spawn(worker: Worker) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "cog_triton.faces.openai.worker", json.dumps(dataclasses.asdict(worker))),
        pass_fds=(worker.listener, worker.ready),
        env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": worker.metrics},
        start_new_session=True,  # Ctrl-C reaches the first process alone, which passes it on
    )
