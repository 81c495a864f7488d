"""tritonserver from its start to its end: what ends it, and what it leaves behind.

Servers whose parts are killed while they serve are test_recovery.py's.
"""

import logging
import os
import re
import secrets
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped, unused-ignore]
import pytest
import tritonclient.grpc

from cog_triton.errors import ANSWERED, LISTENS, TritonStartError
from cog_triton.server.command import Launch
from cog_triton.server.tritonserver import TritonServer
from tests.integration.conftest import ANY_PORTS, Triton, make_server, running, settings_for, start
from tests.integration.test_recovery import part, part_name
from tests.support import (
    SHARED_MEMORY,
    alive,
    children,
    fake_triton,
    left_of,
    limit,
    processes,
    run_until_killed,
    wait_until,
)

SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "REPLICATE_API_TOKEN", "PASSED_ON_TOKEN")
EXPLICIT = ("--model-control-mode=explicit", "--load-model=*")
STREAM = {"text_input": "Hello", "stream": True, "return_num_output_tokens": True}


def regions(server: Triton) -> list[Path]:
    return list(SHARED_MEMORY.glob(f"{server.shm_prefix}*"))


def stream(server: Triton, tokens: int) -> Any:
    url = f"http://{server.endpoints.http}/v2/models/ensemble/generate_stream"
    return httpx.stream("POST", url, json={**STREAM, "max_tokens": tokens}, timeout=limit(30))


def status(server: Triton, method: str, path: str, body: object = None) -> int:
    url = f"http://{server.endpoints.http}/v2/{path}"
    return httpx.request(method, url, json=body, timeout=limit(60), trust_env=False).status_code


def command_line(pid: int) -> str:
    return Path("/proc", str(pid), "cmdline").read_text()


# The start; what fails it is in test_start_failures.py


STARTER = """
    import os, signal
    from pathlib import Path
    from tests.integration.conftest import make_server, settings_for
    from tests.support import fake_triton
    settings = settings_for(Path({model!r}), **fake_triton())
    server = make_server(settings, Path({directory!r}), temporary=True)
    server.start()
    print(server.shm_prefix, flush=True)
    os.kill(server._process.pid, signal.SIGSTOP)  # the guard: it does nothing more
    os.kill(server._process.pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_next_start_removes_what_a_killed_starter_and_its_guard_left(
    demo_model: Path, tmp_path: Path, paced_triton: Triton, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything else, so a start that is out of time does it, too; that one leaves nothing either."""
    left, own = tmp_path / "left", tmp_path / "own"
    left.mkdir()
    own.mkdir()
    others = set(regions(paced_triton))
    program = STARTER.format(model=str(demo_model), directory=str(left))
    prefix = run_until_killed(program, **ANY_PORTS)
    assert left.exists()
    monkeypatch.setenv("FAKE_TRITON_SLOW", "tensorrt_llm")
    limits = {"TRITON_START_TIMEOUT": "0.2", "TRITON_STOP_TIMEOUT": "1"}
    server = make_server(settings_for(demo_model, **fake_triton(), **limits), own)
    with pytest.raises(TritonStartError, match=r"not ready after 0\.2 s"):
        server.start()
    assert not left_of(server.shm_prefix)
    # By this start, or by one of another test that came first and is still at it.
    wait_until(lambda: not (left_of(prefix) or left.exists()), 60, "the removal of what was left")
    # Those of a server that runs stay.
    assert others <= set(regions(paced_triton))
    assert paced_triton.is_ready()


# Stops, and what is seen until then


@dataclass(frozen=True)
class Seen:
    """What a test or the product sees of a server from its start to its end."""

    processes: list[str]
    region_bytes: list[int]
    # The names of their levels, and their texts without what differs from start to start.
    lines: set[tuple[str, str]]
    status: int | None


# Lines of Triton that the product looks for.
READ_BY_THE_PRODUCT = re.compile("|".join(["loading: ", "successfully loaded", LISTENS, ANSWERED]))


