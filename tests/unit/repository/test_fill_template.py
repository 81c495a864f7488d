"""NVIDIA's command line, with the commands as they stand in guides."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from cog_triton import cli
from cog_triton.cli.fill_template import parse_substitutions
from cog_triton.errors import ConfigurationError
from cog_triton.repository.fill import fill_model
from tests.unit.repository.support import TEMPLATES, parse


def main(arguments: list[str]) -> int:
    return cli.main(["fill-template", *arguments])


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


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        pytest.param(["a:1,b:2"], {"a": "1", "b": "2"}, id="two values"),
        pytest.param(["a:1,", "b:2"], {"a": "1", "b": "2"}, id="two arguments"),
        pytest.param([" a : 1 , \n b:2\n"], {"a": "1", "b": "2"}, id="white space"),
        pytest.param(["a:1,\\\n    b:2"], {"a": "1", "b": "2"}, id="line that goes on"),
        pytest.param(["a:,b:"], {"a": "", "b": ""}, id="empty values"),
        pytest.param(["a:1,a:2"], {"a": "2"}, id="a name twice"),
        pytest.param(["a:1", "a:2"], {"a": "2"}, id="a name twice, in two arguments"),
        pytest.param([",,"], {}, id="nothing"),
        pytest.param([r"a:0\,1,b:2"], {"a": "0,1", "b": "2"}, id="comma that is escaped"),
        pytest.param([r"a:/b:c\:d"], {"a": "/b:c:d"}, id="colons"),
        pytest.param([r"a:b\\,c:d"], {"a": "b\\", "c": "d"}, id="backslash that is escaped"),
        pytest.param([r"a:C\dir"], {"a": r"C\dir"}, id="backslash"),
    ],
)
def test_parse_substitutions(arguments: list[str], values: dict[str, str]) -> None:
    assert parse_substitutions(arguments) == values


@pytest.mark.parametrize("text", ["a", "a:1,b", "a\\:1", "a:1,b\\,c"])
def test_a_part_without_a_colon(text: str) -> None:
    with pytest.raises(ConfigurationError, match="expected name:value, got "):
        parse_substitutions([text])


@pytest.mark.parametrize(
    ("model", "values", "problem"),
    [
        pytest.param(
            "ensemble",
            "foo:4",
            "unknown variable; the known ones are decoding_context, logits_datatype, ",
            id="unknown variable",
        ),
        pytest.param(
            "ensemble",
            "triton_max_batch_size",
            "expected name:value, got 'triton_max_batch_size'",
            id="no value",
        ),
        pytest.param(
            "preprocessing",
            "tokenizer_dir:",
            "preprocessing: tokenizer_dir: required, a path",
            id="empty value",
        ),
        pytest.param(
            "preprocessing",
            "tokenizer_dir:${M}",
            "tokenizer_dir: still to be expanded, '${M}'",
            id="variable of the shell",
        ),
        pytest.param(
            "tensorrt_llm",
            "max_queue_size:99999999999",
            "Value out of range: 99999999999",
            id="value out of range",
        ),
        pytest.param("none", "a:1", "No such file or directory", id="no such model"),
    ],
)
@pytest.mark.parametrize("in_place", [["-i"], []], ids=["in place", "to the output"])
def test_errors_leave_the_file_alone(
    in_place: list[str],
    model: str,
    values: str,
    problem: str,
    guide_directory: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = [path for path in guide_directory.glob("*/*") if path.is_file()]
    before = [path.read_bytes() for path in files]
    file = guide_directory / model / "config.pbtxt"
    assert main([*in_place, str(file), values]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert problem in err
    assert before == [path.read_bytes() for path in files]


@pytest.mark.parametrize(
    ("template", "directory", "known"),
    [
        pytest.param(
            'name: "ensemble"\nmax_batch_size: ${triton_max_batch_size}',
            "elsewhere",
            True,
            id="name",
        ),
        pytest.param("max_batch_size: ${triton_max_batch_size}", "ensemble", True, id="directory"),
        pytest.param(
            'name: "mine"\nmax_batch_size: ${triton_max_batch_size}',
            "elsewhere",
            False,
            id="unknown name",
        ),
        pytest.param(
            "max_batch_size: ${triton_max_batch_size}", "elsewhere", False, id="unknown directory"
        ),
    ],
)
def test_the_model_is_known_by_its_name_or_its_directory(
    template: str,
    directory: str,
    known: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / directory / "config.pbtxt"
    file.parent.mkdir()
    file.write_text(template)
    status = main([str(file), "triton_max_batch_size:4"])
    assert (status == 0) is known
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


@pytest.mark.parametrize(
    ("model", "values", "has_context"),
    [
        pytest.param("tensorrt_llm", "model:m", True, id="embedded engine"),
        pytest.param(
            "tensorrt_llm", "triton_backend:tensorrtllm,engine_dir:/e", False, id="C++ backend"
        ),
        pytest.param(
            "tensorrt_llm", "engine_dir:/e", False, id="guides from before there was a choice"
        ),
        pytest.param(
            "tensorrt_llm",
            "engine_dir:/e,decoding_context:true",
            True,
            id="guides, and it is asked for",
        ),
        pytest.param("ensemble", "triton_max_batch_size:4", False, id="ensemble"),
        pytest.param("ensemble", "decoding_context:True", True, id="ensemble, and it is asked for"),
    ],
)
def test_decoding_context_follows_the_backend_and_is_else_off(
    model: str, values: str, has_context: bool, caplog: pytest.LogCaptureFixture
) -> None:
    template = (TEMPLATES / model / "config.pbtxt").read_text()
    filled = fill_model(model, template, parse_substitutions([values]))
    assert ("context_ids" in filled) is has_context
    assert caplog.messages == []
