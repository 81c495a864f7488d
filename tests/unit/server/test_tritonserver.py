"""The pure parts of cog_triton.server.tritonserver; its life is in tests/integration."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cog_triton.errors import ConfigurationError
from cog_triton.server.command import Endpoints, choose_ports, command
from cog_triton.server.installation import Installation, assemble, environment, locate
from cog_triton.server.log import parse_log_line
from cog_triton.server.tritonserver import TritonServer
from cog_triton.settings import read_settings


def install(root: Path) -> Path:
    server = root / "bin" / "tritonserver"
    server.parent.mkdir(parents=True)
    server.write_text("#!/bin/sh\n")
    (root / "backends" / "python").mkdir(parents=True)
    (root / "backends" / "python" / "libtriton_python.so").touch()
    return server


def test_the_setting_comes_before_the_container_and_that_before_the_wheel(tmp_path: Path) -> None:
    chosen, container = install(tmp_path / "chosen"), tmp_path / "container"
    nowhere = tmp_path / "nowhere"
    wheel = locate(read_settings({}), nowhere)
    assert "pytriton" in str(wheel.server)
    assert wheel.stub is not None
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in str(wheel.stub)
    install(container)
    assert locate(read_settings({}), container) == Installation(
        container / "bin" / "tritonserver", container / "backends"
    )
    found = locate(read_settings({"TRITONSERVER": str(chosen)}), container)
    assert found.server == chosen
    same = locate(read_settings({"TRITONSERVER": str(wheel.server)}), nowhere)
    assert same == wheel


def test_a_setting_that_names_no_server(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"TRITONSERVER=.*is no file"):
        locate(read_settings({"TRITONSERVER": str(tmp_path / "none")}))


def test_a_backend_directory_without_the_python_backend(tmp_path: Path) -> None:
    settings = read_settings({"TRITONSERVER_BACKEND_DIR": str(tmp_path)})
    with pytest.raises(ConfigurationError, match="no Python backend"):
        locate(settings, tmp_path / "nowhere")


def test_assembling_makes_the_stub_and_the_server_executable(tmp_path: Path) -> None:
    server = install(tmp_path / "wheel")
    (tmp_path / "wheel" / "backends" / "tensorrtllm").mkdir()
    stub = tmp_path / "stub"
    stub.write_text("stub")
    server.chmod(0o644)
    installation = Installation(server, tmp_path / "wheel" / "backends", stub)
    binary, backends = assemble(installation, tmp_path / "runtime")
    assert os.access(binary, os.X_OK)
    assert os.access(backends / "python" / "triton_python_backend_stub", os.X_OK)
    assert (backends / "python" / "libtriton_python.so").exists()
    assert (backends / "tensorrtllm").is_dir()
    assert not os.access(server, os.X_OK)


def test_the_command_line() -> None:
    settings = read_settings({"TRITON_STOP_TIMEOUT": "10", "TRITON_LOG_VERBOSE": "1"})
    endpoints = Endpoints("127.0.0.1", 1, 2, 3)
    assert command(Path("/ts"), Path("/r"), Path("/b"), endpoints, "pre_", settings) == [
        "/ts",
        "--model-repository=/r",
        "--backend-directory=/b",
        "--http-address=127.0.0.1",
        "--http-port=1",
        "--grpc-address=127.0.0.1",
        "--grpc-port=2",
        "--metrics-address=127.0.0.1",
        "--metrics-port=3",
        "--backend-config=python,shm-region-prefix-name=pre_",
        "--exit-timeout-secs=8",
        "--log-verbose=1",
        "--http-restricted-api=shared-memory,trace,logging:closed=\n",
        "--grpc-restricted-protocol=shared-memory,trace,logging:closed=\n",
        "--disable-auto-complete-config",
    ]


def test_the_environment_leads_the_stubs_to_this_python() -> None:
    installation = Installation(Path("/ts"), Path("/b"), libraries="/wheel/libs")
    found = environment(installation, {"PATH": "/bin", "LD_LIBRARY_PATH": "/own", "KEPT": "yes"})
    assert found["KEPT"] == "yes"
    assert found["PATH"].split(":") == [str(Path(sys.executable).parent), "/bin"]
    libraries = found["LD_LIBRARY_PATH"].split(":")
    assert libraries[:2] == ["/wheel/libs", "/own"]


def test_the_parts_of_tritons_api_that_are_closed() -> None:
    def closed(apis: str) -> list[str]:
        settings = read_settings({"TRITON_CLOSED_APIS": apis})
        line = command(Path("/t"), Path("/r"), Path("/b"), Endpoints("h", 1, 2, 3), "", settings)
        return [option for option in line if "-restricted-" in option]

    assert closed("none") == []
    assert closed("trace,model-repository") == [
        "--http-restricted-api=trace,model-repository:closed=\n",
        "--grpc-restricted-protocol=trace,model-repository:closed=\n",
    ]
    for wrong in ("health", "inference", "trace,", "all"):
        with pytest.raises(ConfigurationError, match="TRITON_CLOSED_APIS"):
            closed(wrong)


def test_without_an_mpirun_in_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    server = TritonServer(tmp_path, tmp_path, read_settings({"WORLD_SIZE": "2"}))
    with pytest.raises(ConfigurationError, match="no mpirun in PATH, which WORLD_SIZE=2 needs"):
        server.start()


def test_two_stops_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = TritonServer(tmp_path, tmp_path, read_settings({}))
    server._process = subprocess.Popen(
        ["head", "-c1"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    both, wait = threading.Semaphore(0), server.wait

    def slow_wait() -> int:
        both.acquire(timeout=0.2)  # a second stop would begin, and end, meanwhile
        return wait()

    monkeypatch.setattr(server, "wait", slow_wait)
    with ThreadPoolExecutor(2) as pool:
        for stopped in [pool.submit(server.stop) for _ in range(2)]:
            stopped.result(10)
    assert not server.alive


SECRETS = {
    "HF_TOKEN": "a",
    "HUGGING_FACE_HUB_TOKEN": "a",
    "HUGGINGFACE_HUB_TOKEN": "a",
    "REPLICATE_API_TOKEN": "a",
    "OPENAI_API_KEY": "a",
    "AWS_SECRET_ACCESS_KEY": "a",
    "db_password": "a",
    "PGPASSWORD": "a",
    "SSH_PRIVATE_KEY": "a",
    "DATABASE_URL": "postgresql://user:a@db/name",
    "REDIS_URL": "redis://:a@cache:6379/0",
    "MYSQL_DSN": "user:a@tcp(db:3306)/name",
    "PG_DSN": "host=db password=a",
    "CLIENT_SECRET": "a",
    "COG_WEIGHTS": "https://example.com/model.tar?signature=a",
    "MODEL": "https://user:a@example.com/model.tar",
}
NO_SECRETS = {
    "MODEL": "/models/llama",
    "HF_HOME": "/cache",
    "HF_TOKEN_PATH": "/cache/token",
    "TOKENIZERS_PARALLELISM": "0",
    "HUB_URL": "https://example.com:8080/models@1",
    "ALERTS_URL": "https://user@example.com",
    "TLLM_SPAWN_PROXY_PROCESS_IPC_HMAC_KEY": "a",  # TensorRT-LLM's own, between its processes
}


def test_secrets_are_kept_from_the_server() -> None:
    installation = Installation(Path("/ts"), Path("/b"))
    made = {"LD_LIBRARY_PATH", "PATH"}
    assert environment(installation, SECRETS).keys() == made
    assert environment(installation, NO_SECRETS).keys() == made | NO_SECRETS.keys()
    named = read_settings({"TRITON_SECRETS": "HF_TOKEN,OPENAI_API_KEY"}).secrets_passed_on
    given = environment(installation, SECRETS, named)
    assert given.keys() == made | {"HF_TOKEN", "OPENAI_API_KEY"}


def test_ports_set_to_zero_are_picked_and_differ() -> None:
    zero = {"TRITON_HTTP_PORT": "0", "TRITON_GRPC_PORT": "0", "TRITON_METRICS_PORT": "0"}
    ports = choose_ports(read_settings(zero))
    assert len({ports.http_port, ports.grpc_port, ports.metrics_port}) == 3
    assert min(ports.http_port, ports.grpc_port, ports.metrics_port) > 0


def test_two_settings_with_the_same_port() -> None:
    taken = choose_ports(
        read_settings(
            {"TRITON_HTTP_PORT": "0", "TRITON_GRPC_PORT": "0", "TRITON_METRICS_PORT": "0"}
        )
    ).http_port
    same = {"TRITON_HTTP_PORT": str(taken), "TRITON_GRPC_PORT": str(taken)}
    with pytest.raises(ConfigurationError, match="TRITON_GRPC_PORT="):
        choose_ports(read_settings(same))


def test_a_server_bound_to_all_addresses_is_reached_by_loopback() -> None:
    assert Endpoints("0.0.0.0", 1, 2, 3).http == "127.0.0.1:1"
    assert Endpoints("127.0.0.1", 1, 2, 3).grpc == "127.0.0.1:2"


@pytest.mark.parametrize(
    ("line", "level", "text"),
    [
        ('I1121 07:09:36.844 1 server.cc:1] "up"', logging.INFO, 'server.cc:1] "up"'),
        ('W1121 07:09:36.844 1 server.cc:1] "hm"', logging.WARNING, 'server.cc:1] "hm"'),
        ('E1121 07:09:36.844 1 server.cc:1] "no"', logging.ERROR, 'server.cc:1] "no"'),
        ("a traceback's line", logging.ERROR, "a traceback's line"),
    ],
)
def test_log_levels_are_kept(line: str, level: int, text: str) -> None:
    assert parse_log_line(line, logging.ERROR, gpu=True) == (level, text)


def test_complaints_of_a_missing_gpu_are_for_debugging_where_there_is_none() -> None:
    line = 'E1121 07:09:36.844 1 server.cc:241] "CudaDriverHelper has not been initialized."'
    assert parse_log_line(line, logging.INFO, gpu=False)[0] == logging.DEBUG
    assert parse_log_line(line, logging.INFO, gpu=True)[0] == logging.ERROR
