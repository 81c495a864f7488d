"""The servers that are measured, started as a deployment starts them, on free ports."""

import importlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped, unused-ignore]

from cog_triton.deployment.engine_choice import resolve_engine
from cog_triton.deployment.model_files import with_files
from cog_triton.deployment.template_variables import template_values
from cog_triton.repository.fill import fill_repository, read_config
from cog_triton.repository.render import CONFIG
from cog_triton.server.installation import PACKAGE_ROOT
from cog_triton.server.tritonserver import TritonServer
from cog_triton.settings import Settings, read_settings
from tools.benchmark.processes import command_of, free_port
from tools.benchmark.targets import MODEL, Endpoints
from tools.command_line import progress

STOP_SECONDS = 60.0
LOG_TAIL = 3000  # characters
SCRIPTS = {"cog": ("serve.py",), "openai": ("serve_openai.py", "--served-model-name", MODEL)}
# The text of the simulated engine. No character has several tokens, which would come as one chunk.
SIMULATED_TEXT = (
    "A simulated engine needs no model and no GPU. It reads these sentences again and again, at the pace "
    "it was told. "
)
ANY_PORTS = {"TRITON_HTTP_PORT": "0", "TRITON_GRPC_PORT": "0", "TRITON_METRICS_PORT": "0"}
STREAMS = 256
# More than a benchmark's longest answer and its prompt have.
STAND_IN = {"max_seq_len": 8192, "max_input_len": 4096, "max_batch_size": STREAMS}

Environment = Mapping[str, str]


def started(
    kind: str, environment: Environment, directory: Path
) -> AbstractContextManager[Endpoints]:
    """Start a target's ``server``, its log in the directory, or what a target without one needs."""
    progress(f"starting {kind} ...")
    if kind in SCRIPTS:
        return api_server(kind, environment, directory / f"{kind}.log")
    return triton_server(environment) if kind == "triton" else no_server(environment)


@contextmanager
def api_server(
    kind: str, environment: Environment, log: Path, *arguments: str
) -> Iterator[Endpoints]:
    """Start Cog's server or OpenAI's, as ``make serve`` and ``make openai`` do, with a Triton each."""
    settings = with_files(read_settings(environment))
    ports = {name: str(free_port()) for name in ("PORT", *ANY_PORTS)}
    http, grpc, metrics = (f"{settings.host}:{ports[name]}" for name in ANY_PORTS)
    given = {**environment, **ports, "HOST": "127.0.0.1"}
    script, *its_arguments = SCRIPTS[kind]
    command = [sys.executable, str(PACKAGE_ROOT / "scripts" / script), *its_arguments, *arguments]
    url = f"http://127.0.0.1:{ports['PORT']}"
    with process(command, given, log, f"{url}/health/ready", settings.start_timeout) as pid:
        yield Endpoints(settings.tokenizer_dir, url, MODEL, grpc, http, metrics, pids=(pid,))


@contextmanager
def triton_server(environment: Environment) -> Iterator[Endpoints]:
    """Start a tritonserver without Cog."""
    with filled_repository(environment) as (repository, settings):
        server = TritonServer(repository, repository.parent, settings)
        try:
            server.start()
            children = psutil.Process().children(recursive=True)
            pids = [child.pid for child in children if server.shm_prefix in str(command_of(child))]
            grpc, http = server.endpoints.grpc, server.endpoints.http
            yield Endpoints(settings.tokenizer_dir, grpc=grpc, http=http, pids=tuple(pids[:1]))
        finally:
            server.stop()


@contextmanager
def no_server(environment: Environment) -> Iterator[Endpoints]:
    """Yield the parameters of an engine that the load generator runs itself."""
    with filled_repository(environment) as (repository, settings):
        config = read_config(repository / "tensorrt_llm" / CONFIG)
    values = {name: one.string_value for name, one in config.parameters.items()}
    given = {name: value for name, value in values.items() if value}
    yield Endpoints(settings.tokenizer_dir, engine=given)


@contextmanager
def filled_repository(environment: Environment) -> Iterator[tuple[Path, Settings]]:
    settings = with_files(read_settings({**environment, **ANY_PORTS}))
    with tempfile.TemporaryDirectory(prefix="cog-triton-benchmark-") as directory:
        repository = Path(directory) / "repository"
        values = template_values(settings, resolve_engine(settings))
        fill_repository(settings.model_repository, repository, values)
        yield repository, settings


def one_token_engine(
    environment: Environment, directory: Path, pace_ms: float = 0
) -> dict[str, str]:
    """Return settings of an engine that sends each token by itself, as TensorRT-LLM's C++ backend does.

    It is the tests' stand-in for that backend where this is a checkout that can compile it, and costs
    what a backend in C++ costs; else the simulated engine. Without a pace, tokens are made at no cost.
    """
    try:
        servers: Any = importlib.import_module("tests.stand_in.servers")
        engine = servers.environment(directory, **STAND_IN)
        engine |= {"STAND_IN_INTER_TOKEN_MS": str(pace_ms), "COG_MAX_CONCURRENCY": str(STREAMS)}
    except (ImportError, FileNotFoundError, subprocess.CalledProcessError):
        engine = simulated(directory, pace_ms, each_token=True)
    return {**environment, **engine}


def simulated(directory: Path, pace_ms: float = 0, *, each_token: bool = False) -> dict[str, str]:
    """Return settings of the simulated engine; with ``each_token``, a response has one."""
    config = directory / "config.yaml"
    most = "max_tokens_per_response: 1" if each_token else ""
    config.write_text(f"server: {{tensorrt_llm: {{args: {{{most}}}}}}}\n")
    return {
        "ENGINE": "simulated",
        "SIMULATED_TEXT": SIMULATED_TEXT,
        "SIMULATED_INTER_TOKEN_MS": str(pace_ms),
        "COG_MAX_CONCURRENCY": str(STREAMS),
        "COG_TRITON_CONFIG": str(config),
    }


@contextmanager
def process(
    command: Sequence[str], environment: Environment, log: Path, health: str, timeout: float
) -> Iterator[int]:
    """Start a server, wait until ``health`` answers 200, yield its id, and stop it."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        server = subprocess.Popen(
            command,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches only the benchmark, which stops this one
        )
    try:
        deadline = time.monotonic() + timeout
        while not _is_ready(health):
            # One whose setup failed ends by itself, and then its log has the reason.
            if server.poll() is not None or time.monotonic() > deadline:
                status = f"exit status {server.returncode}"
                said = log.read_text(errors="replace")[-LOG_TAIL:]
                raise ChildProcessError(f"{log.stem} is not ready, {status}:\n{said}")
            time.sleep(0.05)
        yield server.pid
    finally:
        server.terminate()
        try:
            server.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _is_ready(health: str) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(health, timeout=5, trust_env=False).status_code == 200
    return False
