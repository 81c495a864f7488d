"""A soak's judgement on figures made by hand, its kills on times made by hand, and its page."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from cog_triton.text.chat import render_chat, set_chat_template
from cog_triton.text.tokenizer import load_tokenizer
from tests.support import ROOT, wait_until
from tools.benchmark.cli import exit_status
from tools.soak.chaos import Kill, Killer, Recovery, choose, crashes, recovery
from tools.soak.cli import run
from tools.soak.expected import Difference, Expected, compare
from tools.soak.faces import (
    CUT,
    AskError,
    Face,
    Piece,
    check_status,
    code_of,
    sse_piece,
)
from tools.soak.judge import Figures, Tally, judge, percentile, recovery_table
from tools.soak.openai_faces import (
    CHAT_TEMPLATE,
    chat_body,
    chat_piece,
    of_flood,
    openai_error,
    refusal,
)
from tools.soak.page import figure_over_time, render
from tools.soak.phase import _RESUMED, PhaseReport, leftovers
from tools.soak.plan import KINDS, Case, Phase, phases, pool
from tools.soak.report import as_json, figures, rate, terminal
from tools.soak.streams import Answer, Departure, Outcome, Streams, difference
from tools.soak.watch import Growth, Part, Sample, Shared, Watch, ends, growths, role_of_part
from tools.soak.worker import Output, Spec, places

WHOLE = Outcome("generate()", 1, "id", "whole", 1.0, 10)
KEPT = Tally()
KEPT.add(WHOLE)


def missed(figures: Figures) -> list[str]:
    return [check.name for check in judge(figures) if not check.met]


def tally(*outcomes: Outcome) -> Tally:
    counted = Tally()
    for outcome in (WHOLE, *outcomes):
        counted.add(outcome)
    return counted


# What is promised


def test_a_soak_without_fault_keeps_every_promise() -> None:
    assert missed(Figures(KEPT, growths=[Growth("predictor", 1, 600, 100, 104.9)])) == []


def test_a_soak_without_answers_shows_nothing() -> None:
    assert missed(Figures(Tally())) == ["whole answers"]


def test_a_lost_token_is_a_miss() -> None:
    assert missed(Figures(tally(replace(WHOLE, lost=1)))) == ["tokens lost"]


def test_a_wrong_token_is_a_miss_also_of_an_answer_that_was_left() -> None:
    assert missed(Figures(tally(replace(WHOLE, end="left", wrong=1)))) == ["tokens wrong"]


def test_an_error_is_a_miss_and_one_that_a_retry_mended_is_none() -> None:
    failed = replace(WHOLE, end="failed", code="E2100")
    assert missed(Figures(tally(failed))) == ["requests that failed"]
    mended = tally(replace(WHOLE, tried=("E2105", "E2106")))
    assert missed(Figures(mended)) == []
    assert mended.retries == {"E2105": 1, "E2106": 1}


def test_a_retryable_error_is_a_miss_of_its_own_after_all_attempts() -> None:
    failed = replace(WHOLE, end="failed", code="E2105", tried=("E2105",) * 5)
    (name,) = missed(Figures(tally(failed)))
    assert "retryable" in name


@pytest.mark.parametrize("what", ["crashes", "left", "unfinished"])
def test_a_crash_a_left_over_and_what_hangs_are_misses(what: str) -> None:
    seen: dict[str, Any] = {what: ["a text"]}
    assert len(missed(Figures(KEPT, **seen))) == 1


def test_a_leak_is_a_miss_and_an_allocators_noise_is_none() -> None:
    leak = Figures(KEPT, growths=[Growth("predictor", 1, 600, 100, 105.1)])
    assert missed(leak) == ["resident memory, most growth of a process"]
    noise = Figures(KEPT, growths=[Growth("guard", 1, 600, 10, 12)])
    assert missed(noise) == []


def test_growth_is_from_the_second_quarter_to_the_last() -> None:
    warming = [(float(at), 50.0 if at < 10 else 100.0) for at in range(41)]
    assert ends(warming) == (100, 100)
    leaking = [(float(at), 100.0 + at) for at in range(41)]
    assert ends(leaking) == (115, 135)


def test_growth_is_judged_of_those_who_ran_long_enough_under_the_load() -> None:
    watch = Watch(1)
    short, long, loading = (1, 0), (2, 0), (3, 1000)
    for key, times in {short: range(50), long: range(100), loading: range(10, 100)}.items():
        watch.parts[key] = Part(*key, "predictor")
        watch.samples[key] = [Sample(float(at), 10.0 + at, 1, 1) for at in times]
    tokens = [float(at) for at in [*range(5, 10), *range(60, 100)]]
    (grown,) = growths(watch, tokens, 95, 60)
    assert (grown.pid, grown.seconds) == (2, 90)


# What came, against what was to come


@pytest.mark.parametrize(
    ("came", "whole", "difference"),
    [
        ("abcd", True, Difference()),
        ("abc", True, Difference(lost=1)),
        ("", True, Difference(lost=4)),
        ("abxd", True, Difference(wrong=2)),
        ("abcde", True, Difference(wrong=1)),
        ("acd", True, Difference(lost=1, wrong=2)),
        ("ab", False, Difference()),
        ("ax", False, Difference(wrong=1)),
    ],
)
def test_an_answer_is_compared(came: str, whole: bool, difference: Difference) -> None:
    assert compare("abcd", came, whole=whole) == difference


class Scripted(Face):
    """Answers as it is told: pieces, or an error; then the next answer."""

    name = "scripted"
    has_ids = True

    def __init__(self, *answers: list[Any]) -> None:
        self._answers = iter(answers)
        self.cancelled: list[str] = []
        self._cancel = asyncio.Event()

    async def ask(self, case: Case, request_id: str) -> AsyncGenerator[Piece, None]:  # noqa: ARG002
        for piece in next(self._answers):
            if piece == "silence":
                await self._cancel.wait()
                raise AskError("canceled", "")
            if isinstance(piece, Exception):
                raise piece
            yield piece

    async def cancel(self, request_id: str) -> bool:
        self.cancelled.append(request_id)
        self._cancel.set()
        return True


ANSWER = Expected("ab", (1, 2))
PIECES = [Piece("a", 1, (1,)), Piece("b", 1, (2,))]


def outcome_of(
    face: Face, departure: Departure | None = None, expected: Expected = ANSWER
) -> Outcome:
    streams = Streams([face], pool(1, 0), [expected], lambda _: None, seed=0)
    return asyncio.run(streams._request(face, pool(1, 0)[0], departure))


def test_a_stream_that_brings_all_is_whole() -> None:
    outcome = outcome_of(Scripted(PIECES))
    assert (outcome.end, outcome.tokens, outcome.lost, outcome.wrong) == ("whole", 2, 0, 0)


def test_a_stream_that_ends_early_has_lost_tokens() -> None:
    assert outcome_of(Scripted(PIECES[:1])).lost == 1


def test_ids_are_compared_where_the_text_is_the_same() -> None:
    assert outcome_of(Scripted([Piece("ab", 2, (1, 3))])).wrong == 1


def test_text_alone_is_compared_with_its_number_of_tokens() -> None:
    face = Scripted()
    face.has_ids = False
    assert not difference(face, ANSWER, Answer("ab", 2), whole=True)
    assert difference(face, ANSWER, Answer("ab", 3), whole=True) == Difference(lost=1)


def test_a_retryable_error_is_tried_again_from_the_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tools.soak.streams.FIRST_PAUSE", 0)
    error = AskError("E2105", "gone")
    outcome = outcome_of(Scripted([PIECES[0], error], [error], PIECES))
    assert (outcome.end, outcome.tried, outcome.tokens) == ("whole", ("E2105", "E2105"), 2)
    outcome = outcome_of(Scripted(*[[error]] * 6))
    assert (outcome.end, outcome.code, len(outcome.tried)) == ("failed", "E2105", 5)


def test_on_a_face_that_does_not_resume_a_stream_breaks_with_its_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tools.soak.streams.FIRST_PAUSE", 0)
    face = Scripted([PIECES[0], AskError("E2105", "gone")])
    face.breaks = frozenset({"E2105"})
    broken = outcome_of(face)
    assert (broken.end, broken.lost) == ("broken", 0)
    assert missed(Figures(tally(broken))) == []
    undisturbed = tally(broken)
    undisturbed.excuse([])
    assert missed(Figures(undisturbed)) == ["requests that failed"]


def test_a_connection_breaks_with_the_process_that_had_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.soak.streams.FIRST_PAUSE", 0)
    face = Scripted([PIECES[0], AskError(CUT, "gone")])
    face.breaks = frozenset({CUT})
    counted = tally(outcome_of(face))
    assert (counted.broken, counted.cut) == (1, 1)
    counted.excuse(["tritonserver", "face"])
    assert missed(Figures(counted)) == []
    counted.excuse(["tritonserver"])
    assert missed(Figures(counted)) == ["requests that failed"]


def test_another_error_is_not_tried_again() -> None:
    outcome = outcome_of(Scripted([AskError("E2100", "why")]))
    assert (outcome.end, outcome.code, outcome.note) == ("failed", "E2100", "why")
    assert outcome_of(Scripted([KeyError("x")])).code == "KeyError"


def test_a_client_that_leaves_or_cancels_gets_a_beginning() -> None:
    gone = Scripted([PIECES[0], "silence"])
    assert outcome_of(gone, Departure(0.01, cancels=False)).end == "left"
    assert not gone.cancelled
    cancels = Scripted([PIECES[0], "silence"])
    assert outcome_of(cancels, Departure(0.01, cancels=True)).end == "left"
    assert cancels.cancelled


def test_a_stream_in_which_nothing_comes_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.soak.streams.SILENCE_SECONDS", 0.01)
    assert outcome_of(Scripted([PIECES[0], "silence"])).code == "hung"


# What Cog says


def test_events_of_cog_are_pieces_or_errors() -> None:
    assert sse_piece("output", {"chunk": "a", "index": 0}) == Piece("a")
    assert sse_piece("metric", {"name": "output_token_count", "value": 7}) == Piece("", 7)
    assert sse_piece("metric", {"name": "other", "value": 7}) is None
    assert sse_piece("completed", {"status": "succeeded"}) is None
    with pytest.raises(AskError) as failed:
        sse_piece("completed", {"status": "failed", "error": "E2105 TritonUnavailable: gone"})
    assert (failed.value.code, failed.value.retryable) == ("E2105", True)
    with pytest.raises(AskError, match="cancelled"):
        check_status({"status": "canceled"})


def test_events_of_openai_are_pieces_or_errors() -> None:
    delta = {"choices": [{"delta": {"content": "a"}}], "usage": None}
    assert chat_piece(json.dumps(delta).encode()) == Piece("a")
    assert chat_piece(b'{"choices": [{"delta": {}}]}') is None
    assert chat_piece(b'{"choices": [], "usage": {"completion_tokens": 7}}') == Piece("", 7)
    with pytest.raises(AskError) as failed:
        chat_piece(b'{"error": {"message": "gone", "code": "E2105"}}')
    assert (failed.value.code, failed.value.retryable) == ("E2105", True)
    full = b'{"error": {"message": "full", "code": "rate_limit_exceeded"}}'
    assert openai_error(full, 429).retryable
    assert openai_error(b"Bad gateway", 502).code == "HTTP 502"
    assert refusal(429, {"Retry-After": "3"}, full).code == "E2106"
    assert refusal(429, {}, full).code == "no Retry-After"
    assert refusal(500, {}, b"").code == "HTTP 500"


def test_a_flood_has_one_answer_and_errors_that_may_be_tried_again() -> None:
    full, piece = AskError("E2106", "full"), Piece("a", 1)
    assert of_flood([full, piece, piece]) == piece
    floods: list[tuple[list[Piece | AskError], str]] = [
        ([full, full], "E2106"),
        ([piece, Piece("b", 1)], "answers differ"),
        ([piece, full, AskError("HTTP 500", "")], "HTTP 500"),
    ]
    for answers, code in floods:
        with pytest.raises(AskError) as failed:
            of_flood(answers)
        assert failed.value.code == code


def test_a_chat_has_the_tokens_of_its_prompt(demo_model: Path) -> None:
    tokenizer = load_tokenizer(str(demo_model))
    set_chat_template(tokenizer, CHAT_TEMPLATE)
    case = pool(1, 0)[0]
    text = render_chat(tokenizer, chat_body(case, "demo")["messages"])
    alone = tokenizer.encode(case.prompt)
    assert tokenizer.encode(text, add_special_tokens=False) == alone


def test_the_code_of_an_error_is_in_its_text() -> None:
    assert code_of("E2104 TritonMalformedEvent: …") == "E2104"
    assert code_of("Already running") == "no code"


# What is done


def test_phases_share_the_time_and_take_turns() -> None:
    both = ["simulated", "transformers"]
    short = phases(both, list(KINDS), 120)
    assert short == [
        Phase("simulated", "deployment", "grpc", 30),
        Phase("transformers", "cog", "http", 30),
        Phase("simulated", "openai", "grpc", 30),
        Phase("transformers", "attached", "grpc", 30),
    ]
    assert len(set(phases(both, list(KINDS), 600))) == 9
    long = phases(both, list(KINDS), 2400)
    assert len(set(long)) == 12
    assert {phase.seconds for phase in long} == {200}
    assert [phase.seconds for phase in phases(["simulated"], ["cog"], 6)] == [6]


def test_kills_are_shared_out() -> None:
    assert [phase.kills for phase in phases(["simulated"], ["deployment"], 60, 5)] == [3, 2]
    assert [phase.kills for phase in phases(["simulated"], ["deployment"], 60, 1)] == [1]


def test_the_pool_follows_its_seed() -> None:
    assert pool(8, 1) == pool(8, 1) != pool(8, 2)
    assert len({case.prompt for case in pool(64, 1)}) == 64
    assert {case.request.greedy for case in pool(64, 1)} == {True, False}


# Kills

GUARD = Part(1, 100, "guard")
STUBS = [Part(2, 100, "preprocessing", stub=True), Part(3, 100, "tensorrt_llm", stub=True)]
SERVER = Part(4, 100, "tritonserver")


def test_every_kind_of_part_is_killed_and_nothing_else() -> None:
    parts = [GUARD, SERVER, *STUBS, Part(5, 100, "predictor"), Part(6, 100, "face")]
    random = Random(0)
    chosen = [choose(parts, random) for _ in range(200)]
    assert {part.pid for part in chosen if part} == {1, 2, 3, 4, 6}
    assert choose([], random) is None


def test_a_kill_waits_for_the_server_to_be_back() -> None:
    killer = Killer(Random(0), pause=2)
    assert not killer.due(10, back=False)
    assert not killer.due(11, back=True)
    assert not killer.due(11, back=True)
    assert killer.due(13.1, back=True)


def test_a_kill_is_of_a_process() -> None:
    victim = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    killer = Killer(Random(0), pause=2)
    kill = killer.kill(7, [Part(victim.pid, 100, "guard")])
    assert victim.wait() == -9
    assert kill == Kill(7, "guard", victim.pid, 1.0)
    assert killer.kill(7, []) is None
    assert killer.kills == [kill]


def test_a_process_of_the_openai_face_has_a_life_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    face = Part(6, 300, "face")
    monkeypatch.setattr("tools.soak.chaos.choose", lambda *_: face)
    monkeypatch.setattr("os.kill", lambda *_: None)
    kill = Killer(Random(0), pause=2).kill(7, [GUARD, face])
    assert kill == Kill(7, "face", 6, 3.0)
    assert crashes([(1.0, 10.0)], [kill]) == [10.0]


def test_recovery_counts_from_the_next_servers_start() -> None:
    kill = Kill(10.0, "guard", 1, 1.0)
    tokens = [9.9, 10.1, 10.6, 12.5, 12.6]  # two were under way when the server was killed
    polls = [(9.9, 10.05, True), (10.4, 10.5, False), (12.0, 12.4, True)]
    assert recovery([kill], 0, [1.0, 10.5], tokens, polls) == Recovery(
        "guard", 10.0, 0.5, 12.4 - 10, 2.5
    )
    assert recovery([kill], 0, [1.0], tokens, polls).token is None
    again = Kill(11.0, "guard", 2, 10.5)
    assert recovery([kill, again], 0, [1.0, 10.5], tokens, polls).hasty


def test_a_life_that_nobody_ended_is_a_crash() -> None:
    lives = [(1.0, 10.0), (10.5, 20.0), (20.5, None)]
    assert crashes(lives, [Kill(9.9, "guard", 1, 1.0)]) == [20.0]


def test_recoveries_are_counted_by_what_was_killed_and_hasty_ones_are_left_out() -> None:
    guard = Recovery("guard", 0, 0.1, 2.0, 1.0)
    rows = recovery_table(
        [guard, replace(guard, role="tritonserver", token=3.0), replace(guard, hasty=True)]
    )
    assert [(row["killed"], row["kills"], row["token_p99_s"]) for row in rows] == [
        ("guard", 1, 1.0),
        ("tritonserver", 1, 3.0),
        ("all", 2, 3.0),
    ]


@pytest.mark.parametrize(("share", "value"), [(0.5, 2), (0.99, 4), (0.25, 1)])
def test_percentile(share: float, value: float) -> None:
    assert percentile([4, 2, 1, 3], share) == value
    assert percentile([], share) is None


# What is seen of processes


def sample(watch: Watch, pid: int) -> None:
    """Has a process seen, which has no command for a moment while it begins."""

    def seen() -> bool:
        watch.sample(1.0)
        return any(key[0] == pid for key in watch.parts)

    wait_until(seen, 10, "the process")


def test_a_watch_sees_the_process_its_children_and_their_end() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    watch = Watch(os.getpid())
    sample(watch, child.pid)
    assert child.pid in {part.pid for part in watch.alive()}
    child.communicate()
    watch.sample(2.0)
    assert {key[0] for key in watch.ended} == {child.pid}
    assert os.getpid() in {part.pid for part in watch.alive()}
    assert watch.by_role()["other"][0].descriptors > 0


def test_lives_that_began_in_the_same_tick() -> None:
    """As those of a face's processes, of which one is killed."""
    watch = Watch(1)
    for key in ((7, 100), (8, 100), (9, 50)):
        watch.parts[key] = Part(*key, "face")
    watch.ended[(7, 100)] = 2.0
    lives = watch.lives("face")
    assert [start for start, _ in lives] == sorted(start for start, _ in lives)
    assert [end for _, end in lives] == [None, 2.0, None]


