"""The servers that are measured, started as a deployment starts them, on free ports."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped, unused-ignore]
from google.protobuf import text_format  # type: ignore[import-untyped, unused-ignore]
from tritonclient.grpc.model_config_pb2 import (  # type: ignore[import-untyped, unused-ignore]
    ModelConfig,
)

from cog_triton.deployment.engine_choice import resolve_engine
from cog_triton.deployment.preparation import template_values, with_files
from cog_triton.models import stub
from cog_triton.repository.fill import fill_repository
from cog_triton.server.installation import PACKAGE_ROOT
from cog_triton.server.tritonserver import TritonServer
from cog_triton.settings import read_settings
from tools.benchmark.generator import BenchmarkError
from tools.benchmark.processes import command_of, free_port
from tools.benchmark.targets import MODEL, Endpoints

STOP_SECONDS = 60.0
START_SECONDS = 300.0
LOG_TAIL = 3000  # characters
ANY_PORTS = {"TRITON_HTTP_PORT": "0", "TRITON_GRPC_PORT": "0", "TRITON_METRICS_PORT": "0"}
# One token makes one piece of text: no characters of several tokens, which come as one chunk.
TEXT = (
    "A simulated engine needs no model and no GPU. It reads these sentences again and again, at the "
    "pace it was told. "
)
STREAMS = 256
# More than a benchmark's longest answer and its prompt have.
STAND_IN = {"max_seq_len": 8192, "max_input_len": 4096, "max_batch_size": STREAMS}

Environment = Mapping[str, str]


def started(
    kind: str, environment: Environment, directory: Path
) -> AbstractContextManager[Endpoints]:
    """Start what the targets of a kind need.

    Args:
        kind: a target's ``server``, or the name of a target that needs none.
        environment: the whole environment of the server.
        directory: an existing one, for logs.

    Raises:
        CogTritonError, BenchmarkError: it could not be set up.
    """
    log = directory / f"{kind}.log"
    if kind == "cog":
        return cog_server(environment, log)
    if kind == "openai":
        return openai_server(environment, log)
    if kind == "vllm-serve":
        return _vllm_serve(environment, log)
    if kind == "triton":
        return triton_server(environment)
    return _no_server({**environment, **({"ENGINE": "vllm"} if kind == "vllm" else {})})


@contextmanager
def cog_server(environment: Environment, log: Path) -> Iterator[Endpoints]:
    """The Cog server, as ``make serve`` runs it, and the Triton in it."""
    settings = read_settings(environment)
    port, grpc, http, metrics = (free_port() for _ in range(4))
    ports = {"TRITON_GRPC_PORT": grpc, "TRITON_HTTP_PORT": http, "TRITON_METRICS_PORT": metrics}
    given = {**environment, **{name: str(at) for name, at in {**ports, "PORT": port}.items()}}

    def is_ready() -> bool:
        answer = _get(port, "/health-check")
        status = "STARTING" if answer is None else answer.json()["status"]
        if status not in ("STARTING", "READY"):
            raise BenchmarkError(f"the Cog server says {status}:\n{_tail(log)}")
        return bool(status == "READY")

    command = [sys.executable, str(PACKAGE_ROOT / "scripts" / "serve.py")]
    with _process(command, given, log, is_ready, settings.start_timeout) as pid:
        yield Endpoints(
            tokenizer=with_files(settings).tokenizer_dir,
            url=f"http://127.0.0.1:{port}",
            grpc=f"{settings.host}:{grpc}",
            http=f"{settings.host}:{http}",
            metrics=f"{settings.host}:{metrics}",
            pids=(pid,),
        )


@contextmanager
def openai_server(environment: Environment, log: Path, *arguments: str) -> Iterator[Endpoints]:
    """The OpenAI face, as ``make openai`` runs it with these arguments, and a Triton of its own."""
    settings, port, metrics = read_settings(environment), free_port(), free_port()
    script = str(PACKAGE_ROOT / "scripts" / "serve_openai.py")
    address = ["--host", "127.0.0.1", "--port", str(port), "--model", MODEL]
    command = [sys.executable, script, *address, *arguments]
    given = {**environment, **ANY_PORTS, "TRITON_METRICS_PORT": str(metrics)}
    with _process(command, given, log, lambda: _is_healthy(port), settings.start_timeout) as pid:
        tokenizer = with_files(settings).tokenizer_dir
        yield Endpoints(
            tokenizer,
            url=f"http://127.0.0.1:{port}",
            metrics=f"{settings.host}:{metrics}",
            pids=(pid,),
        )


@contextmanager
def _vllm_serve(environment: Environment, log: Path) -> Iterator[Endpoints]:
    """``vllm serve`` with the arguments of the engine."""
    from cog_triton.engines.vllm import loading_arguments

    with _no_server({**environment, "ENGINE": "vllm"}) as endpoints:
        port = free_port()
        command = vllm_command(loading_arguments(endpoints.engine), port)
        given = {**os.environ, "HF_HUB_OFFLINE": "1"}
        with _process(command, given, log, lambda: _is_healthy(port), START_SECONDS) as pid:
            yield replace(endpoints, url=f"http://127.0.0.1:{port}", pids=(pid,))


def vllm_command(arguments: Mapping[str, Any], port: int) -> list[str]:
    """Return the command line of ``vllm serve`` for arguments of vLLM's AsyncEngineArgs."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL]
    command += ["--uvicorn-log-level", "warning"]
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if name == "skip_tokenizer_init" or value is None:
            continue
        if isinstance(value, bool):
            command.append(f"--{option}" if value else f"--no-{option}")
        else:
            text = json.dumps(value) if isinstance(value, (dict, list)) else str(value)
            command += [f"--{option}", text]
    return command


