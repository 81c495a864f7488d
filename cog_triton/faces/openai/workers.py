"""A server in several processes, which share a socket and a Triton; one that ends is replaced.

Each is ``python -m cog_triton.faces.openai.workers OPTIONS``, which are JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import uvloop
from prometheus_client.multiprocess import mark_process_dead

from cog_triton.faces.openai.attached import attach
from cog_triton.faces.openai.served import LAST_SECONDS, Served
from cog_triton.faces.openai.server import InProcess, bind, run_until_signal
from cog_triton.processes import end_with_parent
from cog_triton.server.log import log_to
from cog_triton.settings import Settings, read_settings

logger = logging.getLogger(__name__)
MARGIN_SECONDS = 3.0
"""Beyond what a worker may take to end."""


def with_fixed_port(settings: Settings) -> Settings:
    """Return the settings with a gRPC port that a restarted Triton has again, if there are workers."""
    if settings.openai_workers == 1 or settings.grpc_port:
        return settings
    with bind(settings.host, 0, "TRITON_HOST: ") as free:
        return settings.model_copy(update={"grpc_port": int(free.getsockname()[1])})


class Workers:
    """See ``server.Server``. It ends when all workers were stopped, or one cannot start."""

    def __init__(
        self,
        settings: Settings,
        models: tuple[str, ...],
        listener: socket.socket,
        context_length: int | None,
        endpoint: str | None = None,
        triton_model: str = "ensemble",
    ) -> None:
        """Start nothing yet; see ``command.run``. Without an endpoint, Triton's port has to be fixed."""
        count, file = settings.openai_workers, settings.openai_api_keys_file
        own = f"{settings.host.replace('0.0.0.0', '127.0.0.1')}:{settings.grpc_port}"
        self._end_seconds = settings.drain_seconds + LAST_SECONDS + MARGIN_SECONDS
        self._options: dict[str, Any] = {
            "models": models,
            "endpoint": endpoint or own,
            "triton_model": triton_model,
            "context_length": context_length,
            "processes": count,
            "listener": listener.fileno(),
            # Those that may differ from the environment's.
            "settings": {
                "max_running": -(-settings.max_running // count),
                "max_waiting": -(-settings.max_waiting // count),
                "tokenizer": settings.tokenizer_dir,
                "allowed_origins": settings.allowed_origins,
                "openai_api_keys_file": str(file) if file else None,
            },
        }
        self._processes: set[asyncio.subprocess.Process] = set()
        self._starting = count
        self._stopping = False

    async def run(self, ready: Callable[[], object]) -> None:
        with tempfile.TemporaryDirectory(prefix="cog-triton-metrics-") as metrics:
            self._options["metrics"] = metrics
            count = self._options["processes"]
            workers = [asyncio.create_task(self._keep_running(ready)) for _ in range(count)]
            await asyncio.wait(workers, return_when=asyncio.FIRST_COMPLETED)
            self.stop()
            await asyncio.gather(*workers)

    def stop(self) -> None:
        if not self._stopping:  # a second signal would end at once what runs
            self._stopping = True
            for process in self._processes:
                _send(process.terminate)
            asyncio.get_running_loop().call_later(self._end_seconds, self._kill)

    drain = stop

    def _kill(self) -> None:
        for process in self._processes:
            _send(process.kill)

    async def _keep_running(self, ready: Callable[[], object]) -> None:
        """Run a worker, and another after each that ends."""
        started = False
        while not self._stopping:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "cog_triton.faces.openai.workers"),
                json.dumps(self._options),
                stdout=asyncio.subprocess.PIPE,  # a byte comes when it is ready
                pass_fds=(self._options["listener"],),
                env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": self._options["metrics"]},
                start_new_session=True,  # Ctrl-C reaches only the first process, which passes it on
            )
            self._processes.add(process)
            if self._stopping:  # meanwhile
                _send(process.terminate)
            assert process.stdout is not None
            if await process.stdout.read(1) and not started:
                started = True
                self._starting -= 1
                if not self._starting:
                    ready()
            await process.wait()
            self._processes.discard(process)
            # Its gauges would be added to the others' otherwise.
            mark_process_dead(process.pid, self._options["metrics"])  # type: ignore[no-untyped-call]
            if not self._stopping and not started:
                logger.error("a worker ended before it was ready: all are stopped")
                return
            if not self._stopping:
                logger.error("a worker ended: another takes its place")


def _send(signal: Callable[[], None]) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal()


async def _run_worker(
    *,
    models: list[str],
    endpoint: str,
    triton_model: str,
    context_length: int | None,
    processes: int,
    listener: int,
    settings: Mapping[str, object],
    metrics: str,
) -> None:
    ready = os.dup(1)
    os.dup2(2, 1)  # what a library prints is no sign of being ready
    given = {**read_settings().model_dump(exclude_unset=True), **settings}
    own = Settings.model_validate(given)
    log_to(own.log_level)
    end_with_parent()
    backend = await attach(own, endpoint, triton_model, context_length)
    try:
        served = Served(backend, tuple(models), processes=processes, metrics_directory=metrics)
        shared = socket.socket(fileno=listener)
        await run_until_signal(InProcess(served, shared), shared, lambda: os.write(ready, b"."))
    finally:
        await backend.stop()


if __name__ == "__main__":
    uvloop.run(_run_worker(**json.loads(sys.argv[1])))
