"""One setup: settings → filled repository → tritonserver → ready → warm."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cog_triton.adapters.directory import check_adapter
from cog_triton.client.resume import ResumingClient
from cog_triton.client.stream import Streams
from cog_triton.client.tracing import tracer
from cog_triton.deployment import (
    announcement,
    engine_choice,
    file_checks,
    model_defaults,
    model_files,
    template_variables,
)
from cog_triton.deployment.running import Supervisor, run_server, timed
from cog_triton.errors import ConfigurationError, InvalidParameter
from cog_triton.generation import Chunk, generate
from cog_triton.protocol.names import (
    ADD_SPECIAL_TOKENS,
    ALLOWED_IDS,
    CONTINUED,
    LOGIT_BIAS,
    MIN_P,
    PROMPT_IDS,
    PROMPT_LOG_PROBS,
    TOP_LOG_PROBS,
)
from cog_triton.request.admission import STOPPING, Admission, Outcome, Tenant
from cog_triton.request.request import Request, request_parameters
from cog_triton.server.command import choose_ports
from cog_triton.settings import Settings, misspelt_variables
from cog_triton.text.chat import set_chat_template
from cog_triton.text.end_tokens import EndTokens, tokenizer_end_id
from cog_triton.text.tokenizer import Tokenizer, load_tokenizer, text_limits, without_torch

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

logger = logging.getLogger("cog_triton.deployment")

# Upper bounds of the classes of waiting times; the first holds those that did not wait.
QUEUE_SECONDS = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80)
# Parameters of requests, by the part of this project that reads them.
_PREPROCESSING_PARAMETERS = (PROMPT_IDS, ADD_SPECIAL_TOKENS, LOGIT_BIAS, CONTINUED)
_ENGINE_PARAMETERS = (MIN_P, TOP_LOG_PROBS, PROMPT_LOG_PROBS, ALLOWED_IDS)


@dataclass(eq=False)
class Deployment:
    """A tritonserver that is kept running, and requests on it, in the event loop that started it."""

    settings: Settings
    streams: Streams
    supervisor: Supervisor
    admission: Admission
    tokenizer: Tokenizer
    _: KW_ONLY
    # The limit of prompt and output together; None if only the engine knows it.
    context_length: int | None = None
    # Whether it is sent to the engine; see ``has_swapped_sampling_params``.
    length_penalty: bool = True
    # The engine in the tensorrt_llm slot.
    engine: engine_choice.EngineName = "transformers"
    # Whether this project's model makes ids of prompts.
    own_preprocessing: bool = True
    # None stands for the tokenizer's alone.
    end_tokens: EndTokens | None = None
    opened: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)

    def __post_init__(self) -> None:
        tracer(self.settings.otel_endpoint)
        self.limits = text_limits(self.tokenizer, self.context_length)
        # For requests at the APIs that leave them to the server.
        self.sampling_defaults = model_defaults.sampling_defaults_of(self.settings, self.engine)

    @property
    def chat_template_for_prompts(self) -> bool:
        """Whether a prompt becomes a user's message, unless a request has a template of its own."""
        return announcement.uses_chat_template_for_prompts(self.settings, self.tokenizer)

    @classmethod
    async def start(cls, settings: Settings) -> "Deployment":
        """Start everything, or raise ConfigurationError and leave nothing."""
        for warning in misspelt_variables():
            logger.warning("%s", warning)
        # Their problems come before a download or a conversion, which may take minutes.
        template_variables.read_overrides(settings)
        choose_ports(settings)
        name = model_files.model_name(settings)
        with timed("model in place"):
            settings = await asyncio.to_thread(model_files.with_files, settings)
        engine = engine_choice.resolve_engine(settings)
        has_own_preprocessing = template_variables.own_preprocessing(settings)
        tensorrt_llm = engine_choice.detect_runtimes(settings).tensorrt_llm
        swapped = engine_choice.has_swapped_sampling_params(engine, tensorrt_llm)
        values = template_variables.template_values(
            settings, engine, num_return_sequences=not swapped
        )
        file_checks.check_files(values["tensorrt_llm"])
        if (
            template_variables.is_limited_by_preprocessing(values["tensorrt_llm"])
            and not has_own_preprocessing
        ):
            raise ConfigurationError(
                "MAX_SEQUENCE_LENGTH requires this project's preprocessing model, but TRITON_MODEL_REPO "
                "has a different one; build the engine with a smaller max_seq_len instead"
            )
        loader = TokenizerLoader(settings, values["tensorrt_llm"])
        end_tokens = await _end_tokens(settings, values, engine, loader)
        model_defaults.warn_of_adapters(settings, end_tokens)
        values = model_defaults.with_end_tokens(settings, values, engine, end_tokens)
        supervisor = Supervisor(
            settings, partial(run_server, values=values, load_tokenizer=loader.load)
        )
        admission = Admission(settings.max_running, settings.max_waiting, settings.queue_timeout)
        async with contextlib.AsyncExitStack() as opened:
            if settings.predictor_metrics_port is not None:
                await opened.enter_async_context(served_metrics(settings, admission, supervisor))
            opened.push_async_callback(supervisor.stop)
            await supervisor.start()
            tokenizer = await loader.load()
            llm = values["tensorrt_llm"]
            context_length = template_variables.context_length(llm)
            served = announcement.served(
                name,
                engine,
                llm,
                tokenizer,
                end_tokens,
                context_length=context_length,
                template=announcement.template_of(settings, tokenizer),
            )
            announcement.logger.info("%s", served.line())
            streams = ResumingClient(
                supervisor,
                # NVIDIA's preprocessing would begin anew.
                attempts=settings.resume_attempts if has_own_preprocessing else 0,
                end_tokens=end_tokens,
                adapters=template_variables.adapter_tensors(settings, engine),
            )
            return cls(
                settings,
                streams,
                supervisor,
                admission,
                tokenizer,
                context_length=context_length,
                length_penalty=not swapped,
                engine=engine,
                own_preprocessing=has_own_preprocessing,
                end_tokens=end_tokens,
                opened=opened.pop_all(),
            )

    def generate(
        self, request: Request, request_id: str | None = None, tenant: Tenant | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """See ``cog_triton.generation.generate``; what would have no effect is refused at once."""
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
            end_tokens=self.end_tokens,
        )

    @property
    def draws_seeds(self) -> bool:
        """Whether requests without a seed get one, which costs time only with vLLM."""
        return self.engine != "vllm"

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
        await self.opened.aclose()