def seen_until_a_stop(server: TritonServer, caplog: pytest.LogCaptureFixture) -> Seen:
    server.stop()
    caplog.clear()
    with caplog.at_level(logging.DEBUG, "tritonserver"):
        start(server)
        assert server.is_ready()
        processes = descriptions(server.shm_prefix)
        region_bytes = [region.stat().st_size for region in regions(server)]
        server.stop()
    # Triton's next look at its models would come a second after the first.
    assert sum("Found 3 live models" in line for line in caplog.messages) <= 1
    server.stop()
    assert not server.is_ready()
    assert not left_of(server.shm_prefix)
    lines = {
        (record.levelname, general(record.getMessage()))
        for record in until_answered(caplog)
        # A connection that has just ended may be counted or not.
        if "service connections" not in record.getMessage()
    }
    return Seen(sorted(processes), sorted(region_bytes), lines, server.status)


def until_answered(caplog: pytest.LogCaptureFixture) -> Iterator[logging.LogRecord]:
    """What a server says until it has answered every request: it may be killed from then on."""
    for record in caplog.records:
        yield record
        if ANSWERED in record.getMessage():
            return
    raise AssertionError("the server did not say that it had answered every request")


def descriptions(prefix: str) -> list[str]:
    """What tells each process of a server from the others: its name, and a stub's model."""
    return [f"{psutil.Process(pid).name()} {part_name(pid)}" for pid in processes(prefix)]


def general(line: str) -> str:
    """A line of the log without its numbers."""
    return re.sub(r"\d+", "N", line)


