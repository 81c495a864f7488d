"""scripts/summarize.py on real servers: the engine must say what Hugging Face's generate() says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cog_triton.server.tritonserver import TritonServer
from tests.support import ROOT, CogServer

DEMO = ROOT / "examples" / "summarize" / "demo.jsonl"
EXAMPLES = 32


def summarize(model: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, as PyTorch must not be hidden from transformers there."""
    command = [
        *(sys.executable, str(ROOT / "scripts" / "summarize.py"), f"--hf_model_dir={model}"),
        *("--eval_task=question_answering", f"--dataset_dir={DEMO}", "--batch_size=8"),
    ]
    return subprocess.run([*command, *flags], capture_output=True, text=True, timeout=300)


def last_line(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def assert_same(report: dict[str, Any]) -> None:
    agreement = report["agreement"]
    assert agreement["outputs"] == agreement["same_ids"] == agreement["same_texts"] == EXAMPLES
    assert agreement["leading_share"] == 1
    engine, hugging_face = report["engine"], report["hugging_face"]
    assert engine["rouge1"] == hugging_face["rouge1"] > 80
    assert engine["log_prob_per_token"] == hugging_face["log_prob_per_token"]
    assert -1 < engine["log_prob_per_token"] < 0


@pytest.mark.parametrize("transport", ["grpc", "http"])
def test_a_running_triton(
    triton: TritonServer, demo_model: Path, tmp_path: Path, transport: str
) -> None:
    address = getattr(triton.endpoints, transport)
    done = summarize(
        demo_model,
        *(f"--{transport}-url={address}", "--check_accuracy", "--leading_threshold=1"),
        *(f"--json={tmp_path}/report.json", f"--output_dir={tmp_path}"),
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert_same(report)
    assert report["endpoint"] == address
    assert "same token ids: 32 of 32 outputs" in done.stdout.splitlines()[-1]
    assert "32/32" in done.stderr
    outputs = [json.loads(line) for line in (tmp_path / "outputs.jsonl").open(encoding="utf-8")]
    assert [row["engine"] for row in outputs] == [row["hugging_face"] for row in outputs]
    # What the model has learned by heart, it says by heart.
    assert outputs[0]["engine"] == outputs[0]["reference"]


def test_a_running_cog(cog_server: CogServer, demo_model: Path) -> None:
    done = summarize(demo_model, f"--url={cog_server.url}", "--leading_threshold=1")
    assert done.returncode == 0, done.stderr
    assert_same(last_line(done))
    assert last_line(done)["agreement"]["ids_of_text"]


def test_an_engine_that_the_script_starts(demo_model: Path) -> None:
    done = summarize(
        demo_model,
        *("--test_trt_llm", "--test_hf", "--data_type=fp32", "--max_ite=1", "--output_len=8"),
        *("--settings", "ENGINE=transformers", "TRITON_LOG_VERBOSE=0", "--leading_threshold=1"),
    )
    assert done.returncode == 0, done.stderr
    report = last_line(done)
    assert report["examples"] == report["agreement"]["same_ids"] == 8
    assert report["engine"]["output_tokens"] == 64
    assert report["settings"]["ENGINE"] == "transformers"


def test_an_engine_that_says_something_else(paced_triton: TritonServer, demo_model: Path) -> None:
    done = summarize(
        demo_model,
        *(f"--grpc-url={paced_triton.endpoints.grpc}", "--output_len=30", "--max_ite=1"),
        *("--check_accuracy", "--tensorrt_llm_rouge1_threshold=50", "--leading_threshold=0.9"),
    )
    assert done.returncode == 1
    first, second = last_line(done)["failures"]
    assert first.startswith("ROUGE-1 of the engine is ")
    assert second.startswith("the share of equal leading tokens is 0.0")
    assert f"not accurate enough: {first}" in done.stderr


def test_one_side_alone(triton: TritonServer, demo_model: Path) -> None:
    done = summarize(demo_model, "--test_hf", "--max_ite=1")
    assert done.returncode == 0, done.stderr
    assert last_line(done)["engine"] is None
    done = summarize(
        demo_model, "--test_trt_llm", f"--grpc-url={triton.endpoints.grpc}", "--max_ite=1"
    )
    assert done.returncode == 0, done.stderr
    report = last_line(done)
    assert (report["hugging_face"], report["engine"]["log_prob_per_token"]) == (None, None)


def test_an_engine_that_cannot_be_reached(demo_model: Path) -> None:
    done = summarize(demo_model, "--test_trt_llm", "--grpc-url=127.0.0.1:1", "--max_ite=1")
    assert done.returncode == 2
    assert "E2105 TritonUnavailable: Triton cannot be reached" in done.stderr
    assert "Traceback" not in done.stderr
