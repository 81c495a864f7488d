"""What a user sees of a start that fails: few lines, the cause once and in the last of them."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cog_triton.errors import TritonStartError
from cog_triton.server.command import Endpoints
from tests.integration.conftest import ANY_PORTS, make_server, settings_for
from tests.support import ROOT, free_port

MOST_LINES = 4


def run(script: str, *arguments: str, **environment: str) -> tuple[int, str]:
    """The exit status of a command, and what it wrote to standard error."""
    process = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / script), *arguments],
        env={**os.environ, **ANY_PORTS, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert process.stdout == ""
    return process.returncode, process.stderr.strip()


def is_told_once(said: str, cause: str) -> bool:
    lines = said.splitlines()
    return cause in lines[-1] and said.count(cause) == 1 and len(lines) <= MOST_LINES


def change_config(model: Path, **values: object) -> None:
    file = model / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def remove(model: Path, pattern: str) -> None:
    for file in model.glob(pattern):
        file.unlink()


def corrupt(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"no weights")


def cut_off(model: Path) -> None:
    os.truncate(model / "model.safetensors", 50_000)


def half_a_config(model: Path) -> None:
    (model / "config.json").write_text('{"model_type": ')


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (shutil.rmtree, "E3001 ConfigurationError: MODEL={model} does not exist"),
        (lambda model: remove(model, "*"), "{model} has no config.json"),
        (lambda model: remove(model, "config.json"), "{model} has no config.json"),
        (half_a_config, "{model}/config.json cannot be read: Expecting value"),
        (lambda model: remove(model, "tokenizer*"), "{model} holds no tokenizer"),
        (lambda model: remove(model, "*.safetensors"), "{model} holds no weights"),
        (corrupt, "{model}/model.safetensors is damaged or incomplete"),
        (cut_off, "{model}/model.safetensors is damaged or incomplete"),
        (
            lambda model: change_config(model, intermediate_size=999),
            "model tensorrt_llm: the weights of {model} are not those of its config.json: "
            "model.layers.0.mlp.down_proj.weight has the shape",
        ),
        (
            lambda model: change_config(model, model_type="zebra"),
            "model tensorrt_llm: The checkpoint you are trying to load has model type `zebra`",
        ),
    ],
    ids=[
        "no directory",
        "empty directory",
        "no configuration",
        "half a configuration",
        "no tokenizer",
        "no weights",
        "damaged weights",
        "cut off weights",
        "weights of another model",
        "unknown architecture",
    ],
)
def test_of_a_model(
    damage: Callable[[Path], None], cause: str, demo_model: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(demo_model, model)
    damage(model)
    status, said = run("run_prediction.py", MODEL=str(model), ENGINE="transformers")
    assert status == 1
    assert is_told_once(said, cause.format(model=model)), said


@pytest.mark.parametrize(
    ("environment", "cause"),
    [
        ({"COG_TRITON_CONFIG": "/none.yaml"}, "COG_TRITON_CONFIG=/none.yaml does not exist"),
        ({"COG_TRITON_CONFIG": "/"}, "/ cannot be read: Is a directory"),
        ({"TRITONSERVER": "/none"}, "TRITONSERVER=/none is no file"),
        (
            {"TOKENIZER": "/none"},
            "no tokenizer could be loaded from '/none', which is no directory",
        ),
        ({"RUNTIME_DIR": "/proc/none"}, "/proc/none: No such file or directory"),
        ({"TRITON_HOST": "192.0.2.1"}, "TRITON_HOST=192.0.2.1 must be an address of this machine"),
        ({"TRITON_START_TIMEOUT": "0.1"}, "not ready after 0.1 s (TRITON_START_TIMEOUT)"),
        ({"DEVICE": "tpu", "DTYPE": "int3"}, "DEVICE='tpu': "),
        ({"MAX_SEQUENCE_LENGTH": "2"}, "Prompt length (4) exceeds maximum input length (1)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_of_a_setting(environment: dict[str, str], cause: str, demo_model: Path) -> None:
    given = {"MODEL": str(demo_model), "ENGINE": "simulated", **environment}
    status, said = run("run_prediction.py", **given)
    assert status == 1
    if "TRITON_START_TIMEOUT" in environment:  # what was loading then comes last
        assert cause in said
        assert len(said.splitlines()) <= MOST_LINES or "still loading" not in said
    else:
        assert is_told_once(said, cause), said
    assert "ensemble" not in said


def test_of_a_model_whose_process_is_killed(demo_model: Path, tmp_path: Path) -> None:
    templates = tmp_path / "templates"
    shutil.copytree(ROOT / "triton_model_repo", templates)
    code = templates / "tensorrt_llm" / "1" / "model.py"
    with code.open("a") as file:
        file.write("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    given = {"MODEL": str(demo_model), "TRITON_MODEL_REPO": str(templates), "ENGINE": "simulated"}
    status, said = run("run_prediction.py", **given)
    assert status == 1
    cause = "the process of model tensorrt_llm ended by signal 9 (SIGKILL)"
    assert is_told_once(said, cause), said


def test_of_a_port_that_is_taken_after_it_was_chosen(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        taken = listener.getsockname()[1]
        endpoints = Endpoints("127.0.0.1", taken, free_port(), free_port())
        server_module = "cog_triton.server.tritonserver"
        monkeypatch.setattr(f"{server_module}.choose_ports", lambda _: endpoints)
        server = make_server(settings_for(demo_model, ENGINE="simulated"), tmp_path)
        with pytest.raises(TritonStartError) as caught:
            server.start()
    assert is_told_once(caught.value.message, f"127.0.0.1:{taken}"), caught.value.message


def test_of_a_repository_that_was_filled_without_a_model(demo_model: Path, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    for model in ("preprocessing", "tensorrt_llm"):
        shutil.copytree(ROOT / "triton_model_repo" / model, repository / model)
        file = str(repository / model / "config.pbtxt")
        status, _ = run("fill_template.py", "-i", file, f"tokenizer_dir:{demo_model}")
        assert status == 0
    status, said = run("launch_triton_server.py", f"--model_repo={repository}")
    assert status == 2
    assert is_told_once(said, "tensorrt_llm: model: the transformers engine needs it"), said


def test_of_a_repository_whose_model_is_damaged(demo_model: Path, tmp_path: Path) -> None:
    model, repository = tmp_path / "model", tmp_path / "repository"
    shutil.copytree(demo_model, model)
    corrupt(model)
    shutil.copytree(ROOT / "triton_model_repo" / "tensorrt_llm", repository / "tensorrt_llm")
    file = str(repository / "tensorrt_llm" / "config.pbtxt")
    assert run("fill_template.py", "-i", file, f"model:{model}")[0] == 0
    status, said = run("launch_triton_server.py", f"--model_repo={repository}")
    assert status == 2
    assert is_told_once(said, f"{model}/model.safetensors is damaged or incomplete"), said
