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
from collections.abc import AsyncGenerator, Awaitable, Iterable, Iterator, Mapping
from pathlib import Path

from cog_triton.client.resume import ResumingClient, Streams
from cog_triton.client.stream import TritonClient
from cog_triton.context_length import context_length
from cog_triton.engine_choice import (
    EngineName,
    Machine,
    check_checkpoint,
    check_engine,
    choose_engine,
    look_around,
    misplaces_parameters,
)
from cog_triton.errors import ConfigurationError, file_problem
from cog_triton.generation import Chunk, generate
from cog_triton.life import TritonLife
from cog_triton.repository.checks import check_streaming, read_config, unmet_needs
from cog_triton.repository.fill import fill_repository
from cog_triton.repository.overrides import load_overrides
from cog_triton.request import Request
from cog_triton.server.guard import process_name
from cog_triton.server.installation import locate
from cog_triton.server.log import GPU
from cog_triton.server.supervisor import RestartPolicy, Supervisor
from cog_triton.server.tritonserver import TritonServer
from cog_triton.settings import Settings
from cog_triton.text.tokenizer import Tokenizer, load_tokenizer, without_torch

logger = logging.getLogger(__name__)

Values = dict[str, dict[str, object]]

EXIT_STATUS = 70
"""Of a process that ends because its tritonserver has been given up: EX_SOFTWARE of sysexits.h."""


class Deployment:
    """A tritonserver that is kept running, and what is needed to run requests on it.

    To be used from the event loop that started it.
    """

    def __init__(
        self,
        settings: Settings,
        streams: Streams,
        supervisor: Supervisor[TritonLife],
        tokenizer: Tokenizer,
        *,
        context_length: int | None = None,
        length_penalty: bool = True,
    ) -> None:
        """Takes over what ``start`` has started.

        Args:
            context_length: most tokens of prompt and output together; None if only the engine knows.
            length_penalty: whether the engine is told of it; see ``misplaces_parameters``.
        """
        self.settings = settings
        self._streams = streams
        self._supervisor = supervisor
        self._tokenizer = tokenizer
        self._context_length = context_length
        self._length_penalty = length_penalty

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
        misplaced = misplaces_parameters(engine, _machine(settings))
        values = template_values(settings, engine, num_return_sequences=not misplaced)
        check_files(values["tensorrt_llm"])
        # The tokenizer takes as long to load as Triton takes to start: do both at once.
        loading = asyncio.create_task(asyncio.to_thread(_load_tokenizer, settings))
        supervisor = Supervisor(
            lambda: begin_life(settings, values, loading),
            RestartPolicy(settings.restarts, settings.restart_window),
            on_failure=_exit if settings.exit_on_failure else None,
        )
        await supervisor.start()
        tokenizer = await loading
        return cls(
            settings,
            ResumingClient(
                LiveClients(supervisor, settings.resume_timeout),
                attempts=settings.resume_attempts if continues(settings) else 0,
                end_id=tokenizer.eos_token_id,
            ),
            supervisor,
            tokenizer,
            context_length=context_length(values["tensorrt_llm"]),
            length_penalty=not misplaced,
        )

    def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """Streams the answer to a request; see ``cog_triton.generation.generate``."""
        if not self._length_penalty:
            request = dataclasses.replace(request, length_penalty=1.0)
        return generate(
            request, self._streams, self._tokenizer, context_length=self._context_length
        )

    async def healthy(self) -> bool:
        """Whether a request that comes now would be answered."""
        life = self._supervisor.life
        return life is not None and await life.healthy()

    async def stop(self) -> None:
        """Stops everything that ``start`` started."""
        await self._supervisor.stop()


class LiveClients:
    """The clients of a supervised server's lives; see ``cog_triton.client.resume.Clients``."""

    def __init__(self, supervisor: Supervisor[TritonLife], timeout: float) -> None:
        """Waits at most ``timeout`` seconds for a life."""
        self._supervisor = supervisor
        self._timeout = timeout

    async def client(self, failed: TritonClient | None) -> TritonClient:
        life = self._supervisor.life
        if life is None or life.client is failed:
            life = await self._supervisor.after(life, self._timeout)
        return life.client


