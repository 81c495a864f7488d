"""The command cog-triton and the files of scripts/, in processes of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cog_triton.cli import SCRIPTS, load_commands, parse, summary
from cog_triton.deployment.preparation import served_names
from cog_triton.settings import VARIABLES, read_settings
from tests.support import ROOT

PROGRAM = "import sys; from cog_triton.cli import main; sys.exit(main())"
FOR_DEVELOPERS = {"image_requirements.py", "make_docs.py"}
COMMANDS = load_commands()


def cog_triton(*arguments: str, program: str = PROGRAM) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)


def test_help_has_a_line_for_each_command() -> None:
    done = cog_triton("--help")
    assert done.returncode == 0
    assert cog_triton().stdout == done.stdout
    for name, command in COMMANDS.items():
        assert f"\n  {name:14}  {summary(command)}\n" in done.stdout


def test_help_imports_nothing_that_takes_time() -> None:
    program = "import sys; from cog_triton.cli import main; main(['--help']); print(*sys.modules)"
    modules = cog_triton(program=program).stdout.splitlines()[-1].split()
    assert not {"numpy", "grpc", "transformers", "torch", "pydantic"} & {*modules}


def test_an_unknown_command_is_one_line_that_names_the_others() -> None:
    done = cog_triton("nothing")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line == f"cog-triton: no command 'nothing'; it is one of {', '.join(COMMANDS)}"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_a_help(command: str) -> None:
    done = cog_triton(command, "--help")
    assert done.returncode == 0, done.stderr
    assert "usage: " in done.stdout
    if "options" in COMMANDS[command]:
        assert done.stdout.startswith(f"usage: cog-triton {command} ")
        assert summary(COMMANDS[command]) in done.stdout


@pytest.mark.parametrize("script", sorted(file.name for file in SCRIPTS.glob("[a-z]*.py")))
def test_each_script_is_a_command(script: str) -> None:
    text, module = (SCRIPTS / script).read_text(), script.removesuffix(".py")
    calls = {command["call"].partition(":")[0] for command in COMMANDS.values()}
    # It names its command, has its function, or calls the tool that the command calls.
    named = {*re.findall(r'^(?:    )?_checkout\.run\("([\w-]+)"\)$', text, re.MULTILINE)}
    tools = {*re.findall(r"^from (tools[\w.]+) import main$", text, re.MULTILINE)}
    assert bool(named & {*COMMANDS} or {module, *tools} & calls) is (script not in FOR_DEVELOPERS)


def test_a_python_without_the_packages_is_told_what_to_do() -> None:
    script = str(SCRIPTS / "fill_template.py")
    done = subprocess.run(  # -S: without the environment's packages
        [sys.executable, "-S", script, "x", "y"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "has no package" in line
    assert ".venv/bin/activate" in line


def test_the_example_for_systemd_names_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})  # the command's options set some
    text = (ROOT / "deploy" / "openai" / "cog-triton-openai.service").read_text()
    assert set(re.findall(r"^Environment=(\w+)=", text, re.MULTILINE)) <= set(VARIABLES)
    # Of a file system that is read-only otherwise, these are the directories that it may write.
    assert "ProtectSystem=strict\nProtectHome=true\n" in text
    settings = read_settings(dict(re.findall(r"^Environment=(\w+)=(.*)$", text, re.MULTILINE)))
    roots = {"StateDirectory": Path("/var/lib"), "CacheDirectory": Path("/var/cache")}
    directories = dict(re.findall(r"^(\w+Directory)=([\w-]+)$", text, re.MULTILINE))
    assert settings.store_file is not None
    assert settings.store_file.parent == roots["StateDirectory"] / directories["StateDirectory"]
    assert settings.weights_cache == roots["CacheDirectory"] / directories["CacheDirectory"]
    modes = re.findall(r"^(\w+Directory)Mode=(\d+)$", text, re.MULTILINE)
    assert dict(modes) == {"StateDirectory": "0700", "CacheDirectory": "0700"}
    limit = settings.drain_seconds + settings.stop_timeout
    assert int(*re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)) > limit
    (command,) = re.findall(r"^ExecStart=\S+/cog-triton openai (.*)$", text, re.MULTILINE)
    assert parse("openai", command.split()).api_keys_file == Path("/etc/cog-triton/keys.txt")


@pytest.mark.parametrize("command", ["predict", "serve", "openai", "batch", "worker"])
def test_the_model_of_a_command_line_is_the_one_that_is_loaded(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODEL", "other/model")
    monkeypatch.setenv("COG_WEIGHTS", "https://example.com/weights.tar")
    output = ["--output", "answers.jsonl"] if command == "batch" else []
    parse(command, ["--model", "some/model", *output])
    settings = read_settings()
    assert (settings.model, settings.weights) == ("some/model", None)
    assert served_names(settings) == ("some/model",)


@pytest.mark.parametrize("command", ["serve", "openai", "batch", "worker"])
def test_served_model_names_are_labels(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MODEL", raising=False)
    monkeypatch.setenv("SERVED_MODEL_NAME", "")
    output = ["--output", "answers.jsonl"] if command == "batch" else []
    names = ["--served-model-name", "assistant", "--served-model-name", "gpt-4o"]
    parse(command, [*names, *output])
    settings = read_settings()
    assert settings.model == read_settings({}).model
    assert served_names(settings) == ("assistant", "gpt-4o")


def test_a_model_of_an_attached_triton_has_its_name_there() -> None:
    assert served_names(read_settings({}), otherwise="ensemble") == ("ensemble",)
    assert served_names(read_settings({"SERVED_MODEL_NAME": "a, b,"}), "ensemble") == ("a", "b")
