"""The servers that are measured, started as a deployment starts them, on free ports."""

from __future__ import annotations

import gc
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
from cog_triton.settings import Settings, read_settings
from tools.benchmark.engine_drivers import load_for_batching
from tools.benchmark.measure import BenchmarkError, Running
from tools.benchmark.openai_drivers import MODEL
from tools.benchmark.processes import descendant_with, free_port

STOP_SECONDS = 60.0
SERVE_START_SECONDS = 300.0
LOG_TAIL = 3000

ANY_PORTS = {"TRITON_HTTP_PORT": "0", "TRITON_GRPC_PORT": "0", "TRITON_METRICS_PORT": "0"}


def started(
    kind: str,
    environment: Mapping[str, str],
    directory: Path,
    serve_python: str = sys.executable,
    **alone: str,
) -> AbstractContextManager[Running]:
    """Start the servers that the drivers of a kind need.

    Args:
        kind: a driver's ``server``, or the name of a target that needs none.
        environment: of the server.
        directory: an existing one for logs.
        serve_python: see ``transformers_serve``.
        alone: see ``transformers_parts``.
    """
    if kind == "cog":
        return cog_server(environment, directory / "cog.log")
    if kind == "openai":
        return openai_server(environment, directory / "openai.log")
    if kind == "vllm-serve":
        return vllm_serve(environment, directory / "vllm-serve.log")
    if kind == "triton":
        return triton_server(environment)
    if kind == "serve":
        return transformers_serve(environment, serve_python, directory / "serve.log")
    if kind == "transformers":
        return transformers_parts(environment, **alone)
    return engine_alone({**environment, **({"ENGINE": kind} if kind == "vllm" else {})})


@contextmanager
def cog_server(environment: Mapping[str, str], log: Path) -> Iterator[Running]:
    """The Cog server, as ``make serve`` runs it, and the Triton in it.

    Args:
        environment: the whole environment of the server.
        log: file for what the server prints.

    Raises:
        BenchmarkError: it could not be set up, with the end of its log.
    """
    settings = read_settings(environment)
    port, grpc, http, metrics = (free_port() for _ in range(4))
    triton = {"TRITON_GRPC_PORT": grpc, "TRITON_HTTP_PORT": http, "TRITON_METRICS_PORT": metrics}
    command = [sys.executable, str(PACKAGE_ROOT / "scripts" / "serve.py")]
    given = {**environment, "PORT": str(port), **{name: str(at) for name, at in triton.items()}}
    with _process(command, given, log) as process:
        _wait_until_set_up(process, port, log, settings.start_timeout)
        yield Running(
            tokenizer=with_files(settings).tokenizer_dir,
            url=f"http://127.0.0.1:{port}",
            grpc=f"{settings.host}:{grpc}",
            http=f"{settings.host}:{http}",
            metrics=f"{settings.host}:{metrics}",
            pids=(process.pid,),
        )


@contextmanager
def openai_server(environment: Mapping[str, str], log: Path, *arguments: str) -> Iterator[Running]:
    """The OpenAI face, as ``make openai`` runs it, and the Triton of its own.

    Args:
        environment: the whole environment of the server.
        log: file for what the server prints.
        arguments: of the command.

    Raises:
        BenchmarkError: it could not be set up, with the end of its log.
    """
    settings = read_settings(environment)
    port, metrics = free_port(), free_port()
    script = str(PACKAGE_ROOT / "scripts" / "serve_openai.py")
    command = [sys.executable, script, "--host", "127.0.0.1", "--port", str(port)]
    given = {**environment, **ANY_PORTS, "TRITON_METRICS_PORT": str(metrics)}
    with _process([*command, "--model", MODEL, *arguments], given, log) as process:
        name = "the OpenAI face"
        _wait(name, process, lambda: _is_healthy(port), log, settings.start_timeout)
        tokenizer = with_files(settings).tokenizer_dir
        yield Running(
            tokenizer,
            url=f"http://127.0.0.1:{port}",
            metrics=f"{settings.host}:{metrics}",
            pids=(process.pid,),
        )