def test_roles() -> None:
    assert role_of_part(["python", "/x/cog_triton/server/guard.py", "server"]) == "guard"
    assert role_of_part(["python", "-m", "tools.soak.worker"]) == "worker"
    assert role_of_part(["python", "-m", "cog_triton.faces.openai.workers", "{}"]) == "face"
    assert role_of_part(["tritonserver", "--model-repository=x"]) == "tritonserver"


def test_what_is_left_is_named_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    watch = Watch(child.pid)
    sample(watch, child.pid)
    (key,) = watch.parts
    region = Path("/dev/shm") / f"cog_triton_{key[0]}_{key[1]}_test"
    region.touch()
    for name in ("run-x", "torchinductor_somebody"):
        (tmp_path / "temporary" / name).mkdir(parents=True)
    coglet, temporary = tmp_path / "coglet", tmp_path / "temporary"
    for name in (f"soak{child.pid}x12", "another"):
        (coglet / name).mkdir(parents=True)
    monkeypatch.setattr("tools.soak.phase.GONE_SECONDS", 0)
    monkeypatch.setattr("tools.soak.phase.COGLET", coglet)
    assert leftovers(watch, temporary) == [
        f"process {child.pid}: other",
        str(region),
        "run-x",
        f"1 directories in {coglet}",
    ]
    assert [path.name for path in coglet.iterdir()] == ["another"]
    assert child.wait() == -9
    assert not region.exists()


