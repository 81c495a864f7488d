"""The benchmark, from its command line to its files, on every target."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT, CogServer
from tools.benchmark.triton_targets import TARGETS as ALL_TARGETS

MARK = "COG_TRITON_TEST_MARK"
REQUESTS = 6
TOKENS = 12
TARGETS = [name for name in ALL_TARGETS if "vllm" not in name]  # which is not installed here


def run(directory: Path, *arguments: str, mark: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            "scripts/benchmark.py",
            *("--request-count", str(REQUESTS), "--output-tokens-mean", str(TOKENS)),
            *("--warmup-request-count", "2", "--artifact-dir", str(directory), *arguments),
        ],
        cwd=ROOT,
        env={**os.environ, MARK: mark},
        capture_output=True,
        text=True,
        check=False,
    )


def report_of(finished: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert finished.returncode == 0, finished.stderr[-3000:]
    found: dict[str, Any] = json.loads(Path(finished.stdout.splitlines()[-1]).read_text())
    return found


def marked(mark: str) -> list[int]:
    """Ids of the processes that have inherited the mark."""
    found = []
    for directory in Path("/proc").iterdir():
        try:
            if directory.name.isdigit() and mark.encode() in (directory / "environ").read_bytes():
                found.append(int(directory.name))
        except OSError:
            continue
    return found


def check(result: dict[str, Any]) -> None:
    assert result["errors"] == {}
    assert result["requests"] == REQUESTS
    # Cog loses the count of a prediction now and then, and text has about as many tokens.
    assert result["output_tokens"] == pytest.approx(REQUESTS * TOKENS, rel=0.2)
    assert 0 < result["ttft_ms"]["p50"] <= result["e2e_ms"]["p50"]
    assert result["e2e_ms"]["max"] <= result["duration_s"] * 1000 + 1e-6
    for name in ("ttft_ms", "e2e_ms", "tokens_per_chunk"):
        figures = result[name]
        ordered = [figures[part] for part in ("min", "p50", "p90", "p99", "max")]
        assert ordered == sorted(ordered)
    assert len(result["ttft_samples_ms"]) == REQUESTS


def test_every_target(demo_model: Path, tmp_path: Path) -> None:
    mark = secrets.token_hex(8)
    settings = (f"MODEL={demo_model}", "ENGINE=simulated", "SIMULATED_INTER_TOKEN_MS=5")
    finished = run(
        tmp_path, "--target", *TARGETS, "--concurrency", "2", "--settings", *settings, mark=mark
    )
    report = report_of(finished)
    assert marked(mark) == []
    results = {result["target"]: result for result in report["results"]}
    assert list(results) == TARGETS
    for result in results.values():
        check(result)
    roles = {name: {one["role"] for one in results[name]["processes"]} for name in results}
    triton = {"tritonserver", "preprocessing", "tensorrt_llm", "postprocessing", "other"}
    assert roles["triton-grpc"] == triton | {"load-generator"}
    assert roles["cog-sse"] == triton | {"load-generator", "cog", "predictor"}
    assert roles["engine"] == {"engine"}
    assert results["triton-grpc"]["tokens_per_chunk"]["max"] <= TOKENS
    assert results["cog-json"]["chunk_gap_ms"]["p50"] is None
    assert report["settings"]["ENGINE"] == "simulated"
    assert finished.stdout.splitlines()[-1] == str(tmp_path / "profile_export.json")
    assert "Plotly" in (tmp_path / "benchmark.html").read_text()


def test_baselines_and_several_generators_in_an_open_loop(demo_model: Path, tmp_path: Path) -> None:
    finished = run(
        tmp_path,
        *("--target", "triton-grpc", "--baseline", "triton-engine", "engine"),
        *("--request-rate", "20", "40", "--generators", "2"),
        *("--settings", f"MODEL={demo_model}", "ENGINE=simulated"),
    )
    results = report_of(finished)["results"]
    loads = [(one["target"], one["request_rate"], one["baseline"]) for one in results]
    assert loads == [
        ("triton-grpc", 20, False),
        ("triton-grpc", 40, False),
        ("triton-engine", 20, True),
        ("triton-engine", 40, True),
        ("engine", 20, True),
        ("engine", 40, True),
    ]
    for one in results:
        check(one)
    assert set(results[0]["ratio_to_baseline"]) == {"triton-engine", "engine"}


def test_targets_in_turns(demo_model: Path, tmp_path: Path) -> None:
    mark = secrets.token_hex(8)
    finished = run(
        tmp_path,
        *("--target", "generate", "--baseline", "engine", "triton-engine", "--rounds", "3"),
        *("--concurrency", "1", "3"),
        *("--settings", f"MODEL={demo_model}", "ENGINE=transformers"),
        mark=mark,
    )
    results = report_of(finished)["results"]
    assert marked(mark) == []
    assert [(one["target"], one["concurrency"], one["baseline"]) for one in results] == [
        (target, streams, target != "generate")
        for target in ("generate", "engine", "triton-engine")
        for streams in (1, 3)
    ]
    for one in results:
        assert (one["rounds"], one["requests"], one["errors"]) == (3, 3 * REQUESTS, {})
        assert one["output_tokens"] == REQUESTS * TOKENS
    added = {"ratio_to_baseline", "cpu_ratio_to_baseline", "ttft_p50_added_ms"}
    assert all(set(results[0][name]) == {"engine", "triton-engine"} for name in added)
    turns = [line for line in finished.stderr.splitlines() if "c=1, round" in line]
    order = ["generate", "engine", "triton-engine"]
    assert [line.split()[0] for line in turns] == [*order, *order[::-1], *order]
    assert "medians of 3 rounds" in finished.stdout


def test_a_running_server(paced_cog_server: CogServer, demo_model: Path, tmp_path: Path) -> None:
    url = paced_cog_server.url.removeprefix("http://")  # as genai-perf is given it
    finished = run(tmp_path, "--url", url, "--tokenizer", str(demo_model), "--streaming")
    [result] = report_of(finished)["results"]
    check(result)
    assert result["itl_ms"]["p50"] > 0
    assert [one["role"] for one in result["processes"]] == ["load-generator"]


def test_a_server_that_is_not_there(demo_model: Path, tmp_path: Path) -> None:
    arguments = ("--url", "http://127.0.0.1:1", "--tokenizer", str(demo_model))
    [result] = report_of(run(tmp_path, *arguments))["results"]
    assert sum(result["errors"].values()) == result["requests"] == REQUESTS
    assert result["ttft_ms"]["p50"] is None


def test_settings_that_cannot_be(tmp_path: Path) -> None:
    finished = run(tmp_path, "--settings", "ENGINE=steam")
    assert finished.returncode == 2
    assert "ENGINE='steam'" in finished.stderr
