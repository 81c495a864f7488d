"""A soak: streams on scripted answers, goals by hand, the watch on real processes."""

import signal
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import psutil  # type: ignore[import-untyped, unused-ignore]
import pytest

from cog_triton.cli import main
from tools.soak import watch
from tools.soak.load import ID_PREFIX, Answer, difference
from tools.soak.report import judge, report_of
from tools.soak.watch import Phase, Watch, Watched


@pytest.mark.parametrize(
    ("came", "whole", "lost", "wrong"),
    [
        pytest.param(Answer("abcd", 4), True, 0, 0, id="the same"),
        pytest.param(Answer("abc", 3), True, 1, 0, id="the last is lost"),
        pytest.param(Answer(), True, 4, 0, id="nothing"),
        pytest.param(Answer("abxd", 4), True, 0, 2, id="one is wrong"),
        pytest.param(Answer("abcde", 5), True, 0, 1, id="one too many"),
        pytest.param(Answer("acd", 3), True, 1, 2, id="one is lost within"),
        pytest.param(Answer("abcd", 6), True, 2, 0, id="another number of tokens"),
        pytest.param(Answer("", 4, [1, 2, 3, 5]), True, 0, 1, id="one id is wrong"),
        pytest.param(Answer("ab", 2), False, 0, 0, id="a beginning"),
        pytest.param(Answer("ax", 2), False, 0, 1, id="a wrong beginning"),
    ],
)
def test_an_answer_is_compared(came: Answer, whole: bool, lost: int, wrong: int) -> None:
    assert difference(Answer("abcd", 4, [1, 2, 3, 4]), came, whole=whole) == (lost, wrong)


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


@pytest.mark.parametrize(
    ("phase", "name"),
    [
        ({"whole": -1}, "whole answers"),
        ({"lost": 1}, "tokens lost"),
        ({"wrong": 1}, "tokens wrong"),
        ({"unanswered": 1}, "lines of batches not answered exactly once"),
        ({"changed": 1}, "background responses that differ from the first"),
        ({"error": "E2100"}, "requests that failed"),
        ({"error": "E2105"}, "requests that failed with a retryable error, six times in a row"),
        ({"left": "x"}, "left behind: processes, shared memory, files"),
        ({"unfinished": "x"}, "streams that did not end, or servers that did not come back"),
        ({"part": [6, 100]}, "largest growth of a process's resident memory"),
        pytest.param({"part": [1.5, 100]}, "", id="an allocator's noise"),
        pytest.param({"part": [6, 40]}, "", id="too short to tell"),
    ],
)
def test_what_is_missed(
    phase: dict[str, Any],
    name: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tools.benchmark.report.get_plotlyjs", lambda: "")  # megabytes of a script
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
