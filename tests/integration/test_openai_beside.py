"""OPENAI_PORT: both faces on one Triton, in one predictor, to their common end."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped, unused-ignore]

from tests.openai_server import MESSAGES, streamed_chat
from tests.support import CogServer, alive, children, free_port, wait_until


def server_with(port: int, model: Path, directory: Path, **environment: str) -> CogServer:
    """Cog's server, and the other face on a port; 20 ms a token."""
    simulated = {"ENGINE": "simulated", "SIMULATED_INTER_TOKEN_MS": "20"}
    given = {"MODEL": str(model), "OPENAI_PORT": str(port), **simulated, **environment}
    return CogServer(given, directory / "log")


@contextmanager
def both(model: Path, directory: Path, **environment: str) -> Iterator[tuple[CogServer, str]]:
    """The server, set up, and the URL of the other face."""
    port = free_port()
    with server_with(port, model, directory, **environment) as server:
        assert server.wait_until_set_up()["status"] == "READY"
        yield server, f"http://127.0.0.1:{port}"


def chat(url: str, **fields: Any) -> httpx.Response:
    body = {"model": "demo", "messages": MESSAGES, "max_tokens": 12, **fields}
    return httpx.post(f"{url}/v1/chat/completions", json=body, trust_env=False, timeout=60)


def test_both_faces_answer_alike_on_one_triton(demo_model: Path, tmp_path: Path) -> None:
    same = {"seed": 7, "temperature": 1.0, "top_p": 0.95, "max_tokens": 12}
    with both(demo_model, tmp_path) as (server, url):
        answer = chat(url, **same).json()
        prediction = server.predict(messages=json.dumps(MESSAGES), **same)
        assert answer["choices"][0]["message"]["content"] == "".join(prediction["output"]) != ""
        names = [psutil.Process(pid).name() for pid in children(server.process.pid)]
        assert names.count("tritonserver") == 1


def test_sigterm_lets_a_chat_end_and_ends_both(demo_model: Path, tmp_path: Path) -> None:
    with both(demo_model, tmp_path) as (server, url):
        family = children(server.process.pid)
        with streamed_chat(url, max_tokens=200, min_tokens=200) as events:
            next(events)
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: chat(url).status_code == 503, 10, "a chat that is refused")
            assert httpx.get(f"{url}/health/ready", trust_env=False).status_code == 503
            *_, last, done = events
        assert (last["choices"][0]["finish_reason"], done) == ("length", "[DONE]")
        assert server.process.wait(60) == 0
        wait_until(lambda: not any(map(alive, family)), 20, "the end of all processes")


def test_what_takes_too_long_ends_with_an_error(demo_model: Path, tmp_path: Path) -> None:
    with both(demo_model, tmp_path, DRAIN_SECONDS="0.5") as (server, url):
        with (
            streamed_chat(url, max_tokens=1000, min_tokens=1000) as events,
            server.stream(prompt="Hello", max_tokens=1000, min_tokens=1000) as prediction,
        ):
            next(events)
            next(prediction)
            server.process.send_signal(signal.SIGTERM)
            *_, failed, done = events
            *_, (_, completed) = prediction
        assert "send the request again" in failed["error"]["message"]
        assert done == "[DONE]"
        assert "E2105" in json.dumps(completed)
        assert server.process.wait(60) == 0


def test_a_port_that_is_taken_is_named(demo_model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with server_with(port, demo_model, tmp_path) as server:
            assert server.process.wait(60) != 0
    taken = f"OPENAI_PORT: 127.0.0.1, port {port}: Address already in use"
    assert taken in server.log.read_text()


def test_the_face_in_processes_of_its_own(demo_model: Path, tmp_path: Path) -> None:
    several = {"OPENAI_WORKERS": "2", "TRITON_GRPC_PORT": "0"}
    with both(demo_model, tmp_path, **several) as (server, url):
        wait_until(lambda: "processes are ready" in server.log.read_text(), 60, "two processes")
        answer = chat(url, seed=7).json()["choices"][0]["message"]["content"]
        prediction = server.predict(messages=json.dumps(MESSAGES), seed=7, max_tokens=12)
        assert answer == "".join(prediction["output"]) != ""
        family = children(server.process.pid)
        commands = [" ".join(psutil.Process(pid).cmdline()) for pid in family]
        assert sum("openai.worker" in command for command in commands) == 2
        with streamed_chat(url, max_tokens=200, min_tokens=200) as events:
            next(events)
            server.process.send_signal(signal.SIGTERM)
            *_, last, done = events
        assert (last["choices"][0]["finish_reason"], done) == ("length", "[DONE]")
        assert server.process.wait(60) == 0
        wait_until(lambda: not any(map(alive, family)), 20, "the end of all processes")
