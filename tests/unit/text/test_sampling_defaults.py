"""A model's recommended sampling parameters."""

import json
from pathlib import Path
from typing import Any

import pytest

from cog_triton.deployment.engine_choice import EngineName
from cog_triton.deployment.model_defaults import sampling_defaults_of
from cog_triton.settings import read_settings
from cog_triton.text.sampling_defaults import sampling_defaults

QWEN = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05, "min_p": 0.1}


def model(directory: Path, content: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "generation_config.json").write_text(json.dumps(content))
    return directory


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        pytest.param({**QWEN, "do_sample": True, "eos_token_id": [1, 2]}, QWEN, id="all"),
        pytest.param(
            {"temperature": 1, "top_k": 64.0}, {"temperature": 1, "top_k": 64}, id="kinds"
        ),
        pytest.param({"temperature": None}, {}, id="null"),
        pytest.param({"do_sample": False}, {}, id="none"),
        pytest.param(
            {"temperature": -1, "top_p": 0, "top_k": 1.5, "min_p": "x", "repetition_penalty": True},
            {},
            id="wrong",
        ),
        pytest.param([1], {}, id="not an object"),
    ],
)
def test_what_the_file_recommends(tmp_path: Path, content: Any, expected: dict[str, float]) -> None:
    assert sampling_defaults([tmp_path / "missing", model(tmp_path, content)]) == expected


def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    assert sampling_defaults([tmp_path]) == {}
    assert "generation_config.json cannot be read" in caplog.text


@pytest.mark.parametrize(
    ("engine", "setting", "left"),
    [
        ("transformers", "model", {*QWEN}),
        ("vllm", "model", {*QWEN}),
        ("tensorrtllm", "model", {*QWEN} - {"min_p"}),
        ("llmapi", "model", {*QWEN} - {"min_p", "repetition_penalty"}),
        ("transformers", "none", set()),
    ],
)
def test_only_what_the_engine_honours(
    engine: EngineName, setting: str, left: set[str], tmp_path: Path
) -> None:
    settings = read_settings({"MODEL": str(model(tmp_path, QWEN)), "GENERATION_DEFAULTS": setting})
    assert sampling_defaults_of(settings, engine).keys() == left


def test_the_models_come_before_its_tokenizers(tmp_path: Path) -> None:
    directory = model(tmp_path / "model", {"top_k": 20})
    tokenizer = model(tmp_path / "tokenizer", {"top_k": 5})
    settings = read_settings({"MODEL": str(directory), "TOKENIZER": str(tokenizer)})
    assert sampling_defaults_of(settings, "transformers") == {"top_k": 20}
    attached = read_settings({"TOKENIZER": str(tokenizer)})
    assert sampling_defaults_of(attached, "transformers") == {"top_k": 5}
