"""Two ranks of the stand-in, by mpirun or Slurm: rank 1 waits for rank 0 and ends with it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from cog_triton.server.tritonserver import TritonServer
from tests.integration.conftest import make_server, running, settings_for
from tests.integration.test_ranks import (
    Job,
    Launched,
    assert_nothing_left,
    needs_mpirun,
    needs_slurm,
    rank,
    slurm,  # noqa: F401
)
from tests.stand_in.servers import environment, ids, stream, tensors
from tests.support import alive, free_port, processes, wait_until

FOLLOWED = "Terminating worker process since shutdown signal was received from leader"
PACE_MS = 20


@pytest.fixture
def server(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[TritonServer]:
    monkeypatch.setenv("STAND_IN_INTER_TOKEN_MS", str(PACE_MS))
    settings = settings_for(demo_model, **environment(tmp_path, world_size=2))
    with running(make_server(settings, tmp_path)) as server:
        yield server


class Stream(threading.Thread):
    """A request for some tokens, one response each."""

    def __init__(self, server: TritonServer, tokens: int) -> None:
        super().__init__(daemon=True)
        self._responses = stream(server, tensors([5, 6, 7], tokens))
        self.ids: list[list[int]] = []
        self.start()

    def run(self) -> None:
        for response in self._responses:
            self.ids += ids(iter([response]))


@needs_mpirun
def test_a_stop_lets_rank_0_finish_and_rank_1_follow(
    server: TritonServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "tritonserver")
    started = processes(server.shm_prefix)
    running = Stream(server, 60)
    wait_until(lambda: running.ids, 20, "the stream")
    server.stop()
    running.join(20)
    assert len(running.ids) == 60
    assert server.status == 0
    assert f"rank 1: [TensorRT-LLM][INFO] {FOLLOWED}" in caplog.text
    assert not [pid for pid in started if alive(pid)]
    assert_nothing_left(server.shm_prefix)


@needs_mpirun
def test_a_stream_that_takes_too_long_is_cut_off(server: TritonServer) -> None:
    """tritonserver gives up on it, and rank 1, which nobody tells to end then, is ended."""
    started = processes(server.shm_prefix)
    responses = stream(server, tensors([5, 6, 7], 2000))
    next(responses)
    server.stop()
    assert server.status != 0
    assert not [pid for pid in started if alive(pid)]
    assert_nothing_left(server.shm_prefix)


@needs_mpirun
@pytest.mark.parametrize("number", [0, 1])
def test_the_death_of_a_rank_ends_the_other(server: TritonServer, number: int) -> None:
    os.kill(rank(server.shm_prefix, number), signal.SIGKILL)
    wait_until(lambda: not server.alive, 20, "the end of the group")
    assert server.wait() != 0
    assert_nothing_left(server.shm_prefix)


@needs_mpirun
def test_rank_1_blocks_before_it_can_handle_a_signal(server: TritonServer) -> None:
    """Why a stop must not reach it: the signal's default action would be its end."""
    status = Path(f"/proc/{rank(server.shm_prefix, 1)}/status").read_text()
    (caught,) = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")]
    assert not int(caught, 16) >> (signal.SIGTERM - 1) & 1


@needs_mpirun
def test_the_launch_script_stops_in_order(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = environment(tmp_path, world_size=2)
    make_server(settings_for(demo_model, **settings), tmp_path)
    for name, value in (settings | {"STAND_IN_INTER_TOKEN_MS": str(PACE_MS)}).items():
        monkeypatch.setenv(name, value)
    port = free_port()
    ports = [f"--http_port={port}", "--grpc_port=0", "--metrics_port=0"]
    repository = tmp_path / "repository"
    launched = Launched(tmp_path / "log", "--world_size=2", f"--model_repo={repository}", *ports)
    try:
        launched.wait_until_ready()
        with events_of(port) as events:
            next(events)
            launched.process.send_signal(signal.SIGTERM)
            assert len(list(events)) == 49
        assert launched.end() == 0
    finally:
        launched.process.kill()
        launched.process.wait()
    assert not processes(str(repository))
    assert "died" not in launched.said


@contextmanager
def events_of(port: int) -> Iterator[Iterator[str]]:
    """The events of a request for 50 tokens."""
    body = {"text_input": "Hello", "max_tokens": 50, "stream": True}
    url = f"http://127.0.0.1:{port}/v2/models/ensemble/generate_stream"
    with httpx.stream("POST", url, json=body, timeout=60, trust_env=False) as reply:
        yield (line for line in reply.iter_lines() if line.startswith("data:"))


@needs_slurm
def test_a_job_of_slurm_stops_in_order(
    slurm: dict[str, str],  # noqa: F811
    demo_model: Path,
    tmp_path: Path,
) -> None:
    settings = environment(tmp_path, world_size=2)
    make_server(settings_for(demo_model, **settings), tmp_path)
    port = free_port()
    settings |= {"STAND_IN_INTER_TOKEN_MS": str(PACE_MS)}
    job = Job(slurm, tmp_path / "repository", port, mpi="pmi2", **settings)
    job.wait_until_ready()
    with events_of(port) as events:
        next(events)
        job.cancel()
        assert len(list(events)) == 49
    wait_until(lambda: job.ended, 20, "the end of the job")
    wait_until(lambda: not processes(str(tmp_path / "repository")), 20, "the end of the ranks")
    assert "died" not in job.said