async def _end_tokens(
    settings: Settings,
    values: template_variables.Values,
    engine: engine_choice.EngineName,
    loader: "TokenizerLoader",
) -> EndTokens:
    """Find the end tokens; wait for the tokenizer only if its files do not say what ends a sequence."""
    eos_token_id: int | None = None
    if not settings.end_ids:
        directory = values["preprocessing"].get("tokenizer_dir") or settings.tokenizer_dir
        try:
            eos_token_id = await asyncio.to_thread(tokenizer_end_id, Path(str(directory)))
        except (LookupError, TypeError, ValueError):
            eos_token_id = (await loader.load()).eos_token_id
    return await asyncio.to_thread(
        model_defaults.end_tokens_of, settings, values, engine, eos_token_id
    )


def check_supported(request: Request, engine: str, own_preprocessing: bool) -> None:
    """Raise InvalidParameter for what TensorRT-LLM's C++ backend or NVIDIA's preprocessing would ignore."""
    parameters = request_parameters(request)
    if engine == "tensorrtllm":
        refused = [name for name in parameters if name in _ENGINE_PARAMETERS]
        _refuse(refused, "TensorRT-LLM's C++ backend")
    if not own_preprocessing:
        refused = [name for name in parameters if name in _PREPROCESSING_PARAMETERS]
        _refuse(refused, "the preprocessing model of TRITON_MODEL_REPO")


