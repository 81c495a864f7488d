"""The predictions that run, their cancels and directories, and the messages between two processes."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from cog_triton.faces.cog import live_stream
from cog_triton.faces.cog import predictions as module
from cog_triton.faces.cog.predictions import VARIABLE, Predictions
from tests.support import wait_until


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setattr(module, "REMOVE_SECONDS", 0.0)
    return tmp_path / "predictions"


@pytest.fixture
def predictions(base: Path) -> Predictions:
    return Predictions(base)


async def removed(path: Path) -> bool:
    for _ in range(20):
        await asyncio.sleep(0.005)
        if not path.exists():
            return True
    return False


@pytest.mark.parametrize("status", [200, 409, 0])
def test_a_directory_goes_when_its_prediction_has_ended(
    predictions: Predictions, base: Path, status: int
) -> None:
    async def test() -> None:
        predictions.begin("x")
        assert not await removed(base / "x")
        assert predictions.left() == "1 prediction"
        assert not await predictions.idle_within(0.01)
        predictions.end("x", status)
        assert predictions.left() == ""
        assert await removed(base / "x")

    asyncio.run(test())


@pytest.mark.parametrize("over_first", [True, False])
def test_an_asynchronous_prediction_runs_until_the_predictor_says_that_it_has_ended(
    predictions: Predictions, base: Path, over_first: bool
) -> None:
    async def test() -> None:
        predictions.receive("hello", "prompt")
        predictions.begin("x")
        if over_first:
            predictions.receive("ended", "x")
        predictions.end("x", 202)
        assert predictions.runs("x") != over_first
        assert await removed(base / "x") == over_first
        predictions.receive("ended", "x")
        predictions.receive("ended", "unknown")
        assert await removed(base / "x")
        assert not predictions.runs("x")

    asyncio.run(test())


def test_a_predictor_that_does_not_listen_is_not_waited_for(
    predictions: Predictions, base: Path
) -> None:
    async def test() -> None:
        predictions.begin("x")
        predictions.end("x", 202)
        assert not predictions.runs("x")
        assert not await removed(base / "x"), "it may still run"

    asyncio.run(test())
    predictions.remove_all()
    assert not (base / "x").exists()


def test_a_directory_stays_while_another_request_uses_it(
    predictions: Predictions, base: Path
) -> None:
    async def request(seconds: float) -> None:
        predictions.begin("x")
        await asyncio.sleep(seconds)
        predictions.end("x", 200)

    async def test() -> None:
        longer = asyncio.create_task(request(0.3))
        await asyncio.create_task(request(0))
        assert not await removed(base / "x")
        await longer
        assert await removed(base / "x")

    asyncio.run(test())


def test_others_that_run(predictions: Predictions) -> None:
    async def test() -> None:
        predictions.receive("busy")
        predictions.begin("x")
        predictions.begin("y")
        assert predictions.left() == "2 predictions and requests of another face"
        predictions.receive("idle")
        assert predictions.left() == "2 predictions"

    asyncio.run(test())


def test_what_a_killed_server_leaves_is_removed_by_the_next(
    predictions: Predictions, base: Path
) -> None:
    code = """
        import asyncio, os, signal, sys
        from pathlib import Path
        from cog_triton.faces.cog.predictions import Predictions

        async def begin():
            Predictions(Path(sys.argv[1])).begin("left")

        asyncio.run(begin())
        os.kill(os.getpid(), signal.SIGKILL)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(base)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert (base / "left").exists()
    (base / "of_others" / "outputs").mkdir(parents=True)

    async def begin() -> None:
        predictions.begin("running")

    asyncio.run(begin())
    Predictions(base)
    wait_until(lambda: not (base / "left").exists(), 10, "the removal")
    assert sorted(path.name for path in base.iterdir()) == ["of_others", "running"]


def test_cancels_reach_a_predictor_that_listens(
    predictions: Predictions, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[str, ...]] = []
    monkeypatch.setattr(predictions, "send", lambda *words: sent.append(words))

    async def test() -> None:
        predictions.begin("x")
        assert not predictions.cancel("x"), "only Cog's server can"
        predictions.receive("hello", "prompt")
        assert not predictions.cancel("y"), "there is no such prediction"
        assert predictions.cancel("x")
        assert predictions.cancel("x")
        predictions.end("x", 200)
        predictions.begin("x")
        predictions.end("x", 200)

    asyncio.run(test())
    assert sent == [("cancel", "x"), ("cancel", "x"), ("forget", "x")]


WORKER = """
import asyncio
from cog_triton.faces.cog import live_stream

async def main():
    stopped = asyncio.Event()
    handlers = {"stop": stopped.set, "drain": lambda: print("drain", flush=True)}
    live_stream.listen(handlers, ("prompt", "messages"))
    print("listening", flush=True)
    await stopped.wait()
    print(*sorted(live_stream._cancelled_early), flush=True)
    live_stream.tell("busy")

asyncio.run(main())
"""


def test_messages_both_ways(predictions: Predictions) -> None:
    async def exchange(worker: subprocess.Popen[str]) -> None:
        predictions.listen()
        assert worker.stdout is not None
        assert worker.stdout.readline() == "listening\n"
        predictions.send("drain")
        predictions.send("unknown")
        assert worker.stdout.readline() == "drain\n"
        for words in (["cancel", "a"], ["cancel", "b"], ["cancel", "c"], ["forget", "b"], ["stop"]):
            predictions.send(*words)
        assert worker.stdout.read() == "a c\n"
        await asyncio.sleep(0.1)

    command = [sys.executable, "-c", WORKER]
    # Cog's server is written in Rust, which closes no descriptor of its children.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, close_fds=False) as worker:
        asyncio.run(exchange(worker))
    assert (predictions.listening, predictions.inputs) == (True, ["prompt", "messages"])
    assert predictions.left() == "requests of another face"


def test_without_a_front_nothing_is_listened_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)

    async def test() -> None:
        live_stream.listen({"stop": lambda: pytest.fail("there is no front")})

    asyncio.run(test())
