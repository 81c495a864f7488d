from __future__ import annotations

import http.server
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import setup_environment as script

from tests.support import ROOT, QuietHandler, free_port, http_server

VERSION = "9.9.9"


@pytest.fixture
def cpu_index(tmp_path: Path) -> Iterator[str]:
    """An index like PyTorch's, with a build for CPUs that any Python can install."""
    name = f"torch-{VERSION}+cpu-py3-none-any.whl"
    directory = tmp_path / "index" / "torch"
    directory.mkdir(parents=True)
    info = f"torch-{VERSION}+cpu.dist-info"
    with zipfile.ZipFile(directory / name, "w") as wheel:
        wheel.writestr("torch.py", "")
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {VERSION}+cpu\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    escaped = name.replace("+", "%2B")
    (directory / "index.html").write_text(f'<a href="{escaped}">{escaped}</a>')
    handler = partial(Quiet, directory=str(tmp_path / "index"))
    with http_server(handler) as url:
        yield url


class Quiet(QuietHandler, http.server.SimpleHTTPRequestHandler):
    pass


def test_the_build_for_cpus_is_seen_in_an_index(cpu_index: str) -> None:
    assert script.cpu_build(cpu_index, VERSION)
    assert not script.cpu_build(cpu_index, "9.9.8")
    assert not script.cpu_build(f"{cpu_index}/elsewhere", VERSION)
    assert not script.cpu_build(f"http://127.0.0.1:{free_port()}", VERSION)


def test_a_build_for_another_python_or_machine_is_none(
    cpu_index: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "index" / "torch" / "index.html"
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    for wheel, fits in {
        f"torch-{VERSION}%2Bcpu-{tag}-{tag}-manylinux_2_28_x86_64.whl": True,
        f"torch-{VERSION}%2Bcpu-{tag}-{tag}-manylinux_2_28_aarch64.whl": False,
        f"torch-{VERSION}%2Bcpu-cp27-cp27-manylinux_2_28_x86_64.whl": False,
        f"torch-{VERSION}%2Bcpu-{tag}-{tag}t-manylinux_2_28_x86_64.whl": False,
    }.items():
        page.write_text(f'<a href="/whl/cpu/{wheel}#sha256=00">{wheel}</a>')
        assert script.cpu_build(cpu_index, VERSION) is fits


@pytest.mark.slow
def test_the_build_for_cpus_is_installed_where_there_is_no_gpu(
    cpu_index: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    monkeypatch.setattr(script, "torch_version", lambda _: VERSION)
    monkeypatch.setattr(script, "has_gpu", lambda: True)
    script.install_torch(python, cpu_index)
    assert f"PyTorch {VERSION} for this machine's GPU" in capsys.readouterr().err
    monkeypatch.setattr(script, "has_gpu", lambda: False)
    script.install_torch(python, f"http://127.0.0.1:{free_port()}")
    assert "no build for CPUs to be had" in capsys.readouterr().err
    script.install_torch(python, cpu_index)
    said = capsys.readouterr().err
    assert f"PyTorch {VERSION} for CPUs" in said
    assert "no build" not in said
    ask = "import importlib.metadata as m; print(m.version('torch'))"
    shown = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == f"{VERSION}+cpu"


def test_a_build_that_cannot_be_installed_leaves_it_to_the_configured_index(
    cpu_index: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "torch_version", lambda _: VERSION)
    monkeypatch.setattr(script, "has_gpu", lambda: False)
    script.install_torch("false", cpu_index)
    assert "no build for CPUs to be had" in capsys.readouterr().err


def test_the_release_is_the_one_that_the_project_pins() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert f'"torch=={script.torch_version(project)}",' in project


def test_a_line_for_each_large_download_and_none_for_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with script.Progress() as progress:
        for line in (
            "Collecting torch\n",
            "  Downloading https://host/torch-2.13.0%2Bcpu-cp311-cp311-linux_x86_64.whl (190.2 MB)\n",
            "Using cached numpy-1.26.4-cp311-cp311-linux_x86_64.whl (18 MB)\n",
            "Using cached ziglang-0.17.1-py3-none-any.whl (101 MB)\n",
        ):
            progress.show(line)
    assert capsys.readouterr().err.splitlines() == [
        "  torch-2.13.0+cpu, 190 MB",
        "  ziglang-0.17.1, 101 MB, cached",
        "  3 files, 309 MB in all",
    ]


def test_a_step_that_fails_says_its_last_lines_and_what_helps() -> None:
    program = "print('so it was'); raise SystemExit(3)"
    with pytest.raises(script.SetupError) as caught:
        script.run([sys.executable, "-c", program], advice="try again")
    first, second, last = str(caught.value).splitlines()
    assert (first, last) == ("so it was", "try again")
    assert second.startswith("failed with status 3: ")


def test_an_old_python_is_refused_by_its_number(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 18))
    assert script.main(["--venv", str(tmp_path / "venv")]) == 1
    assert "Python 3.10 or later is needed" in capsys.readouterr().err
    assert not (tmp_path / "venv").exists()
