"""A soak: streams on scripted answers, goals by hand, the watch on real processes."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import psutil  # type: ignore[import-untyped, unused-ignore]
import pytest

from cog_triton.cli import main
from tests.support import load_cases
from tools.benchmark.targets import Endpoints, Inputs, Target
from tools.server_sent_events import CUT, AnswerError, Part
from tools.soak import load, watch
from tools.soak.load import ID_PREFIX, Answer, Streams, Tally, difference, pool
from tools.soak.report import judge, report_of
from tools.soak.run import KINDS, phases
from tools.soak.watch import Phase, Watch, Watched

CASES = load_cases(__file__, "soak.yaml")
PARTS = [Part("a", 1, [1]), Part("b", 2, [2])]


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "LEFT_SHARE", 0.0)
    monkeypatch.setattr(load, "FIRST_PAUSE", 0.0)


@pytest.mark.parametrize(("came", "whole", "lost", "wrong"), CASES["compared"])
def test_an_answer_is_compared(came: list[Any], whole: bool, lost: int, wrong: int) -> None:
    assert difference(Answer("abcd", 4, [1, 2, 3, 4]), Answer(*came), whole=whole) == (lost, wrong)


class Scripted(Target):
    """Answers as it is told, once for each request: parts, an error, or silence."""

    name = "scripted"

    def __init__(self, *answers: Sequence[Any]) -> None:
        super().__init__(Endpoints(""))
        self._answers = iter(answers)

    async def ask(self, inputs: Inputs, request_id: str) -> AsyncGenerator[Part, None]:  # noqa: ARG002
        for part in next(self._answers):
            if part == "silence":
                await asyncio.Event().wait()
            if isinstance(part, Exception):
                raise part
            yield part

    async def cancel(self, request_id: str) -> bool:  # noqa: ARG002
        return False

    def connect(self) -> None:
        return


def tally_of(target: Target, requests: int = 1, breaks: Sequence[str] = ()) -> Tally:
    """The outcome of requests whose whole answer is "ab"; nobody leaves but by LEFT_SHARE."""

    async def ask() -> Tally:
        streams = Streams({target: breaks}, pool(1, 0), seed=0)
        streams.expected = [Answer("ab", 2, [1, 2])]
        for _ in range(requests):
            await streams.request(target, 0)
        return streams.tally

    return asyncio.run(ask())


def test_a_retryable_error_is_tried_again_from_the_beginning() -> None:
    error = AnswerError("E2105 gone")
    tally = tally_of(Scripted([PARTS[0], error], [error], PARTS))
    assert (tally.counts["whole"], tally.retries["E2105"], tally.counts["tokens"]) == (1, 2, 2)
    tally = tally_of(Scripted(*[[error]] * 6))
    assert (tally.errors["E2105"], tally.retries["E2105"]) == (1, 5)
    assert tally_of(Scripted([KeyError("x")])).errors == {"KeyError": 1}  # another is not


def test_an_answer_may_break_only_where_something_was_killed() -> None:
    phase = phase_of()
    phase.tally = tally_of(Scripted([PARTS[0], AnswerError("gone", CUT)], PARTS), 2, (CUT,))
    counts = phase.tally.counts
    assert (counts["broken"], counts["lost"], phase.tally.errors) == (1, 0, {})
    assert missed(phase) == ["requests that broke although nothing was killed"]
    phase.recoveries = [{"killed": "worker", "at": 1.0, "token_s": 1.0}]
    assert missed(phase) == []


def test_clients_that_leave_get_a_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "LEFT_SHARE", 1.0)
    monkeypatch.setattr(load, "LATEST_DEPARTURE", 0.01)
    assert tally_of(Scripted([PARTS[0], "silence"])).counts["left"] == 1


def test_a_stream_in_which_nothing_comes_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "SILENCE_SECONDS", 0.01)
    assert tally_of(Scripted([PARTS[0], "silence"])).errors == {"hung": 1}


def test_phases_share_the_time_or_the_kills_and_take_turns() -> None:
    both = ["simulated", "transformers"]
    two = phases(both, list(KINDS), 120, None)
    expected = [("simulated", "cog", 60), ("transformers", "openai", 60)]
    assert [(p.engine, p.kind, p.seconds) for p in two] == expected
    every = phases(both, list(KINDS), 3600, None)
    assert len({(p.engine, p.kind) for p in every}) == len(every) == 6
    assert [p.kills for p in phases(["simulated"], list(KINDS), 0, 5)] == [1, 2, 2]


@pytest.fixture
def child() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


def test_an_end_is_a_crash_unless_the_soak_caused_it(child: subprocess.Popen[bytes]) -> None:
    seen = Watch(child.pid)  # and none of the servers that other tests have started here
    process = psutil.Process(child.pid)
    seen.parts[process] = Watched(process, 0.0, "guard", "guard")
    assert seen.kill(Random(0)) is seen.parts[process]
    assert child.wait() == -signal.SIGKILL
    seen.sample()
    assert seen.crashes(float("inf")) == []
    seen.killed.clear()
    assert f"guard {child.pid} ended" in seen.crashes(float("inf"))[0]


def test_what_is_left_is_named_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, child: subprocess.Popen[bytes]
) -> None:
    seen, process = Watch(), psutil.Process(child.pid)
    seen.parts[process] = Watched(process, 0.0, "other")
    region = Path("/dev/shm") / f"cog_triton_{child.pid}_1_test"
    region.touch()
    for name in ("tmp/run-x", "tmp/torchinductor_me", f"coglet/{ID_PREFIX}12", "coglet/other"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setattr(watch, "GONE_SECONDS", 0)
    monkeypatch.setattr(watch, "COGLET", tmp_path / "coglet")
    left = [f"process {child.pid}: other", str(region), "run-x"]
    assert seen.leftovers(tmp_path / "tmp") == [*left, f"{tmp_path}/coglet/{ID_PREFIX}12"]
    assert [path.name for path in (tmp_path / "coglet").iterdir()] == ["other"]
    assert child.wait() == -signal.SIGKILL
    assert not region.exists()


def phase_of(
    *, error: str = "", left: str = "", unfinished: str = "", part: Any = (), **counts: int
) -> Phase:
    """A phase in which nothing was missed but what is given; ``part`` is MB that one grew, and seconds."""
    phase = Phase("simulated", "cog", 100, None, began=0.0, ended=100.0)
    phase.tally.counts.update({"whole": 1, **counts})
    phase.tally.errors.update([error] * bool(error))
    phase.left, phase.unfinished = [left] * bool(left), [unfinished] * bool(unfinished)
    if part:
        by, seconds = part
        rss = [(float(at), 20.0 + (by if at > seconds / 2 else 0)) for at in range(seconds)]
        process = psutil.Process()
        phase.watch.parts[process] = Watched(process, 0.0, "predictor", "predictor", rss)
    return phase


def missed(phase: Phase) -> list[str]:
    return [check.name for check in judge([phase]) if not check.met]


@pytest.mark.parametrize(("phase", "name"), CASES["missed"])
def test_what_is_missed(phase: dict[str, Any], name: str, capsys: Any, tmp_path: Path) -> None:
    found = phase_of(**phase)
    assert missed(found) == [name] * bool(name)
    report_of([found], {}).publish(tmp_path / "soak.json")
    assert f"{len(missed(found))} of 12 goals missed." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--settings", "MODEL=/nothing/there"], "/nothing/there"),
        (["--engine", "nowhere"], "E3001 ConfigurationError: invalid settings: ENGINE='nowhere'"),
    ],
)
def test_a_server_that_cannot_be_started_is_status_2(
    arguments: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--engine", "simulated", *arguments, "--artifact-dir", str(tmp_path)]
    assert main(["soak", *given]) == 2
    assert reason in capsys.readouterr().err
