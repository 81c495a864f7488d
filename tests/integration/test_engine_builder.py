"""Whole builds, with recording fakes for TensorRT-LLM's scripts and its trtllm-build."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import types
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml

from cog_triton.errors import ConfigurationError, EngineBuildError
from cog_triton.processes import locked
from tests.support import ROOT, alive, command, limit, processes, wait_until
from tools.engine_builder.build import build
from tools.engine_builder.config import EngineConfig
from tools.engine_builder.toolchain import Toolchain

TOKEN = "hf_abcdefghijklmnopqrstuvwxyz"

# It stands for all three programs, records its call and writes what TensorRT-LLM would, or fails as
# FAKE_<NAME> says.
FAKE = """\
#!{python}
import json, os, pathlib, signal, sys, time

name = {name!r}
arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
with open(os.environ["FAKE_RECORD"], "a") as record:
    call = {{"name": name, "argv": sys.argv[1:], "token": os.environ.get("HF_TOKEN")}}
    record.write(json.dumps(call) + "\\n")
print("this is", name)
print("using token", os.environ.get("HF_TOKEN"), file=sys.stderr)
fate = os.environ.get("FAKE_" + name.upper().replace("-", "_"), "")
if fate.startswith("exit"):
    sys.exit(int(fate[4:]))
if fate == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if fate == "hang":
    import subprocess

    sleep = "import time; time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", sleep, os.environ["FAKE_RECORD"]])
    print("hanging", flush=True)
    time.sleep(600)
output = pathlib.Path(arguments["--output_dir"])
output.mkdir(exist_ok=True)
config = {{"version": "1.2.0", "mapping": {{"world_size": int(arguments.get("--tp_size", 1))}}}}
if name == "trtllm-build":
    config = json.loads(pathlib.Path(arguments["--checkpoint_dir"], "config.json").read_text())
    for rank in range(config["mapping"]["world_size"] - (fate == "lose")):
        (output / f"rank{{rank}}.engine").write_text(f"engine {{rank}}")
if fate != "nothing":
    (output / "config.json").write_text(json.dumps(config))