# What is said


def test_a_request_that_was_resumed_is_told_by_its_name() -> None:
    names = ("e431a49a", "e431a49a-2", "soak1x94-3c3fb669", "soak1x94-3c3fb669-1")
    log = "\n".join(f"request {name} is tried again after 4 tokens: why" for name in names)
    assert set(_RESUMED.findall(log)) == {"e431a49a", "soak1x94-3c3fb669"}


def test_a_spec_travels() -> None:
    spec = Spec("cog", "grpc", {"A": "b"}, "log", 4, 0, tuple(pool(2, 0)), (ANSWER,))
    assert Spec.of(spec.line()) == spec


def test_the_tokens_of_a_tick_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output()
    for at in (1.0, 1.01, 1.2):
        output({"tokens": [at, 2]})
    output.flush()
    lines = [json.loads(line)["tokens"] for line in capsys.readouterr().out.splitlines()]
    assert lines == [[1.0, 4], [1.2, 2]]


def test_tokens_a_second() -> None:
    assert rate([(10.0, 3), (10.5, 1), (11.5, 2)], 10.0) == {"at": [0, 1], "tokens": [4, 2]}


def phase_report() -> PhaseReport:
    return PhaseReport(
        Phase("simulated", "cog", "grpc", seconds=30),
        seconds=31.0,
        began=100.0,
        tally=tally(replace(WHOLE, lost=1, note="</script>")),
        kills=[Kill(110.0, "guard", 1, 1.0)],
        recoveries=[Recovery("guard", 110.0, 0.1, 2.0, 1.0)],
        restarts=1,
        resumed=5,
        left=["coglet-x"],
        usage={"predictor": [Sample(101.0, 10.0, 5, 3), Sample(102.0, 11.0, 5, 3)]},
        shared=[Shared(101.0, 2, 4.0)],
        rate=[(101.0, 10)],
    )