@contextmanager
def vllm_serve(environment: Mapping[str, str], log: Path) -> Iterator[Running]:
    """``vllm serve`` with the arguments of the engine.

    Raises:
        BenchmarkError: it could not be started, with the end of its log.
    """
    from cog_triton.engines.vllm import loading_arguments

    with engine_alone({**environment, "ENGINE": "vllm"}) as running:
        port = free_port()
        command = vllm_command(loading_arguments(running.engine), port)
        with _process(command, {**os.environ, "HF_HUB_OFFLINE": "1"}, log) as process:
            _wait("vllm serve", process, lambda: _is_healthy(port), log, SERVE_START_SECONDS)
            yield replace(running, url=f"http://127.0.0.1:{port}", pids=(process.pid,))


def vllm_command(arguments: Mapping[str, Any], port: int) -> list[str]:
    """The command line of ``vllm serve``, in this Python.

    Args:
        arguments: of vLLM's AsyncEngineArgs; the server has its own way with texts.
    """
    given = {k: v for k, v in arguments.items() if k != "skip_tokenizer_init" and v is not None}
    options = [option for name, value in given.items() for option in _vllm_option(name, value)]
    program = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    address = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL]
    return [*program, *address, "--uvicorn-log-level", "warning", *options]


def _vllm_option(name: str, value: Any) -> list[str]:
    option = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{option}" if value else f"--no-{option}"]
    return [f"--{option}", json.dumps(value) if isinstance(value, (dict, list)) else str(value)]


@contextmanager
def triton_server(environment: Mapping[str, str]) -> Iterator[Running]:
    """tritonserver alone.

    Raises:
        ConfigurationError, TritonStartError: it could not be set up.
    """
    settings = with_files(read_settings({**environment, **ANY_PORTS}))
    with tempfile.TemporaryDirectory(prefix="cog-triton-benchmark-") as directory:
        repository = filled_repository(settings, Path(directory))
        server = TritonServer(repository, Path(directory), settings)
        try:
            server.start()
            yield Running(
                tokenizer=settings.tokenizer_dir,
                grpc=server.endpoints.grpc,
                http=server.endpoints.http,
                pids=(descendant_with(server.shm_prefix),),
            )
        finally:
            server.stop()


@contextmanager
def engine_alone(environment: Mapping[str, str]) -> Iterator[Running]:
    """No server: what a load generator needs to run the engine in its own process."""
    settings = with_files(read_settings({**environment, **ANY_PORTS}))
    with tempfile.TemporaryDirectory(prefix="cog-triton-benchmark-") as directory:
        text = (
            filled_repository(settings, Path(directory)) / "tensorrt_llm" / "config.pbtxt"
        ).read_text()
    config = text_format.Parse(text, ModelConfig())
    parameters = {
        name: {"string_value": parameter.string_value}
        for name, parameter in config.parameters.items()
    }
    yield Running(
        tokenizer=settings.tokenizer_dir, engine=stub.parameters({"parameters": parameters})
    )


@contextmanager
def transformers_parts(environment: Mapping[str, str], **alone: str) -> Iterator[Running]:
    """No server: what a load generator needs to run transformers' batching in its own process.

    Args:
        alone: see ``engine_drivers.ASYNC_BATCHING``.
    """
    with engine_alone({**environment, "ENGINE": "transformers"}) as running:
        yield replace(running, engine={**running.engine, **alone})


@contextmanager
def transformers_serve(environment: Mapping[str, str], python: str, log: Path) -> Iterator[Running]:
    """``transformers serve`` with the batching of the engine.

    Args:
        python: the Python that has the packages of transformers[serving].
        log: file for what the server prints.

    Raises:
        BenchmarkError: it could not be started, with the end of its log.
    """
    if reason := why_no_serve(python):
        raise BenchmarkError(f"{python} cannot run transformers serve: {reason}")
    with transformers_parts(environment) as running:
        port = free_port()
        command = serve_command(running.engine, _batching(running.engine), python, port)
        with _process(command, {**os.environ, "HF_HUB_OFFLINE": "1"}, log) as process:
            name = "transformers serve"
            _wait(name, process, lambda: _is_healthy(port), log, SERVE_START_SECONDS)
            yield replace(running, url=f"http://127.0.0.1:{port}", pids=(process.pid,))


