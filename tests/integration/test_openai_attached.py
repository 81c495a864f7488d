"""OpenAI's API on a Triton that runs already, on an old ensemble, and in several processes."""

import itertools
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped, unused-ignore]
import pytest
from google.protobuf import text_format

from cog_triton.protocol.names import IDS_ENSEMBLE
from cog_triton.repository.fill import read_config
from cog_triton.server.tritonserver import TritonServer
from cog_triton.text.tokenizer import Tokenizer
from tests.integration.conftest import Triton, attached, make_server, running, settings_for
from tests.openai_server import ANSWER, OpenAIServer, contents
from tests.support import (
    alive,
    children,
    command,
    free_port,
    limit,
    metrics,
    started_by,
    wait_until,
)

CHAT: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
PACE = {"ENGINE": "simulated", "SIMULATED_INTER_TOKEN_MS": "20"}
NEW_INPUTS = {"seed", "min_tokens", "return_num_input_tokens", "return_num_output_tokens"}


def text_of(server: OpenAIServer, **fields: Any) -> str:
    with server.stream(**{**CHAT, **fields}) as events:
        return contents(events)


def test_a_triton_that_runs_already(
    triton: Triton, demo_model: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    end_ids = f"2,{tokenizer.convert_tokens_to_ids('.')}"
    with attached(triton, demo_model, tmp_path / "log", END_ID=end_ids) as server:
        assert text_of(server).startswith(ANSWER)
        assert server.chat(**CHAT).json()["usage"]["completion_tokens"] == 12
        assert text_of(server, temperature=1.5, seed=3) == text_of(server, temperature=1.5, seed=3)
        assert server.get("/health/ready").status_code == 200
        check_ready_line(server)
        check_several_end_tokens(server)
        assert server.stop() == 0
    assert triton.is_ready()


def check_ready_line(server: OpenAIServer) -> None:
    """Check that it leads to the chat page and to a command that gets an answer."""
    ready, command = server.log.read_text().partition("ready: http")[2].splitlines()[:2]
    page = f"{server.url}/"
    assert f"http{ready}" == f"{server.url}, with a chat page at {page} (Ctrl-C stops it); try"
    assert "<title>" in httpx.get(page, trust_env=False, timeout=limit(60)).text
    assert "/v1/chat/completions" in command  # the demo model has a chat template
    ran = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    (choice,) = json.loads(ran.stdout)["choices"]
    assert choice["message"]["content"]


def check_several_end_tokens(server: OpenAIServer) -> None:
    """Check that a request ends at the full stop, which is no end token for Triton's preprocessing.

    Requests name the first end token, and the API cuts off the others.
    """
    (choice,) = server.chat(**CHAT | {"max_tokens": 500}).json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"].startswith(ANSWER)
    assert "." not in choice["message"]["content"]


@pytest.mark.parametrize(
    ("endpoint", "workers", "text"),
    [
        ("localhost", "1", "must be a URL"),
        ("http://x:1", "1", "no Triton is ready"),
        pytest.param("http://127.0.0.1:1", "2", "before it was ready", marks=pytest.mark.rare),
    ],
)
def test_an_endpoint_that_is_none(
    endpoint: str,
    workers: str,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("TRITON_START_TIMEOUT", "0.5")
    monkeypatch.setenv("STORE", "0")
    monkeypatch.setenv("PORT", str(free_port()))
    done = command("openai", "--triton-endpoint", endpoint, "--workers", workers)
    assert done.returncode != 0
    assert text in done.stderr + caplog.text


@pytest.fixture(scope="module")
def old_triton(
    demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    """An ensemble as that of TensorRT-LLM was before May 2025: old names of inputs."""
    directory = tmp_path_factory.mktemp("old")
    settings = settings_for(demo_model, ENGINE="simulated", SIMULATED_INTER_TOKEN_MS="5")
    server = make_server(settings, directory)
    repository = directory / "repository"
    os.rename(repository / IDS_ENSEMBLE, directory / IDS_ENSEMBLE)
    file = repository / "ensemble" / "config.pbtxt"
    config = read_config(file)
    kept = [tensor for tensor in config.input if tensor.name not in NEW_INPUTS]
    del config.input[:]
    config.input.extend(kept)
    for step in config.ensemble_scheduling.step:
        for key in [key for key, value in step.input_map.items() if value in NEW_INPUTS]:
            del step.input_map[key]
    for tensor in config.input:
        if tensor.name in ("bad_words", "stop_words"):
            tensor.optional = False
    file.write_text(text_format.MessageToString(config))
    with running(server) as started:
        yield started


@pytest.fixture(scope="module")
def old_face(
    old_triton: TritonServer, demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OpenAIServer]:
    with attached(old_triton, demo_model, tmp_path_factory.mktemp("old_face") / "log") as server:
        yield server


@pytest.mark.rare
def test_an_old_ensemble_streams_its_text(old_face: OpenAIServer) -> None:
    reply = old_face.chat(max_tokens=20, seed=1, min_tokens=2).json()
    text = reply["choices"][0]["message"]["content"]
    assert text
    assert reply["usage"]["completion_tokens"] == pytest.approx(20, abs=4)
    assert text_of(old_face, max_tokens=20) == text
    (stopped,) = old_face.chat(max_tokens=40, stop=text[10:14]).json()["choices"]
    assert stopped["finish_reason"] == "stop"
    assert stopped["message"]["content"] == text[: text.index(text[10:14])]


@pytest.mark.rare
@pytest.mark.parametrize(
    "fields",
    [{"logit_bias": {"5": 1}}, {"min_p": 0.1}, {"prompt": [1, 2]}, {"stop_token_ids": [5]}],
)
def test_what_an_old_ensemble_does_not_know_is_named(
    old_face: OpenAIServer, fields: dict[str, Any]
) -> None:
    reply = old_face.complete(**fields)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith(*fields)


@pytest.mark.rare
def test_a_triton_that_goes_and_comes_back(demo_model: Path, tmp_path: Path) -> None:
    settings = settings_for(demo_model, **PACE, TRITON_GRPC_PORT=str(free_port()))
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    with running(make_server(settings, tmp_path / "first")) as first:
        openai = attached(first, demo_model, tmp_path / "log", RESUME_TIMEOUT="0.2")
        with openai as server, server.stream(max_tokens=2000, min_tokens=2000) as events:
            next(events)
            first.kill()
            *_, failed, done = events
            assert (failed["error"]["code"], done) == ("E2105", "[DONE]")
            reply = server.chat(**CHAT)
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "E2105")
            assert int(reply.headers["Retry-After"]) > 0
            assert server.get("/health/ready").status_code == 503
            with running(make_server(settings, tmp_path / "second")):
                assert server.chat(**CHAT).status_code == 200
                assert server.get("/health/ready").status_code == 200


# Several processes, in the order of what happens to them: the last test ends them.


@pytest.fixture(scope="module")
def several(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAIServer]:
    """Two processes that answer, and one that runs Triton."""
    patience = {"TRITON_RESTARTS": "3", "RESUME_TIMEOUT": str(limit(60))}
    environment = {**PACE, **patience, "MODEL": str(demo_model)}
    log = tmp_path_factory.mktemp("several") / "log"
    with OpenAIServer(environment, log, "--workers", "2") as server:
        yield server


def workers(server: OpenAIServer) -> set[int]:
    """Ids of the processes that answer."""
    return set(started_by(server.process.pid, "openai.workers"))


def test_figures_of_several_processes_are_one(several: OpenAIServer) -> None:
    for _ in range(10):  # each on a connection of its own
        assert several.chat(max_tokens=5).status_code == 200
    several.chat(model="nothing")
    tokens = 'vllm:generation_tokens_total{model_name="demo"}'
    running = 'vllm:num_requests_running{model_name="demo"}'

    def complete() -> bool:
        seen = metrics(several.address)
        return seen.get(tokens) == 50 and seen[running] == 0

    wait_until(complete, 60, "the figures of all")
    for _ in range(6):
        seen = metrics(several.address)
        assert seen['vllm:time_to_first_token_seconds_count{model_name="demo"}'] == 10
        assert seen['cog_triton_requests_total{outcome="admitted"}'] == 10
        assert seen[running] == 0
        assert seen['cog_triton_errors_total{code="",status="404"}'] == 1


def test_each_of_several_processes_has_the_limits(several: OpenAIServer) -> None:
    """All of the limits, at a single process: test_limits.py."""
    long = {"X": "a" * 40_000}
    foreign = {"Origin": "https://evil.example"}
    for _ in range(10):  # each on a connection of its own
        assert several.get("/health", headers=long).status_code == 431
        assert several.post("/v1/completions", {}, headers=foreign).status_code == 403


def test_an_answer_goes_on_after_tritons_end(several: OpenAIServer) -> None:
    whole = several.chat(max_tokens=100, seed=1).json()["choices"][0]["message"]["content"]
    with several.stream(max_tokens=100, seed=1) as events:
        next(events)
        named = {psutil.Process(pid).name(): pid for pid in children(several.process.pid)}
        os.kill(named["tritonserver"], signal.SIGKILL)
        assert contents(events) == whole


def test_a_process_that_triton_gave_up_is_replaced(several: OpenAIServer) -> None:
    """The error comes to a worker, and its server is the one that can start another Triton."""
    whole = several.chat(max_tokens=20, seed=1).json()["choices"][0]["message"]["content"]
    (given_up,) = started_by(several.process.pid, "/preprocessing/1/model.py")
    os.kill(given_up, signal.SIGSTOP)
    answer = several.chat(max_tokens=20, seed=1).json()
    assert "choices" in answer, answer
    assert answer["choices"][0]["message"]["content"] == whole
    assert not alive(given_up)


def test_another_takes_the_place_of_a_worker_that_ends(several: OpenAIServer) -> None:
    """Its streams end with it: nobody else has their connections. The other's go on."""
    killed, kept = workers(several)
    with ThreadPoolExecutor(6) as pool:
        whole, streams = [*pool.map(partial(stream_of, several), range(6))], []
        for standing, seeds in ((killed, (0, 1, 2)), (kept, (3, 4, 5))):
            os.kill(standing, signal.SIGSTOP)  # so that the other has to take them
            begun = [Event() for _ in seeds]
            streams += [
                pool.submit(stream_of, several, *one) for one in zip(seeds, begun, strict=True)
            ]
            assert all(event.wait(limit(60)) for event in begun)
            os.kill(standing, signal.SIGCONT)
        os.kill(killed, signal.SIGKILL)
        assert [stream.result() for stream in streams] == [*whole[:3], None, None, None]
    wait_until(lambda: len(workers(several) - {killed}) == 2, 60, "another worker")
    figures = Path(psutil.Process(kept).environ()["PROMETHEUS_MULTIPROC_DIR"])
    assert not list(figures.glob(f"gauge_live*_{killed}.db"))
    os.kill(kept, signal.SIGSTOP)  # so that the other has to answer
    try:
        wait_until(lambda: answers(several), 60, "an answer")
    finally:
        os.kill(kept, signal.SIGCONT)
    assert "starting another" in several.log.read_text()


def stream_of(server: OpenAIServer, seed: int, begun: Event | None = None) -> str | None:
    """The text of a stream; None of one that was cut."""
    try:
        with server.stream(max_tokens=150, seed=seed, ignore_eos=True) as events:
            first = next(events)
            if begun is not None:
                begun.set()
            return contents(itertools.chain([first], events))
    except httpx.RemoteProtocolError:
        return None


def answers(server: OpenAIServer) -> bool:
    body = {"model": "demo", "prompt": "Hello", "max_tokens": 3}
    try:
        reply = httpx.post(
            f"{server.url}/v1/completions", json=body, timeout=limit(2), trust_env=False
        )
    except httpx.TransportError:  # the one that stands still has it, until it goes on
        return False
    return reply.status_code == 200


def test_several_processes_end_in_order(several: OpenAIServer) -> None:
    below = children(several.process.pid)
    assert len(workers(several)) == 2
    with several.stream(max_tokens=50) as events:
        next(events)
        several.process.send_signal(signal.SIGTERM)
        *_, last, done = events
    assert (last["choices"][0]["finish_reason"], done) == ("length", "[DONE]")
    assert several.process.wait(timeout=limit(60)) == 0
    assert not [pid for pid in below if alive(pid)]
