"""The servers that are measured, started as a deployment starts them, on free ports."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from google.protobuf import text_format  # type: ignore[import-untyped, unused-ignore]
from tritonclient.grpc.model_config_pb2 import (  # type: ignore[import-untyped, unused-ignore]
    ModelConfig,
)

from cog_triton.deployment import resolve_engine, template_values, with_files
from cog_triton.models import stub
from cog_triton.repository.fill import fill_repository
from cog_triton.server.installation import PACKAGE_ROOT
from cog_triton.server.tritonserver import TritonServer
from cog_triton.settings import Settings, read_settings
from tools.benchmark.measure import BenchmarkError, Running
from tools.benchmark.processes import descendant_with

STOP_SECONDS = 60.0
LOG_TAIL = 3000

ANY_PORTS = {"TRITON_HTTP_PORT": "0", "TRITON_GRPC_PORT": "0", "TRITON_METRICS_PORT": "0"}


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
    port, grpc, http = (free_port() for _ in range(3))
    ports = {"PORT": port, "TRITON_GRPC_PORT": grpc, "TRITON_HTTP_PORT": http}
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, str(PACKAGE_ROOT / "scripts" / "serve.py")],
            env={**environment, **ANY_PORTS, **{name: str(value) for name, value in ports.items()}},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches the benchmark alone, which stops this one
        )
    try:
        _wait_until_set_up(process, port, log, settings.start_timeout)
        yield Running(
            tokenizer=with_files(settings).tokenizer_dir,
            url=f"http://127.0.0.1:{port}",
            grpc=f"{settings.host}:{grpc}",
            http=f"{settings.host}:{http}",
            pids=(process.pid,),
        )
    finally:
        _stop(process)


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


def has_embedded_engine(environment: Mapping[str, str]) -> bool:
    """Whether the engine can run without Triton, which TensorRT-LLM's C++ backend cannot."""
    return resolve_engine(with_files(read_settings(environment))) != "tensorrtllm"


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def filled_repository(settings: Settings, directory: Path) -> Path:
    repository = directory / "repository"
    values = template_values(settings, resolve_engine(settings))
    fill_repository(settings.model_repository, repository, values)
    return repository


def _wait_until_set_up(
    process: subprocess.Popen[bytes], port: int, log: Path, timeout: float
) -> None:
    deadline = time.monotonic() + timeout
    while (status := _health(port)) in (None, "STARTING"):
        if process.poll() is not None:
            raise BenchmarkError(f"the Cog server ended while starting:\n{_tail(log)}")
        if time.monotonic() > deadline:
            raise BenchmarkError(f"the Cog server was not ready after {timeout:g} s:\n{_tail(log)}")
        time.sleep(0.05)
    if status != "READY":
        raise BenchmarkError(f"the Cog server says {status}:\n{_tail(log)}")


def _health(port: int) -> str | None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health-check")
        return str(json.loads(connection.getresponse().read())["status"])
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-LOG_TAIL:]
