"""The command cog-triton and the files of scripts/."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cog_triton import __version__
from cog_triton.cli import load_commands, main, parse, parser_of
from cog_triton.cli.options import port_of
from cog_triton.cli.predict import free_ports
from cog_triton.cli.registry import PACKAGE
from cog_triton.cli.serve import url_of, why_not_free
from cog_triton.deployment.model_files import served_names
from cog_triton.errors import ConfigurationError
from cog_triton.settings import VARIABLES, read_settings
from tests.support import ROOT

PROGRAM = "import sys; from cog_triton.cli import main; sys.exit(main())"
SCRIPTS = ROOT / "scripts"
FOR_DEVELOPERS = {"image_requirements.py", "make_docs.py"}
COMMANDS = load_commands()


def cog_triton(*arguments: str, program: str = PROGRAM) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)


def test_help_has_a_line_for_each_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert main([]) == main(["help"]) == 0
    assert capsys.readouterr().out == text * 2
    for name, command in COMMANDS.items():
        assert f"\n  {name:14}  {command.summary}\n" in text


def test_help_imports_nothing_that_takes_time() -> None:
    heavy = {"numpy", "grpc", "httpx", "transformers", "torch", "pydantic"}
    program = f"""
import sys
from cog_triton.cli import load_commands, main, parser_of
main(["--help"])
for command in load_commands().values():
    parser_of(command)
    found = sorted({heavy} & set(sys.modules))
    assert not found, (command.name, found)
"""
    done = cog_triton(program=program)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["doctor"]])
def test_a_reader_that_leaves_ends_a_command_without_a_traceback(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "cog_triton", *arguments]
    try:
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(writer)
    assert done.stderr == ""
    assert done.returncode in (0, 128 + signal.SIGPIPE)  # argparse passes over it


def test_the_version_is_that_of_the_package() -> None:
    done = cog_triton("--version")
    assert (done.returncode, done.stdout) == (0, f"cog-triton {__version__}\n")


@pytest.mark.parametrize(
    ("word", "advice"),
    [
        ("predcit", "did you mean 'predict'?"),
        ("lanch", "did you mean 'launch'?"),
        ("Serve", "did you mean 'serve'?"),
        ("fill_template", "did you mean 'fill-template'?"),
        ("nothing-like-it", f"the commands are {', '.join(COMMANDS)}"),
    ],
)
def test_an_unknown_command_is_one_line_with_advice(
    word: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word]) == 2
    assert capsys.readouterr().err == (f"cog-triton: error: unknown command {word!r}; {advice}\n")


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["serve", "--prot", "80"], "  unknown option --prot; did you mean --port?"),
        (["openai", "--served-model=a"], None),  # argparse takes the beginning of an option
        (
            ["openai", "--model-name=a"],
            "  unknown option --model-name; did you mean --served-model-name?",
        ),
        (
            ["launch", "--model-repo=/r"],
            "  unknown option --model-repo; did you mean --model_repo?",
        ),
        (["adapter", "lst"], "  did you mean list?"),
        (["predict", "a prompt", "--tempreature", "1"], None),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_misspelt_option_gets_a_suggestion(
    arguments: list[str],
    advice: str | None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ})
    if arguments[1] == "--served-model=a":
        assert parse("openai", arguments[1:]).served_model_name == ["a"]
        return
    with pytest.raises(SystemExit) as ended:
        parse(arguments[0], arguments[1:])
    assert ended.value.code == 2
    first, *others = capsys.readouterr().err.splitlines()
    assert first.startswith(f"cog-triton {arguments[0]}: error: ")
    assert others == [
        *([] if advice is None else [advice]),
        f"Run `cog-triton {arguments[0]} --help` for the options.",
    ]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_a_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: cog-triton {name} ")
    assert f"{COMMANDS[name].summary}.\n" in text


@pytest.mark.parametrize("name", [command.name for command in PACKAGE])
def test_a_wheels_help_names_no_page(name: str) -> None:
    """The pages are in a checkout alone, but for the one beside the templates."""
    pages = re.findall(r"\b[\w/]+\.md\b", parser_of(COMMANDS[name]).format_help())
    assert {*pages} <= {"triton_model_repo/README.md"}


@pytest.mark.parametrize("script", sorted(file.name for file in SCRIPTS.glob("[a-z]*.py")))
def test_each_script_is_a_command(script: str) -> None:
    text = (SCRIPTS / script).read_text()
    named = {*re.findall(r'^(?:    )?_checkout\.run\("([\w-]+)"\)$', text, re.MULTILINE)}
    assert bool(named & {*COMMANDS}) is (script not in FOR_DEVELOPERS)


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


@pytest.mark.parametrize(
    ("environ", "ports"),
    [
        pytest.param({}, (0, 0, 0), id="free ones"),
        pytest.param({"TRITON_HTTP_PORT": "8100"}, (8100, 0, 0), id="one that is set"),
        pytest.param({"TRITON_GRPC_PORT": ""}, (0, 0, 0), id="an empty variable"),
    ],
)
def test_predict_takes_free_ports_unless_they_are_set(
    environ: dict[str, str], ports: tuple[int, int, int]
) -> None:
    settings = read_settings({**environ, **{k: v or "" for k, v in free_ports(environ).items()}})
    assert (settings.http_port, settings.grpc_port, settings.metrics_port) == ports


@pytest.mark.parametrize("port", ["x", "-1", "65536"])
def test_a_port_that_is_none_is_named_with_its_variable(
    port: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PORT", port)
    with pytest.raises(ConfigurationError, match=f"PORT={port} is not a port from 0 to 65535"):
        port_of(None, 5000)
    assert port_of(5001, 5000) == 5001


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


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "tcsh"])
def test_completion_has_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert [name for name in COMMANDS if name not in text] == []
    assert "served-model-name" in text


def test_bash_completes_commands_options_and_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", "bash"]) == 0
    functions = capsys.readouterr().out
    (tmp_path / "repository").mkdir()
    program = f"""
