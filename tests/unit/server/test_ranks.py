"""The command lines of a server and of ranks, the launch script, and the batch script of Slurm."""

import os
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cog_triton import cli
from cog_triton.cli import launching as script
from cog_triton.errors import ConfigurationError
from cog_triton.server.command import Endpoints, Launch, command, guarded
from cog_triton.settings import read_settings
from tests.support import ROOT, load_cases

TABLES = load_cases(__file__, "launches.yaml")
ONE = Launch()
SERVER, MPIRUN = TABLES["server"], TABLES["mpirun"]
SILENT = ["--allow-http=false", "--allow-grpc=false", "--allow-metrics=false"]


def line(environ: Mapping[str, str], launch: Launch = ONE) -> list[str]:
    paths, endpoints = (Path("/ts"), Path("/r"), Path("/b")), Endpoints("127.0.0.1", 1, 2, 3)
    return command(*paths, endpoints, "pre_", read_settings(environ), launch)


def server(rank: int) -> list[str]:
    return [part.replace("pre_", f"pre_{rank}_") for part in SERVER]


def under_guard(rank: int, *options: str) -> list[str]:
    return guarded(str(rank), f"pre_{rank}_", 7.5, [*server(rank), *options])


def test_one_server() -> None:
    assert line({}) == SERVER
    traced = line({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318/"})
    assert "--trace-config=opentelemetry,url=http://c:4318/v1/traces" in traced


def test_the_parts_of_tritons_api_that_are_closed() -> None:
    def closed(apis: str) -> list[str]:
        return [option for option in line({"TRITON_CLOSED_APIS": apis}) if "-restricted-" in option]

    assert closed("none") == []
    assert closed("trace,model-repository") == [
        "--http-restricted-api=trace,model-repository:closed=\n",
        "--grpc-restricted-protocol=trace,model-repository:closed=\n",
    ]
    for wrong in ("health", "inference", "trace,", "all"):
        with pytest.raises(ConfigurationError, match="TRITON_CLOSED_APIS"):
            closed(wrong)


def test_ranks_under_mpirun() -> None:
    follower = ["--model-control-mode=explicit", "--load-model=tensorrt_llm", *SILENT]
    both = [*under_guard(0), ":", "-n", "1", *under_guard(1, *follower)]
    assert line({"WORLD_SIZE": "2"}) == [*MPIRUN, *both]
    assert line({}, Launch(mpi=True)) == [*MPIRUN, *under_guard(0)]


def test_what_a_launch_adds_to_the_ranks() -> None:
    options: dict[str, Any] = {
        "engine_models": ("draft", "target"),
        "options": ("--all",),
        "first_rank_options": ("--first",),
        "launcher": ("trtllm-llmapi-launch",),
    }
    first = ["trtllm-llmapi-launch", *server(0), "--all", "--first"]
    assert line({"WORLD_SIZE": "4"}, Launch(**options, rank=0)) == first
    assert line({"WORLD_SIZE": "4"}, Launch(**options, rank=3)) == [
        *("trtllm-llmapi-launch", *server(3), "--all", "--model-control-mode=explicit"),
        *("--load-model=draft", "--load-model=target", *SILENT),
    ]


# The launch script


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """One without settings, which options may change."""
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"]})


def run_launch(*given: str) -> int:
    return cli.main(["launch", *given])


def options_of(given: dict[str, Any]) -> Any:
    os.environ.clear()
    os.environ.update(given.get("environ", {}))
    return cli.parse("launch", ["--model_repo=/r", *given["options"].split()])


@pytest.mark.parametrize("given", TABLES["settings"], ids=lambda given: given["options"])
def test_the_settings_of_options(given: dict[str, Any]) -> None:
    if problem := given.get("problem"):
        with pytest.raises(ConfigurationError, match=problem):
            script.settings_of(options_of(given), os.environ)
    else:
        assert script.settings_of(options_of(given), os.environ) == read_settings(given["settings"])


@pytest.mark.parametrize("given", TABLES["launches"], ids=lambda given: given["options"])
def test_the_launch_of_options(given: dict[str, Any]) -> None:
    fields: Any = {n: tuple(v) if isinstance(v, list) else v for n, v in given["launch"].items()}
    assert script.launch_of(options_of(given), os.environ, gpus=2) == Launch(**fields)


def make_repository(root: Path, **configs: str) -> Path:
    for model, config in configs.items():
        (root / model).mkdir(parents=True)
        (root / model / "config.pbtxt").write_text(config)
    return root


def test_variables_left_over_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    repository = make_repository(
        tmp_path / "r",
        tensorrt_llm='name: "tensorrt_llm"\nmax_batch_size: ${size}\nx: "${engine_dir}" # ${no}\n',
        ensemble='name: "#${a}"',
        bls="# ${comment}",
    )
    assert run_launch(f"--model_repo={repository}") == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: E3001 ConfigurationError: some variables have no value; fill them with fill-template:",
        f"  {repository}/ensemble/config.pbtxt: ${{a}}",
        f"  {repository}/tensorrt_llm/config.pbtxt: ${{engine_dir}}, ${{size}}",
    ]


def test_a_repository_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_launch(f"--model_repo={tmp_path}") == 2
    assert "contains no <model>/config.pbtxt" in capsys.readouterr().err
    repository = make_repository(tmp_path / "r", tensorrt_llm="")
    names = "--tensorrt_llm_model_name=tensorrt_llm,draft"
    assert run_launch(f"--model_repo={repository}", "--world_size=2", names) == 2
    assert "does not contain draft, which every rank must load" in capsys.readouterr().err


def test_a_dry_run_prints_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    triton, backends = tmp_path / "bin" / "tritonserver", tmp_path / "backends"
    (backends / "python").mkdir(parents=True)
    triton.parent.mkdir()
    triton.touch()
    repository = make_repository(tmp_path / "r", draft="", target="")
    given = [f"--model_repo={repository}", f"--tritonserver={triton}", "--dry-run"]
    endpoints = Endpoints("127.0.0.1", 8000, 8001, 8002)
    assert run_launch(*given, "--world_size=2", "--tensorrt_llm_model_name=draft,target") == 0
    wanted, launch = read_settings({"WORLD_SIZE": "2"}), Launch(engine_models=("draft", "target"))
    expected = command(triton, repository, backends, endpoints, "prefix", wanted, launch)
    assert shlex.split(capsys.readouterr().out) == expected


def test_the_batch_script_makes_one_srun(tmp_path: Path) -> None:
    """With an srun that prints its command line."""
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\nprintf "%s\\n" "$TRITON_HOST" "$@"\n')
    srun.chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    given = {
        "MODEL_REPO": "/models/the repository",
        "COG_TRITON_DIR": "/src",
        "CONTAINER_IMAGE": "image",
        "CONTAINER_MOUNTS": "/models:/models",
    }
    batch = ["bash", str(ROOT / "deploy" / "slurm" / "cog_triton.sbatch"), "--log"]

    def run(**environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(batch, env=path | environment, capture_output=True, text=True)

    assert run(**given).stdout.splitlines() == [
        "",  # so that the default counts, the loopback address
        *("--mpi=pmix", "--kill-on-bad-exit=1", "--wait=30", "--label"),
        *("--container-image=image", "--container-workdir=/src"),
        "--container-mounts=/models:/models",
        *("python3", "/src/scripts/launch_triton_server.py", "--rank-from-slurm"),
        *("--model_repo=/models/the repository", "--log"),
    ]
    assert run(**given, TRITON_HOST="10.0.0.7").stdout.splitlines()[0] == "10.0.0.7"
    without = run()
    assert without.returncode != 0
    assert "MODEL_REPO: set it to a model repository" in without.stderr
