"""scripts/summarize.py on real servers: the engine must say what Hugging Face's generate() says."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Triton
from tests.support import ROOT, script

DEMO = ROOT / "examples" / "summarize" / "demo.jsonl"
EXAMPLES = 32


def summarize(model: Path, *flags: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """In a process of its own, as PyTorch must not be hidden from transformers there."""
    task = ("--eval_task=question_answering", f"--dataset_dir={DEMO}", "--batch_size=8")
    done = script("summarize.py", f"--hf_model_dir={model}", *task, *flags)
    return done, json.loads(done.stdout.splitlines()[-1]) if done.stdout else {}


@pytest.mark.rare
def test_a_running_triton(triton: Triton, demo_model: Path, tmp_path: Path) -> None:
    done, report = summarize(
        demo_model,
        *(f"--grpc-url={triton.endpoints.grpc}", "--check_accuracy", "--leading_threshold=1"),
        f"--output_dir={tmp_path}/new",
    )
    assert done.returncode == 0, done.stderr
    agreement, engine, reference = report["agreement"], report["engine"], report["hugging_face"]
    assert agreement["outputs"] == agreement["same_ids"] == agreement["same_texts"] == EXAMPLES
    assert engine["rouge1"] == reference["rouge1"] > 80
    assert -1 < engine["log_prob_per_token"] == reference["log_prob_per_token"] < 0
    assert "same token ids: 32 of 32 outputs" in done.stdout.splitlines()[-2]
    assert "4/4" in done.stderr
    lines = (tmp_path / "new" / "outputs.jsonl").read_text(encoding="utf-8").splitlines()
    outputs = [json.loads(line) for line in lines]
    assert [row["engine"] for row in outputs] == [row["hugging_face"] for row in outputs]
    # What the model has learned by heart, it says by heart.
    assert outputs[0]["engine"]["text"] == outputs[0]["reference"]


@pytest.mark.rare
def test_an_engine_that_the_script_starts(demo_model: Path) -> None:
    done, report = summarize(
        demo_model,
        *("--test_trt_llm", "--data_type=fp32", "--max_ite=1", "--output_len=8"),
        *("--settings", "ENGINE=transformers", "TRITON_LOG_VERBOSE=0"),
    )
    assert done.returncode == 0, done.stderr
    assert (report["hugging_face"], report["engine"]["log_prob_per_token"]) == (None, None)
    assert report["engine"]["output_tokens"] == 64
    assert report["settings"]["ENGINE"] == "transformers"


@pytest.mark.rare
def test_an_engine_that_says_something_else(paced_triton: Triton, demo_model: Path) -> None:
    done, report = summarize(
        demo_model,
        *(f"--grpc-url={paced_triton.endpoints.grpc}", "--output_len=30", "--max_ite=1"),
        *("--check_accuracy", "--tensorrt_llm_rouge1_threshold=50", "--leading_threshold=0.9"),
    )
    assert done.returncode == 1
    first, second = report["failures"]
    assert first.startswith("ROUGE-1 of the engine is ")
    assert second.startswith("the share of equal leading tokens is 0.0")
    assert f"not accurate enough: {first}" in done.stderr


@pytest.mark.rare
def test_an_engine_that_cannot_be_reached(demo_model: Path) -> None:
    done, _ = summarize(demo_model, "--test_trt_llm", "--grpc-url=127.0.0.1:1", "--max_ite=1")
    assert done.returncode == 2
    assert "error: E2105 TritonUnavailable: Triton cannot be reached" in done.stderr
    assert "Traceback" not in done.stderr