def test_the_report_says_what_was_missed_and_the_page_shows_it() -> None:
    reports = [phase_report()]
    checks = judge(figures(reports))
    about: dict[str, Any] = {"title": "Soak", "command": "c", "date": "d"}
    about |= {"machine": {}, "versions": {}, "settings": {}}
    report = as_json(about, reports, checks)
    assert json.loads(json.dumps(report))["phases"][0]["recoveries"][0]["at"] == 10.0
    told = terminal(report, checks)
    assert "2 of 9 promises were missed" in told
    assert "Seconds from a kill, simulated" in told
    assert max(map(len, told.splitlines())) <= 120
    page = render(report)
    assert "coglet-x" in page
    assert "<link" not in page
    assert " src=" not in page
    assert "&lt;/script&gt;" in page
    names = {trace.name for trace in figure_over_time(report["phases"][0]).data}
    assert names == {"tokens", "kills", "/dev/shm", "predictor"}


@pytest.mark.parametrize(("kept", "status"), [(True, 0), (False, 1)])
def test_the_exit_status_is_the_judgement(kept: bool, status: int) -> None:
    assert exit_status(lambda: kept) == status


def test_a_server_that_cannot_be_started_is_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing = ["--settings", "MODEL=/nothing/there", "--artifact-dir", str(tmp_path)]
    assert exit_status(lambda: run(["--engine", "simulated", *nothing])) == 2
    assert "/nothing/there" in capsys.readouterr().err


def test_make_hands_its_variables_on() -> None:
    command = ["make", "-n", "soak", "MINUTES=2", "CHAOS=1", "STREAMS=8", "KILLS=5"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    words = " ".join(done.stdout.replace("\\\n", " ").split())
    assert "scripts/soak.py --minutes 2 --streams 8 --chaos --kills 5" in words
    plain = subprocess.run(command[:3], capture_output=True, text=True, cwd=ROOT, check=True)
    assert "--chaos" not in plain.stdout


def test_where_a_stream_stands_can_be_told() -> None:
    async def wait() -> None:
        await asyncio.Event().wait()

    async def test() -> list[str]:
        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        told = list(places(task.get_coro()))
        task.cancel()
        return told

    first, second, *_ = asyncio.run(test())
    assert first.startswith("test_soak.py:")
    assert first.endswith(" wait")
    assert second.endswith(" wait")


def test_a_mistake_in_the_settings_is_one_line(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert exit_status(lambda: run(["--engine", "nowhere", "--artifact-dir", str(tmp_path)])) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("E3001 ConfigurationError: invalid settings: ENGINE='nowhere'")
