"""tritonserver's life: what ends it, and what it leaves behind."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from pathlib import Path

import pytest

from cog_triton.errors import ConfigurationError, TritonStartError
from cog_triton.server.tritonserver import TritonServer
from tests.integration.conftest import ANY_PORTS, make_server, settings_for
from tests.support import SHARED_MEMORY, alive, children, processes, run_until_killed, wait_until


def regions(server: TritonServer) -> list[Path]:
    return list(SHARED_MEMORY.glob(f"{server.shm_prefix}*"))


def test_a_model_that_does_not_load_is_named_with_its_reason(
    demo_model: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "model"
    shutil.copytree(demo_model, broken)
    (broken / "model.safetensors").write_bytes(b"no weights")
    server = make_server(settings_for(broken), tmp_path)
    with pytest.raises(TritonStartError) as caught:
        server.start()
    message = str(caught.value)
    assert message.startswith("E3003 TritonStartError: tritonserver died while starting")
    assert "model tensorrt_llm: " in message
    assert "safetensor" in message.lower()
    assert not regions(server)
    assert not processes(server.shm_prefix)


def test_the_time_limit(demo_model: Path, tmp_path: Path) -> None:
    settings = settings_for(demo_model, TRITON_START_TIMEOUT="0.2", TRITON_STOP_TIMEOUT="1")
    server = make_server(settings, tmp_path)
    with pytest.raises(TritonStartError, match=r"not ready after 0\.2 s"):
        server.start()
    assert not regions(server)
    assert not processes(server.shm_prefix)


def test_a_port_in_use_names_its_setting(demo_model: Path, tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        server = make_server(settings_for(demo_model, TRITON_GRPC_PORT=str(port)), tmp_path)
        with pytest.raises(ConfigurationError, match=f"TRITON_GRPC_PORT={port}: cannot listen"):
            server.start()


def test_a_stop_leaves_nothing_and_may_be_repeated(demo_model: Path, tmp_path: Path) -> None:
    server = make_server(settings_for(demo_model, ENGINE="simulated"), tmp_path)
    server.stop()
    server.start()
    assert server.is_ready()
    assert regions(server)
    started = processes(server.shm_prefix)
    server.stop()
    server.stop()
    assert not server.is_ready()
    assert not regions(server)
    assert not [pid for pid in started if alive(pid)]


def test_a_server_that_crashes_is_noticed_and_leaves_nothing(
    demo_model: Path, tmp_path: Path
) -> None:
    server = make_server(settings_for(demo_model, ENGINE="simulated"), tmp_path)
    server.start()
    (triton,) = [pid for pid in processes(server.shm_prefix) if is_tritonserver(pid)]
    stubs = children(triton)
    os.kill(triton, signal.SIGSEGV)
    wait_until(lambda: not server.alive, 10, "the end of the guard")
    assert not server.is_ready()
    assert not [pid for pid in stubs if alive(pid)]
    assert not regions(server)
    server.stop()


def test_a_server_that_hangs_is_killed(demo_model: Path, tmp_path: Path) -> None:
    settings = settings_for(demo_model, ENGINE="simulated", TRITON_STOP_TIMEOUT="0.5")
    server = make_server(settings, tmp_path)
    server.start()
    pids = processes(server.shm_prefix)
    (triton,) = [pid for pid in pids if is_tritonserver(pid)]
    os.kill(triton, signal.SIGSTOP)
    server.stop()
    assert not [pid for pid in pids if alive(pid)]
    assert not regions(server)


def test_it_dies_with_a_starter_that_is_killed(demo_model: Path, tmp_path: Path) -> None:
    program = f"""
        import os, signal
        from pathlib import Path
        from tests.integration.conftest import make_server, settings_for
        settings = settings_for(Path({str(demo_model)!r}), ENGINE="simulated")
        server = make_server(settings, Path({str(tmp_path)!r}))
        server.start()
        print(server.shm_prefix, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    prefix = run_until_killed(program, **ANY_PORTS)
    wait_until(lambda: not processes(prefix), 20, "the end of Triton")
    assert not list(SHARED_MEMORY.glob(f"{prefix}*"))


def is_tritonserver(pid: int) -> bool:
    return Path(f"/proc/{pid}/comm").read_text().strip() == "tritonserver"
