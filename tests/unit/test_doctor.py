"""``cog-triton doctor``: what is missing is named, with what to do about it."""

import os
import socket
from pathlib import Path

import pytest

from cog_triton.cli import main


def report(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *options: str,
    **environment: str,
) -> tuple[int, str]:
    ports = {f"TRITON_{name}_PORT": "0" for name in ("HTTP", "GRPC", "METRICS")}
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    monkeypatch.setattr(os, "environ", {**kept, **ports, **environment})
    status = main(["doctor", *options])
    return status, capsys.readouterr().out


def test_a_machine_that_can_serve(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    status, text = report(monkeypatch, capsys, WEIGHTS_CACHE=str(tmp_path / "cache"))
    assert status == 0
    assert "PROBLEM" not in text
    for subject in ("Python", "GPU", "PyTorch", "tritonserver", "ENGINE", "MODEL", "ports", "disk"):
        assert f"  {subject} " in text
    assert "toy demo model" in text
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("environment", "problem", "remedy"),
    [
        ({"MODEL": "/no/such/model"}, "/no/such/model does not exist", "--model"),
        ({"MODEL": "/nothing"}, "/nothing does not exist", "--model"),
        ({"TRITONSERVER": "/nothing"}, "TRITONSERVER=/nothing is not a file", "nvidia-pytriton"),
        ({"MAX_RUNNING": "many"}, "MAX_RUNNING='many'", ""),
        ({"ENGINE": "tensorrtllm"}, "ENGINE=tensorrtllm requires ENGINE_DIR", ""),
    ],
    ids=["model", "short-path", "tritonserver", "setting", "engine"],
)
def test_a_problem_is_named_with_its_remedy(
    environment: dict[str, str],
    problem: str,
    remedy: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, text = report(monkeypatch, capsys, **environment)
    assert status == 1
    (line,) = [line for line in text.splitlines() if line.startswith("PROBLEM")][:1]
    assert problem in line
    assert remedy in text


def test_a_port_in_use_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        status, text = report(monkeypatch, capsys, TRITON_GRPC_PORT=port)
    assert status == 1
    assert f"TRITON_GRPC_PORT={port} is in use" in text
    assert "set TRITON_GRPC_PORT=0" in text


def test_what_is_no_problem_is_a_note(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = report(monkeypatch, capsys, "--model", "org/some-model", MAX_RUNING="3")
    assert status == 0
    assert "org/some-model will be downloaded" in text
    assert "note     settings      the environment variable MAX_RUNING" in text
