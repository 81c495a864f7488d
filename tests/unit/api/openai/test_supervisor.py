"""Worker processes: what they are started with, and when they are started again."""

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from cog_triton.api.openai import supervisor
from cog_triton.api.openai.supervisor import RestartPolicy, WorkerConfig, Workers
from cog_triton.settings import read_settings

pytestmark = pytest.mark.anyio
SETTINGS = read_settings(
    {"OPENAI_WORKERS": "3", "MAX_RUNNING": "10", "MAX_WAITING": "4", "TOKENIZER": "org/name"}
)


async def workers(
    listener: socket.socket, on_given_up: Callable[[str], object] = lambda _: None
) -> Workers:
    return Workers(
        SETTINGS,
        listener,
        address="127.0.0.1:8001",
        triton_model="ensemble",
        context_length=None,
        models=["m", "other"],
        on_given_up=on_given_up,
    )


async def test_a_worker_reads_the_configuration_that_it_was_started_with() -> None:
    with socket.socket() as listener:
        config = (await workers(listener)).config(2, Path("/tmp/metrics"))
        *command, argument = config.command()
        assert command[1:] == ["-m", "cog_triton.api.openai.workers"]
        assert WorkerConfig.model_validate_json(argument) == config
        assert config.listener == listener.fileno()
        assert config.models == ("m", "other")


async def test_each_worker_has_its_part_of_the_limits() -> None:
    with socket.socket() as listener:
        config = (await workers(listener)).config(0, Path("/tmp/metrics"))
    applied = config.applied_to(SETTINGS)
    assert (applied.max_running, applied.max_waiting) == (4, 2)
    assert applied.tokenizer_dir == "org/name"
    assert applied.openai_workers == 3


@pytest.mark.parametrize(
    "argument",
    ["[]", '{"number": 0}', '{"number": "first", "listener": 3}'],
    ids=["list", "fields missing", "type"],
)
def test_a_configuration_of_another_form_is_refused(argument: str) -> None:
    with pytest.raises(ValidationError):
        WorkerConfig.model_validate_json(argument)


def test_a_worker_that_was_never_ready_is_not_replaced() -> None:
    assert RestartPolicy().on_end(was_ready=False) is None


def test_a_worker_that_was_ready_is_replaced_at_once() -> None:
    policy = RestartPolicy()
    for _ in range(3):
        policy.on_ready()
        assert policy.on_end(was_ready=True) == 0


def test_pauses_between_failed_starts_grow_until_one_succeeds() -> None:
    policy = RestartPolicy()
    policy.on_ready()
    pauses = [policy.on_end(was_ready=False) for _ in range(7)]
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    policy.on_ready()
    assert policy.on_end(was_ready=True) == 0
    assert policy.on_end(was_ready=False) == 1


async def test_a_worker_that_cannot_start_ends_the_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "MODULE", "cog_triton.no_such_module")
    ready: list[int] = []
    with socket.socket() as listener:
        await asyncio.wait_for((await workers(listener)).run(lambda: ready.append(1)), 60)
    assert not ready
    assert "a worker ended before it was ready; stopping all workers" in caplog.text


async def test_workers_that_end_are_replaced_until_the_server_stops(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each is ready at once and ends; one ready call is made for all."""
    (tmp_path / "brief_worker.py").write_text("import os; os.write(1, b'.')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(supervisor, "MODULE", "brief_worker")
    ready: list[int] = []
    started: list[int] = []
    with socket.socket() as listener:
        server = await workers(listener)
        command = WorkerConfig.command

        def counted(config: WorkerConfig) -> list[str]:
            started.append(config.number)
            # One worker may be replaced several times before another has had the processor at all.
            if len(started) >= 9 and ready:
                server.stop()
            return command(config)

        monkeypatch.setattr(WorkerConfig, "command", counted)
        await asyncio.wait_for(server.run(lambda: ready.append(1)), 60)
    assert len(started) >= 9
    assert ready == [1]


async def test_a_worker_tells_of_a_models_process_that_was_given_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = "import os, signal; os.write(1, b'.preprocessing\\n'); signal.pause()\n"
    (tmp_path / "telling_worker.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(supervisor, "MODULE", "telling_worker")
    told: list[str] = []

    def note(model: str) -> None:
        told.append(model)
        if len(told) == SETTINGS.openai_workers:
            server.stop()

    with socket.socket() as listener:
        server = await workers(listener, note)
        await asyncio.wait_for(server.run(lambda: None), 60)
    assert told == ["preprocessing"] * SETTINGS.openai_workers
