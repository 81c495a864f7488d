import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest

from cog_triton.adapters import directory as adapters
from cog_triton.cli import main
from cog_triton.errors import ConfigurationError, EngineError, InvalidParameter
from cog_triton.protocol.parameters import adapter_task_id

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def save(adapter: Path, weights: str = "first") -> Path:
    adapter.mkdir(parents=True, exist_ok=True)
    (adapter / CONFIG).write_text("{}")
    (adapter / WEIGHTS).write_text(weights)
    return adapter


def test_adapters_are_the_directories_that_are_whole(tmp_path: Path) -> None:
    for name in ("poet", "7", ".poet.partial"):
        save(tmp_path / name)
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / CONFIG).touch()
    (tmp_path / "README").touch()
    assert adapters.adapter_names(tmp_path) == ("7", "poet")
    (tmp_path / "converted").mkdir()
    (tmp_path / "converted" / "model.lora_weights.npy").touch()
    assert "converted" not in adapters.adapter_names(tmp_path)
    (tmp_path / "converted" / "model.lora_config.npy").touch()
    assert "converted" in adapters.adapter_names(tmp_path)
    assert adapters.adapter_names(tmp_path / "nowhere") == adapters.adapter_names(None) == ()


def test_two_of_one_number_are_neither(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "poet")
    save(tmp_path / "bard")
    monkeypatch.setattr(adapters, "adapter_task_id", lambda _: 5)
    with pytest.raises(LookupError, match="the adapters bard, poet have the same id"):
        adapters.adapter_path(tmp_path, 5)


def test_an_unknown_name_is_refused_with_those_that_are_there(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidParameter, match="'poet' does not exist; LORA_DIR contains no adapters"
    ):
        adapters.check_adapter("poet", tmp_path)
    save(tmp_path / "bard")
    save(tmp_path / "poet")
    adapters.check_adapter("poet", tmp_path)
    adapters.check_adapter("", tmp_path)
    adapters.check_adapter("any", None)
    with pytest.raises(InvalidParameter, match="LORA_DIR contains bard, poet"):
        adapters.check_adapter("../bard", tmp_path)


def test_links_of_a_cache_become_files_and_a_linked_adapter_is_unlinked(tmp_path: Path) -> None:
    files, directory = save(tmp_path / "cached"), tmp_path / "adapters"
    (tmp_path / "snapshot").mkdir()
    for file in files.iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    adapters.place_adapter("copied", tmp_path / "snapshot", directory)
    assert not any(file.is_symlink() for file in (directory / "copied").iterdir())
    (directory / "linked").symlink_to(files)
    adapters.remove_adapter("linked", directory)
    assert adapters.adapter_names(directory) == ("copied",)
    assert len([*files.iterdir()]) == 2


def test_a_failed_copy_leaves_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, one = tmp_path / "adapters", save(tmp_path / "one")
    adapters.place_adapter("sql", one, directory)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copytree", full)
    with pytest.raises(OSError, match="No space left"):
        adapters.place_adapter("sql", one, directory)
    assert [path.name for path in directory.iterdir()] == ["sql"]


def test_what_a_killed_process_left_is_in_nobodys_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, one = tmp_path / "adapters", save(tmp_path / "one")
    monkeypatch.setattr("os.getpid", lambda: 1)  # as the first process of every container has it
    for _ in range(2):
        adapters.place_adapter("sql", one, directory)
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "rmtree", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                adapters.remove_adapter("sql", directory)
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "rmtree", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                adapters.place_adapter("sql", one, directory)
    adapters.place_adapter("sql", one, directory)
    adapters.place_adapter("sql", one, directory)
    adapters.remove_adapter("sql", directory)
    assert adapters.adapter_names(directory) == ()
    adapters.place_adapter("n" * 255, one, directory)
    adapters.remove_adapter("n" * 255, directory)


@pytest.mark.parametrize("name", ["", ".hidden", "..", "a/b", "/a", "n" * 257])
def test_a_name_that_is_no_directorys_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="is not a valid name of an adapter"):
        adapters.place_adapter(name, save(tmp_path / "one"), tmp_path / "adapters")
    with pytest.raises(ConfigurationError, match="is not a valid name of an adapter"):
        adapters.remove_adapter(name, tmp_path)
    assert (tmp_path / "one").is_dir()


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "adapters"
    monkeypatch.setenv("LORA_DIR", str(directory))

    def run(*arguments: str) -> tuple[int, str, str]:
        return main(["adapter", *arguments]), *capsys.readouterr()

    assert run("add", "sql", str(save(tmp_path / "one")))[0] == 0
    assert run("add", "sql", str(save(tmp_path / "two", "second")))[0] == 0  # in place of the first
    assert (directory / "sql" / WEIGHTS).read_text() == "second"
    assert run("list") == (0, "sql\n", "")
    assert run("remove", "sql")[0] == 0
    assert [*directory.iterdir()] == []
    assert (tmp_path / "two").is_dir()
    status, out, error = run("remove", "sql")
    assert (status, out, error.count("\n")) == (1, "", 1)
    assert f"E3001 ConfigurationError: adapter 'sql' does not exist in {directory}" in error
    assert "is not an adapter: it must contain " in run("add", "sql", str(tmp_path))[2]
    monkeypatch.delenv("LORA_DIR")
    assert run("list")[2].endswith("set LORA_DIR or pass --lora-dir\n")


def test_an_engine_is_told_which_adapter_it_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="lora_task_id 4: no adapter has this id"):
        adapters.current_version(4, tmp_path)
    with pytest.raises(EngineError, match="requires lora_prefetch_dir"):
        adapters.current_version(3, None)
    (tmp_path / "8").mkdir()
    for file in ("model.lora_config.npy", "model.lora_weights.npy"):
        (tmp_path / "8" / file).touch()
    with pytest.raises(EngineError, match=r"lora_task_id 8: .*/8 has no adapter_config\.json"):
        adapters.current_version(8, tmp_path)


def test_each_version_of_an_adapter_has_one_number_in_all_processes(tmp_path: Path) -> None:
    def number(name: str) -> int:  # each in a process of its own
        made = adapters.LoraRequests(tmp_path).of(adapter_task_id(name), lambda *values: values)
        assert made == (f"{name}:{made[1]}", made[1], str(tmp_path / name))
        return int(made[1])

    adapter, _ = save(tmp_path / "3"), save(tmp_path / "poet")
    first, other = number("3"), number("poet")
    (adapter / "README.md").touch()
    assert number("3") == first
    save(adapter, "other")
    second = number("3")
    shutil.copy2(adapter / CONFIG, adapter / "copy")  # of the same size and time
    (adapter / "copy").replace(adapter / CONFIG)
    assert len({first, other, second, number("3")}) == 4
