"""A wheel of this checkout in an environment of its own, its commands called from an empty directory."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from cog_triton.cli.registry import PACKAGE
from tests.integration.conftest import ANY_PORTS
from tests.integration.test_python_versions import interpreter
from tests.openai_server import ANSWER, MESSAGES, QUESTION
from tests.support import ROOT, START_TIMEOUT, Server, free_port

pytestmark = pytest.mark.rare

SOURCES = ("cog_triton", "triton_model_repo", "predict.py", "cog.yaml")
BUILD = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    source = directory / "source"
    source.mkdir()
    for name in (*SOURCES, "tools", *BUILD):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(directory)]
    subprocess.run([*pip, str(source)], check=True, timeout=900)
    shutil.rmtree(source)
    (wheel,) = directory.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """The directory of the environment's commands."""
    directory = wheel.parent
    script = [f"{ROOT}/scripts/install.sh", f"{directory}/venv", f"{wheel}[local]"]
    subprocess.run(script, env={**os.environ, "PYTHON": sys.executable}, check=True, timeout=900)
    return directory / "venv" / "bin"


def package(commands: Path) -> Path:
    (found,) = commands.parent.glob("lib/python*/site-packages/cog_triton")
    return found


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("PYTHON")]:
        monkeypatch.delenv(name)
    for name, value in ANY_PORTS.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def output_of(*command: str | Path, directory: Path) -> str:
    most = 2 * START_TIMEOUT
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=most)
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def running(directory: Path, *command: str | Path) -> Iterator[Server]:
    """A command that serves, once it is ready; it must end well."""
    server = Server({}, directory / "log")
    server.command, server.directory = [*map(str, command)], directory
    with server:
        server.wait_for_line()
        yield server
        assert server.stop() == 0, server.log.read_text()[-3000:]


def test_it_has_every_data_file(installed: Path) -> None:
    source = ROOT / "cog_triton"
    files = [*source.rglob("*.yaml"), *source.rglob("*.html"), *(source / "demo").iterdir()]
    names = [file.relative_to(source) for file in files if file.is_file()]
    assert [name for name in names if not (package(installed) / name).is_file()] == []


def test_it_has_no_package_but_its_own(installed: Path, empty: Path) -> None:
    names = ("tools", "predict", "scripts")
    program = f"from importlib.util import find_spec; print(*map(find_spec, {names}))"
    assert output_of(installed / "python", "-c", program, directory=empty) == "None None None\n"
    help_text = output_of(installed / "cog-triton", directory=empty)
    listed = re.findall(r"^  (\S+)  ", help_text, re.MULTILINE)
    assert listed == [command.name for command in PACKAGE]


def test_predict(installed: Path, empty: Path) -> None:
    answer = output_of(installed / "cog-triton", "predict", QUESTION, directory=empty)
    assert answer.startswith(ANSWER)
    assert not list(empty.iterdir())


def test_serve(installed: Path, empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(package(installed) / "demo", empty / "model")
    monkeypatch.setenv("MODEL", "model")  # of the directory in which the command is called
    with running(empty, installed / "cog-triton", "serve") as server:
        url = f"{server.url}/predictions"
        body = {"input": {"prompt": QUESTION, "temperature": 0}}
        answer = httpx.post(url, json=body, timeout=60, trust_env=False).json()
        assert "".join(answer["output"]).startswith(ANSWER)
        refused = {"input": {"max_tokens": 0}}
        assert httpx.post(url, json=refused, trust_env=False).status_code == 422


def test_openai(installed: Path, empty: Path) -> None:
    port = str(free_port())
    with running(empty, installed / "cog-triton", "openai", "--port", port):
        body = {"model": "demo", "messages": MESSAGES}
        url = f"http://127.0.0.1:{port}"
        reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60, trust_env=False)
        assert ANSWER in reply.json()["choices"][0]["message"]["content"]


def test_templates_that_are_filled_are_launched(installed: Path, empty: Path) -> None:
    repository, demo = empty / "repository", package(installed) / "demo"
    shutil.copytree(package(installed) / "root" / "triton_model_repo", repository)
    shutil.rmtree(repository / "tensorrt_llm_bls")
    values = {
        "ensemble": "decoding_context:true",
        "preprocessing": f"tokenizer_dir:{demo}",
        "postprocessing": f"tokenizer_dir:{demo}",
        "tensorrt_llm": f"engine:transformers,model:{demo},decoding_context:true",
    }
    for model, value in values.items():
        file = repository / model / "config.pbtxt"
        command = [str(installed / "cog-triton"), "fill-template", "-i", str(file), value]
        subprocess.run(command, cwd=empty, check=True)
    port = free_port()
    options = ["--model_repo=repository", f"--http_port={port}"]
    with running(empty, installed / "cog-triton", "launch", *options):
        url = f"http://127.0.0.1:{port}/v2/models/ensemble/generate"
        body = {"text_input": QUESTION, "max_tokens": 10, "exclude_input_in_output": True}
        answer = httpx.post(url, json=body, timeout=60, trust_env=False).json()
        assert answer["text_output"].startswith(ANSWER)


@pytest.mark.parametrize("minor", [10, 11, 12, 13])
def test_a_bare_wheel_in_an_empty_environment(minor: int, wheel: Path, tmp_path: Path) -> None:
    """Installed as from an index, without an extra: the command works, and says what is missing."""
    uv = str(Path(sys.executable).with_name("uv"))
    environment = tmp_path / "venv"
    base = interpreter(f"3.{minor}")
    subprocess.run([uv, "venv", "-q", "--python", base, environment], check=True)
    python = environment / "bin" / "python"
    subprocess.run([uv, "pip", "install", "-q", "--python", python, wheel], check=True, timeout=900)
    command = environment / "bin" / "cog-triton"
    assert output_of(command, "--version", directory=tmp_path).startswith("cog-triton ")
    assert "doctor" in output_of(command, directory=tmp_path)
    doctor = subprocess.run([command, "doctor"], cwd=tmp_path, capture_output=True, text=True)
    assert doctor.returncode == 1, doctor.stderr
    assert "pip install 'nvidia-pytriton" in doctor.stdout
    assert "Traceback" not in doctor.stderr


@pytest.mark.parametrize("minor", [10, 11, 12, 13])
@pytest.mark.parametrize("extra", ["local", "vllm"])
def test_an_extra_resolves(extra: str, minor: int, wheel: Path) -> None:
    """Nothing of it is installed."""
    uv = str(Path(sys.executable).with_name("uv"))
    command = [uv, "pip", "compile", "-q", "--no-header", "--python-version", f"3.{minor}", "-"]
    requirement = f"cog-triton[{extra}] @ {wheel.as_uri()}"
    done = subprocess.run(command, input=requirement, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert f"\n{'vllm' if extra == 'vllm' else 'torch'}==" in done.stdout
