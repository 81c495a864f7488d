"""The API's servers: in this process or in several, until a signal comes, or inside Cog's predictor."""

import asyncio
import contextlib
import gc
import json
import logging
import shlex
import signal
import socket
from collections.abc import Callable
from typing import Any

import uvloop

from cog_triton.api.openai.app import create_app
from cog_triton.api.openai.background import BackgroundResponses
from cog_triton.api.openai.background_tasks import BackgroundTasks
from cog_triton.api.openai.batch_runner import Runner
from cog_triton.api.openai.errors import ApiError
from cog_triton.api.openai.keys import configured_keys
from cog_triton.api.openai.served import Served
from cog_triton.api.openai.supervisor import Workers
from cog_triton.deployment import Deployment
from cog_triton.deployment.attached import address_of, attach
from cog_triton.deployment.deployment import tokenizer_of
from cog_triton.deployment.model_files import served_names
from cog_triton.deployment.template_variables import context_length
from cog_triton.errors import ConfigurationError
from cog_triton.server.command import choose_ports
from cog_triton.server.log import log_to
from cog_triton.settings import Settings, read_settings
from cog_triton.terminal import end_at_once_on_signals
from cog_triton.text.chat import has_chat_template
from cog_triton.web import Refusal
from cog_triton.web import server as web
from cog_triton.web.origin import access_rule

logger = logging.getLogger(__name__)
FORM_BYTES = 1 << 16  # what a form may have beside its file
_REFUSAL_CODES = {403: "forbidden", 413: "request_too_large", 415: "unsupported_content_encoding"}


def run(host: str, port: int, endpoint: str | None, triton_model: str) -> int:
    """Serve until a signal comes; return the exit status. Without an ``endpoint``, a Triton is started."""
    settings = read_settings()
    log_to(settings.log_level)
    configured_keys(settings)  # a mistake in them is reported before a download
    # Clients of openai_trtllm know a Triton's model by its name there.
    names = served_names(settings, otherwise=triton_model if endpoint else None)
    return uvloop.run(_serve(settings, names, endpoint, triton_model, bind(host, port)))


async def _serve(
    settings: Settings,
    names: tuple[str, ...],
    endpoint: str | None,
    triton_model: str,
    listener: socket.socket,
) -> int:
    server: InProcess | Workers
    async with contextlib.AsyncExitStack() as stack:
        if endpoint is None:
            deployment = await Deployment.start(with_fixed_port(settings))
            stack.push_async_callback(deployment.stop)
            server = server_of(deployment, names, listener)
            tokenizer = deployment.tokenizer
        else:
            address = address_of(endpoint)
            # The setting counts more than the model's files: that server may stretch the model's context.
            length = settings.max_sequence_length
            length = length or context_length({"model": settings.tokenizer_dir})
            if settings.openai_workers > 1:
                tokenizer = await asyncio.to_thread(tokenizer_of, settings)
                server = Workers(
                    settings,
                    listener,
                    address=address,
                    triton_model=triton_model,
                    context_length=length,
                    models=names,
                )
            else:
                attached = await attach(settings, address, triton_model, length)
                stack.push_async_callback(attached.stop)
                tokenizer = attached.tokenizer
                server = InProcess(Served(attached, names), listener)
        chat = has_chat_template(tokenizer)
        text = invitation(settings, names[0], url_of(listener), chat=chat)
        return await run_until_signal(server, listener, lambda: print(text, flush=True))


class Embedded:
    """OpenAI's API in Cog's predictor: its deployment, queue and event loop, until the process ends."""

    def __init__(self, settings: Settings, busy: Callable[[bool], object]) -> None:
        """Take OPENAI_PORT before anything slow is begun, or raise ConfigurationError."""
        configured_keys(settings)
        self.settings = with_fixed_port(settings)  # for its deployment
        self._busy = busy
        self._tasks = BackgroundTasks()
        self._listener = bind(settings.openai_host, settings.openai_port or 0, "OPENAI_PORT: ")

    def serve(self, deployment: Deployment) -> None:
        """Answer from now on, or raise ConfigurationError if the port was taken meanwhile."""
        listen(self._listener, "OPENAI_PORT: ")
        names = served_names(self.settings)
        self._server = server_of(deployment, names, self._listener, self._busy)
        self._tasks.start("serve OpenAI's API", self._run())
        logger.info("OpenAI's API: %s", url_of(self._listener))

    def drain(self) -> None:
        """Refuse new requests; those that run continue."""
        self._server.drain()

    async def _run(self) -> None:
        if isinstance(self._server, Workers):
            self._busy(True)  # until they have ended; they end when nothing runs in them
        await self._server.run(lambda: logger.info("OpenAI's API: its processes are ready"))
        self._listener.close()
        self._busy(False)


