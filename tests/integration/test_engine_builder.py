"""Whole builds, with recording fakes for TensorRT-LLM's scripts and its trtllm-build."""

from __future__ import annotations

import base64
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import types
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from cog_triton import weights
from cog_triton.errors import ConfigurationError, EngineBuildError
from cog_triton.processes import locked
from tests.support import ROOT, alive, free_port, processes, wait_until
from tools.engine_builder.build import BuildResult, build
from tools.engine_builder.config import parse_config
from tools.engine_builder.toolchain import Toolchain, plan

TOKEN = "hf_abcdefghijklmnopqrstuvwxyz"

# One program stands for all three: it records what it was called with, and writes what TensorRT-LLM
# would. FAKE_<NAME> says how it is to fail.
FAKE = """\
#!{python}
import json, os, pathlib, signal, subprocess, sys, time

name = {name!r}
arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
with open(os.environ["FAKE_RECORD"], "a") as record:
    call = {{"name": name, "argv": sys.argv[1:], "cwd": os.getcwd()}}
    call["token"] = os.environ.get("HF_TOKEN")
    record.write(json.dumps(call) + "\\n")
print("this is", name)
print("using token", os.environ.get("HF_TOKEN"), file=sys.stderr)
fate = os.environ.get("FAKE_" + name.upper().replace("-", "_"), "")
if fate.startswith("exit"):
    print("Traceback: it went wrong")
    sys.exit(int(fate[4:]))
if fate == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if fate == "hang":
    sleep = "import time; time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", sleep, os.environ["FAKE_RECORD"]])
    print("hanging", flush=True)
    time.sleep(600)
output = next(v for k, v in arguments.items() if k in ("--output_dir", "--output-model-dir"))
output = pathlib.Path(output)
output.mkdir(parents=True, exist_ok=True)
if fate == "nothing":
    sys.exit(0)
if name != "trtllm-build":
    ranks = int(arguments.get("--tp_size", 1)) * int(arguments.get("--pp_size", 1))
    (output / "config.json").write_text(json.dumps({{"mapping": {{"world_size": ranks}}}}))
else:
    checkpoint = json.loads((pathlib.Path(arguments["--checkpoint_dir"]) / "config.json").read_text())
    ranks = checkpoint["mapping"]["world_size"]
    (output / "config.json").write_text(json.dumps({{"version": "1.2.0", "pretrained_config": checkpoint}}))
    for rank in range(ranks - (fate == "lose")):
        (output / f"rank{{rank}}.engine").write_text(f"engine {{rank}}")
print("\\u2588 100%")
"""


