"""The processes of the command: one that serves, or several that share its socket and its Triton."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import logging
import os
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import uvloop

from cog_triton.context_length import context_length
from cog_triton.deployment import Deployment, tokenizer_of
from cog_triton.errors import ConfigurationError
from cog_triton.faces.openai.attached import Attached, RunningTriton, address_of
from cog_triton.faces.openai.operation import configured_keys
from cog_triton.faces.openai.served import LAST_SECONDS, Backend, Part
from cog_triton.faces.openai.serving import (
    BACKLOG,
    Address,
    bound,
    exit_status,
    model_names,
    serve,
    told_to_end,
)
from cog_triton.parent import end_with_parent
from cog_triton.server.log import log_to
from cog_triton.settings import Settings, read_settings

logger = logging.getLogger(__name__)
MARGIN_SECONDS = 3.0
"""Beyond what a worker may take to end."""


@dataclass(frozen=True)
class Options:
    """What the command line says.

    Attributes:
        models: names in requests; empty for that of MODEL.
        endpoint: of a Triton that runs; None to start one.
        triton_model: of that Triton, where it has no ensemble that returns ids.
        tokenizer: a directory or an id; None for that of the settings.
        workers: processes that answer.
        api_keys_file: None for that of the settings, as below.
    """

    host: str
    port: int
    models: tuple[str, ...] = ()
    endpoint: str | None = None
    triton_model: str = "ensemble"
    tokenizer: str | None = None
    workers: int = 1
    api_keys_file: Path | None = None
    allowed_origins: str | None = None


@dataclass(frozen=True)
class Worker:
    """What one of several processes is told.

    Attributes:
        listener: descriptor of the socket that they share.
        ready: descriptor to write to when requests can come.
        metrics: directory for the figures of all.
        settings: those that differ from the environment's.
    """

    listener: int
    ready: int
    models: tuple[str, ...]
    endpoint: str
    triton_model: str
    context_length: int | None
    processes: int
    metrics: str
    settings: Mapping[str, object]


def run(options: Options) -> int:
    """Serves until a signal comes; returns the exit status.

    Raises:
        CogTritonError: the settings are wrong, or something could not be started.
    """
    settings = with_options(read_settings(), options)
    log_to(settings.log_level)
    configured_keys(settings)  # what is wrong with them comes before a download
    address = Address(options.host, options.port)
    listener = bound(address)

    def ready() -> None:
        print(f"ready: {address.url}", flush=True)

    if options.workers > 1:
        return uvloop.run(_serve_with_workers(options, settings, listener, ready))
    names = options.models or _names(options, settings)
    return uvloop.run(serve(_start(options, settings), names, listener, ready))


def run_worker(told: str) -> None:
    """Serves as one of several, on a Triton that the first runs."""
    worker = Worker(**json.loads(told))
    settings = Settings.model_validate(
        {**read_settings().model_dump(exclude_unset=True), **worker.settings}
    )
    log_to(settings.log_level)
    end_with_parent()

    async def start() -> Backend:
        tokenizer = await asyncio.to_thread(tokenizer_of, settings)
        triton = RunningTriton(worker.endpoint, worker.triton_model)
        return await Attached.connect(settings, tokenizer, triton, worker.context_length)

    listener = socket.socket(fileno=worker.listener)
    part = Part(worker.processes, worker.metrics)
    ready = functools.partial(os.write, worker.ready, b".")
    uvloop.run(serve(start, tuple(worker.models), listener, ready, part))


def with_options(settings: Settings, options: Options) -> Settings:
    """The settings with what the command line says of them."""
    given = {
        "tokenizer": options.tokenizer,
        "openai_api_keys_file": options.api_keys_file,
        "allowed_origins": options.allowed_origins,
    }
    return settings.model_copy(update={k: v for k, v in given.items() if v is not None})


def _names(options: Options, settings: Settings) -> tuple[str, ...]:
    # The name that clients of openai_trtllm use is that of Triton's model.
    return (options.triton_model,) if options.endpoint else model_names(settings)


def _start(options: Options, settings: Settings) -> Callable[[], Awaitable[Backend]]:
    async def start() -> Backend:
        if options.endpoint is None:
            return await Deployment.start(settings)
        tokenizer = await asyncio.to_thread(tokenizer_of, settings)
        triton = RunningTriton(address_of(options.endpoint), options.triton_model)
        return await Attached.connect(settings, tokenizer, triton, _context_length(settings))

    return start


async def _serve_with_workers(
    options: Options, settings: Settings, listener: socket.socket, ready: Callable[[], object]
) -> int:
    """Runs Triton here, and what answers in processes that end with this one."""
    deployment, endpoint = None, options.endpoint
    if endpoint is None:
        # One port for all lives of the server: the workers are not told of another.
        port = settings.grpc_port or _free_port(settings.host)
        settings = settings.model_copy(update={"grpc_port": port})
        deployment = await Deployment.start(settings)
        settings = deployment.settings
        endpoint = f"{settings.host.replace('0.0.0.0', '127.0.0.1')}:{port}"
    try:
        length = deployment.context_length if deployment else _context_length(settings)
        with tempfile.TemporaryDirectory(prefix="cog-triton-metrics-") as metrics:
            told = _told(options, settings, endpoint, length, metrics)
            workers = [told] * options.workers
            return await _run_workers(workers, listener, settings.drain_seconds, ready)
    finally:
        if deployment is not None:
            await deployment.stop()


def _told(
    options: Options, settings: Settings, endpoint: str, length: int | None, metrics: str
) -> Worker:
    """What each worker is told; the queue is shared out among them."""
    file = settings.openai_api_keys_file
    share = {
        "max_running": -(-settings.max_running // options.workers),
        "max_waiting": -(-settings.max_waiting // options.workers),
        "tokenizer": settings.tokenizer_dir,
        "allowed_origins": settings.allowed_origins,
        "openai_api_keys_file": str(file) if file else None,
    }
    names = options.models or _names(options, settings)
    return Worker(
        -1,
        -1,
        names,
        address_of(endpoint),
        options.triton_model,
        length,
        options.workers,
        metrics,
        share,
    )


def _context_length(settings: Settings) -> int | None:
    """Of the model of a Triton that runs, as far as the tokenizer's directory tells."""
    model, limit = settings.tokenizer_dir, settings.max_sequence_length
    return context_length({"model": model, "max_seq_len": limit})


