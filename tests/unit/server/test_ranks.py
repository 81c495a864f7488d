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
from tests.support import ROOT

ONE = Launch()
# With the prefix "pre_" of its shared memory.
SERVER = [
    "/ts",
    "--model-repository=/r",
    "--backend-directory=/b",
    "--http-address=127.0.0.1",
    "--http-port=1",
    "--grpc-address=127.0.0.1",
    "--grpc-port=2",
    "--metrics-address=127.0.0.1",
    "--metrics-port=3",
    "--backend-config=python,shm-region-prefix-name=pre_",
    "--exit-timeout-secs=8",
    "--log-verbose=0",
    "--http-restricted-api=shared-memory,trace,logging:closed=\n",
    "--grpc-restricted-protocol=shared-memory,trace,logging:closed=\n",
    "--disable-auto-complete-config",
]
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--tag-output"]
MPIRUN += ["-n", "1"]
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


def parsed(options: str, environ: Mapping[str, str]) -> Any:
    """The options, in an environment that has only these variables."""
    os.environ.clear()
    os.environ.update(environ)
    return cli.parse("launch", ["--model_repo=/r", *options.split()])


@pytest.mark.parametrize(
    ("options", "environ", "settings"),
    [
        pytest.param("", {}, {}, id="none"),
        pytest.param("--no-mpi --world_size 1", {}, {}, id="one rank"),
        pytest.param(
            "--rank-from-slurm",
            {"SLURM_NTASKS": "2", "SLURM_PROCID": "1"},
            {"WORLD_SIZE": "2"},
            id="ranks of Slurm",
        ),
        pytest.param(
            (
                "--world_size=4 --tritonserver=/ts --grpc_port 11 --http_port 10 "
                "--metrics_port=12 --log --exit_timeout=30"
            ),
            {"TRITON_HTTP_PORT": "1", "TRITON_HOST": "::1"},
            {
                "WORLD_SIZE": "4",
                "TRITONSERVER": "/ts",
                "TRITON_HTTP_PORT": "10",
                "TRITON_GRPC_PORT": "11",
                "TRITON_METRICS_PORT": "12",
                "TRITON_HOST": "::1",
                "TRITON_LOG_VERBOSE": "3",
                "TRITON_STOP_TIMEOUT": "60",
            },
            id="all",
        ),
    ],
)
def test_the_settings_of_options(
    options: str, environ: dict[str, str], settings: dict[str, str]
) -> None:
    found = script.settings_of(parsed(options, environ), os.environ)
    assert found == read_settings(settings)


@pytest.mark.parametrize(
    ("options", "environ", "problem"),
    [
        pytest.param("--world_size=0", {}, "WORLD_SIZE", id="no ranks"),
        pytest.param(
            "--world_size=2 --no-mpi", {}, "must be 1 with --no-mpi", id="ranks without MPI"
        ),
        pytest.param(
            "--world_size=2 --multi-model",
            {},
            "must be 1 with --multi-model",
            id="ranks of several models",
        ),
        pytest.param(
            "--rank-from-slurm",
            {},
            "SLURM_NTASKS is not set; start this command with srun",
            id="no Slurm",
        ),
        pytest.param(
            "--rank-from-slurm --world_size=3",
            {"SLURM_NTASKS": "2"},
            "--world_size=3, but Slurm started 2 tasks",
            id="other number than Slurm's",
        ),
    ],
)
def test_options_that_cannot_be_combined(
    options: str, environ: dict[str, str], problem: str
) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        script.settings_of(parsed(options, environ), os.environ)


SMALL_POOLS = (
    "--pinned-memory-pool-byte-size=0",
    "--enable-peer-access=false",
    "--cuda-memory-pool-byte-size=0:0",
    "--cuda-memory-pool-byte-size=1:0",
)
SPAWNING = {"TRTLLM_ORCHESTRATOR": "1", "TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES": "1"}


@pytest.mark.parametrize(
    ("options", "environ", "launch"),
    [
        pytest.param("--oversubscribe", {}, Launch(), id="oversubscribe"),
        pytest.param(
            "--multi-model",
            {},
            Launch(mpi=True, options=SMALL_POOLS, environment=SPAWNING),
            id="several models",
        ),
        pytest.param(
            "--multi-model --no-mpi",
            {},
            Launch(options=SMALL_POOLS, environment=SPAWNING),
            id="several models without MPI",
        ),
        pytest.param(
            "--multi-model",
            {"NVIDIA_TRITON_SERVER_VERSION": "24.06"},
            Launch(mpi=True, environment=SPAWNING),
            id="several models on an older Triton",
        ),
        pytest.param(
            "--multi-model --disable-spawn-processes --world_size=2 --tensorrt_llm_model_name=a,b",
            {},
            Launch(
                engine_models=("a", "b"),
                environment={**SPAWNING, "TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES": "0"},
            ),
            id="several models in this process",
        ),
        pytest.param(
            "--multimodal_gpu0_cuda_mem_pool_bytes=300",
            {},
            Launch(first_rank_options=("--cuda-memory-pool-byte-size=0:300",)),
            id="pool for a multimodal model",
        ),
        pytest.param(
            "--trtllm_llmapi_launch",
            {},
            Launch(launcher=("trtllm-llmapi-launch",)),
            id="launcher of the LLM API",
        ),
        pytest.param(
            "--rank-from-slurm",
            {"SLURM_NTASKS": "2", "SLURM_PROCID": "1"},
            Launch(rank=1),
            id="rank of Slurm",
        ),
    ],
)
def test_the_launch_of_options(options: str, environ: dict[str, str], launch: Launch) -> None:
    assert script.launch_of(parsed(options, environ), os.environ, gpus=2) == launch


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
