"""One setup: settings → filled repository → tritonserver → ready → warm."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from cog_triton.adapters.directory import check_adapter
from cog_triton.client.resume import ResumingClient
from cog_triton.client.stream import Streams
from cog_triton.deployment.engine_choice import (
    EngineName,
    check_supported,
    detect_runtimes,
    has_swapped_sampling_params,
    resolve_engine,
    without_bos,
)
from cog_triton.deployment.preparation import (
    adapter_tensors,
    check_files,
    context_length,
    read_overrides,
    template_values,
    with_files,
)
from cog_triton.deployment.running import Supervisor, server_starter, timed
from cog_triton.errors import ConfigurationError
from cog_triton.generation import Chunk, generate
from cog_triton.request.admission import STOPPING, Admission, Outcome, Tenant
from cog_triton.request.request import Request
from cog_triton.settings import Settings
from cog_triton.text.chat import Message, render_chat, set_chat_template
from cog_triton.text.tokenizer import Tokenizer, load_tokenizer, text_limits, without_torch

logger = logging.getLogger("cog_triton.deployment")

QUEUE_SECONDS = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80)
"""Upper bounds of the classes of waiting times; the first holds those that did not wait."""
EXIT_STATUS = 70  # EX_SOFTWARE of sysexits.h: its tritonserver has been given up


@dataclass(eq=False)
class Deployment:
    """A tritonserver that is kept running, and what is needed to run requests on it.

    To be used from the event loop that started it.
    """

    settings: Settings
    streams: Streams
    supervisor: Supervisor
    admission: Admission
    tokenizer: Tokenizer
    _: KW_ONLY
    opened: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)  # until ``stop``
    context_length: int | None = (
        None  # tokens of prompt and output together; None: the engine knows
    )
    length_penalty: bool = True  # sent to the engine; see ``has_swapped_sampling_params``
    engine: EngineName = "transformers"  # what runs in the tensorrt_llm slot
    own_preprocessing: bool = True  # prompts become ids in this project's model

    def __post_init__(self) -> None:
        self.limits = text_limits(self.tokenizer, self.context_length)

    @classmethod
    async def start(cls, settings: Settings) -> Deployment:
        """Start everything; what was started is stopped again if something fails.

        Raises:
            ConfigurationError: the settings, the configuration file, the model or the server is at
                fault.
        """
        read_overrides(settings)  # its problems come before a download
        with timed("model in place"):
            settings = await asyncio.to_thread(with_files, settings)
        engine = resolve_engine(settings)
        swapped = has_swapped_sampling_params(engine, detect_runtimes(settings).tensorrt_llm)
        values = template_values(settings, engine, num_return_sequences=not swapped)
        check_files(values["tensorrt_llm"])
        # The tokenizer takes as long to load as Triton takes to start: do both at once.
        loading = asyncio.create_task(asyncio.to_thread(tokenizer_of, settings))
        supervisor = Supervisor(
            server_starter(settings, values, loading),
            max_restarts=settings.restarts,
            window=settings.restart_window,
            resume_timeout=settings.resume_timeout,
            on_failure=_exit if settings.exit_on_failure else lambda _: None,
        )
        admission = Admission(settings.max_running, settings.max_waiting, settings.queue_timeout)
        with contextlib.ExitStack() as opening:
            if (port := settings.predictor_metrics_port) is not None:
                metrics = Metrics()
                metrics.watch(admission, lambda: supervisor.restarts)
                opening.enter_context(metrics.served(settings.host, port))
            await supervisor.start()
            opened = opening.pop_all()
        tokenizer = await loading
        own = own_preprocessing(settings)
        streams = ResumingClient(
            supervisor,
            attempts=settings.resume_attempts if own else 0,  # NVIDIA's would begin anew
            end_id=tokenizer.eos_token_id,
            adapters=adapter_tensors(settings, engine),
        )
        return cls(
            settings,
            streams,
            supervisor,
            admission,
            tokenizer,
            opened=opened,
            context_length=context_length(values["tensorrt_llm"]),
            length_penalty=not swapped,
            engine=engine,
            own_preprocessing=own,
        )

    def chat_prompt(self, messages: Sequence[Message], **options: Any) -> str:
        """Render messages by the model's chat template, to be sent with add_special_tokens False.

        Args:
            options: as for ``render_chat``.
        """
        return render_chat(self.tokenizer, messages, limits=self.limits, **options)

    def generate(
        self, request: Request, request_id: str | None = None, tenant: Tenant | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """Stream the output of a request; see ``cog_triton.generation.generate``.

        Raises:
            InvalidParameter: at once, where a parameter would have no effect.
        """
        if not self.own_preprocessing:
            request = without_bos(request, self.tokenizer)
        check_supported(request, self.engine, own_preprocessing=self.own_preprocessing)
        check_adapter(request.adapter, self.settings.lora_dir)
        if not self.length_penalty:
            request = replace(request, length_penalty=1.0)
        return generate(
            request,
            self.streams,
            self.tokenizer,
            admission=self.admission,
            context_length=self.context_length,
            request_id=request_id,
            tenant=tenant,
        )

    def close(self) -> None:
        """End all requests with an error that asks to send them again, and take no more."""
        self.admission.close(STOPPING)

    async def healthy(self) -> bool:
        """Return whether a request that comes now would be answered."""
        server = self.supervisor.running
        return not self.admission.closed and server is not None and await server.healthy()

    async def stop(self) -> None:
        """Stop everything that ``start`` started."""
        self.close()
        await self.supervisor.stop()
        await asyncio.to_thread(self.opened.close)


class Metrics:
    """Queue and restarts in Prometheus' text format; the metrics on Triton's port are of the engine."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Histogram  # few setups need it

        self.registry = CollectorRegistry()
        self._queued = Histogram(
            "cog_triton_queue_seconds",
            "Seconds that requests waited for a slot.",
            buckets=QUEUE_SECONDS,
            registry=self.registry,
        )
        self._requests = Counter(
            "cog_triton_requests",
            "Requests, by their outcome at the queue.",
            ["outcome"],
            registry=self.registry,
        )

    def observe(self, outcome: Outcome, seconds: float) -> None:
        """Count a request that was admitted or refused, and its wait if it had one."""
        self._requests.labels(outcome).inc()
        if outcome in ("admitted", "late"):
            self._queued.observe(seconds)

    def watch(self, admission: Admission, restarts: Callable[[], int]) -> None:
        """Count an admission's requests; read the gauges when the metrics are."""
        from prometheus_client import Gauge

        admission.observers.append(self.observe)
        gauges: list[tuple[str, str, Callable[[], float]]] = [
            ("requests_running", "Requests that have a slot.", lambda: admission.running),
            ("requests_waiting", "Requests that wait for one.", lambda: admission.waiting),
            ("restarts", "Restarts of tritonserver.", restarts),
        ]
        for name, text, value in gauges:
            Gauge(f"cog_triton_{name}", text, registry=self.registry).set_function(value)

    @contextlib.contextmanager
    def served(self, host: str, port: int) -> Iterator[int]:
        """Serve ``/metrics``; yield the port, or raise ConfigurationError if it is taken."""
        from prometheus_client import make_asgi_app

        from cog_triton.web import Limits
        from cog_triton.web.server import Config, Server, bound

        try:
            listener = bound(host, port)
            listener.listen()
        except OSError as error:
            raise ConfigurationError(
                f"PREDICTOR_METRICS_PORT={port}: cannot listen on {host}:{port} ({error.strerror})"
            ) from None
        limits = Limits(body_bytes=0, request_seconds=10.0)
        server = Server(Config(make_asgi_app(self.registry), limits))
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


def own_preprocessing(settings: Settings) -> bool:
    """Return whether preprocessing is this project's, which reads a request's parameters, not NVIDIA's."""
    model = settings.model_repository / "preprocessing/1/model.py"
    return model.is_file() and "cog_triton.models.preprocessing" in model.read_text()


def tokenizer_of(settings: Settings) -> Tokenizer:
    """Load the tokenizer that the settings name, once in a process that runs no model itself.

    Raises:
        ConfigurationError: it cannot be loaded.
    """
    without_torch()
    with timed("tokenizer loaded"):
        trusted = settings.trust_remote_code
        tokenizer = load_tokenizer(settings.tokenizer_dir, trust_remote_code=trusted)
    if settings.chat_template is not None:
        set_chat_template(tokenizer, settings.chat_template)
    return tokenizer


def _exit(reason: str) -> None:
    """End the process at once: what watches it starts another."""
    logger.critical("exiting: %s (EXIT_ON_FAILURE)", reason)
    logging.shutdown()
    os._exit(EXIT_STATUS)