async def _run_workers(
    workers: list[Worker],
    listener: socket.socket,
    drain_seconds: float,
    ready: Callable[[], object],
) -> int:
    """Runs workers until a signal comes, or one of them ends; returns the exit status."""
    listener.listen(BACKLOG)
    said, say = os.pipe()
    with told_to_end() as told:
        processes = [await _spawn(worker, listener.fileno(), say) for worker in workers]
        os.close(say)
        ends = [asyncio.create_task(process.wait()) for process in processes]
        telling = asyncio.create_task(_all_ready(said, len(workers), ready))
        await asyncio.wait([*ends, told], return_when=asyncio.FIRST_COMPLETED)
        if not told.done():
            logger.error("a worker ended: all are stopped")
        for process in processes:
            if process.returncode is None:
                process.terminate()
        await asyncio.wait(ends, timeout=drain_seconds + LAST_SECONDS + MARGIN_SECONDS)
        for process in processes:
            if process.returncode is None:
                process.kill()
        telling.cancel()
        return exit_status(told)


async def _spawn(worker: Worker, listener: int, ready: int) -> asyncio.subprocess.Process:
    told = dataclasses.replace(worker, listener=listener, ready=ready)
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "cog_triton.faces.openai.worker", json.dumps(dataclasses.asdict(told))),
        pass_fds=(listener, ready),
        env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": worker.metrics},
        start_new_session=True,  # Ctrl-C reaches the first process alone, which passes it on
    )


async def _all_ready(said: int, count: int, ready: Callable[[], object]) -> None:
    """Calls ``ready`` when each worker has said that it is."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    with os.fdopen(said, "rb") as pipe:
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        with contextlib.suppress(asyncio.IncompleteReadError):  # they have ended
            await reader.readexactly(count)
            ready()


def _free_port(host: str) -> int:
    with socket.socket() as listener:
        try:
            listener.bind((host, 0))
        except OSError as error:
            raise ConfigurationError(f"TRITON_HOST={host}: {error.strerror}") from None
        return int(listener.getsockname()[1])
