"""What files tell of the context length, before an engine has started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cog_triton.deployment.preparation import context_length


def directory(tmp_path: Path, config: Any) -> str:
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"max_position_embeddings": 2048}, 2048),
        ({"text_config": {"max_position_embeddings": 4096}}, 4096),
        ({}, None),
        ({"max_position_embeddings": None}, None),
        ("no JSON", None),
        ("[]", None),
    ],
)
def test_of_a_model(config: Any, expected: int | None, tmp_path: Path) -> None:
    assert context_length({"model": directory(tmp_path, config)}) == expected


def test_a_model_that_is_not_here_says_nothing() -> None:
    assert context_length({"model": "meta-llama/Llama-3.2-1B"}) is None
    assert context_length({}) is None


def test_a_setting_lowers_the_models(tmp_path: Path) -> None:
    model = directory(tmp_path, {"max_position_embeddings": 2048})
    assert context_length({"model": model, "max_seq_len": 100}) == 100
    assert context_length({"model": model, "max_seq_len": "9999"}) == 2048


def test_of_an_engine(tmp_path: Path) -> None:
    engine = directory(tmp_path, {"build_config": {"max_seq_len": 3000, "max_input_len": 1000}})
    values = {"triton_backend": "tensorrtllm", "engine_dir": engine}
    assert context_length(values) == 3000


def test_the_models_limit_does_not_bind_every_engine(tmp_path: Path) -> None:
    model = directory(tmp_path, {"max_position_embeddings": 2048})
    assert context_length({"model": model, "engine": "simulated"}) is None
    values = {"model": model, "engine": "llmapi", "llm_api_config": "/more.yaml"}
    assert context_length(values) is None
