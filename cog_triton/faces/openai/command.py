"""The face by itself, as ``make openai`` runs it, and embedded in Cog's predictor."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shlex
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import uvloop

from cog_triton.deployment import Deployment
from cog_triton.deployment.preparation import context_length
from cog_triton.faces.openai.attached import address_of, attach
from cog_triton.faces.openai.operation import configured_keys
from cog_triton.faces.openai.served import Served
from cog_triton.faces.openai.server import InProcess, Server, bind, listen, run_until_signal
from cog_triton.faces.openai.workers import Workers, with_fixed_port
from cog_triton.server.log import log_to
from cog_triton.settings import Settings, read_settings

logger = logging.getLogger(__name__)


def run(
    host: str,
    port: int,
    models: Sequence[str] = (),
    endpoint: str | None = None,
    triton_model: str = "ensemble",
    **given: object,
) -> int:
    """Serve until a signal comes; return the exit status.

    Args:
        models: names in requests; empty for that of MODEL.
        endpoint: of a Triton that runs; None to start one.
        triton_model: of that Triton, where it has no ensemble that returns ids.
        given: settings in place of the environment's, but for those that are None.
    """
    update = {name: value for name, value in given.items() if value is not None}
    settings = read_settings().model_copy(update=update)
    log_to(settings.log_level)
    configured_keys(settings)  # what is wrong with them comes before a download
    # Clients of openai_trtllm know a Triton's model by its name there.
    names = tuple(models) or (triton_model if endpoint else model_name(settings),)
    return uvloop.run(_serve(settings, names, endpoint, triton_model, bind(host, port)))


async def _serve(
    settings: Settings,
    names: tuple[str, ...],
    endpoint: str | None,
    triton_model: str,
    listener: socket.socket,
) -> int:
    server: Server
    async with contextlib.AsyncExitStack() as stack:
        if endpoint is None:
            deployment = await Deployment.start(with_fixed_port(settings))
            stack.push_async_callback(deployment.stop)
            server = _server(deployment, names, listener)
        else:
            address, limit = address_of(endpoint), settings.max_sequence_length
            length = context_length({"model": settings.tokenizer_dir, "max_seq_len": limit})
            if settings.openai_workers > 1:
                server = Workers(settings, names, listener, length, address, triton_model)
            else:
                attached = await attach(settings, address, triton_model, length)
                stack.push_async_callback(attached.stop)
                server = InProcess(Served(attached, names), listener)
        text = invitation(settings, names[0], url_of(listener))
        return await run_until_signal(server, listener, lambda: print(text, flush=True))


class Embedded:
    """The face in the predictor: its deployment, queue and event loop, until the process ends."""

    def __init__(self, settings: Settings, port: int, busy: Callable[[bool], object]) -> None:
        """Take the port before anything slow is begun, or raise ConfigurationError.

        Args:
            busy: called when requests begin to run, with True, and when none does any more.
        """
        configured_keys(settings)
        self._models, self._busy = (model_name(settings),), busy
        self._listener = bind(settings.openai_host, port, "OPENAI_PORT: ")

    def serve(self, deployment: Deployment) -> None:
        """Answer from now on, or raise ConfigurationError if the port was taken meanwhile."""
        listen(self._listener, "OPENAI_PORT: ")
        self._server = _server(deployment, self._models, self._listener, self._busy)
        self._running = asyncio.create_task(self._run())
        logger.info("OpenAI's API: %s", url_of(self._listener))

    def drain(self) -> None:
        """Refuse new requests; those that run continue."""
        self._server.drain()

    async def _run(self) -> None:
        if isinstance(self._server, Workers):
            self._busy(True)  # until they have ended, which they do when nothing runs in them
        await self._server.run(lambda: logger.info("OpenAI's API: its processes are ready"))
        self._listener.close()
        self._busy(False)


def _server(
    deployment: Deployment,
    models: tuple[str, ...],
    listener: socket.socket,
    busy: Callable[[bool], object] = lambda _: None,
) -> Server:
    settings = deployment.settings
    if settings.openai_workers == 1:
        return InProcess(Served(deployment, models, busy=busy), listener)
    return Workers(settings, models, listener, deployment.context_length)


def model_name(settings: Settings) -> str:
    """Return the model's name: an id of a hub as it is, or the last part of a directory."""
    source = settings.weights or settings.model
    if settings.engine_dir is not None and not settings.weights:
        source = str(settings.engine_dir)
    local = Path(source).exists() or "://" in source or source.startswith(("/", "."))
    return Path(source.rstrip("/")).name.split(".tar")[0] if local else source


def url_of(listener: socket.socket) -> str:
    """Return the URL by which this machine reaches a socket."""
    host, port = listener.getsockname()[:2]
    host = host.replace("0.0.0.0", "127.0.0.1")
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def invitation(settings: Settings, model: str, url: str) -> str:
    """Return the text of a server that is ready: the page's address, and a command to try."""
    page = f", with a page to chat at {url}/" if settings.chat_page else ""
    key = ' -H "Authorization: Bearer $OPENAI_API_KEY"' if configured_keys(settings) else ""
    body = json.dumps({"model": model, "prompt": "What is a KV cache?", "max_tokens": 64})
    return (
        f"ready: {url}{page} (Ctrl-C stops it); try\n"
        f"  curl -s {url}/v1/completions -H 'Content-Type: application/json'{key} "
        f"-d {shlex.quote(body)}"
    )
