"""The server in several worker processes, which share a socket and a Triton.

``Workers`` starts the processes and replaces those that end, by the rules of ``RestartPolicy``. A process
runs ``workers.py`` and gets a ``WorkerConfig``.
"""

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from prometheus_client.multiprocess import mark_process_dead
from pydantic import BaseModel, ConfigDict

from cog_triton.api.openai.served import LAST_SECONDS
from cog_triton.processes import temporary_directory
from cog_triton.settings import Settings

logger = logging.getLogger(__name__)
MODULE = "cog_triton.api.openai.workers"
METRICS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"  # prometheus_client reads it while it is imported
MARGIN_SECONDS = 3.0  # beyond what a worker may take to end
READY = b"."  # written by a worker that accepts requests
FIRST_PAUSE = 1.0
LONGEST_PAUSE = 30.0


class WorkerConfig(BaseModel):
    """What one worker process needs to know beside its environment.

    Attributes:
        number: the worker's place among all of them, from 0.
        listener: descriptor of the socket that all workers accept connections from.
        address: host and port of Triton's gRPC endpoint.
        triton_model: the model to ask there if the deployment is not cog-triton's.
        context_length: None if it is unknown.
        models: names of the model in requests; the first is the deployment's.
        metrics_directory: where all workers write their metrics.
        max_running: this worker's part of the deployment's limit.
        max_waiting: this worker's part of the deployment's limit.
        tokenizer: directory or id.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int
    listener: int
    address: str
    triton_model: str
    context_length: int | None
    models: tuple[str, ...]
    metrics_directory: Path
    max_running: int
    max_waiting: int
    tokenizer: str

    def command(self) -> list[str]:
        """Return the command line of this worker."""
        return [sys.executable, "-m", MODULE, self.model_dump_json()]

    def applied_to(self, settings: Settings) -> Settings:
        """Return the settings of this worker, from those of its environment."""
        changes = {
            "max_running": self.max_running,
            "max_waiting": self.max_waiting,
            "tokenizer": self.tokenizer,
        }
        return settings.model_copy(update=changes)


class RestartPolicy:
    """When a worker process that has ended is started again.

    - A worker whose first process ends before it is ready is not: its settings must be wrong, and the
      server stops.
    - Afterwards a process that was ready is replaced at once.
    - One that ends before it is ready is replaced after a pause, which doubles each time.
    """

    def __init__(self) -> None:
        self._was_ever_ready = False
        self._failed_starts = 0

    def on_ready(self) -> None:
        """Note that the current process accepts requests."""
        self._was_ever_ready = True
        self._failed_starts = 0

    def on_end(self, *, was_ready: bool) -> float | None:
        """Return the seconds until the next process is started, or None if there is to be none."""
        if not self._was_ever_ready:
            return None
        if was_ready:
            return 0.0
        pause = min(FIRST_PAUSE * 2.0**self._failed_starts, LONGEST_PAUSE)
        self._failed_starts += 1
        return pause


class Workers:
    """A server in several processes; see ``server.InProcess`` for its methods.

    ``run`` also ends when a process cannot start.
    """

    def __init__(
        self,
        settings: Settings,
        listener: socket.socket,
        *,
        address: str,
        triton_model: str,
        context_length: int | None,
        models: Sequence[str],
        on_given_up: Callable[[str], object] = lambda _: None,
    ) -> None:
        """Start nothing yet; see ``WorkerConfig`` for the arguments.

        ``on_given_up`` is called with the name of a model when Triton gave up its process, as a worker's
        request was told.
        """
        self._settings = settings
        self._listener = listener
        self._address = address
        self._triton_model = triton_model
        self._context_length = context_length
        self._models = tuple(models)
        self._on_given_up = on_given_up
        self._count = settings.openai_workers
        self._ready_numbers: set[int] = set()  # workers that have been ready
        self._stop_requested = asyncio.Event()
        self._end_seconds = settings.drain_seconds + LAST_SECONDS + MARGIN_SECONDS
        self._processes: set[Process] = set()

    def config(self, number: int, metrics_directory: Path) -> WorkerConfig:
        """Return the configuration of one worker."""
        return WorkerConfig(
            number=number,
            listener=self._listener.fileno(),
            address=self._address,
            triton_model=self._triton_model,
            context_length=self._context_length,
            models=self._models,
            metrics_directory=metrics_directory,
            max_running=math.ceil(self._settings.max_running / self._count),
            max_waiting=math.ceil(self._settings.max_waiting / self._count),
            tokenizer=self._settings.tokenizer_dir,
        )

    async def run(self, ready: Callable[[], object]) -> None:
        """Serve until stopped; call ``ready`` once all workers accept requests."""
        with temporary_directory("cog-triton-metrics.") as metrics_directory:
            configs = [self.config(n, Path(metrics_directory)) for n in range(self._count)]
            tasks = [asyncio.create_task(self._keep_running(config, ready)) for config in configs]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            self.stop()
            await asyncio.gather(*tasks)

    def stop(self) -> None:
        """Let the workers end, and kill those that take too long."""
        if self._stop_requested.is_set():
            return  # a second signal would end running requests at once
        self._stop_requested.set()
        send_signal(signal.SIGTERM, self._processes)
        loop = asyncio.get_running_loop()
        loop.call_later(self._end_seconds, send_signal, signal.SIGKILL, self._processes)

    drain = stop

    async def _keep_running(self, config: WorkerConfig, ready: Callable[[], object]) -> None:
        """Run a worker's processes, one after the other."""
        policy = RestartPolicy()
        while not self._stop_requested.is_set():
            was_ready = await self._run_process(config, policy, ready)
            if self._stop_requested.is_set():
                return
            pause = policy.on_end(was_ready=was_ready)
            if pause is None:
                logger.error("a worker ended before it was ready; stopping all workers")
                return
            if pause == 0:
                logger.error("a worker ended; starting another")
                continue
            logger.error("a worker ended before it was ready; starting another in %.0f s", pause)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stop_requested.wait(), pause)

    async def _run_process(
        self, config: WorkerConfig, policy: RestartPolicy, ready: Callable[[], object]
    ) -> bool:
        """Run one process until it ends; return whether it was ready."""
        process = await asyncio.create_subprocess_exec(
            *config.command(),
            # The worker writes READY, and later the names of models whose processes Triton gave up.
            stdout=PIPE,
            pass_fds=(config.listener,),
            env={**os.environ, METRICS_VARIABLE: str(config.metrics_directory)},
            start_new_session=True,  # Ctrl-C reaches only the first process, which passes it on
        )
        self._processes.add(process)
        if self._stop_requested.is_set():  # while the process was being made
            send_signal(signal.SIGTERM, [process])
        assert process.stdout is not None
        was_ready = bool(await process.stdout.read(len(READY)))
        if was_ready:
            policy.on_ready()
            self._note_ready(config.number, ready)
        async for line in process.stdout:
            self._on_given_up(line.decode().strip())
        await process.wait()
        self._processes.discard(process)
        # The gauges of an ended process would be added to the others' otherwise.
        mark_process_dead(process.pid, str(config.metrics_directory))  # type: ignore[no-untyped-call]
        return was_ready

    def _note_ready(self, number: int, ready: Callable[[], object]) -> None:
        """Call ``ready`` when the last of the workers is ready for the first time."""
        if number in self._ready_numbers:
            return
        self._ready_numbers.add(number)
        if len(self._ready_numbers) == self._count:
            ready()


def send_signal(number: int, processes: Iterable[Process]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
