"""The predictions that run, their cancels, and the directories that they leave."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cog_triton.faces.cog.predictions import Predictions


class Running(Predictions):
    """Notes the messages to the predictor, and removes when it is asked to."""

    def __init__(self, base: Path) -> None:
        self.sent: list[tuple[str, ...]] = []
        self.due: list[tuple[Callable[[str], object], str]] = []
        self.base = base / "predictions"
        super().__init__(lambda *words: self.sent.append(words), self.base)

    def directory_of(self, identifier: str) -> Path:
        path = self.base / identifier
        (path / "outputs").mkdir(parents=True, exist_ok=True)
        (path / "outputs" / "file").touch()
        return path

    def call_later(self, _: float, __: object, remove: Callable[[str], object], name: str) -> None:
        self.due.append((remove, name))

    def removes(self, path: Path) -> bool:
        while self.due:
            remove, name = self.due.pop()
            remove(name)
        return not path.exists()


TASK: Any = object()


@pytest.fixture
def predictions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Running:
    found = Running(tmp_path)
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: found)
    return found


@pytest.mark.parametrize("status", [200, 409, None])
def test_a_directory_goes_when_its_prediction_has_ended(
    predictions: Running, status: int | None
) -> None:
    path = predictions.directory_of("x")
    predictions.begin("x", TASK)
    assert not predictions.removes(path)
    assert predictions.left() == "1 prediction"
    predictions.end("x", TASK, status)
    assert predictions.removes(path)
    assert predictions.left() == ""


@pytest.mark.parametrize("over_first", [True, False])
def test_an_asynchronous_prediction_runs_until_the_predictor_says_that_it_has_ended(
    predictions: Running, over_first: bool
) -> None:
    predictions.receive("hello", "prompt")
    path = predictions.directory_of("x")
    predictions.begin("x", TASK)
    if over_first:
        predictions.receive("ended", "x")
    predictions.end("x", TASK, 202)
    assert predictions.running == (set() if over_first else {"x"})
    assert predictions.removes(path) == over_first
    predictions.receive("ended", "x")
    predictions.receive("ended", "unknown")
    assert predictions.removes(path)
    assert not predictions.running


def test_a_predictor_that_does_not_listen_is_not_waited_for(predictions: Running) -> None:
    path = predictions.directory_of("x")
    predictions.begin("x", TASK)
    predictions.end("x", TASK, 202)
    assert not predictions.running
    assert not predictions.removes(path), "it may still run"
    predictions.remove_all()
    assert not path.exists()


def test_a_directory_stays_while_another_request_uses_it(predictions: Running) -> None:
    path = predictions.directory_of("x")
    predictions.begin("x", TASK)
    predictions.begin("x", TASK)
    predictions.end("x", TASK, 200)
    assert not predictions.removes(path)
    predictions.end("x", TASK, 200)
    assert predictions.removes(path)


def test_others_that_run(predictions: Running) -> None:
    predictions.receive("busy")
    predictions.begin("x", TASK)
    predictions.begin("y", TASK)
    assert predictions.left() == "2 predictions and requests of another face"
    predictions.receive("idle")
    assert predictions.left() == "2 predictions"


def test_others_directories_stay(predictions: Running) -> None:
    path = predictions.directory_of("y")
    predictions.remove_abandoned()
    predictions.remove_all()
    assert path.exists()


def test_what_a_killed_server_leaves_is_removed_by_the_next(tmp_path: Path) -> None:
    code = """
        import os, signal, sys
        from pathlib import Path
        from cog_triton.faces.cog.predictions import Predictions
        Predictions(print, Path(sys.argv[1], "predictions")).begin("x", None)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    left = tmp_path / "predictions" / "x"
    assert left.exists()
    other = Running(tmp_path)
    other.begin("other", TASK)
    running = Running(tmp_path)
    running.remove_abandoned()
    assert (left.exists(), (tmp_path / "predictions/other").exists()) == (False, True)
    running.remove_all()
    other.remove_all()
    assert not list(tmp_path.glob("*.lock"))
    assert not list((tmp_path / "predictions").iterdir())


def test_cancels_reach_a_predictor_that_listens(predictions: Running) -> None:
    predictions.begin("x", TASK)
    assert not predictions.cancel("x"), "only Cog's server can"
    predictions.receive("hello", "prompt")
    assert not predictions.cancel("y"), "there is no such prediction"
    assert predictions.cancel("x")
    assert predictions.cancel("x")
    predictions.end("x", TASK, 200)
    predictions.begin("x", TASK)
    predictions.end("x", TASK, 200)
    assert predictions.sent == [("cancel", "x"), ("cancel", "x"), ("forget", "x")]
