"""The benchmark, from its command line to its files, on every target."""

import json
import secrets
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support import CogServer, command, marked, script
from tools.benchmark.targets import TARGETS

MARK = "COG_TRITON_TEST_MARK"
REQUESTS, TOKENS = 6, 12


def run(directory: Path, *arguments: str, mark: str = "") -> subprocess.CompletedProcess[str]:
    lengths = ("--request-count", str(REQUESTS), "--output-tokens-mean", str(TOKENS))
    fixed = (*lengths, "--warmup-request-count", "2", "--artifact-dir", str(directory))
    return script("benchmark.py", *fixed, *arguments, environ={MARK: mark})


def results_of(finished: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert finished.returncode == 0, finished.stderr[-3000:]
    return list(json.loads(Path(finished.stdout.splitlines()[-1]).read_text())["results"])


@pytest.mark.rare
def test_every_target_in_turns(demo_model: Path, tmp_path: Path) -> None:
    mark = secrets.token_hex(8)
    settings = (f"MODEL={demo_model}", "ENGINE=simulated", "SIMULATED_INTER_TOKEN_MS=5")
    rounds = ("--baseline", "engine", "--rounds", "2", "--concurrency", "1", "3")
    finished = run(tmp_path, "--target", *TARGETS, *rounds, "--settings", *settings, mark=mark)
    results = results_of(finished)
    assert marked(mark) == []
    assert [(one["target"], one["concurrency"]) for one in results] == [
        (target, streams) for target in TARGETS for streams in (1, 3)
    ]
    for one in results:
        figures = one["figures"]
        assert (one["errors"], one["requests"]) == ({}, 2 * REQUESTS)
        # Cog loses the count of a prediction now and then, and text has about as many tokens.
        assert figures["output_tokens"] == pytest.approx(REQUESTS * TOKENS, rel=0.2)
        assert 0 < figures["ttft_ms_p50"] <= figures["e2e_ms_p50"] <= figures["e2e_ms_p99"]
        assert set(one["ratios"]) == {"engine"} - {one["target"]}
    roles = {one["target"]: set(one["cpu_s"]) for one in results}
    triton = {"tritonserver", "preprocessing", "tensorrt_llm", "postprocessing", "other"}
    assert (
        roles["triton-grpc"] == roles["cog-sse"] == triton | {"load-generator", "cog", "predictor"}
    )
    assert roles["openai-sse"] == triton | {"load-generator", "openai"}
    assert roles["engine"] == {"engine"}
    turns = [line.split()[0] for line in finished.stderr.splitlines() if "c=1, round" in line]
    assert turns == [*TARGETS, *reversed(TARGETS)]
    assert "Plotly" in (tmp_path / "benchmark.html").read_text()


@pytest.mark.rare
def test_a_running_server(paced_cog_server: CogServer, demo_model: Path, tmp_path: Path) -> None:
    url = paced_cog_server.url.removeprefix("http://")  # as genai-perf is given it
    [result] = results_of(run(tmp_path, "--url", url, "--tokenizer", str(demo_model)))
    assert (result["errors"], list(result["cpu_s"])) == ({}, ["load-generator"])
    assert result["figures"]["itl_ms_p50"] > 0


def test_a_server_that_is_not_there(demo_model: Path, tmp_path: Path) -> None:
    arguments = ("--url", "http://127.0.0.1:1", "--tokenizer", str(demo_model))
    [result] = results_of(run(tmp_path, *arguments))
    assert sum(result["errors"].values()) == result["requests"] == REQUESTS
    assert result["figures"]["ttft_ms_p50"] is None


def test_settings_that_cannot_be(tmp_path: Path) -> None:
    finished = command("bench", "--artifact-dir", str(tmp_path), "--settings", "ENGINE=steam")
    assert finished.returncode == 2
    assert "ENGINE='steam'" in finished.stderr


@pytest.mark.rare
def test_an_engine_beside_the_stack(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["--shape", "tiny", "--streams", "1", "4", "--output-tokens", "8", "--repeat", "2"]
    finished = command("bench-engine", *arguments)
    assert finished.returncode == 0, finished.stderr[-3000:]
    report = json.loads(finished.stdout.splitlines()[-1])
    assert [(one["target"], one["concurrency"]) for one in report["results"]] == [
        (name, streams) for name in ("engine", "generate") for streams in (1, 4)
    ]
    for one in report["results"]:
        assert (one["errors"], one["figures"]["output_tokens"]) == ({}, 8 * one["concurrency"])
    names = {check["name"] for check in report["checks"]}
    assert names == {f"generate/engine at {streams} streams" for streams in (1, 4)}
    assert json.loads((tmp_path / "artifacts/engine/benchmark.json").read_text()) == report