def _refuse(names: list[str], part: str) -> None:
    if names:
        raise InvalidParameter(f"{part} does not support {', '.join(names)}")


def without_bos(request: Request, tokenizer: Tokenizer) -> Request:
    """Remove a rendered chat's first special token for a preprocessing model that always adds it."""
    if request.add_special_tokens is not False:
        return request
    begin = getattr(tokenizer, "bos_token", None) or ""
    return replace(request, prompt=request.prompt.removeprefix(begin), add_special_tokens=None)


def queue_metrics(admission: Admission) -> "CollectorRegistry":
    """Return a registry that counts an admission's requests, and their seconds of waiting."""
    # Here, because few setups need it.
    from prometheus_client import CollectorRegistry, Counter, Histogram

    registry = CollectorRegistry()
    text = "Time that requests waited for a slot, in seconds."
    queued = Histogram("cog_triton_queue_seconds", text, buckets=QUEUE_SECONDS, registry=registry)
    text = "Requests that reached the queue, by outcome."
    requests = Counter("cog_triton_requests", text, ["outcome"], registry=registry)

    def observe(outcome: Outcome, seconds: float) -> None:
        requests.labels(outcome).inc()
        if outcome in ("admitted", "late"):
            queued.observe(seconds)

    admission.observers.append(observe)
    return registry


@contextlib.asynccontextmanager
async def served_metrics(
    settings: Settings, admission: Admission, supervisor: Supervisor
) -> AsyncIterator[int]:
    """Serve the queue's metrics and restarts at ``/metrics`` of PREDICTOR_METRICS_PORT; yield the port."""
    from prometheus_client import Gauge, make_asgi_app

    from cog_triton.web.origin import access_rule
    from cog_triton.web.server import Limits, Server, bound

    port = settings.predictor_metrics_port or 0
    registry = queue_metrics(admission)
    for name, text, value in (
        ("requests_running", "Requests that are running.", lambda: admission.running),
        ("requests_waiting", "Requests that are waiting for a slot.", lambda: admission.waiting),
        ("restarts", "Restarts of tritonserver.", lambda: supervisor.restarts),
    ):
        Gauge(f"cog_triton_{name}", text, registry=registry).set_function(value)
    try:
        listener = bound(settings.host, port)
    except OSError as error:
        raise ConfigurationError(f"PREDICTOR_METRICS_PORT={port}: {error.strerror}") from None
    access = access_rule(listener, hosts=settings.allowed_hosts)
    server = Server(make_asgi_app(registry), Limits(body_bytes=0, request_seconds=10.0), access)
    serving = asyncio.create_task(server.serve([listener]))
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await serving


class TokenizerLoader:
    """Loads the tokenizer once, in a thread, when it is first asked for.

    The model's family is checked there too: both import transformers, and Triton starts meanwhile.
    """

    def __init__(self, settings: Settings, llm: Mapping[str, object]) -> None:
        self._settings = settings
        self._llm = llm
        self._loading: asyncio.Future[Tokenizer] | None = None

    def load(self) -> Awaitable[Tokenizer]:
        if self._loading is None:
            self._loading = asyncio.ensure_future(asyncio.to_thread(self._load))
        return self._loading

    def _load(self) -> Tokenizer:
        file_checks.check_family(self._llm)
        return tokenizer_of(self._settings)


def tokenizer_of(settings: Settings) -> Tokenizer:
    """Load the tokenizer that the settings name, in a process that runs no model itself."""
    without_torch()
    with timed("tokenizer loaded"):
        trusted = settings.trust_remote_code
        tokenizer = load_tokenizer(settings.tokenizer_dir, trust_remote_code=trusted)
    if settings.chat_template is not None:
        set_chat_template(tokenizer, settings.chat_template)
    return tokenizer
