"""One setup: settings → filled repository → tritonserver → ready → warm."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import shutil
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cog_triton.adapters.directory import adapter_names, check_adapter
from cog_triton.client.resume import ResumingClient, Streams
from cog_triton.client.stream import TritonClient
from cog_triton.deployment.engine_choice import (
    EngineName,
    check_supported,
    misplaces_parameters,
    with_own_beginning,
)
from cog_triton.deployment.preparation import (
    Values,
    adapter_tensors,
    check_files,
    context_length,
    machine,
    read_overrides,
    resolve_engine,
    template_values,
    with_files,
)
from cog_triton.deployment.running import RunningServer
from cog_triton.deployment.supervisor import NOTICE_SECONDS, RestartPolicy, Supervisor
from cog_triton.errors import (
    ConfigurationError,
    TritonPortTaken,
    TritonStartError,
    TritonUnavailable,
    file_problem,
)
from cog_triton.generation import Chunk, generate
from cog_triton.repository.checks import check_streaming
from cog_triton.repository.fill import fill_repository
from cog_triton.request.admission import STOPPING, Admission, Bounds, Tenant
from cog_triton.request.request import Request
from cog_triton.server.guard import process_name
from cog_triton.server.tritonserver import TritonServer
from cog_triton.settings import Settings
from cog_triton.text.chat import Message, chat_template, render_chat, set_chat_template
from cog_triton.text.tokenizer import Tokenizer, load_tokenizer, text_limits, without_torch

logger = logging.getLogger("cog_triton.deployment")

PORT_CHOICES = 3
RESTART_SECONDS = 60.0
RESTART_FACTOR = 10.0  # on the longest start so far
EXIT_STATUS = 70  # EX_SOFTWARE of sysexits.h: its tritonserver has been given up


class Deployment:
    """A tritonserver that is kept running, and what is needed to run requests on it.

    To be used from the event loop that started it.
    """

    def __init__(
        self,
        settings: Settings,
        streams: Streams,
        supervisor: Supervisor[RunningServer],
        admission: Admission,
        tokenizer: Tokenizer,
        *,
        opened: contextlib.ExitStack | None = None,
        context_length: int | None = None,
        length_penalty: bool = True,
        engine: EngineName = "transformers",
        own_preprocessing: bool = True,
    ) -> None:
        """Takes over what ``start`` has started.

        Args:
            opened: is closed at the end.
            context_length: most tokens of prompt and output together; None if only the engine knows.
            length_penalty: whether the engine is told of it; see ``misplaces_parameters``.
            engine: what runs in the tensorrt_llm slot.
            own_preprocessing: whether prompts become ids in this project's model.
        """
        self.engine = engine
        self.settings = settings
        self.limits = text_limits(tokenizer, context_length)
        self._streams = streams
        self._supervisor = supervisor
        self.admission = admission
        self.tokenizer = tokenizer
        self._opened = opened or contextlib.ExitStack()
        self.context_length = context_length
        self._length_penalty = length_penalty
        self._own_preprocessing = own_preprocessing

    @classmethod
    async def start(cls, settings: Settings) -> Deployment:
        """Starts everything; what was started is stopped again if something fails.

        Raises:
            ConfigurationError: the settings, the configuration file, the model or the server is at
                fault.
        """
        read_overrides(settings)  # its problems come before a download
        with _timed("model in place"):
            settings = await asyncio.to_thread(with_files, settings)
        engine = resolve_engine(settings)
        misplaced = misplaces_parameters(engine, machine(settings))
        values = template_values(settings, engine, num_return_sequences=not misplaced)
        check_files(values["tensorrt_llm"])
        # The tokenizer takes as long to load as Triton takes to start: do both at once.
        loading = asyncio.create_task(asyncio.to_thread(tokenizer_of, settings))
        supervisor = Supervisor(
            lives(settings, values, loading),
            RestartPolicy(settings.restarts, settings.restart_window),
            on_failure=_exit if settings.exit_on_failure else None,
        )
        with contextlib.ExitStack() as opening:
            admission = _admission(settings, supervisor, opening)
            await supervisor.start()
            opened = opening.pop_all()
        tokenizer = await loading
        return cls(
            settings,
            ResumingClient(
                LiveClients(supervisor, settings.resume_timeout),
                # NVIDIA's would begin anew.
                attempts=settings.resume_attempts if own_preprocessing(settings) else 0,
                end_id=tokenizer.eos_token_id,
                adapters=adapter_tensors(settings, engine),
            ),
            supervisor,
            admission,
            tokenizer,
            opened=opened,
            context_length=context_length(values["tensorrt_llm"]),
            length_penalty=not misplaced,
            engine=engine,
            own_preprocessing=own_preprocessing(settings),
        )

    def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt that messages make by the model's chat template; see ``render_chat``.

        It is to be sent with add_special_tokens False.
        """
        return render_chat(
            self.tokenizer,
            messages,
            tools=tools,
            kwargs=kwargs,
            add_generation_prompt=add_generation_prompt,
            limits=self.limits,
        )

    @property
    def adapters(self) -> tuple[str, ...]:
        """The LoRA adapters that a request may name now."""
        return adapter_names(self.settings.lora_dir)

    def generate(
        self, request: Request, request_id: str | None = None, tenant: Tenant | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """Streams the answer to a request; see ``cog_triton.generation.generate``.

        Raises:
            InvalidParameter: at once, where something of it would have no effect.
        """
        if not self._own_preprocessing:
            request = with_own_beginning(request, self.tokenizer)
        check_supported(request, self.engine, own_preprocessing=self._own_preprocessing)
        check_adapter(request.adapter, self.settings.lora_dir)
        if not self._length_penalty:
            request = dataclasses.replace(request, length_penalty=1.0)
        return generate(
            request,
            self._streams,
            self.tokenizer,
            admission=self.admission,
            context_length=self.context_length,
            request_id=request_id,
            tenant=tenant,
        )

    def close(self) -> None:
        """Ends all requests with an error that asks to send them again, and takes no more."""
        self.admission.close(STOPPING)

    async def healthy(self) -> bool:
        """Whether a request that comes now would be answered."""
        life = self._supervisor.running
        return not self.admission.closed and life is not None and await life.healthy()

    async def stop(self) -> None:
        """Stops everything that ``start`` started."""
        self.close()
        await self._supervisor.stop()
        await asyncio.to_thread(self._opened.close)


class LiveClients:
    """The clients of a supervised server's lives; see ``cog_triton.client.resume.Clients``."""

    def __init__(self, supervisor: Supervisor[RunningServer], timeout: float) -> None:
        """Waits at most ``timeout`` seconds for a life."""
        self._supervisor = supervisor
        self._timeout = timeout

    async def client(self, failed: TritonClient | None) -> TritonClient:
        life = self._supervisor.running
        if life is None or life.client is failed:
            life = await self._supervisor.after(life, self._timeout)
        return life.client


def lives(
    settings: Settings, values: Values, loading: Awaitable[Tokenizer]
) -> Callable[[], Awaitable[RunningServer]]:
    """What begins one life after another; arguments as for ``begin_life``.

    Each gets as long as those before it give reason for: a stub may hang as it starts (seen once in 200).
    """
    taken: list[float] = []

    async def begin() -> RunningServer:
        began = time.monotonic()
        timeout = start_timeout(settings.start_timeout, taken)
        life = await begin_life(
            settings.model_copy(update={"start_timeout": timeout}), values, loading
        )
        taken.append(time.monotonic() - began)
        return life

    return begin


def start_timeout(setting: float, taken: Sequence[float]) -> float:
    """Seconds that a server may take to become ready.

    Args:
        setting: TRITON_START_TIMEOUT.
        taken: seconds that the starts before it took.
    """
    return min(setting, max(RESTART_SECONDS, RESTART_FACTOR * max(taken))) if taken else setting


async def begin_life(
    settings: Settings, values: Values, loading: Awaitable[Tokenizer]
) -> RunningServer:
    """Fills a repository, starts tritonserver on it, and returns once a request was answered.

    Args:
        values: of the template variables of each model.
        loading: the tokenizer, which may still be on its way.

    Raises:
        CogTritonError: it did not start; nothing is left of it.
    """
    for _ in range(PORT_CHOICES - 1):
        # Another choice, or an error that names the setting of a port that is not to be chosen.
        with contextlib.suppress(TritonPortTaken):
            return await _begin_life(settings, values, loading)
    return await _begin_life(settings, values, loading)


async def _begin_life(
    settings: Settings, values: Values, loading: Awaitable[Tokenizer]
) -> RunningServer:
    with contextlib.ExitStack() as cleanup:
        try:
            runtime = _runtime_directory(settings, cleanup)
            repository = runtime / "repository"
            with contextlib.ExitStack() as partial:
                partial.callback(shutil.rmtree, runtime, ignore_errors=True)
                fill_repository(settings.model_repository, repository, values)
                partial.pop_all()
        except OSError as error:
            raise ConfigurationError(file_problem(error)) from error
        check_streaming(repository)
        server = TritonServer(
            repository, runtime, settings, temporary=settings.runtime_directory is None
        )
        cleanup.callback(server.stop)
        _, tokenizer = await asyncio.gather(asyncio.to_thread(server.start), loading)
        life = RunningServer(
            server,
            create_client(settings, server),
            tokenizer,
            cleanup.pop_all(),
            hang_timeout=settings.hang_timeout,
        )
    try:
        with _timed("warmed up"):
            await life.warm_up()
    except BaseException as error:
        gone = isinstance(error, TritonUnavailable)
        ended = gone and await asyncio.to_thread(server.ends_within, NOTICE_SECONDS)
        await life.stop()
        if ended:  # which is the cause; the request only noticed
            raise TritonStartError(server.end) from error
        raise
    return life


def _admission(
    settings: Settings, supervisor: Supervisor[RunningServer], opened: contextlib.ExitStack
) -> Admission:
    """The queue that the settings ask for, and a server of its metrics, which ``opened`` closes.

    Raises:
        ConfigurationError: nothing can listen on the port of those.
    """
    bounds = Bounds(settings.max_running, settings.max_waiting, settings.queue_timeout)
    admission = Admission(bounds)
    if settings.predictor_metrics_port is not None:
        from cog_triton.deployment.metrics import Metrics

        metrics = Metrics()
        metrics.watch(admission, lambda: supervisor.restarts)
        opened.enter_context(metrics.served(settings.host, settings.predictor_metrics_port))
    return admission


def own_preprocessing(settings: Settings) -> bool:
    """Whether preprocessing is this project's, which reads a request's parameters, and not NVIDIA's."""
    model = settings.model_repository / "preprocessing/1/model.py"
    return model.is_file() and "cog_triton.models.preprocessing" in model.read_text()


def _exit(reason: str) -> None:
    """Ends the process at once: what watches it starts another."""
    logger.critical("exiting: %s (EXIT_ON_FAILURE)", reason)
    logging.shutdown()
    os._exit(EXIT_STATUS)


def create_client(settings: Settings, server: TritonServer) -> TritonClient:
    """The client of the transport that the settings name."""
    if settings.transport == "http":
        from cog_triton.client.http_transport import HttpClient

        return HttpClient(server.endpoints.http, response_timeout=settings.response_timeout)
    from cog_triton.client.grpc_transport import GrpcClient

    return GrpcClient(server.endpoints.grpc, response_timeout=settings.response_timeout)


def tokenizer_of(settings: Settings) -> Tokenizer:
    """The tokenizer that the settings name; to be called once in a process that runs no model itself.

    Raises:
        ConfigurationError: it cannot be loaded.
    """
    without_torch()
    with _timed("tokenizer loaded"):
        tokenizer = load_tokenizer(
            settings.tokenizer_dir, trust_remote_code=settings.trust_remote_code
        )
    if settings.chat_template is not None:
        set_chat_template(tokenizer, chat_template(settings.chat_template))
    return tokenizer


@contextlib.contextmanager
def _timed(what: str) -> Iterator[None]:
    """Logs what has been done, and how long it took; nothing of what failed."""
    started = time.monotonic()
    yield
    logger.info("%s in %.1f s", what, time.monotonic() - started)


def _runtime_directory(settings: Settings, cleanup: contextlib.ExitStack) -> Path:
    if settings.runtime_directory is not None:
        settings.runtime_directory.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="run-", dir=settings.runtime_directory))
    directory = Path(tempfile.mkdtemp(prefix=f"cog-triton-{process_name(os.getpid())}-"))
    cleanup.callback(shutil.rmtree, directory, ignore_errors=True)
    return directory
