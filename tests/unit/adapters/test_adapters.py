from __future__ import annotations

from pathlib import Path

import pytest
from tritonclient.grpc.model_config_pb2 import (  # type: ignore[import-untyped, unused-ignore]
    DataType,
)

from cog_triton.adapters import directory as adapters
from cog_triton.adapters.directory import adapter_names, adapter_path, check_adapter
from cog_triton.adapters.tensors import AdapterTensors
from cog_triton.deployment.engine_choice import EngineName, adapter_dtype
from cog_triton.deployment.preparation import (
    ADAPTERS,
    adapter_tensors,
    check_adapters,
    template_values,
)
from cog_triton.errors import ConfigurationError, InvalidParameter
from cog_triton.repository.fill import fill_repository, read_config
from cog_triton.settings import read_settings
from cog_triton.wire import adapter_task_id
from tests.stand_in.engine import make_engine


def save(directory: Path, *names: str) -> None:
    for name in names:
        (directory / name).mkdir()
        (directory / name / "adapter_config.json").write_text("{}")
        (directory / name / "adapter_model.safetensors").touch()


def test_adapters_are_the_directories_that_are_whole(tmp_path: Path) -> None:
    save(tmp_path, "poet", "7", ".poet.partial")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "adapter_config.json").touch()
    (tmp_path / "README").touch()
    assert adapter_names(tmp_path) == ("7", "poet")
    (tmp_path / "converted").mkdir()
    (tmp_path / "converted" / "model.lora_weights.npy").touch()
    assert "converted" not in adapter_names(tmp_path)
    (tmp_path / "converted" / "model.lora_config.npy").touch()
    assert "converted" in adapter_names(tmp_path)
    assert adapter_names(tmp_path / "nowhere") == adapter_names(None) == ()


def test_one_that_appears_can_be_used_and_one_that_goes_cannot(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match="no adapter"):
        adapter_path(tmp_path, adapter_task_id("poet"))
    save(tmp_path, "poet", "7")
    assert adapter_path(tmp_path, adapter_task_id("poet")) == tmp_path / "poet"
    assert adapter_path(tmp_path, 7) == tmp_path / "7"
    (tmp_path / "poet" / "adapter_model.safetensors").unlink()
    with pytest.raises(LookupError, match="no adapter"):
        adapter_path(tmp_path, adapter_task_id("poet"))


def test_two_adapters_of_one_number_are_neither(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, "poet", "bard")
    monkeypatch.setattr(adapters, "adapter_task_id", lambda _: 5)
    with pytest.raises(LookupError, match="the adapters bard, poet have the same number"):
        adapter_path(tmp_path, 5)


@pytest.mark.parametrize(
    ("name", "number"), [("1", 1), ("2147483647", 2**31 - 1), ("poet", None), ("007", None)]
)
def test_numbers(name: str, number: int | None) -> None:
    made = adapter_task_id(name)
    assert 0 < made < 2**31
    assert number in (None, made)


@pytest.mark.parametrize("name", ["0", "2147483648", "9" * 40, "٣", "-1"])
def test_what_is_no_task_id_is_a_name(name: str) -> None:
    assert 0 < adapter_task_id(name) < 2**31


def test_an_unknown_name_is_refused_with_those_that_are_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="'poet' does not exist; LORA_DIR has none"):
        check_adapter("poet", tmp_path)
    save(tmp_path, "bard", "poet")
    check_adapter("poet", tmp_path)
    check_adapter("", tmp_path)
    check_adapter("any", None)
    with pytest.raises(InvalidParameter, match="those of LORA_DIR are bard, poet"):
        check_adapter("../bard", tmp_path)


def test_what_an_engine_can_do_with_a_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no effect with ENGINE=simulated: transformers, "):
        check_adapters(tmp_path, "simulated")
    with pytest.raises(ConfigurationError, match="is not a directory"):
        check_adapters(tmp_path / "nowhere", "vllm")
    for engine in ADAPTERS:
        check_adapters(tmp_path, engine)


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_the_directory_reaches_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: EngineName
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "adapters").mkdir()
    settings = read_settings({"LORA_DIR": "adapters"})
    values = template_values(settings, engine)["tensorrt_llm"]
    assert values["lora_prefetch_dir"] == str(tmp_path.resolve() / "adapters")
    assert "lora_prefetch_dir" not in template_values(read_settings({}), engine)["tensorrt_llm"]
    with pytest.raises(ConfigurationError, match="LORA_DIR has no effect"):
        template_values(settings, "simulated")


@pytest.mark.parametrize(
    ("dtype", "plugin", "kind"),
    [("float16", "auto", "TYPE_FP16"), ("bfloat16", "bfloat16", "TYPE_BF16")],
)
def test_tensorrt_llm_gets_adapters_with_requests(
    tmp_path: Path, dtype: str, plugin: str, kind: str
) -> None:
    """It would look for numbers as names in a directory of its own."""
    engine = make_engine(tmp_path / "engine", dtype=dtype, plugin_config={"lora_plugin": plugin})
    settings = read_settings({"LORA_DIR": str(tmp_path), "ENGINE_DIR": str(engine)})
    assert adapter_tensors(settings, "tensorrtllm") == AdapterTensors(tmp_path, dtype)
    assert adapter_tensors(settings, "vllm") is None
    values = template_values(settings, "tensorrtllm")
    assert "lora_prefetch_dir" not in values["tensorrt_llm"]
    fill_repository(settings.model_repository, tmp_path / "repository", values)
    for model in ("ensemble", "ensemble_ids", "tensorrt_llm"):
        config = read_config(tmp_path / "repository" / model / "config.pbtxt")
        (tensor,) = [tensor for tensor in config.input if tensor.name == "lora_weights"]
        assert DataType.Name(tensor.data_type) == kind


@pytest.mark.parametrize(
    ("dtype", "plugin", "message"),
    [
        ("float16", None, "was built without lora_plugin"),
        ("bfloat16", "float16", "is bfloat16, and its lora_plugin float16: they must be the same"),
        ("fp8", "auto", "is fp8"),
    ],
)
def test_an_engine_that_cannot_have_adapters(
    tmp_path: Path, dtype: str, plugin: str | None, message: str
) -> None:
    engine = make_engine(tmp_path / "engine", dtype=dtype, plugin_config={"lora_plugin": plugin})
    with pytest.raises(ConfigurationError, match=message):
        adapter_dtype(engine)


def test_http_cannot_carry_an_adapter(tmp_path: Path) -> None:
    engine = make_engine(tmp_path / "engine", plugin_config={"lora_plugin": "auto"})
    settings = read_settings(
        {"LORA_DIR": str(tmp_path), "ENGINE_DIR": str(engine), "TRANSPORT": "http"}
    )
    with pytest.raises(ConfigurationError, match="needs TRANSPORT=grpc"):
        template_values(settings, "tensorrtllm")