def server_of(
    deployment: Deployment,
    models: tuple[str, ...],
    listener: socket.socket,
    busy: Callable[[bool], object] = lambda _: None,
) -> "InProcess | Workers":
    settings = deployment.settings
    if settings.openai_workers == 1:
        return InProcess(Served(deployment, models, busy=busy), listener)
    address = f"{settings.host.replace('0.0.0.0', '127.0.0.1')}:{settings.grpc_port}"
    return Workers(
        settings,
        listener,
        address=address,
        triton_model="ensemble",
        context_length=deployment.context_length,
        models=models,
        on_given_up=deployment.supervisor.kill_because_given_up,
    )


class InProcess:
    """A server on the event loop of its caller, of a socket that listens by the time of ``run``."""

    def __init__(self, served: Served, listener: socket.socket) -> None:
        settings = served.settings
        uploads = {b"/v1/files": settings.max_file_bytes + FORM_BYTES}
        app = create_app(served)
        limits = web.Limits(
            settings.max_request_bytes, request_seconds=settings.receive_timeout, uploads=uploads
        )
        access = access_rule(
            listener,
            hosts=settings.allowed_hosts,
            origins=settings.allowed_origins,
            origins_setting="OPENAI_ALLOWED_ORIGINS",
        )
        self._server = web.Server(app, limits, access, refusal_body)
        self._served = served
        self._listener = listener
        self._background: BackgroundResponses | None = app.state.background
        self._batches: Runner | None = None
        if served.storage is not None:
            self._batches = Runner(app, served, served.storage)
        self._ending: list[asyncio.Future[Any]] = []  # batches that are stopping

    async def run(self, ready: Callable[[], object]) -> None:
        """Serve until stopped; call ``ready`` once requests can come."""
        tasks = self._served.tasks
        tasks.start("refresh the metrics", self._served.figures.keep_fresh())
        if self._background is not None:
            tasks.start("run background responses", self._background.work())
        if self._batches is not None:
            tasks.start("run batches", self._batches.work())
        storage = self._served.storage
        if storage is not None:
            tasks.start("housekeeping of the journal", storage.housekeeping.run())
        ready()
        await self._server.serve(sockets=[self._listener])
        await tasks.stop()
        if storage is not None:
            await storage.journal.close()

    def drain(self) -> None:
        self._served.draining = True
        if self._background is not None:
            self._background.closed = True
        if self._batches is not None:
            self._ending.append(self._batches.stop())  # the next process continues with them

    def stop(self) -> None:
        """Drain, let requests end for DRAIN_SECONDS, end the others, and make ``run`` return."""
        logger.info("stopping: %d requests are running", self._served.running)
        self.drain()
        self._served.tasks.start("stop", self._stop())

    async def _stop(self) -> None:
        await self._served.drain()
        await asyncio.gather(*self._ending)
        if self._background is not None:
            await self._background.stop()
        self._server.should_exit = True


def refusal_body(refusal: Refusal, target: str) -> dict[str, Any]:
    """Return the body of the response to a request that never reached the application."""
    code = _REFUSAL_CODES.get(refusal.status)
    return ApiError(refusal.status, refusal.detail, code=code).body(target)


def with_fixed_port(settings: Settings) -> Settings:
    """Return the settings with a gRPC port that a restarted Triton has again, if there are workers."""
    if settings.openai_workers == 1 or settings.grpc_port:
        return settings
    return settings.model_copy(update={"grpc_port": choose_ports(settings).grpc_port})


async def run_until_signal(
    server: InProcess | Workers, listener: socket.socket, ready: Callable[[], object]
) -> int:
    """Run a server until a signal; return 0, 130 after Ctrl-C, 1 if it ended. A second one kills it."""
    gc.collect()
    gc.freeze()  # what lives now lives on, so full collections need not look at it
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


def url_of(listener: socket.socket) -> str:
    """Return the URL by which this machine reaches a socket."""
    host, port = listener.getsockname()[:2]
    host = host.replace("0.0.0.0", "127.0.0.1")
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def invitation(settings: Settings, model: str, url: str, *, chat: bool) -> str:
    """Return the text of a server that is ready: the page's address, and a command to try.

    Args:
        chat: whether the model has a chat template, which a question wants around it.
    """
    page = f", with a chat page at {url}/" if settings.chat_page else ""
    key = ' -H "Authorization: Bearer $OPENAI_API_KEY"' if configured_keys(settings) else ""
    question = "What is a KV cache?"
    body: dict[str, object] = {"model": model, "prompt": question, "max_tokens": 64}
    path = "completions"
    if chat:
        messages = [{"role": "user", "content": question}]
        body = {"model": model, "messages": messages, "max_tokens": 64}
        path = "chat/completions"
    return (
        f"ready: {url}{page} (Ctrl-C stops it); try\n"
        f"  curl -s {url}/v1/{path} -H 'Content-Type: application/json'{key} "
        f"-d {shlex.quote(json.dumps(body))}"
    )