def test_a_stop_leaves_nothing_and_may_be_repeated(
    demo_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The stand-in for tritonserver, on which other tests rely, shows and says what the real one does."""
    servers = {}
    for name, environment in (("real", {"ENGINE": "simulated"}), ("fake", fake_triton())):
        (tmp_path / name).mkdir()
        server = make_server(settings_for(demo_model, **environment), tmp_path / name)
        servers[name] = seen_until_a_stop(server, caplog)
    real, fake = servers["real"], servers["fake"]
    assert real.status == 0
    assert (fake.processes, fake.region_bytes) == (real.processes, real.region_bytes)
    assert fake.status == real.status
    assert fake.lines <= real.lines
    read = {line for line in real.lines if READ_BY_THE_PRODUCT.search(line[1])}
    assert len(read) > 8
    assert read <= fake.lines


@pytest.mark.parametrize(
    "environment",
    [
        pytest.param({"ENGINE": "simulated"}, id="tritonserver", marks=pytest.mark.rare),
        pytest.param(fake_triton(), id="its stand-in"),
    ],
)
def test_a_stop_lets_requests_end_and_does_not_wait_for_clients_that_are_gone(
    demo_model: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    """The requests of those run on in Triton, which would wait for minutes of tokens."""
    slowly = {"SIMULATED_INTER_TOKEN_MS": "20", "TRITON_STOP_TIMEOUT": "100"}
    launch = Launch(environment={"FAKE_TRITON_TOKEN_MS": "20"})
    settings = settings_for(demo_model, **slowly, **environment)
    server = make_server(settings, tmp_path, launch=launch)
    start(server)
    for _ in range(8):
        with stream(server, tokens=5000) as response:
            next(response.iter_lines())
    stop = threading.Thread(target=server.stop)
    counts: list[str] = []
    with stream(server, tokens=50) as response:
        for line in response.iter_lines():
            if not counts:
                stop.start()
            counts += re.findall(r'"num_output_tokens":(\d+)', line)
    stop.join(60)  # of the 100 s that it may take, and would
    assert not stop.is_alive()
    assert counts[-1] == "50"
    assert server.status == 0


# What is open to whom


@pytest.fixture(scope="module")
def secret() -> str:
    return secrets.token_hex(8)


@pytest.fixture(scope="module")
def opened(
    demo_model: Path, secret: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    """A server that may unload models, whose API is open, and whose starter has secrets."""
    given = {
        "ENGINE": "simulated",
        "HF_TOKEN": secret,
        "TRITON_SECRETS": "PASSED_ON_TOKEN",
        "TRITON_CLOSED_APIS": "none",
        "TRITON_LOG_VERBOSE": "1",
        "TRITON_STOP_TIMEOUT": "0.5",
    }
    directory = tmp_path_factory.mktemp("opened")
    settings = settings_for(demo_model, **given)
    server = make_server(settings, directory, launch=Launch(options=EXPLICIT))
    logger, handler = logging.getLogger("tritonserver"), logging.FileHandler(directory / "log")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    with pytest.MonkeyPatch.context() as patch:
        for name in SECRETS:
            patch.setenv(name, f"{secret}-{name}")
        with running(server):
            yield server
    logger.setLevel(logging.NOTSET)
    logger.removeHandler(handler)
    handler.close()


def test_no_process_of_the_server_has_a_secret(opened: TritonServer, secret: str) -> None:
    (own_guard,) = [pid for pid in processes(opened.shm_prefix) if "guard.py" in command_line(pid)]
    all_started = children(own_guard)
    assert len(all_started) == 4  # tritonserver and three stubs
    for pid in (own_guard, *all_started):
        environ = Path("/proc", str(pid), "environ").read_text()
        assert environ.count(secret) == 1
        assert f"PASSED_ON_TOKEN={secret}-PASSED_ON_TOKEN" in environ
        assert secret not in command_line(pid)
    said = (opened.runtime / "log").read_text()
    assert "tensorrt_llm" in said
    assert secret not in said


def test_shared_memory_is_for_this_user_only(paced_triton: Triton) -> None:
    """From the moment on in which the server has started; requests make no others."""
    before = regions(paced_triton)
    assert {region.stat().st_mode & 0o777 for region in before} == {0o600}
    body = {"text_input": "What is machine learning?", "max_tokens": 20}
    assert status(paced_triton, "POST", "models/ensemble/generate", body) == 200
    assert set(regions(paced_triton)) == set(before)


def restricted(server: Triton) -> tuple[list[int], int]:
    """The statuses of what no client needs of Triton's HTTP API, and the refused calls of gRPC's."""
    (name, *_) = [region.name for region in regions(server) if "lock" not in region.name]
    a_region = {"key": name, "byte_size": 8}  # in which the requests of others are
    statuses = [
        status(server, "POST", "systemsharedmemory/region/x/register", a_region),
        status(server, "GET", "systemsharedmemory/status"),
        status(server, "GET", "cudasharedmemory/status"),
        status(server, "POST", "logging", {"log_verbose_level": 0}),
        status(server, "GET", "trace/setting"),
    ]
    refused = 0
    with tritonclient.grpc.InferenceServerClient(server.endpoints.grpc) as client:
        for ask in (
            client.get_log_settings,
            client.get_trace_settings,
            client.get_system_shared_memory_status,
        ):
            try:
                ask()
            except tritonclient.utils.InferenceServerException as error:
                refused += "restricted" in str(error)
        client.get_inference_statistics()
    return statuses, refused


def test_what_no_client_needs_of_tritons_api_is_closed(paced_triton: Triton) -> None:
    assert restricted(paced_triton) == ([403] * 5, 3)
    for method, path in [
        ("POST", "repository/index"),
        ("GET", "models/ensemble/config"),
        ("GET", "models/stats"),
    ]:
        assert status(paced_triton, method, path, {} if method == "POST" else None) == 200


def test_what_is_closed_can_be_opened(opened: TritonServer) -> None:
    assert restricted(opened) == ([200] * 5, 0)


def test_the_model_repository_cannot_be_changed(paced_triton: Triton) -> None:
    new = {"config": '{"backend": "python"}', "file:1/model.py": "cHJpbnQoMSkK"}
    for path, body in [
        ("new/load", {"parameters": new}),
        ("tensorrt_llm/load", {}),
        ("tensorrt_llm/unload", {}),
    ]:
        assert status(paced_triton, "POST", f"repository/models/{path}", body) == 503
    assert paced_triton.is_ready()


def test_a_model_that_is_unloaded_does_not_end_the_server_and_one_that_hangs_is_killed(
    opened: TritonServer,
) -> None:
    model = "repository/models/preprocessing"
    (stub,) = processes(f"/preprocessing/1/model.py {opened.shm_prefix}")
    assert status(opened, "POST", f"{model}/unload") == 200
    wait_until(lambda: not alive(stub), 60, "the end of the stub")
    assert status(opened, "POST", f"{model}/load") == 200
    assert opened.is_ready()
    os.kill(part(opened.shm_prefix, "tritonserver"), signal.SIGSTOP)
    opened.stop()
    assert not left_of(opened.shm_prefix)
