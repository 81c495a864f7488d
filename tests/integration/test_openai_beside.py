"""OPENAI_PORT: both APIs on one Triton, in one predictor, to their common end."""

import contextlib
import signal
import socket
from pathlib import Path
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped, unused-ignore]

from tests.openai_server import streamed_chat
from tests.support import CogServer, alive, children, free_port, limit, wait_until


def server_with(model: Path, directory: Path, **environment: str) -> CogServer:
    """Cog's server, with OpenAI's API on another port; 20 ms a token."""
    simulated = {"ENGINE": "simulated", "SIMULATED_INTER_TOKEN_MS": "20"}
    given = {"MODEL": str(model), "OPENAI_PORT": str(free_port()), **simulated, **environment}
    return CogServer(given, directory / "log")


def url_of(server: CogServer) -> str:
    return f"http://127.0.0.1:{server.environment['OPENAI_PORT']}"


def requests_running(server: CogServer) -> Any:
    (load,) = httpx.get(f"{url_of(server)}/v1/loads", trust_env=False).json()["loads"]
    return load["num_running_reqs"]


def test_running_requests_end_before_both_faces_do(demo_model: Path, tmp_path: Path) -> None:
    with server_with(demo_model, tmp_path, OPENAI_WORKERS="2", MAX_RUNNING="6") as server:
        server.wait_until_ready()
        wait_until(lambda: "processes are ready" in server.log.read_text(), 60, "the processes")
        family = children(server.process.pid)
        commands = [" ".join(psutil.Process(pid).cmdline()) for pid in family]
        assert sum("openai.workers" in command for command in commands) == 2
        assert [psutil.Process(pid).name() for pid in family].count("tritonserver") == 1
        with contextlib.ExitStack() as stack:
            long = {"max_tokens": 400, "min_tokens": 400}
            chats = [streamed_chat(url_of(server), **long) for _ in range(6)]
            streams = [stack.enter_context(chat) for chat in chats]  # whichever process gets them
            wait_until(lambda: requests_running(server) == 6, 60, "the sum of the processes")
            server.process.send_signal(signal.SIGTERM)
            ends = [[*events][-2:] for events in streams]
        for last, done in ends:
            assert (last["choices"][0]["finish_reason"], done) == ("length", "[DONE]")
        assert server.process.wait(limit(60)) == 0
        wait_until(lambda: not any(map(alive, family)), 60, "the end of all processes")


def test_a_port_that_is_taken_is_named(demo_model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with server_with(demo_model, tmp_path, OPENAI_PORT=str(port)) as server:
            assert server.process.wait(limit(60)) != 0
    assert f"OPENAI_PORT: 127.0.0.1, port {port}: Address already in use" in server.log.read_text()
