"""The processes of the command: one that serves, or several that share its socket and its Triton."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import shlex
import socket
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from cog_triton.context_length import context_length
from cog_triton.deployment import Deployment, tokenizer_of
from cog_triton.faces.openai.attached import Attached, RunningTriton, address_of
from cog_triton.faces.openai.operation import configured_keys
from cog_triton.faces.openai.served import LAST_SECONDS, Backend, Part
from cog_triton.faces.openai.serving import (
    Address,
    bound,
    exit_status,
    model_names,
    serve,
    told_to_end,
)
from cog_triton.faces.openai.workers import (
    Worker,
    Workers,
    share,
    with_one_port,
    worker_on,
)
from cog_triton.parent import end_with_parent
from cog_triton.server.log import log_to
from cog_triton.settings import Settings, read_settings
from cog_triton.web.server import BACKLOG

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
        workers: processes that answer; OPENAI_WORKERS if None.
        api_keys_file: None for that of the settings, as below.
    """

    host: str
    port: int
    models: tuple[str, ...] = ()
    endpoint: str | None = None
    triton_model: str = "ensemble"
    tokenizer: str | None = None
    workers: int | None = None
    api_keys_file: Path | None = None
    allowed_origins: str | None = None


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

    names = options.models or _names(options, settings)

    def ready() -> None:
        print(invitation(settings, names[0], address.url), flush=True)

    if settings.openai_workers > 1:
        return uvloop.run(_serve_with_workers(options, settings, listener, ready))
    return uvloop.run(serve(_start(options, settings), names, listener, ready))


def invitation(settings: Settings, model: str, url: str) -> str:
    """Return the text that is printed when requests can come: the page, and a command to try."""
    page = f", with a page to chat at {url}/" if settings.chat_page else ""
    key = ' -H "Authorization: Bearer $OPENAI_API_KEY"' if configured_keys(settings) else ""
    body = json.dumps({"model": model, "prompt": "What is machine learning?", "max_tokens": 64})
    return (
        f"ready: {url}{page} (Ctrl-C stops it); try\n"
        f"  curl -s {url}/v1/completions -H 'Content-Type: application/json'{key} "
        f"-d {shlex.quote(body)}"
    )


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
        "openai_workers": options.workers,
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
    names = options.models or _names(options, settings)
    async with contextlib.AsyncExitStack() as stack:
        metrics = stack.enter_context(tempfile.TemporaryDirectory(prefix="cog-triton-metrics-"))
        if options.endpoint is None:
            deployment = await Deployment.start(with_one_port(settings))
            stack.push_async_callback(deployment.stop)
            worker = worker_on(deployment, names, metrics, listener.fileno())
        else:
            worker = Worker(
                models=names,
                endpoint=address_of(options.endpoint),
                triton_model=options.triton_model,
                context_length=_context_length(settings),
                processes=settings.openai_workers,
                metrics=metrics,
                settings=share(settings, settings.openai_workers),
                listener=listener.fileno(),
            )
        listener.listen(BACKLOG)
        return await _run_until_told(Workers(worker), settings.drain_seconds, ready)


def _context_length(settings: Settings) -> int | None:
    """Of the model of a Triton that runs, as far as the tokenizer's directory tells."""
    model, limit = settings.tokenizer_dir, settings.max_sequence_length
    return context_length({"model": model, "max_seq_len": limit})


async def _run_until_told(
    workers: Workers, drain_seconds: float, ready: Callable[[], object]
) -> int:
    """Runs workers until a signal comes, or one cannot start; returns the exit status."""
    with told_to_end() as told:
        running = asyncio.create_task(workers.run(ready))
        first: list[asyncio.Future[Any]] = [running, told]
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        workers.stop()
        await asyncio.wait([running], timeout=drain_seconds + LAST_SECONDS + MARGIN_SECONDS)
        workers.kill()
        await running
        return exit_status(told)