async def begin_life(
    settings: Settings, values: Values, loading: Awaitable[Tokenizer]
) -> TritonLife:
    """Fills a repository, starts tritonserver on it, and returns once a request was answered.

    Args:
        values: of the template variables of each model.
        loading: the tokenizer, which may still be on its way.

    Raises:
        CogTritonError: it did not start; nothing is left of it.
    """
    with contextlib.ExitStack() as cleanup:
        try:
            runtime = _runtime_directory(settings, cleanup)
            repository = runtime / "repository"
            fill_repository(settings.model_repository, repository, values)
        except OSError as error:
            raise ConfigurationError(file_problem(error)) from error
        check_streaming(repository)
        server = TritonServer(
            repository, runtime, settings, temporary=settings.runtime_directory is None
        )
        cleanup.callback(server.stop)
        _, tokenizer = await asyncio.gather(asyncio.to_thread(server.start), loading)
        life = TritonLife(
            server,
            create_client(settings, server),
            tokenizer,
            cleanup.pop_all(),
            hang_timeout=settings.hang_timeout,
        )
    try:
        with _timed("warmed up"):
            await life.warm_up()
    except BaseException:
        await life.stop()
        raise
    return life


def continues(settings: Settings) -> bool:
    """Whether preprocessing can take up an answer where it broke off; NVIDIA's would begin anew."""
    model = settings.model_repository / "preprocessing" / "1" / "model.py"
    return model.is_file() and "continued_ids" in model.read_text()


def _exit(reason: str) -> None:
    """Ends the process at once: what watches it starts another."""
    logger.critical("exiting: %s (EXIT_ON_FAILURE)", reason)
    logging.shutdown()
    os._exit(EXIT_STATUS)


def resolve_engine(settings: Settings) -> EngineName:
    """The engine to run, after everything that can be known before a start has been checked.

    Raises:
        ConfigurationError: there is no tritonserver, or the engine or model cannot be run.
    """
    machine = _machine(settings)
    engine = choose_engine(settings.engine, settings.engine_dir, machine)
    if engine == "tensorrtllm":
        check_engine(settings.engine_dir, machine, settings.world_size)
    elif settings.world_size > 1 and engine != "simulated":  # which is how ranks are tried out
        raise ConfigurationError(
            f"WORLD_SIZE={settings.world_size} is for TensorRT-LLM's C++ backend, and the engine is "
            f"{engine}; the LLM API's workers are set by tensor_parallel_size"
        )
    return engine


def _machine(settings: Settings) -> Machine:
    return look_around(locate(settings).backends, gpu=GPU)


def with_files(settings: Settings) -> Settings:
    """The settings with what they name on this machine: downloaded, unpacked and checked.

    Raises:
        ConfigurationError: it is missing, or cannot be downloaded.
    """
    if settings.weights is not None:
        return placed(settings, _fetch(settings, settings.weights))
    if settings.engine_dir is not None or Path(settings.model).is_dir():
        return settings
    check_model(settings)
    return placed(settings, _fetch(settings, settings.model))


def placed(settings: Settings, directory: Path) -> Settings:
    """The settings for weights in a directory: an engine, or a Hugging Face model."""
    for engine_dir in (directory / "engine", directory):
        if any(engine_dir.glob("*.engine")):
            return settings.model_copy(update={"engine_dir": engine_dir})
    return settings.model_copy(update={"model": str(directory)})


def template_values(
    settings: Settings, engine: EngineName, *, num_return_sequences: bool = True
) -> Values:
    """The template variables of each model: from the settings, overridden by the configuration file.

    Args:
        num_return_sequences: whether the models have this input; see ``misplaces_parameters``.

    Raises:
        ConfigurationError: the configuration file cannot be read.
    """
    overrides = read_overrides(settings)
    tokenizer: dict[str, object] = {"tokenizer_dir": settings.tokenizer_dir}
    # Only where it is asked for: the C++ backend and NVIDIA's own templates have no such variable.
    if settings.trust_remote_code:
        tokenizer["trust_remote_code"] = True
    llm = {**tokenizer, **_engine_values(settings, engine)}
    limit = context_length({**llm, **overrides.get("tensorrt_llm", {})})
    values: Values = {
        "ensemble": {},
        "preprocessing": {**tokenizer, "max_seq_len": limit},
        "postprocessing": dict(tokenizer),
        "tensorrt_llm": llm,
    }
    if not num_return_sequences:
        for model in ("ensemble", "tensorrt_llm"):
            values[model]["num_return_sequences"] = False
    return merge(values, overrides)


