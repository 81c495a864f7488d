"""What a user sees of a start that fails: few lines, the cause once and in the last of them."""

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped, unused-ignore]
import pytest

from cog_triton.deployment import Deployment
from cog_triton.errors import CogTritonError
from cog_triton.server.guard import GIVEN_UP
from tests.integration.conftest import ANY_PORTS, settings_for
from tests.support import ROOT, command, fake_triton, free_port, script, wait_until

MAX_LINES = 6  # three parts of the start may have loaded before


def run(name: str, *arguments: str, **environment: str) -> tuple[int, str]:
    """The exit status of a script, and what it wrote to standard error."""
    process = script(name, *arguments, environ={**ANY_PORTS, **environment})
    assert process.stdout == ""
    return process.returncode, process.stderr.strip()


def is_told_once(said: str, cause: str) -> bool:
    lines = said.splitlines()
    return cause in lines[-1] and said.count(cause) == 1 and len(lines) <= MAX_LINES


@pytest.mark.rare
@pytest.mark.anyio
async def test_a_stub_that_gets_no_processor_is_started_again(
    demo_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Triton 2.51 waits forever for the end of one whose sign of life is a second late."""
    me, stopped = psutil.Process(), set[int]()
    others = set(me.children(recursive=True))  # of servers that tests share

    def stop_one() -> bool:
        for process in set(me.children(recursive=True)) - others:
            with contextlib.suppress(psutil.Error, OSError):
                if "/postprocessing/" in " ".join(process.cmdline()):
                    process.nice(19)  # it loads no faster than this looks
                    if "numpy" in Path(f"/proc/{process.pid}/maps").read_text():  # it imports
                        process.suspend()
                        stopped.add(process.pid)
        return bool(stopped)

    with caplog.at_level("INFO", "tritonserver"):
        settings = settings_for(demo_model, ENGINE="simulated")
        starting = asyncio.create_task(Deployment.start(settings))
        await asyncio.to_thread(wait_until, stop_one, 120, "a process that loads")
        await (await starting).stop()
    assert GIVEN_UP in caplog.text


@pytest.mark.anyio
async def test_a_server_that_has_given_a_stub_up_is_started_again(
    demo_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = tmp_path / "first"
    first.touch()
    monkeypatch.setenv("FAKE_TRITON_GIVES_UP", str(first))
    with caplog.at_level("INFO", "tritonserver"):
        deployment = await Deployment.start(settings_for(demo_model, **fake_triton()))
        await deployment.stop()
    assert GIVEN_UP in caplog.text
    assert not first.exists()


PLANTED = """
mount --bind "$0" /mnt || exit 77
mount -t tmpfs tmpfs /tmp && mkdir -p "$0" /tmp/coglet /tmp/home/Documents || exit 77
mount --bind /mnt "$0" || exit 77
ln -s /tmp/home /tmp/coglet/predictions
"$@"
status=$?
ls /tmp/home /tmp/home/*
exit $status
"""


def test_a_link_that_another_user_put_where_cog_keeps_files(tmp_path: Path) -> None:
    """In a mount namespace, so that /tmp is this test's; the checkout may be in the real one."""
    command = ["unshare", "-m", "sh", "-c", PLANTED, str(ROOT)]
    command += [sys.executable, str(ROOT / "scripts" / "serve.py")]
    environment = {**os.environ, **ANY_PORTS, "PORT": str(free_port()), "LOG_FORMAT": "text"}
    process = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    if process.returncode == 77 or "unshare failed" in process.stderr:
        pytest.skip("no right to make a mount namespace")
    assert process.returncode == 1
    assert "/tmp/coglet/predictions is a link or a file" in process.stderr
    assert process.stdout.split() == ["/tmp/home:", "Documents", "/tmp/home/Documents:"]


NO_TOKENIZER = "{model} contains no tokenizer"
ZEBRA = "the installed transformers cannot generate text with the model type 'zebra' in {model}"


@pytest.mark.parametrize(
    ("files", "content", "cause"),
    [
        pytest.param(
            "config.json", None, "{model}/config.json does not exist", id="no config.json"
        ),
        pytest.param(
            "config.json",
            '{"model_type": ',
            "{model}/config.json cannot be read: Expecting value",
            id="half a config.json",
        ),
        pytest.param("tokenizer*", None, NO_TOKENIZER, id="no tokenizer"),
        pytest.param(
            "model.safetensors",
            "no",
            "{model}/model.safetensors is damaged or incomplete",
            id="damaged weights",
        ),
        pytest.param("config.json", {"model_type": "zebra"}, ZEBRA, id="an unknown type"),
    ],
)
def test_of_a_model(files: str, content: Any, cause: str, demo_model: Path, tmp_path: Path) -> None:
    """With another content of some files: none, a text, or other values in an object."""
    model = tmp_path / "model"
    shutil.copytree(demo_model, model)
    for file in model.glob(files):
        if content is None:
            file.unlink()
        elif isinstance(content, str):
            file.write_text(content)
        else:
            file.write_text(json.dumps({**json.loads(file.read_text()), **content}))
    said = error_of_a_start(model, ENGINE="transformers")
    assert is_told_once(said, cause.format(model=model)), said


def error_of_a_start(model: Path, **environment: str) -> str:
    with pytest.raises(CogTritonError) as caught:
        asyncio.run(Deployment.start(settings_for(model, **environment)))
    return caught.value.message


@pytest.mark.parametrize(
    ("name", "value", "cause"),
    [
        ("MODEL", "/none/model", "MODEL=/none/model does not exist"),
        ("COG_TRITON_CONFIG", "/none.yaml", "COG_TRITON_CONFIG=/none.yaml does not exist"),
        ("TOKENIZER", "/none", "no tokenizer could be loaded from '/none': the directory does not"),
        ("RUNTIME_DIR", "/proc/none", "/proc/none: No such file or directory"),
        ("TRITON_HOST", "192.0.2.1", "TRITON_HOST=192.0.2.1 must be an address of this machine"),
    ],
)
def test_of_a_setting(name: str, value: str, cause: str, demo_model: Path) -> None:
    said = error_of_a_start(demo_model, **{**fake_triton(), name: value})
    assert is_told_once(said, cause), said
    assert "ensemble" not in said


TOO_LONG = "Prompt length (4) exceeds maximum input length (1)"


@pytest.mark.rare
def test_of_a_warm_up_that_the_models_refuse(demo_model: Path) -> None:
    said = error_of_a_start(demo_model, ENGINE="simulated", MAX_SEQUENCE_LENGTH="2")
    assert is_told_once(said, TOO_LONG), said
    assert "ensemble" not in said


def test_of_a_warm_up_that_is_refused(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = f"in ensemble 'ensemble_ids', Failed to process the request(s): {TOO_LONG}."
    monkeypatch.setenv("FAKE_TRITON_REFUSES", refusal)
    said = error_of_a_start(demo_model, **fake_triton())
    assert is_told_once(said, TOO_LONG), said
    assert "ensemble" not in said


def test_of_a_model_in_its_process(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in for tritonserver, on which other tests rely, says it as the real one."""
    cause = "simulated_text '</s>' has no tokens that make text"
    said = error_of_a_start(demo_model, ENGINE="simulated", SIMULATED_TEXT="</s>")
    assert is_told_once(said, f"model tensorrt_llm: {cause}"), said
    assert "ensemble" not in said
    error = said.splitlines()[-1].removeprefix("model tensorrt_llm: ")
    monkeypatch.setenv("FAKE_TRITON_FAILS", f"tensorrt_llm: ValueError: {error}")
    assert error_of_a_start(demo_model, **fake_triton()) == said


def test_of_a_killed_model(demo_model: Path) -> None:
    behaviour = fake_triton(dies="tensorrt_llm")
    status, said = run("run_prediction.py", MODEL=str(demo_model), **behaviour)
    assert status == 1
    killed = "the process of model tensorrt_llm ended by signal 9 (SIGKILL)"
    assert is_told_once(said, killed), said


def test_of_a_template(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from predict import Predictor

    monkeypatch.setenv("MODEL", str(demo_model))
    monkeypatch.setenv("PROMPT_TEMPLATE", "{oops}")
    with pytest.raises(CogTritonError, match=r"^E1004 "):
        asyncio.run(Predictor().setup())


def test_of_a_repository_that_was_filled_without_a_model(demo_model: Path, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    for model in ("preprocessing", "tensorrt_llm"):
        shutil.copytree(ROOT / "triton_model_repo" / model, repository / model)
        file = str(repository / model / "config.pbtxt")
        filled = command("fill-template", "-i", file, f"tokenizer_dir:{demo_model}")
        assert filled.returncode == 0
    launched = command("launch", f"--model_repo={repository}")
    assert launched.returncode == 2
    cause = "tensorrt_llm: model: the transformers engine needs it"
    assert is_told_once(launched.stderr.strip(), cause), launched.stderr