def serve_command(
    parameters: Mapping[str, str], batching: Any, python: str, port: int
) -> list[str]:
    """The command line of ``transformers serve``.

    Args:
        parameters: of the tensorrt_llm model.
        batching: transformers' configuration that the engine has with these.
    """
    device = parameters.get("device", "auto")
    options = {
        "--host": "127.0.0.1",
        "--port": port,
        "--device": None if device == "auto" else device,
        "--log-level": "error",
        "--attn-implementation": "sdpa",  # as the engine's
        "--cb-block-size": batching.page_size,
        "--cb-num-blocks": batching.num_blocks,
        "--cb-max-batch-tokens": batching.max_batch_tokens,
    }
    given = [str(part) for option in options.items() if option[1] is not None for part in option]
    program = [python, "-m", "transformers.cli.transformers", "serve", parameters["model"]]
    return [*program, "--continuous-batching", "--no-cb-use-cuda-graph", *given]


def why_no_serve(python: str) -> str | None:
    """Return the reason why Python cannot run ``transformers serve``; None if it can."""
    code = (
        "from transformers.utils import import_utils as u\n"
        "if not (u.is_serve_available() and u.is_accelerate_available()):\n"
        "    raise SystemExit('the packages of transformers[serving] are not installed')"
    )
    try:
        completed = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, timeout=SERVE_START_SECONDS
        )
    except OSError as error:
        return str(error)
    return None if completed.returncode == 0 else completed.stderr.strip().rpartition("\n")[2]


def has_embedded_engine(environment: Mapping[str, str]) -> bool:
    """Return whether the engine runs without Triton; TensorRT-LLM's C++ backend does not."""
    return resolve_engine(with_files(read_settings(environment))) != "tensorrtllm"


def filled_repository(settings: Settings, directory: Path) -> Path:
    repository = directory / "repository"
    values = template_values(settings, resolve_engine(settings))
    fill_repository(settings.model_repository, repository, values)
    return repository


def _batching(parameters: Mapping[str, str]) -> Any:
    """The configuration of the engine's batching, for which a model has to be loaded and let go."""
    _, _, batching = load_for_batching(parameters)
    gc.collect()
    if "torch" in sys.modules and (cuda := sys.modules["torch"].cuda).is_available():
        cuda.empty_cache()
    return batching


@contextmanager
def _process(
    command: Sequence[str], environment: Mapping[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches the benchmark alone, which stops this one
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_set_up(
    process: subprocess.Popen[bytes], port: int, log: Path, timeout: float
) -> None:
    def status() -> str | None:
        answer = _get(port, "/health-check")
        return None if answer is None else str(answer.json()["status"])

    name = "the Cog server"
    _wait(name, process, lambda: status() not in (None, "STARTING"), log, timeout)
    if (last := status()) != "READY":
        raise BenchmarkError(f"{name} says {last}:\n{_tail(log)}")


def _wait(
    name: str,
    process: subprocess.Popen[bytes],
    ready: Callable[[], bool],
    log: Path,
    timeout: float,
) -> None:
    """Waits for a server to be ready.

    Raises:
        BenchmarkError: it ended, or was not ready in time.
    """
    deadline = time.monotonic() + timeout
    while not ready():
        if process.poll() is not None:
            raise BenchmarkError(f"{name} ended while starting:\n{_tail(log)}")
        if time.monotonic() > deadline:
            raise BenchmarkError(f"{name} was not ready after {timeout:g} s:\n{_tail(log)}")
        time.sleep(0.05)


def _get(port: int, path: str) -> httpx.Response | None:
    """The server's answer; None if it does not answer."""
    try:
        return httpx.get(f"http://127.0.0.1:{port}{path}", timeout=5, trust_env=False)
    except httpx.TransportError:
        return None


def _is_healthy(port: int) -> bool:
    answer = _get(port, "/health")
    return answer is not None and answer.status_code == 200


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-LOG_TAIL:]