complete_words() {{
    COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
    _shtab_cog_triton
    echo "${{COMPREPLY[@]}}"
}}
{functions}
complete_words cog-triton pre
complete_words cog-triton serve --po
complete_words cog-triton adapter li
complete_words cog-triton launch --model_repo {tmp_path}/rep
"""
    completed = subprocess.run(["bash", "-c", program], capture_output=True, text=True)
    assert completed.stdout.splitlines() == [
        "predict",
        "--port",
        "list",
        f"{tmp_path}/repository",
    ]


@pytest.mark.parametrize("command", ["serve", "openai"])
def test_servers_listen_on_loopback_unless_told_otherwise(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOST", raising=False)
    assert parse(command, []).host == "127.0.0.1"
    assert parse(command, ["--host", "0.0.0.0"]).host == "0.0.0.0"
    monkeypatch.setenv("HOST", "::")
    assert parse(command, []).host == "::"
    settings = read_settings({})
    assert {settings.host, settings.openai_host} == {"127.0.0.1"}


def test_the_options_of_openai_trtllm_are_taken() -> None:
    options = parse("openai", ["-H", "0.0.0.0", "-p", "3001", "-t", "http://localhost:8001"])
    assert (options.host, options.port) == ("0.0.0.0", 3001)
    assert options.triton_endpoint == "http://localhost:8001"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_port_is_looked_for_in_the_family_of_its_address(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip(f"this machine has no {host}")
    with listener:
        port = listener.getsockname()[1]
        assert why_not_free(host, port) == f"port {port} is in use"
    assert why_not_free(host, port) == ""


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:5000"),
        ("localhost", "http://localhost:5000"),
        ("::1", "http://[::1]:5000"),
        ("::", "http://[::1]:5000"),
    ],
)
def test_the_url_of_a_server_can_be_asked(host: str, url: str) -> None:
    assert url_of(host, 5000) == url