@contextmanager
def triton_server(environment: Environment) -> Iterator[Endpoints]:
    """A tritonserver without Cog."""
    settings = with_files(read_settings({**environment, **ANY_PORTS}))
    with tempfile.TemporaryDirectory(prefix="cog-triton-benchmark-") as directory:
        server = TritonServer(_repository(settings, directory), Path(directory), settings)
        try:
            server.start()
            children = psutil.Process().children(recursive=True)
            yield Endpoints(
                tokenizer=settings.tokenizer_dir,
                grpc=server.endpoints.grpc,
                http=server.endpoints.http,
                pids=tuple(p.pid for p in children if server.shm_prefix in str(command_of(p)))[:1],
            )
        finally:
            server.stop()


@contextmanager
def _no_server(environment: Environment) -> Iterator[Endpoints]:
    """The parameters of an engine that the load generator runs itself."""
    settings = with_files(read_settings({**environment, **ANY_PORTS}))
    with tempfile.TemporaryDirectory(prefix="cog-triton-benchmark-") as directory:
        file = _repository(settings, directory) / "tensorrt_llm" / "config.pbtxt"
        config = text_format.Parse(file.read_text(), ModelConfig())
    parameters = {
        name: {"string_value": parameter.string_value}
        for name, parameter in config.parameters.items()
    }
    yield Endpoints(settings.tokenizer_dir, engine=stub.parameters({"parameters": parameters}))


@contextmanager
def one_token_engine(environment: Environment, pace_ms: float = 0) -> Iterator[Environment]:
    """Settings of an engine that sends each token by itself, as TensorRT-LLM's C++ backend does.

    It is the tests' stand-in for that backend where this is a checkout that can compile it, and costs
    what a backend in C++ costs; else the simulated engine.

    Args:
        pace_ms: milliseconds between the tokens of a request; 0 makes them at no cost.
    """
    with tempfile.TemporaryDirectory(prefix="cog-triton-benchmark-") as directory:
        try:
            servers: Any = importlib.import_module("tests.stand_in.servers")
            engine = servers.environment(Path(directory), **STAND_IN)
            engine["STAND_IN_INTER_TOKEN_MS"] = str(pace_ms)
        except (ImportError, FileNotFoundError, subprocess.CalledProcessError):
            engine = {**simulated(pace_ms), **single_tokens(Path(directory))}
        yield {**environment, "COG_MAX_CONCURRENCY": str(STREAMS), **engine}


def simulated(pace_ms: float = 0) -> dict[str, str]:
    return {
        "ENGINE": "simulated",
        "SIMULATED_TEXT": TEXT,
        "SIMULATED_INTER_TOKEN_MS": str(pace_ms),
        "COG_MAX_CONCURRENCY": str(STREAMS),
    }


def single_tokens(directory: Path) -> dict[str, str]:
    """Return the setting with which the embedded engine sends each token by itself."""
    config = directory / "config.yaml"
    config.write_text("server: {tensorrt_llm: {args: {max_tokens_per_response: 1}}}\n")
    return {"COG_TRITON_CONFIG": str(config)}


def has_embedded_engine(environment: Environment) -> bool:
    """Return True if the engine runs without Triton; TensorRT-LLM's C++ backend does not."""
    return resolve_engine(with_files(read_settings(environment))) != "tensorrtllm"


def _repository(settings: Any, directory: str) -> Path:
    repository = Path(directory) / "repository"
    values = template_values(settings, resolve_engine(settings))
    fill_repository(settings.model_repository, repository, values)
    return repository


@contextmanager
def _process(
    command: Sequence[str],
    environment: Environment,
    log: Path,
    is_ready: Callable[[], bool],
    timeout: float,
) -> Iterator[int]:
    """Start a server, wait until it is ready, yield its id, and stop it."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches only the benchmark, which stops this one
        )
    try:
        deadline = time.monotonic() + timeout
        while not is_ready():
            if process.poll() is not None:
                raise BenchmarkError(f"{log.stem} ended while starting:\n{_tail(log)}")
            if time.monotonic() > deadline:
                raise BenchmarkError(f"{log.stem} was not ready in {timeout:g} s:\n{_tail(log)}")
            time.sleep(0.05)
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _get(port: int, path: str) -> httpx.Response | None:
    try:
        return httpx.get(f"http://127.0.0.1:{port}{path}", timeout=5, trust_env=False)
    except httpx.TransportError:
        return None


def _is_healthy(port: int) -> bool:
    answer = _get(port, "/health")
    return answer is not None and answer.status_code == 200


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-LOG_TAIL:]
