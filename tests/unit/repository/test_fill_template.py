"""NVIDIA's command line, with the commands as they stand in guides."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cog_triton import cli
from cog_triton.cli.fill_template import parse_substitutions
from cog_triton.errors import ConfigurationError
from cog_triton.repository.fill import fill_model
from tests.support import load_cases
from tests.unit.repository.support import TEMPLATES, parse


def main(arguments: list[str]) -> int:
    return cli.main(["fill-template", *arguments])


CASES = load_cases(__file__, "substitutions.yaml")
# Guides for cog-triton, Llama, Baichuan and Phi-3.
COMMANDS = Path(__file__).with_name("guide_commands.txt").read_text().rstrip().split("\n\n")
ENVIRONMENT = {
    "HF_GPT_MODEL": "/models/gpt2",
    "HF_LLAMA_MODEL": "/models/llama",
    "ENGINE_DIR": "/engines/baichuan",
    "VAR_DIR": "triton_model_repo",
}


@pytest.fixture
def guide_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in which the guides' commands find what they name."""
    repository = Path(shutil.copytree(TEMPLATES, tmp_path / "triton_model_repo"))
    (tmp_path / "all_models").mkdir()
    (tmp_path / "all_models" / "inflight_batcher_llm").symlink_to(repository)
    (tmp_path / "tensorrtllm_backend").symlink_to(tmp_path)
    for model in ("preprocessing", "tensorrt_llm"):
        (tmp_path / "triton_model" / model).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return repository


def shell_arguments(command: str) -> list[str]:
    """What python3 gets from a shell that runs ``command``, without the script's name."""
    show = 'python3() { printf "%s\\0" "$@" >&2; }\n'
    environment = {**os.environ, **ENVIRONMENT}
    result = subprocess.run(
        ["bash", "-c", show + command], env=environment, capture_output=True, check=True
    )
    return result.stderr.decode().split("\0")[1:-1]


@pytest.mark.usefixtures("guide_directory")
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_guides(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = shell_arguments(command)
    assert main(arguments) == 0
    in_place = arguments[0] in ("-i", "--in_place")
    file = Path(arguments[1] if in_place else arguments[0])
    filled = file.read_text() if in_place else capsys.readouterr().out
    assert "${" not in filled
    config = parse(filled)
    assert config.name == file.parent.name
    assert f"triton_max_batch_size:{config.max_batch_size}" in command


@pytest.mark.parametrize("case", CASES["parsed"])
def test_parse_substitutions(case: dict[str, Any]) -> None:
    assert parse_substitutions(case["arguments"]) == case["values"]


@pytest.mark.parametrize("text", ["a", "a:1,b", "a\\:1", "a:1,b\\,c"])
def test_a_part_without_a_colon(text: str) -> None:
    with pytest.raises(ConfigurationError, match="expected name:value, got "):
        parse_substitutions([text])


@pytest.mark.parametrize("case", CASES["refused"])
@pytest.mark.parametrize("in_place", [["-i"], []])
def test_errors_leave_the_file_alone(
    in_place: list[str],
    case: dict[str, str],
    guide_directory: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = [path for path in guide_directory.glob("*/*") if path.is_file()]
    before = [path.read_bytes() for path in files]
    file = guide_directory / case["model"] / "config.pbtxt"
    assert main([*in_place, str(file), case["values"]]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert case["problem"] in err
    assert before == [path.read_bytes() for path in files]


@pytest.mark.parametrize("case", CASES["models"])
def test_the_model_is_known_by_its_name_or_its_directory(
    case: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / case["at"] / "config.pbtxt"
    file.parent.mkdir()
    file.write_text(case["template"])
    known = main([str(file), "triton_max_batch_size:4"]) == 0
    assert known is case["known"]
    out, err = capsys.readouterr()
    assert ("max_batch_size: 4" in out) is known
    assert ("unknown model" in err and "the known models are ensemble, " in err) is not known


def test_a_file_that_is_filled_in_place_keeps_its_mode_and_is_filled_once(
    guide_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = guide_directory / "ensemble" / "config.pbtxt"
    file.chmod(0o640)
    link = guide_directory / "link.pbtxt"
    link.symlink_to(file)
    assert main(["-i", str(link), "triton_max_batch_size:4"]) == 0
    assert link.is_symlink()
    assert file.stat().st_mode & 0o777 == 0o640
    assert parse(file.read_text()).max_batch_size == 4
    assert [path.name for path in file.parent.iterdir() if path.is_file()] == ["config.pbtxt"]
    assert main(["-i", str(file), "triton_max_batch_size:4"]) == 2
    assert f"{file}: contains no ${{…}} variables; it was filled already" in capsys.readouterr().err


@pytest.mark.parametrize("case", CASES["decoding_context"])
def test_decoding_context_follows_the_backend_and_is_else_off(
    case: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    template = (TEMPLATES / case["model"] / "config.pbtxt").read_text()
    filled = fill_model(case["model"], template, parse_substitutions([case["values"]]))
    assert ("context_ids" in filled) is case["context"]
    assert caplog.messages == []
