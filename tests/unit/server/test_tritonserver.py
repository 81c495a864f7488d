"""Where tritonserver is found, its environment and its ports; that it runs is in tests/integration."""

import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cog_triton.errors import ConfigurationError, TritonPortTaken
from cog_triton.server import guard
from cog_triton.server.command import Endpoints, choose_ports
from cog_triton.server.installation import Installation, environment, locate
from cog_triton.server.tritonserver import TritonServer
from cog_triton.settings import read_settings

ANY_PORTS = dict.fromkeys(["TRITON_HTTP_PORT", "TRITON_GRPC_PORT", "TRITON_METRICS_PORT"], "0")


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
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in str(wheel.stub)
    server = install(container)
    assert locate(read_settings({}), container) == Installation(server, container / "backends")
    assert locate(read_settings({"TRITONSERVER": str(chosen)}), container).server == chosen
    assert locate(read_settings({"TRITONSERVER": str(wheel.server)}), nowhere) == wheel


@pytest.mark.parametrize(
    ("variable", "message"),
    [("TRITONSERVER", "TRITONSERVER=.*not a file"), ("TRITONSERVER_BACKEND_DIR", "no Python back")],
)
def test_a_setting_that_names_no_server(variable: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=message):
        locate(read_settings({variable: str(tmp_path / "none")}), tmp_path / "nowhere")


def test_the_environment_leads_the_stubs_to_this_python() -> None:
    installation = Installation(Path("/ts"), Path("/b"), libraries="/wheel/libs")
    found = environment(installation, {"PATH": "/bin", "LD_LIBRARY_PATH": "/own", "KEPT": "yes"})
    assert found["KEPT"] == "yes"
    assert found["PATH"].split(":") == [str(Path(sys.executable).parent), "/bin"]
    assert found["LD_LIBRARY_PATH"].split(":")[:2] == ["/wheel/libs", "/own"]


def test_ports_set_to_zero_are_picked_and_differ_and_a_port_is_not_taken_twice() -> None:
    ports = choose_ports(read_settings(ANY_PORTS))
    assert len({0, ports.http_port, ports.grpc_port, ports.metrics_port}) == 4
    same = {"TRITON_HTTP_PORT": str(ports.http_port), "TRITON_GRPC_PORT": str(ports.http_port)}
    with pytest.raises(ConfigurationError, match="TRITON_GRPC_PORT="):
        choose_ports(read_settings(same))


def test_a_server_bound_to_all_addresses_is_reached_by_loopback() -> None:
    assert Endpoints("0.0.0.0", 1, 2, 3).http == "127.0.0.1:1"
    assert Endpoints("10.0.0.1", 1, 2, 3).grpc == "10.0.0.1:2"


def test_without_an_mpirun_in_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    with pytest.raises(
        ConfigurationError, match="WORLD_SIZE=2 requires mpirun, which is not in PATH"
    ):
        TritonServer(tmp_path, tmp_path, read_settings({"WORLD_SIZE": "2"})).start()


def test_a_server_that_hangs_without_its_port_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cog_triton.server.tritonserver.TAKEN_SECONDS", 0.1)
    server = TritonServer(tmp_path, tmp_path, read_settings({}))
    line = b"E1124 05:22:00.000000 1 main.cc:257] failed to start HTTP service: already in use\n"
    assert list(server._log.read([line]))
    with subprocess.Popen(["sleep", "600"]) as server._process:
        server._end_thread = threading.Thread(target=server._process.wait)
        server._end_thread.start()
        with pytest.raises(TritonPortTaken, match="tritonserver: failed to start HTTP service"):
            server._wait_until_ready()
        server._process.kill()


def test_a_server_listens_until_its_port_is_closed(tmp_path: Path) -> None:
    server = TritonServer(tmp_path, tmp_path, read_settings({}))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        server.endpoints = Endpoints("127.0.0.1", http_port=port, grpc_port=0, metrics_port=0)
        assert server.listens()
    assert not server.listens()


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
            stopped.result(60)
    assert not server.alive


def test_a_log_that_cannot_be_shown_is_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A server whose pipe is full would wait, and answer nobody."""
    server = TritonServer(tmp_path, tmp_path, read_settings({}))
    monkeypatch.setattr(server, "_forward_line", lambda *_: 1 / 0)
    megabyte = ["head", "-c", "1000000", "/dev/zero"]
    with subprocess.Popen(["sh", "-c", f"echo begin; {' '.join(megabyte)}"], stdout=-1) as process:
        server._forward_log(process)
        assert process.returncode == 0
    assert "the rest of the log of tritonserver is not shown" in caplog.text


def test_a_guard_that_cannot_be_started_leaves_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(guard, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(subprocess, "Popen", fail)
    server = TritonServer(tmp_path, tmp_path, read_settings({}))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(BlockingIOError):
        server._spawn(Path("tritonserver"), Path("backends"), {})
    assert len(os.listdir("/proc/self/fd")) == before
    assert os.listdir(tmp_path) == []