print("\\u2588 100%")
"""


class Machine:
    """A machine with a fake TensorRT-LLM, and a model."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.examples = root / "examples"
        self.bin = root / "bin"
        self.record = root / "record.jsonl"
        self.record.touch()
        self.script("trtllm-build", self.bin / "trtllm-build")
        self.script("convert", self.examples / "models/core/llama/convert_checkpoint.py")
        self.script("quantize", self.examples / "quantization/quantize.py")
        self.tools = Toolchain(sys.executable, str(self.bin / "trtllm-build"), self.examples)
        self.model = self.make_model(root / "TinyLlama")
        self.output = root / "engine.tar"
        self.workdir = root / "work"

    def script(self, name: str, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(FAKE.format(python=sys.executable, name=name))
        path.chmod(0o755)

    def make_model(self, directory: Path, model_type: str = "llama") -> Path:
        directory.mkdir(parents=True)
        (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
        for name in ("tokenizer.json", "tokenizer_config.json", "model.safetensors"):
            (directory / name).write_text(name)
        return directory

    def build(self, token: str | None = None, **keys: Any) -> dict[str, str]:
        """Build in the working directory; return the tar's files and their texts."""
        config = EngineConfig(**{"model": str(self.model), **keys})
        build(config, self.output, toolchain=self.tools, workdir=self.workdir, hf_token=token)
        return self.content()

    def content(self) -> dict[str, str]:
        with tarfile.open(self.output) as tar:
            files = {member.name: tar.extractfile(member) for member in tar}
            return {name: file.read().decode() for name, file in files.items() if file}

    def calls(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.record.read_text().splitlines()]

    def names(self) -> list[str]:
        return [call["name"] for call in self.calls()]

    def environment(self) -> dict[str, str]:
        """For a process that builds with what is in PATH."""
        path = f"{self.bin}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        return {"PATH": path, "TENSORRT_LLM_EXAMPLES": str(self.examples)}

    def config_file(self, **keys: Any) -> Path:
        file = self.root / "engine.yaml"
        file.write_text(yaml.safe_dump({"model": str(self.model), **keys}))
        return file


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(tmp_path)
    monkeypatch.setenv("FAKE_RECORD", str(machine.record))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return machine


def test_a_build(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    keys: dict[str, Any] = {"dtype": "float16", "tp_size": 2, "max_batch_size": 4}
    content = machine.build(**keys)
    assert [(call["name"], shlex.join(call["argv"])) for call in machine.calls()] == [
        ("convert", f"--model_dir {machine.model} --output_dir {machine.workdir}/checkpoint "
         "--dtype float16 --tp_size 2"),
        ("trtllm-build", f"--checkpoint_dir {machine.workdir}/checkpoint "
         f"--output_dir {machine.workdir}/engine --max_batch_size 4"),
    ]  # fmt: skip
    record, log = yaml.safe_load(content.pop("build.yaml")), content.pop("build.log")
    assert content.pop("engine/config.json")
    assert content == {
        "engine/rank0.engine": "engine 0",
        "engine/rank1.engine": "engine 1",
        "tokenizer/config.json": '{"model_type": "llama"}',
        "tokenizer/tokenizer.json": "tokenizer.json",
        "tokenizer/tokenizer_config.json": "tokenizer_config.json",
    }
    assert record["config"] == {"model": str(machine.model), **keys}
    assert record["versions"]["tensorrt_llm"] == "1.2.0"
    assert [step["name"] for step in record["steps"]] == ["fetch", "convert", "build"]
    assert record["steps"][2]["command"].endswith("--max_batch_size 4")
    assert capsys.readouterr().out.startswith(log)
    assert "\n[convert] this is convert\n" in log
    assert "\n[build] █ 100%\n" in log


def test_a_checkpoint_is_built_as_it_is(machine: Machine, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"checkpoint: .* has no config\.json"):
        machine.build(checkpoint=str(tmp_path))
    (tmp_path / "config.json").write_text('{"mapping": {"world_size": 2}}')
    assert "engine/rank1.engine" in machine.build(checkpoint=str(tmp_path))
    assert machine.names() == ["trtllm-build"]


def test_a_model_of_an_unknown_type_needs_a_script(machine: Machine, tmp_path: Path) -> None:
    (machine.model / "config.json").write_text('{"model_type": "brandnew"}')
    with pytest.raises(ConfigurationError, match=r"'brandnew'.*gpt2.*convert_script"):
        machine.build()
    with pytest.raises(ConfigurationError, match=r"other\.py is not there: set TENSORRT"):
        machine.build(convert_script="other.py")
    machine.script("convert", tmp_path / "mine.py")
    machine.build(convert_script=str(tmp_path / "mine.py"))
    machine.script("convert", machine.examples / "llama/convert_checkpoint.py")  # of old releases
    shutil.rmtree(machine.examples / "models")
    machine.build(family="llama")
    assert machine.names() == ["convert", "trtllm-build"] * 2


def test_the_model_is_fetched_under_its_own_name_and_its_secrets_are_stored_nowhere(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fetch = Mock(return_value=machine.model)
    monkeypatch.setattr("tools.engine_builder.build.fetch", fetch)
    url = "https://me:pass-word@host/w/Tiny-1.tar?sig=signature"
    for _ in range(2):
        content = machine.build(TOKEN, model=url, checksum="sha256:0")
    cache = machine.workdir / "weights"
    fetch.assert_called_with(url, cache=cache, checksum="sha256:0", token=TOKEN)
    first = machine.calls()[0]
    assert first["argv"][:2] == ["--model_dir", str(machine.workdir / "models" / "Tiny-1")]
    assert first["token"] == TOKEN
    everything = "\n".join([capsys.readouterr().out, *content.values()])
    for secret in ("pass-word", "signature", TOKEN):
        assert secret not in everything
    assert "using token ***" in everything
    assert yaml.safe_load(content["build.yaml"])["config"]["model"] == "https://host/w/Tiny-1.tar"


def test_the_tokenizer_may_be_another_models(machine: Machine, tmp_path: Path) -> None:
    (machine.model / "tokenizer.json").unlink()
    with pytest.raises(ConfigurationError, match="has no tokenizer"):
        machine.build()
    assert not machine.calls()
    content = machine.build(tokenizer=str(machine.make_model(tmp_path / "other", "other")))
    assert content["tokenizer/config.json"] == '{"model_type": "other"}'


@pytest.mark.parametrize("quantization", ["none", "fp8"])
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_a_model_with_code_of_its_own_is_converted_when_it_is_trusted(
    name: str, quantization: str, machine: Machine
) -> None:
    code = {"model_type": "llama", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    (machine.model / name).write_text(json.dumps(code))
    with pytest.raises(ConfigurationError, match=f"{name}.*trust_remote_code: true"):
        machine.build(quantization=quantization)
    assert not machine.calls()
    machine.build(quantization=quantization, trust_remote_code=True)


# Failures


@pytest.mark.parametrize(
    ("program", "fate", "problem"),
    [
        pytest.param(
            "convert", "exit3", "step convert failed with exit status 3", id="conversion fails"
        ),
        pytest.param(
            "quantize", "exit1", "step quantize failed with exit status 1", id="quantization fails"
        ),
        pytest.param(
            "trtllm-build", "exit9", "step build failed with exit status 9", id="build fails"
        ),
        pytest.param(
            "trtllm-build",
            "kill",
            r"step build was ended by SIGKILL \(out of memory\?\)",
            id="build is killed",
        ),
        pytest.param(
            "convert",
            "nothing",
            r"with status 0, but wrote no .*/checkpoint/config\.json",
            id="conversion writes nothing",
        ),
        pytest.param(
            "trtllm-build",
            "nothing",
            r"with status 0, but wrote no .*/engine/config\.json",
            id="build writes nothing",
        ),
        pytest.param(
            "trtllm-build",
            "lose",
            r"with status 0, but wrote no .*/rank1\.engine",
            id="build leaves out a rank",
        ),
    ],
)
def test_a_step_that_fails(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, program: str, fate: str, problem: str
) -> None:
    monkeypatch.setenv(f"FAKE_{program.upper().replace('-', '_')}", fate)
    machine.output.write_text("of an earlier build")
    with pytest.raises(EngineBuildError, match=problem) as caught:
        machine.build(TOKEN, quantization="fp8" if program == "quantize" else "none", tp_size=2)
    assert machine.output.read_text() == "of an earlier build"
    log = machine.workdir / "build.log"
    assert str(caught.value) in log.read_text()
    for text in (str(log), f"] this is {program}", "using token ***"):
        assert text in str(caught.value)


def test_what_does_not_fit_is_found_before_anything_runs(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = types.SimpleNamespace(free=2 * len("model.safetensors") - 1)
    monkeypatch.setattr("shutil.disk_usage", lambda _: disk)
    with pytest.raises(ConfigurationError, match="not enough space"):
        machine.build()
    machine.workdir = machine.model
    with pytest.raises(ConfigurationError, match="is not empty, and not of an earlier build"):
        machine.build()
    machine.output = machine.root / "engine.tar.gz"
    with pytest.raises(ConfigurationError, match=r"must end in \.tar"):
        machine.build()
    assert not machine.calls()


def test_a_workdir_is_one_builds_at_a_time_and_then_the_next_ones(machine: Machine) -> None:
    machine.build(tp_size=2)
    with (
        locked(machine.workdir, waiting=lambda: None),
        pytest.raises(ConfigurationError, match="another build is running in"),
    ):
        machine.build()
    content = machine.build()
    assert "engine/rank0.engine" in content
    assert "engine/rank1.engine" not in content


# The command


def test_the_commands_output_and_exit_status(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(machine.root)
    for name, value in machine.environment().items():
        monkeypatch.setenv(name, value)
    build_engine = partial(command, "build-engine")
    wrong = build_engine(str(machine.config_file(modell="x")))
    assert (wrong.returncode, wrong.stderr[:31]) == (2, "error: E3001 ConfigurationError")
    file = str(machine.config_file(dtype="float16", convert_args={"name": "with space"}))
    dry = build_engine(file, "--dry-run", "--workdir", "work")
    assert dry.returncode == 0, dry.stderr
    assert not machine.calls()
    names, lines = dry.stdout.splitlines()[::2], dry.stdout.splitlines()[1::2]
    assert names == ["# convert", "# build"]
    monkeypatch.setenv("FAKE_TRTLLM_BUILD", "exit3")
    failed = build_engine(file, "--workdir", "work")
    assert failed.returncode == 1
    assert failed.stderr.startswith("E3101 EngineBuildError: step build failed with exit status 3")
    for line, call in zip(lines, machine.calls(), strict=True):
        assert line.endswith(shlex.join(call["argv"]))
    monkeypatch.delenv("FAKE_TRTLLM_BUILD")
    assert build_engine(file).returncode == 0
    assert "engine/rank0.engine" in machine.content()
    assert not (machine.root / "engine.build").exists()


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.rare),
        (signal.SIGKILL, -9),
    ],
)
def test_an_interrupted_command_leaves_nothing_running_and_no_tar(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, number: int, status: int
) -> None:
    monkeypatch.setenv("FAKE_TRTLLM_BUILD", "hang")
    process = subprocess.Popen(
        [sys.executable, ROOT / "scripts" / "build_engine.py", machine.config_file()],
        env={**os.environ, **machine.environment()},
        stdout=subprocess.PIPE,
        text=True,
        cwd=machine.root,
        # As in a terminal: what runs in the background may have Ctrl-C ignored, and hands that down.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    # The line is here while the step runs.
    assert any(line == "[build] hanging\n" for line in process.stdout)
    running = wait_until(lambda: processes(str(machine.record)), 60, "the step's own process")
    process.send_signal(number)
    assert process.wait(timeout=limit(60)) == status
    process.stdout.close()
    wait_until(lambda: not any(alive(pid) for pid in running), 60, "the end of the step")
    assert not list(machine.root.glob("*.tar*"))


def test_a_training_by_cog(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    from cog import Path as CogPath
    from cog import Secret

    import train

    monkeypatch.setattr("tempfile.tempdir", str(machine.root))
    for name, value in machine.environment().items():
        monkeypatch.setenv(name, value)
    output = train.train(config=CogPath(machine.config_file()), hf_token=Secret(TOKEN))
    machine.output = Path(output.weights)
    assert "engine/rank0.engine" in machine.content()
    assert {call["token"] for call in machine.calls()} == {TOKEN}
    monkeypatch.setenv("FAKE_TRTLLM_BUILD", "exit3")
    with pytest.raises(EngineBuildError) as caught:
        train.train(config=CogPath(machine.config_file()), hf_token=None)
    (log,) = machine.root.glob("engine-*/engine.build/build.log")
    assert str(log) in str(caught.value)
    assert not any(path.is_dir() for path in log.parent.iterdir())
