"""The benchmark's figures by hand, its readers of answers, its promises and its page."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.support import ROOT
from tools.benchmark import engines
from tools.benchmark.cli import circumstances, loads, parse
from tools.benchmark.generator import Generator, Record, error_text
from tools.benchmark.load import Length, Load, plan
from tools.benchmark.measure import compared, run_loads
from tools.benchmark.page import plots, render
from tools.benchmark.processes import LOAD_GENERATOR, Usage, Watch, role_of
from tools.benchmark.report import Check, Result, check_table, medians, result, table, verdict
from tools.benchmark.servers import vllm_command
from tools.benchmark.targets import CogJson, CogSse, Endpoints, Failed, OpenAiSse, TritonHttp

DEMO = ROOT / "cog_triton" / "demo"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def count(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False).ids)


# The load


def test_the_same_load_is_the_same_requests_and_another_turn_has_others(
    tokenizer: Tokenizer,
) -> None:
    load = Load(4, requests=20, warmup=3, input=Length(32), output=Length(16, 4))
    [share] = plan(load, tokenizer)
    assert plan(load, tokenizer) == [share]
    assert (len(share.warmup), len(share.requests), share.concurrency) == (3, 20, 4)
    prompts = {one.prompt for one in share.requests}
    assert len(prompts) == 20
    assert prompts.isdisjoint(one.prompt for one in plan(load, tokenizer, 1)[0].requests)
    for one in share.requests:
        assert one.input_tokens == count(tokenizer, one.prompt) == pytest.approx(32, abs=3)
    assert len({one.output_tokens for one in share.requests}) > 1


def test_generators_share_requests_and_streams(tokenizer: Tokenizer) -> None:
    shares = plan(Load(5, requests=10, generators=2, input=Length(4)), tokenizer)
    assert [share.concurrency for share in shares] == [3, 2]
    assert [len(share.requests) for share in shares] == [5, 5]
    assert [len(share.warmup) for share in shares] == [10, 0]
    assert len(plan(Load(1, requests=4, generators=8), tokenizer)) == 1
    assert len(plan(Load(None, 10, requests=4, generators=2), tokenizer)) == 2


def test_arrivals_are_random_at_the_rate(tokenizer: Tokenizer) -> None:
    load = Load(None, request_rate=50, requests=1000, warmup=0, prompts=1, input=Length(2))
    [share] = plan(load, tokenizer)
    at = [one.at for one in share.requests]
    assert at == sorted(at)
    assert at[-1] == pytest.approx(20, rel=0.15)


def test_a_vocabulary_without_english_words_gives_its_own(tmp_path: Path) -> None:
    engines.make_model(tmp_path, engines.parse(["--shape", "tiny"]))
    made = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    [share] = plan(Load(1, requests=3, input=Length(7)), made)
    assert [len(one.prompt.split()) for one in share.requests] == [7, 7, 7]
    assert all(word.startswith("w") for word in share.requests[0].prompt.split())


# The answers


def target(kind: Any, tokenizer: Tokenizer) -> Any:
    made = kind.__new__(kind)  # without a connection
    made.endpoints, made.tokenizer, made.load = Endpoints(str(DEMO)), tokenizer, Load()
    return made


def sse(*events: tuple[str, Any], status: int = 200) -> list[tuple[float, Any]]:
    """The pieces of a reply: an event a second, each in two reads."""
    pieces: list[tuple[float, Any]] = [(0.0, status)]
    for at, (name, data) in enumerate(events, 1):
        text = data if isinstance(data, str) else json.dumps(data)
        whole = f"event: {name}\ndata: {text}\n\n".encode()
        pieces += [(at - 0.5, whole[:9]), (float(at), whole[9:])]
    return pieces


def test_events_of_cog(tokenizer: Tokenizer) -> None:
    metric = ("metric", {"name": "output_token_count", "value": 3})
    output = [("output", {"chunk": text}) for text in ("a", "", " b")]
    answer = target(CogSse, tokenizer).parse(
        sse(*output, metric, ("completed", {"status": "succeeded"}))
    )
    assert (answer.times, answer.total) == ([1.0, 3.0], 3)
    assert answer.tokens == [count(tokenizer, "a"), count(tokenizer, " b")]
    for events, reason in (
        ([], "no event completed"),
        ([("completed", {"status": "failed", "error": "E2101 late"})], "E2101 late"),
        ([("error", {})], "no reason given"),
    ):
        with pytest.raises(Failed, match=reason):
            target(CogSse, tokenizer).parse(sse(*events))
    body = [(0.0, 422), (1.0, b'{"detail": "too long"}')]
    with pytest.raises(Failed, match="HTTP 422: too long"):
        target(CogSse, tokenizer).parse(body)


def test_a_whole_answer_of_cog(tokenizer: Tokenizer) -> None:
    body = {"status": "succeeded", "output": ["a", " b"], "metrics": {"output_token_count": 5}}
    pieces = [(0.0, 200), (2.0, json.dumps(body).encode())]
    answer = target(CogJson, tokenizer).parse(pieces)
    assert (answer.times, answer.tokens, answer.total) == ([2.0], [5], 5)
    with pytest.raises(Failed, match="not a JSON object"):
        target(CogJson, tokenizer).parse([(0.0, 200), (1.0, b"<html>")])


def test_events_of_openai(tokenizer: Tokenizer) -> None:
    chunk = ("message", {"choices": [{"delta": {"content": "a"}}]})
    usage = ("message", {"choices": [], "usage": {"completion_tokens": 1}})
    answer = target(OpenAiSse, tokenizer).parse(sse(chunk, usage, ("message", "[DONE]")))
    assert (answer.times, answer.total) == ([1.0], 1)
    with pytest.raises(Failed, match="no event"):
        target(OpenAiSse, tokenizer).parse(sse(chunk, usage))
    with pytest.raises(Failed, match="no room"):
        target(OpenAiSse, tokenizer).parse(sse(("message", {"error": "no room"})))


def test_events_of_triton(tokenizer: Tokenizer) -> None:
    events = [("message", {"sequence_length": tokens}) for tokens in (2, 0, 1)]
    answer = target(TritonHttp, tokenizer).parse(sse(*events))
    assert (answer.times, answer.tokens, answer.total) == ([1.0, 3.0], [2, 1], 3)
    with pytest.raises(Failed, match="queue full"):
        target(TritonHttp, tokenizer).parse(sse(("message", {"error": "queue full"})))


def test_a_generator_that_cannot_work_says_why() -> None:
    from tools.benchmark.generator import BenchmarkError

    with (
        Generator("engine", Endpoints("/nothing/there"), Load()) as generator,
        pytest.raises(BenchmarkError, match="a load generator for engine ended with status 1"),
    ):
        generator.read()
    assert error_text(OSError("a\n b")) == "OSError: a b"


# The figures


def record(start: float, times: list[float], tokens: list[int], error: str | None = None) -> Record:
    end = times[-1] if times else start + 1
    return Record(start, end, times, tokens, 8, sum(tokens), error)


def a_result(name: str = "cog-sse", rate: float = 1.0, **fields: Any) -> Result:
    """Two requests: 3 tokens in chunks of 1 and 2, and 2 tokens; and one that failed."""
    records = [
        record(0.0, [0.1, 0.3], [1, 2]),
        record(0.5, [0.8, 1.0], [1, 1]),
        record(0.5, [], [], "E2101 late"),
    ]
    usages = [Usage("predictor", 0.02, 100, 50), Usage(LOAD_GENERATOR, 0.01, 80, None)]
    made = result(name, Load(16), records, usages, [0.3, 0.9])
    return replace(made, output_tokens_per_s=made.output_tokens_per_s * rate, **fields)


def test_the_figures_of_a_load() -> None:
    one = a_result()
    assert (one.requests, one.errors, one.output_tokens) == (3, {"E2101 late": 1}, 5)
    assert one.duration_s == pytest.approx(1.5)
    assert one.output_tokens_per_s == pytest.approx(5 / 1.5)
    assert one.requests_per_s == pytest.approx(2 / 1.5)
    assert one.ttft_ms["min"] == pytest.approx(100)
    assert one.ttft_ms["max"] == pytest.approx(300)
    assert one.itl_ms["min"] == pytest.approx(100)  # 200 ms for 2 tokens
    assert one.itl_ms["max"] == pytest.approx(200)
    assert one.chunk_gap_ms["p50"] == pytest.approx(200)
    assert one.tokens_per_chunk["one_token_fraction"] == 0.75
    assert one.load_generator_cpu_share == pytest.approx(0.6)
    assert one.tokens_per_core_second == pytest.approx(250)
    nothing = result("cog-sse", Load(), [record(0, [], [], "no")], [], [])
    assert nothing.ttft_ms["p50"] is None
    assert math.isnan(nothing.tokens_per_core_second)


def test_rounds_are_medians_and_ratios_are_those_within_a_round() -> None:
    stack = [a_result(rate=rate) for rate in (1.0, 2.0, 9.0)]
    base = [a_result("engine", rate=rate) for rate in (2.0, 2.0, 10.0)]
    one, other = compared({"cog-sse": stack, "engine": base}, ["engine"])
    assert one.output_tokens_per_s == stack[1].output_tokens_per_s
    assert (one.rounds, one.requests, one.errors) == (3, 9, {"E2101 late": 3})
    assert one.ratio_to_baseline == {"engine": pytest.approx(0.9)}
    assert one.cpu_ratio_to_baseline == {"engine": 1.0}
    assert one.ttft_p50_added_ms == {"engine": 0.0}
    assert (other.baseline, other.ratio_to_baseline) == (True, {})
    assert medians(stack[:1]) is stack[0]


def test_the_tables_fit_a_terminal() -> None:
    one = a_result(ratio_to_baseline={"triton-http, the classic ensemble": 10.123})
    text = table([one, replace(one, target="a-target-of-a-very-long-name" * 3, baseline=True)])
    assert max(map(len, text.splitlines())) <= 120
    assert "10.1" in text
    assert "predictor=4.000" in text
    assert "! cog-sse c=16: 1 x E2101 late" in text
    assert "try --generators" not in text
    assert "try --generators 2" in table([replace(one, load_generator_cpu_share=0.9)])


# The promises


def test_a_promise_is_met_or_missed() -> None:
    checks = [
        Check("rate", 9.0, 10.0, "tokens/s"),
        Check("added", 3.0, 5.0, "ms", least=False),
        Check("unknown", math.nan, 1.0),
    ]
    assert [check.met for check in checks] == [False, True, False]
    assert verdict(checks).splitlines() == [
        "2 of 3 promises were missed:",
        "  rate: 9.00 tokens/s, promised >= 10.0 tokens/s",
        "  unknown: -, promised >= 1.00",
    ]
    assert verdict(checks[1:2]) == "All 1 promises were met."
    assert "MISSED  rate" in check_table(checks)
    assert [check.as_report()["value"] for check in checks] == [9.0, 3.0, None]


def test_the_promises_of_an_engine() -> None:
    added = {"vllm": 12.0}
    one = a_result("generate", ratio_to_baseline={"vllm": 0.93}, ttft_p50_added_ms=added)
    on_gpu, on_cpu = (engines.promises([one], device) for device in ("cuda", "cpu"))
    assert [(check.name, check.met) for check in on_gpu] == [
        ("generate/vllm at 16 streams", False),
        ("generate's TTFT p50 - vllm's at 16 streams", False),
    ]
    assert [check.met for check in on_cpu] == [True]  # 0.9 there


# The page


def report_page(results: list[Result], checks: list[Check]) -> str:
    about = {
        "title": "A <b>title</b>",
        "command": "bench",
        **circumstances({"ENGINE": "simulated"}),
    }
    return render(about, results, checks)


def test_the_page_needs_no_network_and_runs_no_text() -> None:
    evil = a_result("</script><script>alert(1)</script>")
    page = report_page([evil, a_result("engine", baseline=True)], [Check("speed", 1.0, 2.0)])
    assert "<b>title</b>" not in page
    assert "<script>alert" not in page
    assert "✗ missed" in page
    assert "width:25.0%" in page
    assert "<dt>ENGINE</dt><dd>simulated</dd>" in page
    assert "1 × <code>E2101 late</code>" in page
    assert not re.search(r'<(?:script|link|img)[^>]+(?:src|href)="?https?:', page)
    assert page.count('class="plot"') == 3
    assert "Promises" not in report_page([], [])


def test_the_plots_hold_the_results() -> None:
    latency, first, cpu = plots([a_result(), a_result("engine", rate=2.0)]).values()
    assert [trace.name for trace in latency.data] == ["cog-sse", "engine"]
    assert list(first.data[0].x) == [100.0, 300.0]
    assert list(first.data[0].y) == [50.0, 100.0]
    assert {bar.name for bar in cpu.data} == {"predictor", LOAD_GENERATOR}


# The command line, the servers, the processes


def test_options_become_loads(capsys: pytest.CaptureFixture[str]) -> None:
    options = parse(["--concurrency", "1", "16", "--output-tokens-stddev", "3", "--ignore-eos"])
    assert [load.concurrency for load in loads(options)] == [1, 16]
    assert loads(options)[0].output == Length(128, 3)
    assert loads(options)[1].count == 100
    assert loads(parse(["--request-rate", "30"]))[0].count == 300
    assert options.target == ["cog-sse"]
    address = parse(["--target", "triton-grpc", "-u", "localhost:8001"])
    assert (address.grpc_url, address.url) == ("localhost:8001", None)
    for arguments, reason in (
        (["--settings", "ENGINE"], "--settings ENGINE is not KEY=VALUE"),
        (["--concurrency", "0"], "0 is below 1"),
        (["--concurrency", "1", "--request-rate", "1"], "not both"),
        (["--target", "generate-http", "--grpc-url", "a:1"], "takes --http-url"),
    ):
        with pytest.raises(SystemExit):
            parse(arguments)
        assert reason in capsys.readouterr().err


def test_the_command_of_vllm() -> None:
    arguments = {"model": "m", "enforce_eager": False, "seed": None, "lora": {"r": 8}}
    command = vllm_command({**arguments, "skip_tokenizer_init": True}, 7)
    assert command[-5:] == ["--model", "m", "--no-enforce-eager", "--lora", '{"r": 8}']


def test_a_report_names_settings_without_secrets() -> None:
    found = circumstances({"ENGINE": "simulated", "HF_TOKEN": "hf_secret", "HOME": "/root"})
    assert found["settings"] == {"ENGINE": "simulated"}
    assert set(found["machine"]) == {"CPU", "cores", "memory", "GPU", "Python"}


@pytest.mark.parametrize(
    ("command", "role"),
    [
        (["/opt/tritonserver", "--model"], "tritonserver"),
        (["triton_python_backend_stub", "/r/preprocessing/1/model.py", "x"], "preprocessing"),
        (["python", "-m", "cog.server.http"], "cog"),
        (["python", "/x/serve_openai.py"], "openai"),
        ([], "other"),
    ],
)
def test_roles(command: list[str], role: str) -> None:
    assert role_of(command) == role


def test_a_watch_counts_processor_time() -> None:
    import os
    import time

    watch = Watch((), [os.getpid()], role="me")
    until = time.process_time() + 0.3
    while time.process_time() < until:
        pass
    [usage] = watch.stop()
    assert (usage.role, usage.uss_mb is not None) == ("me", True)
    assert usage.cpu_s >= 0.25


# An engine beside its library


def test_weights_that_vllm_makes_up_are_not_written(tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text("load_format: dummy\n")
    arguments = ["--engine", "vllm", "--shape", "tiny", "--dtype", "bfloat16"]
    options = engines.parse([*arguments, "--vllm-config", str(file)])
    assert options.contestants == ["vllm", "engine", "stack", "openai", "vllm-serve"]
    engines.make_model(tmp_path / "model", options)
    assert not list(tmp_path.glob("**/*.safetensors"))
    assert json.loads((tmp_path / "model/config.json").read_text())["dtype"] == "bfloat16"
    settings = engines.environment(options, tmp_path / "model", tmp_path)
    assert (settings["ENGINE"], "DEVICE" in settings) == ("vllm", False)
    with pytest.raises(SystemExit):
        engines.parse(["--contestants", "vllm"])


def test_greedy_decoding_of_a_random_model_does_not_end(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    engines.make_model(tmp_path, engines.parse(["--shape", "tiny", "--seed", "3"]))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    logits = model(torch.arange(1, 200)[None]).logits
    assert (logits.argmax(-1) != engines.END_ID).all()
    before = (tmp_path / "model.safetensors").read_bytes()
    engines.make_model(tmp_path, engines.parse(["--shape", "tiny", "--seed", "4"]))
    assert (tmp_path / "model.safetensors").read_bytes() == before


@pytest.mark.slow
def test_an_engine_beside_the_stack(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["--shape", "tiny", "--streams", "1", "4", "--output-tokens", "8", "--repeat", "2"]
    assert engines.main(arguments) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(one["target"], one["concurrency"]) for one in report["results"]] == [
        (name, streams) for name in ("engine", "generate") for streams in (1, 4)
    ]
    for one in report["results"]:
        assert (one["errors"], one["output_tokens"]) == ({}, 8 * one["concurrency"])
    names = {check["name"] for check in report["checks"]}
    assert names == {f"generate/engine at {streams} streams" for streams in (1, 4)}
    assert json.loads((tmp_path / "artifacts/engine/profile_export.json").read_text()) == report


def test_each_server_ends_before_the_next_one_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []

    class Session:
        def __init__(self, _: Endpoints, name: str, __: Any) -> None:
            self.name = name

        def __enter__(self) -> Session:
            return self

        def __exit__(self, *_: object) -> None:
            return

        def measure(self, _: Load, turn: int, **__: bool) -> Result:
            happened.append(f"{self.name} {turn}")
            return a_result(self.name)

    def start(kind: str, cleanup: Any) -> Endpoints:
        happened.append(f"start {kind}")
        cleanup.callback(happened.append, f"end {kind}")
        return Endpoints("")

    monkeypatch.setattr("tools.benchmark.measure.Session", Session)
    names = ["cog-sse", "generate", "triton-grpc"]
    assert len(run_loads(names, [], [Load(1)], start, print)) == 3
    apart = ["start cog", "cog-sse 0", "end cog", "start triton", "generate 0", "triton-grpc 0"]
    assert happened == [*apart, "end triton"]
    happened.clear()
    run_loads(names[:2], [], [Load(1, rounds=2)], start, print)
    turns = ["cog-sse 0", "generate 1", "generate 2", "cog-sse 3"]
    assert happened[:-2] == ["start cog", "start triton", *turns]
    assert asdict(a_result())["baseline"] is False
