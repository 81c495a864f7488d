"""tritonserver's life: what ends it, and what it leaves behind."""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import signal
import socket
import threading
from pathlib import Path

import httpx
import pytest
import tritonclient.grpc

from cog_triton.errors import ConfigurationError, TritonStartError
from cog_triton.server import guard
from cog_triton.server.command import Launch
from cog_triton.server.tritonserver import TritonServer
from tests.integration.conftest import ANY_PORTS, make_server, running, settings_for
from tests.support import SHARED_MEMORY, alive, children, processes, run_until_killed, wait_until

EXPLICIT = ("--model-control-mode=explicit", "--load-model=*")


def regions(server: TritonServer) -> list[Path]:
    return list(SHARED_MEMORY.glob(f"{server.shm_prefix}*"))


def test_a_model_that_does_not_load_is_named_with_its_reason(
    demo_model: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "model"
    shutil.copytree(demo_model, broken)
    (broken / "model.safetensors").write_bytes(b"no weights")  # which a deployment finds before
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


def test_a_stop_does_not_wait_for_tritons_next_look(
    demo_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It comes a second after the first, and until then nothing is unloaded."""
    server = make_server(settings_for(demo_model, ENGINE="simulated"), tmp_path)
    server.start()
    with caplog.at_level(logging.DEBUG, "tritonserver"):
        server.stop()
    assert server.status == 0
    assert sum("live models" in line for line in caplog.messages) == 1


def test_a_stop_lets_running_requests_end(demo_model: Path, tmp_path: Path) -> None:
    settings = settings_for(demo_model, ENGINE="simulated", SIMULATED_INTER_TOKEN_MS="20")
    server = make_server(settings, tmp_path)
    server.start()
    stop = threading.Thread(target=server.stop)
    url = f"http://{server.endpoints.http}/v2/models/ensemble/generate_stream"
    body = {
        "text_input": "Hello",
        "max_tokens": 50,
        "stream": True,
        "return_num_output_tokens": True,
    }
    counts: list[str] = []
    with httpx.stream("POST", url, json=body, timeout=30) as response:
        for line in response.iter_lines():
            if not counts:
                stop.start()
            counts += re.findall(r'"num_output_tokens":(\d+)', line)
    stop.join()
    assert counts[-1] == "50"
    assert server.status == 0


def test_a_stop_does_not_wait_for_clients_that_are_gone(
    demo_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Their requests run on in Triton, which would wait for minutes of tokens."""
    settings = settings_for(demo_model, ENGINE="simulated", SIMULATED_INTER_TOKEN_MS="1000")
    server = make_server(settings, tmp_path)
    server.start()
    url = f"http://{server.endpoints.http}/v2/models/ensemble/generate_stream"
    body = {"text_input": "Hello", "max_tokens": 100, "stream": True}
    for _ in range(8):
        with httpx.stream("POST", url, json=body, timeout=30) as response:
            next(response.iter_lines())
    with caplog.at_level(logging.DEBUG, "tritonserver"):
        server.stop()
    assert server.status == 0
    assert sum('"Timeout ' in line for line in caplog.messages) == 1


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


@pytest.mark.parametrize("model", ["preprocessing", "tensorrt_llm"])
def test_a_killed_stub_ends_the_server_which_names_the_model(
    demo_model: Path, tmp_path: Path, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = make_server(settings_for(demo_model, ENGINE="simulated"), tmp_path)
    server.start()
    (stub,) = processes(f"/{model}/1/model.py\0{server.shm_prefix}".replace("\0", " "))
    os.kill(stub, signal.SIGKILL)
    wait_until(lambda: not server.alive, 2, "the end of the server")
    server.wait()
    assert re.search(rf"the process of model ({model}|\(unknown\)) ended by signal 9", caplog.text)
    assert not regions(server)
    assert not processes(server.shm_prefix)
    server.stop()


def test_a_stub_that_is_killed_as_it_appears_ends_the_start(
    demo_model: Path, tmp_path: Path
) -> None:
    server = make_server(settings_for(demo_model, TRITON_START_TIMEOUT="60"), tmp_path)
    stub = tmp_path / "backends" / "python" / guard.STUB

    def kill_the_first() -> None:
        pids = wait_until(lambda: processes(f"{stub} "), 60, "the start of a stub")
        os.kill(pids[0], signal.SIGKILL)

    killer = threading.Thread(target=kill_the_first)
    killer.start()
    with pytest.raises(TritonStartError, match=r"the process of model .* ended by signal 9"):
        server.start()
    killer.join()
    assert not regions(server)
    assert not processes(server.shm_prefix)


def test_a_model_that_is_unloaded_does_not_end_the_server(demo_model: Path, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    settings = settings_for(demo_model, ENGINE="simulated")
    server = make_server(settings, tmp_path, launch=Launch(options=EXPLICIT))
    server.start()
    url = f"http://{server.endpoints.http}/v2/repository/models/preprocessing"
    (stub,) = processes(f"{repository}/preprocessing/1/model.py {server.shm_prefix}")
    assert httpx.post(f"{url}/unload", timeout=60, trust_env=False).status_code == 200
    wait_until(lambda: not alive(stub), 20, "the end of the stub")
    assert httpx.post(f"{url}/load", timeout=60, trust_env=False).status_code == 200
    assert server.is_ready()
    server.stop()


def test_shared_memory_is_for_this_user_alone(demo_model: Path, tmp_path: Path) -> None:
    """From the moment on in which the server has started; requests make no others."""
    with running(make_server(settings_for(demo_model, ENGINE="simulated"), tmp_path)) as server:
        url = f"http://{server.endpoints.http}/v2/models/ensemble/generate"
        body = {"text_input": "What is machine learning?", "max_tokens": 20}
        before = regions(server)
        assert {region.stat().st_mode & 0o777 for region in before} == {0o600}
        assert httpx.post(url, json=body, trust_env=False).status_code == 200
        assert set(regions(server)) == set(before)


def test_no_process_of_the_server_has_a_secret(
    demo_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    secret = secrets.token_hex(8)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "REPLICATE_API_TOKEN", "PASSED_ON_TOKEN"):
        monkeypatch.setenv(name, f"{secret}-{name}")
    caplog.set_level(logging.DEBUG)
    settings = settings_for(
        demo_model,
        ENGINE="simulated",
        HF_TOKEN=secret,
        TRITON_SECRETS="PASSED_ON_TOKEN",
        TRITON_LOG_VERBOSE="1",
    )
    with running(make_server(settings, tmp_path)) as server:
        pids = processes(server.shm_prefix)
        (own_guard,) = [pid for pid in pids if "guard.py" in command_line(pid)]
        started = children(own_guard)
        assert len(started) == 4  # tritonserver and three stubs
        for pid in (own_guard, *started):
            environ = Path("/proc", str(pid), "environ").read_text()
            assert environ.count(secret) == 1
            assert f"PASSED_ON_TOKEN={secret}-PASSED_ON_TOKEN" in environ
            assert secret not in command_line(pid)
    assert "tensorrt_llm" in caplog.text
    assert secret not in caplog.text


@pytest.mark.parametrize("closed", ["shared-memory,trace,logging", "none"])
def test_what_no_client_needs_of_tritons_api_is_closed(
    demo_model: Path, tmp_path: Path, closed: str
) -> None:
    settings = settings_for(demo_model, ENGINE="simulated", TRITON_CLOSED_APIS=closed)
    with running(make_server(settings, tmp_path)) as server:
        url = f"http://{server.endpoints.http}/v2"
        (region, *_) = [region.name for region in regions(server) if "lock" not in region.name]
        answers = {
            path: httpx.request(method, f"{url}/{path}", json=body, trust_env=False).status_code
            for method, path, body in [
                # The regions in which the requests of others are.
                ("POST", "systemsharedmemory/region/x/register", {"key": region, "byte_size": 8}),
                ("GET", "systemsharedmemory/status", None),
                ("GET", "cudasharedmemory/status", None),
                ("POST", "logging", {"log_verbose_level": 1}),
                ("GET", "trace/setting", None),
                ("POST", "repository/index", {}),
                ("GET", "models/ensemble/config", None),
                ("GET", "models/stats", None),
            ]
        }
        states = {False: 200, True: 403}[closed != "none"]
        assert list(answers.values()) == [*[states] * 5, 200, 200, 200]
        client = tritonclient.grpc.InferenceServerClient(server.endpoints.grpc)
        for ask in (
            client.get_log_settings,
            client.get_trace_settings,
            client.get_system_shared_memory_status,
        ):
            if closed == "none":
                ask()
            else:
                with pytest.raises(tritonclient.utils.InferenceServerException, match="restricted"):
                    ask()
        client.get_inference_statistics()
        client.close()


def test_the_model_repository_cannot_be_changed(demo_model: Path, tmp_path: Path) -> None:
    with running(make_server(settings_for(demo_model, ENGINE="simulated"), tmp_path)) as server:
        url = f"http://{server.endpoints.http}/v2/repository/models"
        new = {"config": '{"backend": "python"}', "file:1/model.py": "cHJpbnQoMSkK"}
        for path, body in [
            ("new/load", {"parameters": new}),
            ("tensorrt_llm/load", {}),
            ("tensorrt_llm/unload", {}),
        ]:
            answer = httpx.post(f"{url}/{path}", json=body, trust_env=False)
            assert answer.status_code == 503
            assert "not allowed" in answer.text
        assert server.is_ready()


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


def test_a_killed_guard_leaves_nothing(demo_model: Path, tmp_path: Path) -> None:
    runtime = tmp_path / "runtime"
    runtime.mkdir()
    server = make_server(settings_for(demo_model, ENGINE="simulated"), runtime, temporary=True)
    server.start()
    started = processes(server.shm_prefix)
    (own_guard,) = [pid for pid in processes("guard.py") if pid in started]
    os.kill(own_guard, signal.SIGKILL)
    wait_until(lambda: not [pid for pid in started if alive(pid)], 2, "the end of all of it")
    server.wait()
    assert not regions(server)
    assert not runtime.exists()
    server.stop()


def test_the_next_start_removes_what_a_killed_starter_and_its_guard_left(
    demo_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "runtime").mkdir()
    program = f"""
        import os, signal
        from pathlib import Path
        from tests.integration.conftest import make_server, settings_for
        settings = settings_for(Path({str(demo_model)!r}), ENGINE="simulated")
        server = make_server(settings, Path({str(tmp_path / "runtime")!r}), temporary=True)
        server.start()
        print(server.shm_prefix, flush=True)
        os.kill(server._process.pid, signal.SIGSTOP)
        os.kill(server._process.pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    prefix = run_until_killed(program, **ANY_PORTS)
    assert (tmp_path / "runtime").exists()
    (tmp_path / "next").mkdir()
    server = make_server(settings_for(demo_model, ENGINE="simulated"), tmp_path / "next")
    server.start()
    assert not list(SHARED_MEMORY.glob(f"{prefix}*"))
    assert not processes(prefix)
    assert not (tmp_path / "runtime").exists()
    assert regions(server)
    server.stop()


def test_a_start_leaves_the_shared_memory_of_another_server_alone(triton: TritonServer) -> None:
    before = set(regions(triton))
    assert before
    guard.sweep()
    assert before <= set(regions(triton))
    assert triton.is_ready()


def command_line(pid: int) -> str:
    return Path("/proc", str(pid), "cmdline").read_text()


def is_tritonserver(pid: int) -> bool:
    return Path(f"/proc/{pid}/comm").read_text().strip() == "tritonserver"
