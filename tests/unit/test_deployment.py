from __future__ import annotations

from pathlib import Path

import pytest

from cog_triton.deployment import (
    check_model,
    merge,
    placed,
    resolve_engine,
    template_values,
    with_files,
)
from cog_triton.errors import ConfigurationError
from cog_triton.settings import read_settings


def test_the_configuration_file_overrides_the_settings(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("server:\n  tensorrt_llm:\n    args: {engine: simulated, max_seq_len: 99}\n")
    environment = {"COG_TRITON_CONFIG": str(file), "ENGINE": "transformers", "MODEL": "org/name"}
    values = template_values(read_settings(environment), "transformers")
    assert values["tensorrt_llm"]["engine"] == "simulated"
    assert values["tensorrt_llm"]["max_seq_len"] == 99
    assert values["tensorrt_llm"]["model"] == "org/name"
    assert values["preprocessing"]["tokenizer_dir"] == "org/name"


def test_a_missing_configuration_file_is_none(tmp_path: Path) -> None:
    settings = read_settings({"COG_TRITON_CONFIG": str(tmp_path / "none.yaml")})
    values = template_values(settings, "transformers")
    assert values["tensorrt_llm"]["engine"] == "transformers"


def test_merging_keeps_models_that_only_one_side_has() -> None:
    assert merge({"a": {"x": 1, "y": 2}}, {"a": {"y": 3}, "b": {"z": 4}}) == {
        "a": {"x": 1, "y": 3},
        "b": {"z": 4},
    }


@pytest.mark.parametrize("model", ["models/none", "/none", "./none", "a/b/c"])
def test_a_path_where_nothing_is(model: str) -> None:
    with pytest.raises(ConfigurationError, match=f"MODEL={model} is no directory"):
        check_model(read_settings({"MODEL": model}))


def test_an_id_is_left_to_the_loader() -> None:
    check_model(read_settings({"MODEL": "org/name"}))


def test_an_engine_directory_goes_to_the_backend_with_its_own_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text("{}")
    values = template_values(read_settings({"ENGINE_DIR": str(tmp_path)}), "tensorrtllm")
    assert values["tensorrt_llm"] == {
        "triton_backend": "tensorrtllm",
        "engine_dir": str(tmp_path),
        "tokenizer_dir": str(tmp_path / "tokenizer"),
    }
    assert values["preprocessing"]["tokenizer_dir"] == str(tmp_path / "tokenizer")


def test_without_a_gpu_and_an_engine_auto_is_transformers(demo_model: Path) -> None:
    assert resolve_engine(read_settings({"MODEL": str(demo_model)})) == "transformers"


def test_weights_are_an_engine_or_a_model(tmp_path: Path) -> None:
    settings = read_settings({})
    model, packed, flat = tmp_path / "model", tmp_path / "packed", tmp_path / "flat"
    for directory in (model, packed / "engine", flat):
        directory.mkdir(parents=True)
    (packed / "engine" / "rank0.engine").touch()
    (flat / "rank0.engine").touch()
    assert placed(settings, model).model == str(model)
    assert placed(settings, packed).engine_dir == packed / "engine"
    assert placed(settings, flat).engine_dir == flat


def test_what_is_on_this_machine_is_not_fetched(tmp_path: Path) -> None:
    for environment in (
        {"MODEL": str(tmp_path)},
        {"ENGINE_DIR": str(tmp_path), "MODEL": "org/name"},
    ):
        settings = read_settings(environment)
        assert with_files(settings) == settings


def test_weights_take_the_place_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    settings = read_settings({"COG_WEIGHTS": f"file://{tmp_path}", "MODEL": "org/name"})
    assert with_files(settings).model == str(tmp_path)


def test_ranks_are_for_the_backend_alone(demo_model: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"WORLD_SIZE=2 is for TensorRT-LLM's C\+\+ backend"
    ):
        resolve_engine(read_settings({"MODEL": str(demo_model), "WORLD_SIZE": "2"}))
