from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cog_triton.adapters.directory import adapter_names, place_adapter, remove_adapter
from cog_triton.errors import ConfigurationError
from tests.support import ROOT


def adapter(directory: Path, weights: str = "first") -> Path:
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_text("{}")
    (directory / "adapter_model.safetensors").write_text(weights)
    return directory


def test_an_adapter_is_copied_replaced_and_removed(tmp_path: Path) -> None:
    directory = tmp_path / "adapters"
    place_adapter("sql", adapter(tmp_path / "one"), directory)
    place_adapter("sql", adapter(tmp_path / "two", "second"), directory)
    assert adapter_names(directory) == ("sql",)
    assert (directory / "sql" / "adapter_model.safetensors").read_text() == "second"
    remove_adapter("sql", directory)
    assert [*directory.iterdir()] == []
    assert (tmp_path / "two").is_dir()


def test_links_of_a_cache_become_files_and_a_linked_adapter_is_unlinked(tmp_path: Path) -> None:
    files, directory = adapter(tmp_path / "cached"), tmp_path / "adapters"
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for file in files.iterdir():
        (snapshot / file.name).symlink_to(file)
    place_adapter("copied", snapshot, directory)
    assert not any(file.is_symlink() for file in (directory / "copied").iterdir())
    (directory / "linked").symlink_to(files)
    remove_adapter("linked", directory)
    assert adapter_names(directory) == ("copied",)
    assert len([*files.iterdir()]) == 2


def test_what_cannot_be_copied_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "adapters"
    place_adapter("sql", adapter(tmp_path / "one"), directory)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copytree", full)
    with pytest.raises(OSError, match="No space left"):
        place_adapter("sql", tmp_path / "one", directory)
    assert [path.name for path in directory.iterdir()] == ["sql"]


@pytest.mark.parametrize("name", ["", ".hidden", "..", "a/b", "/a", "n" * 257])
def test_a_name_that_is_no_directorys_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="an adapter's name must be"):
        place_adapter(name, adapter(tmp_path / "one"), tmp_path / "adapters")
    with pytest.raises(ConfigurationError, match="an adapter's name must be"):
        remove_adapter(name, tmp_path)
    assert (tmp_path / "one").is_dir()


def test_what_is_no_adapter_and_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="is not an adapter: it needs "):
        place_adapter("sql", tmp_path, tmp_path / "adapters")
    with pytest.raises(ConfigurationError, match="there is no adapter 'sql' in"):
        remove_adapter("sql", tmp_path)


def test_the_command(tmp_path: Path) -> None:
    environment = {**os.environ, "LORA_DIR": str(tmp_path / "adapters")}

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(ROOT / "scripts" / "adapter.py"), *arguments],
            env=environment, capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    assert command("add", "sql", str(adapter(tmp_path / "one"))).stderr == ""
    assert command("list").stdout == "sql\n"
    assert command("remove", "sql").returncode == 0
    assert command("list").stdout == ""
    again = command("remove", "sql")
    assert (again.returncode, again.stdout) == (1, "")
    assert again.stderr.count("\n") == 1
    assert f"E3001 ConfigurationError: there is no adapter 'sql' in {tmp_path}" in again.stderr
    del environment["LORA_DIR"]
    assert command("list").stderr.endswith(": set LORA_DIR, or give --lora-dir\n")