def read_overrides(settings: Settings) -> Values:
    """What the configuration file overrides, by model and variable; nothing without one.

    Raises:
        ConfigurationError: it cannot be read, or it was named and is not there.
    """
    file = settings.config_file
    if file.exists():
        return load_overrides(file)
    if settings.names_config_file:
        raise ConfigurationError(f"COG_TRITON_CONFIG={file} does not exist")
    return {}


def check_files(llm: Mapping[str, object]) -> None:
    """Finds files of a model that are missing or damaged, before Triton is started on them.

    Args:
        llm: the values of tensorrt_llm, as ``template_values`` or a filled configuration have them.

    Raises:
        ConfigurationError: naming the file.
    """
    model = Path(str(llm.get("model", "")))
    if llm.get("engine") == "transformers" and model.is_dir() and str(model) != ".":
        check_checkpoint(model)


def check_models(configs: Iterable[Path]) -> None:
    """Finds what the engines of models that are filled already would miss.

    Args:
        configs: their config.pbtxt.

    Raises:
        ConfigurationError: a model's configuration is not valid, or lacks what its engine cannot load
            without; or a file of its model is missing or damaged.
    """
    parsed = {config: read_config(config) for config in configs}
    problems = [
        f"  {problem}"
        for config, content in parsed.items()
        for problem in unmet_needs(config.parent.name, content)
    ]
    if problems:
        raise ConfigurationError(
            "\n".join(["models that cannot be loaded as they were filled:", *problems])
        )
    for content in parsed.values():
        check_files({name: value.string_value for name, value in content.parameters.items()})


def merge(
    values: Mapping[str, Mapping[str, object]], overrides: Mapping[str, Mapping[str, object]]
) -> Values:
    """``values`` with the variables of ``overrides`` in place of those of the same model and name."""
    return {
        model: {**values.get(model, {}), **overrides.get(model, {})}
        for model in [*values, *(model for model in overrides if model not in values)]
    }


def check_model(settings: Settings) -> None:
    """Finds a model that is not there before anything is started.

    Raises:
        ConfigurationError: MODEL looks like a path, and there is nothing.
    """
    path = Path(settings.model)
    looks_like_path = (
        settings.model.startswith((".", "/", "models/")) or settings.model.count("/") > 1
    )
    if looks_like_path and "://" not in settings.model and not path.expanduser().exists():
        hint = "; make it with scripts/make_demo_model.py" if path == Path("models/demo") else ""
        raise ConfigurationError(f"MODEL={settings.model} does not exist{hint}")


def _fetch(settings: Settings, source: str) -> Path:
    from cog_triton.weights import fetch  # brings httpx and more, which few setups need

    return fetch(
        source,
        cache=settings.weights_cache.expanduser(),
        checksum=settings.weights_checksum,
        token=settings.hf_token.get_secret_value() if settings.hf_token else None,
    )


def create_client(settings: Settings, server: TritonServer) -> TritonClient:
    """The client of the transport that the settings name."""
    if settings.transport == "http":
        from cog_triton.client.http_transport import HttpClient

        return HttpClient(server.endpoints.http, response_timeout=settings.response_timeout)
    from cog_triton.client.grpc_transport import GrpcClient

    return GrpcClient(server.endpoints.grpc, response_timeout=settings.response_timeout)


def _engine_values(settings: Settings, engine: EngineName) -> dict[str, object]:
    # The predictor returns the answer alone; for others the default is NVIDIA's, with the prompt.
    predictors = {"exclude_input_in_output": True}
    if engine == "tensorrtllm":
        return {
            **predictors,
            "triton_backend": "tensorrtllm",
            "engine_dir": settings.absolute_engine_dir,
        }
    return {
        **predictors,
        "engine": engine,
        "model": settings.model_dir,
        "device": settings.device,
        "dtype": settings.dtype,
        "max_seq_len": settings.max_sequence_length,
        "simulated_prefill_ms": settings.simulated_prefill_ms,
        "simulated_prefill_tokens_per_s": settings.simulated_prefill_tokens_per_s,
        "simulated_inter_token_ms": settings.simulated_inter_token_ms,
        "simulated_max_batch": settings.simulated_max_batch,
        "simulated_failure_rate": settings.simulated_failure_rate,
        "simulated_failures": settings.simulated_failures,
        "simulated_text": settings.simulated_text,
    }


def _load_tokenizer(settings: Settings) -> Tokenizer:
    without_torch()
    with _timed("tokenizer loaded"):
        return load_tokenizer(settings.tokenizer_dir, trust_remote_code=settings.trust_remote_code)


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
