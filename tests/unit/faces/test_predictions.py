"""The predictions that run, their cancels, and the directories that they leave."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from cog_triton.faces.cog.predictions import Predictions


class Running(Predictions):
    """Notes the messages to the predictor."""

    def __init__(self, base: Path) -> None:
        self.sent: list[tuple[str, ...]] = []
        self.base = base / "predictions"
        super().__init__(lambda *words: self.sent.append(words), self.base)

    def directory_of(self, identifier: str) -> Path:
        path = self.base / identifier
        (path / "outputs").mkdir(parents=True)
        return path


@pytest.fixture
def predictions(tmp_path: Path) -> Running:
    return Running(tmp_path)


@pytest.mark.parametrize("status", [200, 409, None])
def test_a_directory_goes_when_its_prediction_has_ended(
    predictions: Running, status: int | None
) -> None:
    path = predictions.directory_of("x")
    (path / "outputs" / "file").touch()
    predictions.begin("x")
    predictions.sweep()
    assert path.exists()
    predictions.end("x", status)
    predictions.sweep()
    assert not path.exists()
    assert len(predictions) == 0


@pytest.mark.parametrize("over_first", [True, False])
def test_an_asynchronous_prediction_runs_until_the_predictor_says_that_it_has_ended(
    predictions: Running, over_first: bool
) -> None:
    predictions.listening = True
    path = predictions.directory_of("x")
    (path / "outputs" / "file").touch()
    predictions.begin("x")
    if over_first:
        predictions.over("x")
    predictions.end("x", 202)
    assert predictions.background == (set() if over_first else {"x"})
    predictions.sweep()
    assert path.exists() == (not over_first)
    predictions.over("x")
    predictions.sweep()
    assert not path.exists()
    assert len(predictions) == 0


def test_a_predictor_that_does_not_listen_is_not_waited_for(predictions: Running) -> None:
    path = predictions.directory_of("x")
    predictions.begin("x")
    predictions.end("x", 202)
    assert len(predictions) == 0
    predictions.sweep()
    assert path.exists(), "it may still run"
    predictions.remove_all()
    assert not path.exists()


def test_a_directory_stays_while_another_request_uses_it(predictions: Running) -> None:
    path = predictions.directory_of("x")
    predictions.begin("x")
    predictions.begin("x")
    predictions.end("x", 200)
    predictions.sweep()
    assert path.exists()
    predictions.end("x", 200)
    predictions.sweep()
    assert not path.exists()


def test_others_directories_stay(predictions: Running) -> None:
    path = predictions.directory_of("y")
    predictions.sweep_abandoned()
    predictions.remove_all()
    assert path.exists()


def test_what_a_killed_server_leaves_is_removed_by_the_next(tmp_path: Path) -> None:
    code = """
        import os, signal, sys
        from pathlib import Path
        from cog_triton.faces.cog.predictions import Predictions
        predictions = Predictions(print, Path(sys.argv[1], "predictions"))
        for name in ("x", "../y"):
            predictions.begin(name)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    running, other = Running(tmp_path), Running(tmp_path)
    other.begin("other")
    left, others = running.directory_of("x"), other.directory_of("other")
    (tmp_path / "y").mkdir()
    running.sweep_abandoned()
    assert (left.exists(), others.exists(), (tmp_path / "y").exists()) == (False, True, True)
    running.remove_all()
    other.end("other", 200)
    other.remove_all()
    assert not list(tmp_path.glob("*.ids"))
    assert not others.exists()


def test_the_list_of_ids_stays_short(predictions: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cog_triton.faces.cog.predictions.LONG_LIST", 100)
    for i in range(50):
        predictions.begin(f"x{i}")
        predictions.end(f"x{i}", 200)
    predictions.begin("runs")
    predictions.sweep()
    (file,) = predictions.base.parent.glob("*.ids")
    assert file.read_text() == "runs\n"


def test_cancels_reach_a_predictor_that_listens(predictions: Running) -> None:
    predictions.begin("x")
    assert not predictions.cancel("x"), "only Cog's server can"
    predictions.listening = True
    assert not predictions.cancel("y"), "there is no such prediction"
    assert predictions.cancel("x")
    assert predictions.cancel("x")
    predictions.end("x", 200)
    predictions.begin("x")
    predictions.end("x", 200)
    assert predictions.sent == [("cancel", "x"), ("cancel", "x"), ("forget", "x")]