class Machine:
    """A machine with a fake TensorRT-LLM, and a model."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.examples = root / "examples"
        self.bin = root / "bin"
        self.record = root / "record.jsonl"
        self.script("trtllm-build", self.bin / "trtllm-build")
        self.script("convert", self.examples / "models/core/llama/convert_checkpoint.py")
        self.script("quantize", self.examples / "quantization/quantize.py")
        self.tools = Toolchain(sys.executable, str(self.bin / "trtllm-build"), self.examples)
        self.model = self.make_model(root / "TinyLlama")
        self.output = root / "out" / "engine.tar"
        self.lines: list[str] = []

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

    def build(self, workdir: Path | None = None, **keys: Any) -> BuildResult:
        config = parse_config({"model": str(self.model), **keys})
        self.lines.clear()
        return build(
            config, self.output, toolchain=self.tools, workdir=workdir, emit=self.lines.append
        )

    def calls(self) -> list[dict[str, Any]]:
        if not self.record.exists():
            return []
        return [json.loads(line) for line in self.record.read_text().splitlines()]

    def names(self) -> list[str]:
        return [call["name"] for call in self.calls()]

    def environment(self) -> dict[str, str]:
        """For a process that builds with what is in PATH."""
        path = os.pathsep.join(
            [str(self.bin), str(Path(sys.executable).parent), os.environ["PATH"]]
        )
        return {**os.environ, "PATH": path, "TENSORRT_LLM_EXAMPLES": str(self.examples)}

    def config_file(self, **keys: Any) -> Path:
        file = self.root / "engine.yaml"
        file.write_text(yaml.safe_dump({"model": str(self.model), **keys}))
        return file

    def content(self) -> dict[str, str]:
        with tarfile.open(self.output) as tar:
            return {
                member.name: tar.extractfile(member).read().decode()  # type: ignore[union-attr]
                for member in tar.getmembers()
            }


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path)
    monkeypatch.setenv("FAKE_RECORD", str(made.record))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return made


def test_a_build(machine: Machine, tmp_path: Path) -> None:
    workdir = tmp_path / "work"
    result = machine.build(
        workdir, dtype="float16", tp_size=2, plugins={"gemm_plugin": "auto"}, max_batch_size=4
    )
    checkpoint, engine = str(workdir / "checkpoint"), str(workdir / "engine")
    assert [(call["name"], call["argv"]) for call in machine.calls()] == [
        (
            "convert",
            shlex.split(
                f"--model_dir {machine.model} --output_dir {checkpoint} --dtype float16 --tp_size 2"
            ),
        ),
        (
            "trtllm-build",
            shlex.split(
                f"--checkpoint_dir {checkpoint} --output_dir {engine} --gemm_plugin auto "
                "--max_batch_size 4"
            ),
        ),
    ]
    assert {call["cwd"] for call in machine.calls()} == {str(workdir)}
    assert result.output == machine.output
    assert list(result.seconds) == ["fetch", "convert", "build", "package"]
    content = machine.content()
    assert {name: text for name, text in content.items() if not name.startswith("build.")} == {
        "engine/config.json": json.dumps(
            {"version": "1.2.0", "pretrained_config": {"mapping": {"world_size": 2}}}
        ),
        "engine/rank0.engine": "engine 0",
        "engine/rank1.engine": "engine 1",
        "tokenizer/config.json": '{"model_type": "llama"}',
        "tokenizer/tokenizer.json": "tokenizer.json",
        "tokenizer/tokenizer_config.json": "tokenizer_config.json",
    }
    record = yaml.safe_load(content["build.yaml"])
    assert record["config"] == {
        "model": str(machine.model),
        "dtype": "float16",
        "tp_size": 2,
        "max_batch_size": 4,
        "plugins": {"gemm_plugin": "auto"},
    }
    assert record["versions"]["tensorrt_llm"] == "1.2.0"
    assert [step["name"] for step in record["steps"]] == ["fetch", "convert", "build"]
    assert record["steps"][2]["command"].endswith("--gemm_plugin auto --max_batch_size 4")
    for line in ("[convert] this is convert", "[trtllm-build]", "[build] █ 100%"):
        assert (line in machine.lines) is (line != "[trtllm-build]")
        assert (line in content["build.log"]) is (line != "[trtllm-build]")
    assert (workdir / "build.log").read_text().startswith(content["build.log"])
    assert "done in" in machine.lines[-2]
    assert machine.lines[-1].startswith(f"{machine.output} is ready: ")


def test_without_a_workdir_only_the_tar_is_left(machine: Machine) -> None:
    machine.build()
    assert [path.name for path in machine.output.parent.iterdir()] == ["engine.tar"]


def test_quantizing_takes_the_place_of_converting(machine: Machine) -> None:
    machine.build(quantization="fp8", kv_cache_dtype="fp8")
    assert machine.names() == ["quantize", "trtllm-build"]
    assert machine.calls()[0]["argv"][4:] == ["--qformat", "fp8", "--kv_cache_dtype", "fp8"]


def test_a_checkpoint_is_built_as_it_is(machine: Machine, tmp_path: Path) -> None:
    checkpoint = tmp_path / "ready"
    checkpoint.mkdir()
    with pytest.raises(ConfigurationError, match=r"checkpoint: .*ready has no config\.json"):
        machine.build(checkpoint=str(checkpoint))
    (checkpoint / "config.json").write_text('{"mapping": {"world_size": 2}}')
    machine.build(checkpoint=str(checkpoint))
    assert "engine/rank1.engine" in machine.content()
    assert machine.names() == ["trtllm-build"]
    assert machine.calls()[0]["argv"][:2] == ["--checkpoint_dir", str(checkpoint)]


def test_the_older_layout_of_the_examples(machine: Machine) -> None:
    script = machine.examples / "models/core/llama/convert_checkpoint.py"
    script.unlink()
    with pytest.raises(ConfigurationError) as caught:
        machine.build()
    assert str(script) in str(caught.value)
    assert "TENSORRT_LLM_EXAMPLES" in str(caught.value)
    machine.script("convert", machine.examples / "llama/convert_checkpoint.py")
    machine.build()
    assert machine.names() == ["convert", "trtllm-build"]


def test_a_model_of_an_unknown_type_needs_a_script(machine: Machine, tmp_path: Path) -> None:
    machine.model = machine.make_model(tmp_path / "new", "brandnew")
    with pytest.raises(ConfigurationError, match=r"'brandnew'.*convert_script"):
        machine.build()
    mine = tmp_path / "mine.py"
    machine.script("convert", mine)
    machine.build(convert_script=str(mine))
    machine.build(family="llama")
    assert machine.names() == ["convert", "trtllm-build"] * 2


def test_the_model_is_fetched_under_its_own_name(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[tuple[Any, ...]] = []

    def fetch(source: str, *, cache: Path, checksum: str | None, token: str | None) -> Path:
        fetched.append((source, cache, checksum, token))
        return machine.model

    monkeypatch.setattr(weights, "fetch", fetch)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    workdir = tmp_path / "work"
    url = "https://me:pass-word@host/w/Tiny-1.tar?sig=signature"
    for _ in range(2):
        machine.build(workdir, model=url, checksum="sha256:0")
    assert fetched[0] == (url, workdir / "weights", "sha256:0", TOKEN)
    argv = machine.calls()[0]["argv"]
    assert argv[:2] == ["--model_dir", str(workdir / "models" / "Tiny-1")]
    everything = "\n".join([*machine.lines, *machine.content().values()])
    for secret in ("pass-word", "signature", TOKEN):
        assert secret not in everything
    assert "https://***@host/w/Tiny-1.tar?***" in everything


def test_the_tokenizer_may_be_another_models(machine: Machine, tmp_path: Path) -> None:
    (machine.model / "tokenizer.json").unlink()
    with pytest.raises(ConfigurationError, match="has no tokenizer"):
        machine.build()
    assert not machine.calls()
    machine.build(tokenizer=str(machine.make_model(tmp_path / "other", "other")))
    assert machine.content()["tokenizer/config.json"] == '{"model_type": "other"}'


def test_no_secret_is_left_anywhere(machine: Machine, tmp_path: Path) -> None:
    workdir = tmp_path / "work"
    machine.build(
        workdir,
        hf_token=TOKEN,
        convert_args={"calib_url": "https://u:pass-word@host/x?s=1"},
    )
    assert {call["token"] for call in machine.calls()} == {TOKEN}
    assert "https://u:pass-word@host/x?s=1" in machine.calls()[0]["argv"]
    everything = "\n".join(
        [*machine.lines, *machine.content().values(), (workdir / "build.log").read_text()]
    )
    for secret in (TOKEN, "pass-word", "s=1"):
        assert secret not in everything
    assert "using token ***" in everything
    assert yaml.safe_load(machine.content()["build.yaml"])["config"]["convert_args"] == {
        "calib_url": "https://***@host/x?***",
    }


# Failures


@pytest.mark.parametrize(
    ("step", "program", "fate", "problem"),
    [
        ("convert", "convert", "exit3", "step convert failed with exit status 3"),
        ("quantize", "quantize", "exit1", "step quantize failed with exit status 1"),
        ("build", "trtllm-build", "exit9", "step build failed with exit status 9"),
        ("build", "trtllm-build", "kill", r"step build was ended by SIGKILL \(out of memory\?\)"),
        ("convert", "convert", "nothing", r"with status 0, but wrote no checkpoint/config\.json"),
        ("build", "trtllm-build", "nothing", r"with status 0, but wrote no engine/config\.json"),
        ("build", "trtllm-build", "lose", r"step build wrote no rank1\.engine"),
    ],
)
def test_a_step_that_fails(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    program: str,
    fate: str,
    problem: str,
) -> None:
    monkeypatch.setenv(f"FAKE_{program.upper().replace('-', '_')}", fate)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    machine.output.parent.mkdir()
    machine.output.write_text("of an earlier build")
    quantization = "fp8" if step == "quantize" else "none"
    with pytest.raises(EngineBuildError, match=problem) as caught:
        machine.build(quantization=quantization, tp_size=2)
    assert str(caught.value).startswith("E3101 EngineBuildError: ")
    assert machine.output.read_text() == "of an earlier build"
    log = machine.output.with_name("engine.build") / "build.log"
    assert str(caught.value) in log.read_text()
    assert TOKEN not in str(caught.value) + log.read_text()
    if fate != "lose":
        assert f"\n  this is {program}" in str(caught.value)
        assert str(log) in str(caught.value)
    if fate.startswith("exit"):
        assert str(caught.value).endswith("\n  Traceback: it went wrong")
    assert machine.names()[-1] == program


def test_a_step_that_hangs_is_stopped_with_all_it_started(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CONVERT", "hang")
    with pytest.raises(EngineBuildError, match=r"was stopped at its time limit of 1\.5 s"):
        machine.build(timeout=1.5)
    assert not processes(str(machine.record))


def test_what_does_not_fit_is_found_before_anything_runs(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.output = tmp_path / "engine.tar.gz"
    with pytest.raises(ConfigurationError, match=r"must end in \.tar"):
        machine.build()
    machine.output = tmp_path / "engine.tar"
    with pytest.raises(ConfigurationError, match="is not empty, and not of an earlier build"):
        machine.build(machine.model)
    monkeypatch.setattr("shutil.disk_usage", lambda _: types.SimpleNamespace(free=10))
    with pytest.raises(ConfigurationError, match="not enough space"):
        machine.build()
    assert not machine.calls()
    assert (machine.model / "model.safetensors").exists()


def test_a_workdir_is_one_builds_at_a_time_and_then_the_next_ones(
    machine: Machine, tmp_path: Path
) -> None:
    workdir = tmp_path / "work"
    machine.build(workdir, tp_size=2)
    with (
        locked(workdir, waiting=lambda: None),
        pytest.raises(ConfigurationError, match="another build is running in"),
    ):
        machine.build(workdir)
    machine.build(workdir)
    assert "engine/rank0.engine" in machine.content()
    assert "engine/rank1.engine" not in machine.content()


# The command


def command(machine: Machine, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "build_engine.py"), *arguments],
        env=machine.environment(),
        capture_output=True,
        text=True,
        check=False,
        cwd=machine.root,
    )


def test_the_command(machine: Machine) -> None:
    file = machine.config_file(dtype="float16", plugins={"gemm_plugin": None})
    run = command(machine, str(file))
    assert run.returncode == 0, run.stderr
    assert machine.calls()[-1]["argv"][-2:] == ["--gemm_plugin", "auto"]
    machine.output = machine.root / "engine.tar"
    assert "engine/rank0.engine" in machine.content()


def test_a_dry_run_prints_the_commands_that_a_run_gets(machine: Machine) -> None:
    file = machine.config_file(dtype="float16", convert_args={"url": f"https://host/x?{TOKEN}"})
    dry = command(machine, str(file), "--dry-run", "--workdir", "work")
    assert dry.returncode == 0, dry.stderr
    assert not machine.calls()
    assert not (machine.root / "work").exists()
    names, lines = dry.stdout.splitlines()[::2], dry.stdout.splitlines()[1::2]
    assert names == ["# convert", "# build"]
    assert command(machine, str(file), "--workdir", "work").returncode == 0
    for line, call in zip(lines, machine.calls(), strict=True):
        arguments = shlex.split(line)[2 if call["name"] == "convert" else 1 :]
        assert arguments == [word.replace(TOKEN, "***") for word in call["argv"]]


def test_a_dry_run_knows_no_family_before_the_model_is_there(machine: Machine) -> None:
    config = parse_config({"model": "org/name@main"})
    planned = plan(config, machine.tools, Path("/build"))
    assert planned.notes == ["FAMILY is read from the model's config.json once it is there"]
    convert = planned.steps[0].command
    assert convert[1] == str(machine.examples / "models/core/FAMILY/convert_checkpoint.py")
    assert convert[2:4] == ("--model_dir", "/build/models/name")


def test_the_commands_exit_status(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    run = command(machine, str(machine.config_file(modell="x")))
    assert run.returncode == 2
    assert run.stderr.startswith("E3001 ConfigurationError: ")
    assert "modell: unknown key; did you mean model?" in run.stderr
    monkeypatch.setenv("FAKE_CONVERT", "exit3")
    run = command(machine, str(machine.config_file()))
    assert run.returncode == 1
    assert run.stderr.startswith("E3101 EngineBuildError: step convert failed with exit status 3")


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_an_interrupted_command_leaves_nothing_running_and_no_tar(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, number: int, status: int
) -> None:
    monkeypatch.setenv("FAKE_TRTLLM_BUILD", "hang")
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "scripts" / "build_engine.py"), str(machine.config_file())],
        env=machine.environment(),
        stdout=subprocess.PIPE,
        text=True,
        cwd=machine.root,
        # As in a terminal: what runs in the background may have Ctrl-C ignored, and hands that down.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    # The line is here while the step runs.
    assert any(line == "[build] hanging\n" for line in process.stdout)
    running = wait_until(lambda: processes(str(machine.record)), 10, "the step's own process")
    process.send_signal(number)
    assert process.wait(timeout=20) == status
    process.stdout.close()
    wait_until(lambda: not any(alive(pid) for pid in running), 20, "the end of the step")
    assert not list(machine.root.glob("*.tar*"))
    assert not list(machine.root.glob(".*tmp"))


# The training entry


def test_training(machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from cog import Path as CogPath
    from cog import Secret

    import train

    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    for name, value in machine.environment().items():
        monkeypatch.setenv(name, value)
    output = train.train(config=CogPath(machine.config_file()), hf_token=Secret(TOKEN))
    machine.output = Path(output.weights)
    assert "engine/rank0.engine" in machine.content()
    assert {call["token"] for call in machine.calls()} == {TOKEN}
    monkeypatch.setenv("FAKE_CONVERT", "exit3")
    with pytest.raises(EngineBuildError) as caught:
        train.train(config=CogPath(machine.config_file()), hf_token=None)
    (log,) = scratch.glob("*/engine.build/build.log")
    assert str(log) in str(caught.value)
    assert not any(path.is_dir() for path in log.parent.iterdir())


def test_cogs_server_runs_a_training(machine: Machine, tmp_path: Path) -> None:
    source = tmp_path / "src"  # without the schema of the predictor
    source.mkdir()
    shutil.copy(ROOT / "train.py", source)
    config = base64.b64encode(machine.config_file(dtype="float16").read_bytes()).decode()
    port = free_port()
    environment = {
        **machine.environment(),
        "COG_TRAIN_TYPE_STUB": "train.py:train",
        "PORT": str(port),
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(tmp_path),
    }
    server = subprocess.Popen(
        [sys.executable, "-m", "cog.server.http", "--x-mode", "train", "--host", "127.0.0.1"],
        cwd=source,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60)

    def ready() -> bool:
        try:
            return bool(client.get("/health-check").json()["status"] == "READY")
        except httpx.TransportError:
            return False

    try:
        wait_until(ready, 60, "setup")
        inputs = {"config": f"data:text/yaml;base64,{config}", "hf_token": TOKEN}
        reply = client.post("/trainings", json={"input": inputs}).json()
    finally:
        server.terminate()
        server.wait(timeout=30)
    assert reply["status"] == "succeeded", reply
    assert "[build] this is trtllm-build\n" in reply["logs"]
    assert TOKEN not in reply["logs"]
    kind, _, content = reply["output"]["weights"].partition(",")
    assert kind == "data:application/x-tar;base64"
    machine.output.parent.mkdir()
    machine.output.write_bytes(base64.b64decode(content))
    assert "engine/rank0.engine" in machine.content()


@pytest.mark.parametrize("keys", [{}, {"quantization": "fp8"}])
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_a_model_with_code_of_its_own_is_converted_when_it_is_trusted(
    name: str, keys: dict[str, Any], machine: Machine
) -> None:
    code = {"model_type": "llama", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    (machine.model / name).write_text(json.dumps(code))
    with pytest.raises(ConfigurationError, match="trust_remote_code: true") as caught:
        machine.build(**keys)
    assert name in str(caught.value)
    config = parse_config({"model": str(machine.model), **keys})
    with pytest.raises(ConfigurationError, match="trust_remote_code: true"):
        plan(config, machine.tools, machine.root / "work")
    assert "trtllm-build" not in machine.names()
    machine.build(**keys, trust_remote_code=True)
    assert "trtllm-build" in machine.names()
