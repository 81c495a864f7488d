"""One setup: settings → filled repository → tritonserver → ready → warm."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncGenerator, Sequence
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
from cog_triton.deployment.running import server_starter, timed
from cog_triton.deployment.supervisor import Supervisor
from cog_triton.generation import Chunk, generate
from cog_triton.request.admission import STOPPING, Admission, Tenant
from cog_triton.request.request import Request
from cog_triton.settings import Settings
from cog_triton.text.chat import Message, render_chat, set_chat_template
from cog_triton.text.tokenizer import Tokenizer, load_tokenizer, text_limits, without_torch

logger = logging.getLogger("cog_triton.deployment")

EXIT_STATUS = 70  # EX_SOFTWARE of sysexits.h: its tritonserver has been given up


@dataclass(eq=False)
class Deployment:
    """A tritonserver that is kept running, and what is needed to run requests on it.

    To be used from the event loop that started it.

    Attributes:
        opened: closed at the end.
        context_length: most tokens of prompt and output together; None if only the engine knows.
        length_penalty: sent to the engine; see ``has_swapped_sampling_params``.
        engine: what runs in the tensorrt_llm slot.
        own_preprocessing: prompts become ids in this project's model.
        limits: of the length of texts.
    """

    settings: Settings
    streams: Streams
    supervisor: Supervisor
    admission: Admission
    tokenizer: Tokenizer
    _: KW_ONLY
    opened: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    context_length: int | None = None
    length_penalty: bool = True
    engine: EngineName = "transformers"
    own_preprocessing: bool = True

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
            if settings.predictor_metrics_port is not None:
                from cog_triton.deployment.metrics import Metrics

                metrics = Metrics()
                metrics.watch(admission, lambda: supervisor.restarts)
                served = metrics.served(settings.host, settings.predictor_metrics_port)
                opening.enter_context(served)
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
