"""The benchmark's figures by hand, its requests, its goals and its page."""

import json
import math
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from cog_triton.cli import main
from tests.support import ROOT
from tools.benchmark import bench, engines
from tools.benchmark.load import Load, Record
from tools.benchmark.measuring import Result, Round, result_of
from tools.benchmark.processes import LOAD_GENERATOR, Usage
from tools.benchmark.report import Check, report_of
from tools.server_sent_events import Part

TOKENIZER = Tokenizer.from_file(str(ROOT / "cog_triton" / "demo" / "tokenizer.json"))


@pytest.mark.parametrize(
    ("parts", "chunks", "tokens", "error"),
    [
        ([Part("a"), Part(""), Part(" b"), Part(tokens=3)], [(0, 1), (2, 1)], 3, None),
        ([Part("a", 1), Part("", 2), Part("bc", 4)], [(0, 1), (2, 3)], 4, None),
        ([Part(tokens=2, ids=[1, 2]), Part(tokens=3, ids=[3])], [(0, 2), (1, 1)], 3, None),
        ([Part("a b c")], [(0, 3)], 3, None),  # about as many as were asked for
        ([Part("a", 1)], [(0, 1)], 1, "short answer"),
        ([Part(tokens=3)], [], 3, "short answer"),
    ],
)
def test_the_tokens_of_an_answers_chunks(
    parts: list[Part], chunks: list[tuple[float, int]], tokens: int, error: str | None
) -> None:
    record = Record("", 3, parts=[(float(at), part) for at, part in enumerate(parts)])
    record.count(TOKENIZER)
    assert (record.chunks, record.output_tokens, record.error) == (chunks, tokens, error)


def a_round(rate: float = 1.0) -> Round:
    """Two requests: 3 tokens in chunks of 1 and 2, and 2 tokens; and one that failed."""
    records = [
        Record("", 3, 0.0, 0.3 / rate, chunks=[(0.1 / rate, 1), (0.3 / rate, 2)], output_tokens=3),
        Record("", 2, 0.5, 1.0, chunks=[(0.8, 1), (1.0, 1)], output_tokens=2),
        Record("", 2, 0.5, 1.5 / rate, "E2101 late"),
    ]
    usage = Usage({})
    usage.cpu_s.update({"predictor": 0.02, LOAD_GENERATOR: 0.01})
    return Round(records, 0.9, usage)


def a_result(name: str = "cog-sse") -> Result:
    return result_of(name, Load(16), {name: [a_round()]})


def test_the_figures_of_a_load() -> None:
    one = a_result()
    assert (one.requests, one.errors) == (3, {"E2101 late": 1})
    expected = {
        "duration_s": 1.5,
        "output_tokens": 5,
        "tokens_per_s": 5 / 1.5,
        "requests_per_s": 2 / 1.5,
        "tokens_per_core_second": 250,
        "ttft_ms_p50": 200,
        "itl_ms_p50": 150,  # 200 ms for 2 tokens, 200 ms for 1
        "gap_ms_p50": 200,
        "one_token_chunks": 0.75,
        "generator_cpu": 0.6,
    }
    assert {name: one.figures[name] for name in expected} == pytest.approx(expected)
    assert math.isnan(Round([Record("", 1, 0.0, 1.0, "no")], 0.0, Usage({})).figures["ttft_ms_p50"])


def test_rounds_are_medians_and_ratios_are_those_within_a_round() -> None:
    stack, base = ([*map(a_round, rates)] for rates in ((1.0, 1.2, 1.1), (0.5, 1.0, 1.1)))
    one = result_of("cog-sse", Load(16), {"cog-sse": stack, "engine": base}, ["engine", "cog-sse"])
    assert one.rate == stack[2].figures["tokens_per_s"]
    assert (one.rounds, one.requests, one.errors, one.baseline) == (3, 9, {"E2101 late": 3}, True)
    ratios = {"tokens_per_s": 1.2, "cpu_s": 1.0, "ttft_added_ms": -25 / 3}
    assert one.ratios == {"engine": pytest.approx(ratios)}


def test_a_report_names_missed_goals_and_needs_no_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = [
        Check("rate", 9.0, 10.0, "tokens/s"),
        Check("added", 3.0, 5.0, "ms", least=False),
        Check("unknown", math.nan, 1.0),
    ]
    assert [check.met for check in checks] == [False, True, False]
    given = {"ENGINE": "simulated", "HF_TOKEN": "hf_secret", "HOME": "/root"}
    results = [a_result("</script><script>alert(1)</script>"), a_result("engine")]
    found = report_of("A <b>title</b>", given, results, checks).publish(tmp_path / "b.json")
    assert json.loads((tmp_path / "b.json").read_text()) == found
    assert [check["value"] for check in found["checks"]] == [9.0, 3.0, None]
    assert found["settings"] == {"ENGINE": "simulated"}
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 120
    assert re.search(r"MISSED +rate +9.00 tokens/s +>= 10.0 tokens/s", shown)
    assert "2 of 3 goals missed." in shown
    assert "! engine c=16: 1 x E2101 late" in shown
    page = (tmp_path / "b.html").read_text()
    assert "<b>title</b>" not in page
    assert "<script>alert" not in page
    assert "✗ missed" in page
    assert "<dt>ENGINE</dt><dd>simulated</dd>" in page
    assert page.count('class="plot"') == 3
    assert not re.search(r'<(?:script|link|img)[^>]+(?:src|href)="?https?:', page)


@pytest.mark.parametrize(("rate", "status"), [(9.0, 1), (11.0, 0)])
def test_the_exit_status_says_whether_a_goal_was_missed(
    rate: float, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "run_suite", lambda _: iter([Check("rate", rate, 10.0)]))
    assert main(["bench", "--suite", "--artifact-dir", str(tmp_path)]) == status


def test_the_goals_of_an_engine() -> None:
    one = a_result("generate")
    one.ratios["vllm"] = {"tokens_per_s": 0.93, "ttft_added_ms": 12.0}
    on_gpu, on_cpu = (engines.goals([one], device) for device in ("cuda", "cpu"))
    assert [(check.name, check.met) for check in on_gpu] == [
        ("generate/vllm at 16 streams", False),
        ("generate's TTFT p50 - vllm's at 16 streams", False),
    ]
    assert [check.met for check in on_cpu] == [True]  # 0.9 there
