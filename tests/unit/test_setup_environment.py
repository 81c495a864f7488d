"""Set-up by uv: pip's configuration in uv's variables, and PyTorch's build for CPUs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import setup_environment as script

from tests.support import ROOT

PIP_CONF = """
[global]
index-url = https://packages.example/simple
find-links = /wheels
    /more-wheels
[install]
extra-index-url = https://a.example/simple https://b.example/simple
"""


@pytest.fixture
def pip_conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for option, variable in script.OPTIONS.items():
        monkeypatch.delenv("PIP_" + option.upper().replace("-", "_"), raising=False)
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "pip.conf").write_text(PIP_CONF)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))


@pytest.mark.usefixtures("pip_conf")
def test_uv_is_given_the_configuration_of_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    found = script.pip_configuration(sys.executable)
    assert found["UV_DEFAULT_INDEX"] == "https://packages.example/simple"
    assert found["UV_INDEX"] == "https://a.example/simple https://b.example/simple"
    assert found["UV_FIND_LINKS"] == "/wheels,/more-wheels"
    assert found["UV_INDEX_STRATEGY"] == "unsafe-best-match"
    monkeypatch.setenv("PIP_INDEX_URL", "https://c.example/simple")
    monkeypatch.setenv("UV_FIND_LINKS", "/own")
    found = script.pip_configuration(sys.executable)
    assert found["UV_DEFAULT_INDEX"] == "https://c.example/simple"
    assert "UV_FIND_LINKS" not in found


@pytest.mark.parametrize(("gpu", "reachable"), [(True, True), (False, True), (False, False)])
@pytest.mark.usefixtures("pip_conf")
def test_pytorch_for_cpus_is_taken_where_there_is_no_gpu(
    gpu: bool,
    reachable: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    commands: list[list[str]] = []

    def call(command: list[str], **_: object) -> int:
        commands.append(command)
        return int("--torch-backend" in command and not reachable)

    monkeypatch.setattr("subprocess.call", call)
    monkeypatch.setattr(script, "has_gpu", lambda: gpu)
    monkeypatch.setattr(script, "pip_configuration", lambda _: {})
    assert script.main([str(tmp_path / "venv"), "--editable", ".[local]"]) == 0
    backend = [command[-1] for command in commands if "--torch-backend" in command]
    pinned = re.search(r'"(torch==[^"]+)"', (ROOT / "pyproject.toml").read_text())
    assert pinned is not None
    assert backend == ([] if gpu else [pinned[1]])
    assert commands[-1][-2:] == ["--editable", ".[local]"]
    assert ("cannot be reached" in capsys.readouterr().err) is not reachable


def test_an_old_python_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 1))
    assert script.main(["venv"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("setup: Python 3.10 or later is needed, not 3.9: make setup PYTHON=")


def test_a_failed_step_is_the_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.call", lambda command, **_: int("pip" in command))
    assert script.main([str(tmp_path), "x"]) == 1
