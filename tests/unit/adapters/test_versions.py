from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cog_triton.adapters.directory import AdapterVersion, current_version
from cog_triton.engines.base import EngineError
from cog_triton.wire import adapter_task_id


@pytest.fixture
def adapters(tmp_path: Path) -> Path:
    for name in ("3", "poet"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").touch()
        (tmp_path / name / "adapter_model.safetensors").touch()
    return tmp_path


def test_an_adapter_has_a_number(adapters: Path) -> None:
    assert current_version(3, adapters).path == adapters / "3"
    assert current_version(adapter_task_id("poet"), adapters).path.name == "poet"
    with pytest.raises(EngineError, match="lora_task_id 4: there is no such adapter"):
        current_version(4, adapters)
    with pytest.raises(EngineError, match="needs lora_prefetch_dir"):
        current_version(3, None)


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_version_ends_with_a_change_of_its_files(adapters: Path, file: str) -> None:
    version = current_version(3, adapters)
    assert version.is_current
    assert current_version(3, adapters) == version
    (adapters / "3" / "README.md").touch()
    assert version.is_current
    (adapters / "3" / file).write_text("other")
    assert not version.is_current
    assert current_version(3, adapters) != version


def test_files_of_the_same_size_and_time_are_others(adapters: Path) -> None:
    version = current_version(3, adapters)
    config = adapters / "3" / "adapter_config.json"
    shutil.copy2(config, adapters / "copy")
    (adapters / "copy").replace(config)
    assert not version.is_current


def test_one_that_is_gone_is_not_current(adapters: Path) -> None:
    version = current_version(3, adapters)
    shutil.rmtree(adapters / "3")
    assert not version.is_current
    assert AdapterVersion.of(adapters / "3") != version
