"""The command lines of a group of ranks, what its merged log tells, and the launch script's options."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import launch_triton_server as script
import pytest

from cog_triton.errors import ConfigurationError
from cog_triton.server.command import GUARD, Endpoints, Launch, command
from cog_triton.server.log import ServerLog, describe_status, lines_of_ranks, parse_log_line
from cog_triton.settings import Settings, read_settings
from tests.support import ROOT, alive, children, wait_until

SILENT = ["--allow-http=false", "--allow-grpc=false", "--allow-metrics=false"]
ENDPOINTS = Endpoints("127.0.0.1", 1, 2, 3)


ALONE = Launch()


def line(environ: Mapping[str, str], launch: Launch = ALONE) -> list[str]:
    paths = Path("/ts"), Path("/r"), Path("/b")
    return command(*paths, ENDPOINTS, "pre_", read_settings(environ), launch)


def server(prefix: str) -> list[str]:
    return [part.replace("pre_", prefix) for part in line({})]


def guard(role: str, prefix: str, timeout: str, directory: str = "") -> list[str]:
    return [sys.executable, "-I", "-S", str(GUARD), role, prefix, timeout, directory]


# Command lines

MPIRUN = [
    *("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--tag-output"),
    *("-n", "1"),
]


def test_two_ranks_under_mpirun() -> None:
    assert line({"WORLD_SIZE": "2"}) == [
        *(*MPIRUN, *guard("0", "pre_0_", "7.5"), *server("pre_0_")),
        *(":", "-n", "1", *guard("1", "pre_1_", "7.5"), *server("pre_1_")),
        *("--model-control-mode=explicit", "--load-model=tensorrt_llm", *SILENT),
    ]
    spawning = [*MPIRUN, *guard("0", "pre_0_", "7.5"), *server("pre_0_")]
    assert line({}, Launch(mpi=True)) == spawning


def test_what_a_launch_adds_to_the_ranks() -> None:
    options: dict[str, Any] = {
        "engine_models": ("draft", "target"),
        "options": ("--all",),
        "first_rank_options": ("--first",),
        "launcher": ("trtllm-llmapi-launch",),
    }
    first = ["trtllm-llmapi-launch", *server("pre_0_"), "--all", "--first"]
    assert line({"WORLD_SIZE": "4"}, Launch(**options, rank=0)) == first
    assert line({"WORLD_SIZE": "4"}, Launch(**options, rank=3)) == [
        *("trtllm-llmapi-launch", *server("pre_3_"), "--all", "--model-control-mode=explicit"),
        *("--load-model=draft", "--load-model=target", *SILENT),
    ]


# The merged log


@pytest.mark.parametrize(
    ("merged", "lines"),
    [
        pytest.param(["alone\n", "two\n"], [(None, "alone"), (None, "two")], id="one server"),
        pytest.param(
            ["[1,0]<stderr>:from 0\n", "[1,1]<stdout>:  from 1\n", "mpirun: help\n"],
            [(0, "from 0"), (1, "  from 1"), (None, "mpirun: help")],
            id="Open MPI 4",
        ),
        pytest.param(
            ["[1,0]<stderr>: from 0\n", "[prterun-host-7@1,12]<stdout>: from 12\n"],
            [(0, "from 0"), (12, "from 12")],
            id="Open MPI 5",
        ),
        pytest.param(
            ["[1,1]<stderr>:up[1,1]<stderr>: 1[1,1]<stderr>: 7\n"],
            [(1, "up 1 7")],
            id="a line in pieces",
        ),
        pytest.param(
            ["[1,0]<stdout>:a[1,1]<stdout>:x[1,0]<stdout>:b\n", "[1,1]<stdout>:y\n"],
            [(0, "ab"), (1, "xy")],
            id="lines that cross",
        ),
        pytest.param(
            ["[1,0]<stdout>:out[1,0]<stderr>:err\n", "[1,0]<stdout>:put\n"],
            [(0, "err"), (0, "output")],
            id="two streams of a rank",
        ),
        pytest.param(["[1,1]<stderr>:cut o"], [(1, "cut o")], id="the end of a rank"),
        pytest.param(["[1,1]<stderr>:\n"], [(1, "")], id="an empty line"),
        pytest.param(["ids [5,1] <stdout>\n"], [(None, "ids [5,1] <stdout>")], id="no tag"),
    ],
)
def test_the_lines_of_each_rank(merged: list[str], lines: list[tuple[int | None, str]]) -> None:
    assert list(lines_of_ranks(merged)) == lines


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (0, "with exit status 0"),
        (3, "with exit status 3"),
        (-9, "by signal 9 (SIGKILL)"),
        (139, "by signal 11 (SIGSEGV)"),
        (255, "with exit status 255"),
    ],
)
def test_a_status_in_words(status: int, words: str) -> None:
    assert describe_status(status) == words


def log_of(*lines: str, world_size: int = 2) -> ServerLog:
    log = ServerLog(world_size)
    list(log.read(f"{line}\n".encode() for line in lines))
    return log


def test_the_rank_that_ended_first_is_named_with_its_last_lines() -> None:
    log = log_of(
        "[1,0]<stderr>:serving",
        "[1,1]<stderr>:out of memory",
        "[1,1]<stderr>:tritonserver of rank 1 ended without being told to, with status -9",
        "[1,0]<stderr>:lost a peer",
        "[1,0]<stderr>:tritonserver of rank 0 ended without being told to, with status 1",
    )
    assert log.reason("tritonserver died", 137).splitlines() == [
        "tritonserver died: rank 1 of 2 ended by signal 9 (SIGKILL)",
        "the last lines of rank 1's log:",
        "out of memory",
        "tritonserver of rank 1 ended without being told to, with status -9",
    ]


def test_a_rank_whose_guard_was_killed_is_named_by_mpirun() -> None:
    said = "mpirun noticed that process rank 1 with PID 0 on node here exited on signal 9 (Killed)."
    reason = log_of("[1,0]<stderr>:serving", said).reason("tritonserver died", 137)
    assert reason.startswith("tritonserver died: rank 1 of 2 ended by signal 9 (SIGKILL)\n")


def test_without_a_culprit_every_rank_is_shown() -> None:
    log = log_of("[1,1]<stderr>:one", "[1,0]<stderr>:zero", "mpirun was here")
    assert log.reason("tritonserver was not ready").splitlines() == [
        "tritonserver was not ready",
        *("the last lines of its log:", "mpirun was here"),
        *("the last lines of rank 0's log:", "zero"),
        *("the last lines of rank 1's log:", "one"),
    ]


def test_a_model_that_failed_is_named_with_its_rank() -> None:
    failed = "E1121 07:09:36.844 1 model.cc:1] \"failed to load 'tensorrt_llm' version 1: no GPU\""
    assert "model tensorrt_llm on rank 1: no GPU" in log_of(f"[1,1]<stderr>:{failed}").reason("")
    assert "model tensorrt_llm: no GPU" in log_of(failed, world_size=1).reason("")


def triton_line(level: str, text: str) -> str:
    return f'{level}1121 07:09:36.844 1 model_lifecycle.cc:1] "{text}"'


def test_of_a_server_that_is_not_ready_the_models_are_named_that_load() -> None:
    said = ["loading: preprocessing:1", "loading: tensorrt_llm:1"]
    said.append("successfully loaded 'preprocessing'")
    log = log_of(*(triton_line("I", text) for text in said), world_size=1)
    assert log.reason("not ready").splitlines() == ["not ready", "still loading: tensorrt_llm"]


def test_a_server_that_ends_by_itself_has_said_why() -> None:
    lines = [triton_line("E", "failed to start HTTP service: in use"), triton_line("I", "bye")]
    why = "failed to start HTTP service: in use"
    assert log_of(*lines).reason("died", 1).splitlines() == ["died, with exit status 1", why]
    by_a_signal = log_of(*lines).reason("died", -11).splitlines()
    assert by_a_signal == ["died, by signal 11 (SIGSEGV)", "the last lines of its log:", *lines]


def test_what_triton_repeats_of_a_failed_model_is_for_debugging() -> None:
    for text in ("Failed to create instance: no", "failed to load 'a' version 1: no"):
        assert parse_log_line(triton_line("E", text), logging.INFO)[0] == logging.DEBUG


def test_the_level_of_a_line_is_kept_for_each_rank() -> None:
    lines = [
        'W1121 07:09:36.844 1 server.cc:1] "careful"',
        "[1,0]<stderr>:E1121 07:09:36.844 1 server.cc:1] a traceback",
        "[1,1]<stderr>:I1121 07:09:36.844 1 server.cc:1] all is well",
        "[1,0]<stderr>:of three",
        "[1,1]<stderr>:as before",
    ]
    read = list(ServerLog(2).read(f"{line}\n".encode() for line in lines))
    assert [text for level, text in read if level >= 40] == [
        "rank 0: server.cc:1] a traceback",
        "rank 0: of three",
    ]


# A rank's guard


@pytest.mark.parametrize(("prefix", "left"), [("", ["other", "own_1"]), ("own_", ["other"])])
def test_a_guard_removes_the_shared_memory_that_is_its_own(
    prefix: str, left: list[str], tmp_path: Path
) -> None:
    """Without a prefix there is none: the engine builder runs its commands under a guard, too."""
    for name in ("own_1", "other"):
        (tmp_path / name).touch()
    program = f"""
        import pathlib, sys
        from cog_triton.server import guard
        guard.SHARED_MEMORY = pathlib.Path({str(tmp_path)!r})
        sys.exit(guard.run("server", {prefix!r}, 1.0, "", ["true"]))
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT) as process:
        assert process.wait(60) == 0
    assert sorted(file.name for file in tmp_path.iterdir()) == left


def start_guard(
    tmp_path: Path, *command: str, role: str = "1", timeout: str = "5"
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*guard(role, "cog_triton_no_such_", timeout), *command],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )


@pytest.mark.parametrize(
    ("command", "status", "said"), [("exit 0", 1, 0), ("exit 3", 3, 3), ("kill -9 $$", 137, -9)]
)
def test_a_rank_that_ends_by_itself_says_so_and_fails(
    tmp_path: Path, command: str, status: int, said: int
) -> None:
    process = start_guard(tmp_path, "sh", "-c", command)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == status
    assert errors == f"tritonserver of rank 1 ended without being told to, with status {said}\n"


@pytest.mark.parametrize("name", [signal.SIGTERM, signal.SIGUSR1])
def test_a_rank_that_is_told_to_stop(tmp_path: Path, name: signal.Signals) -> None:
    process = start_guard(
        *(tmp_path, "sh", "-c", "trap 'exit 0' TERM; touch up; while :; do sleep 0.05; done"),
        role="0",
    )
    wait_until((tmp_path / "up").exists, 10, "the start")
    process.send_signal(name)
    _, errors = process.communicate(timeout=10)
    assert (process.returncode, errors) == (0, "")


# Ends when somebody else is done, or by a signal once it handles one.
FOLLOWER = """
import os, signal, sys, time
handler = lambda *_: sys.exit(0)
if sys.argv[1] == "handles":
    signal.signal(signal.SIGTERM, handler)
open("up", "w").close()
while not os.path.exists("done"):
    time.sleep(0.01)
"""


@pytest.mark.parametrize("name", [signal.SIGTERM, signal.SIGUSR1])
def test_a_rank_that_cannot_handle_the_signal_yet_ends_with_rank_0(
    tmp_path: Path, name: signal.Signals
) -> None:
    process = start_guard(tmp_path, sys.executable, "-c", FOLLOWER, "waits")
    wait_until((tmp_path / "up").exists, 10, "the start")
    (server,) = children(process.pid)
    process.send_signal(name)
    os.kill(server, signal.SIGTERM)  # as Slurm's, which reaches every process
    assert process.poll() is None
    (tmp_path / "done").touch()
    _, errors = process.communicate(timeout=10)
    assert (process.returncode, errors) == (0, "")


def test_a_rank_that_handles_the_signal_ends_by_it(tmp_path: Path) -> None:
    process = start_guard(tmp_path, sys.executable, "-c", FOLLOWER, "handles")
    wait_until((tmp_path / "up").exists, 10, "the start")
    process.send_signal(signal.SIGUSR1)
    _, errors = process.communicate(timeout=10)
    assert (process.returncode, errors) == (0, "")


def test_a_rank_that_neither_handles_the_signal_nor_ends_is_killed(tmp_path: Path) -> None:
    process = start_guard(tmp_path, sys.executable, "-c", FOLLOWER, "waits", timeout="0.5")
    wait_until((tmp_path / "up").exists, 10, "the start")
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=10)
    assert process.returncode == 128 + signal.SIGKILL


def test_a_rank_ends_with_its_mpirun(tmp_path: Path) -> None:
    command = shlex.join(guard("0", "cog_triton_no_such_", "5"))
    server = "echo $$ > pid.new; mv pid.new pid; exec sleep 60"
    mpirun = subprocess.Popen(
        ["sh", "-c", f"{command} sh -c {shlex.quote(server)}; true"], cwd=tmp_path
    )
    pid = tmp_path / "pid"
    wait_until(pid.exists, 10, "the start")
    mpirun.kill()
    mpirun.wait()
    wait_until(lambda: not alive(int(pid.read_text())), 10, "the end of the server")


def test_descendants_in_process_groups_of_their_own_are_killed(tmp_path: Path) -> None:
    program = """
import os, subprocess
child = subprocess.Popen(["setsid", "sleep", "60"])
open("pid", "w").write(str(child.pid))
os._exit(0)
"""
    process = start_guard(tmp_path, sys.executable, "-c", program)
    process.communicate(timeout=10)
    assert not alive(int((tmp_path / "pid").read_text()))


# The launch script


def options(*given: str) -> list[str]:
    return ["--model_repo=/r", *given]


def launch(*given: str, environ: Mapping[str, str] | None = None, gpus: int = 2) -> Launch:
    return script.launch_of(script.parser().parse_args(options(*given)), environ or {}, gpus)


def settings(*given: str, environ: Mapping[str, str] | None = None) -> Settings:
    return script.settings_of(script.parser().parse_args(options(*given)), environ or {})


def test_the_command_line_sets_settings() -> None:
    found = settings(
        *("--world_size=4", "--tritonserver=/ts", "--grpc_port", "11", "--http_port", "10"),
        *("--metrics_port=12", "--log", "--exit_timeout=30"),
        environ={"TRITON_HTTP_PORT": "1", "TRITON_HOST": "::1"},
    )
    assert found == read_settings(
        {
            "WORLD_SIZE": "4",
            "TRITONSERVER": "/ts",
            "TRITON_GRPC_PORT": "11",
            "TRITON_HTTP_PORT": "10",
            "TRITON_METRICS_PORT": "12",
            "TRITON_LOG_VERBOSE": "3",
            "TRITON_STOP_TIMEOUT": "60",
            "TRITON_HOST": "::1",
        }
    )
    assert settings() == read_settings({})
    assert settings("--no-mpi", "--world_size", "1") == read_settings({})
    slurm = {"SLURM_NTASKS": "2", "SLURM_PROCID": "1"}
    assert settings("--rank-from-slurm", environ=slurm).world_size == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--world_size=0"], "WORLD_SIZE"),
        (["--world_size=2", "--no-mpi"], "must be 1 with --no-mpi"),
        (["--world_size=2", "--multi-model"], "must be 1 with --multi-model"),
        (["--rank-from-slurm"], "SLURM_NTASKS is not set; start this with srun"),
        (["--rank-from-slurm", "--world_size=3"], "--world_size=3, but Slurm started 2 tasks"),
    ],
)
def test_options_that_contradict(given: list[str], message: str) -> None:
    environ = {"SLURM_NTASKS": "2"} if len(given) == 2 else {}
    with pytest.raises(ConfigurationError) as caught:
        settings(*given, environ=environ)
    assert message in caught.value.message


def test_one_model_needs_no_options() -> None:
    assert launch() == Launch()
    assert launch("--oversubscribe") == Launch()


def test_several_models_that_the_backend_spawns_processes_for() -> None:
    pools = (
        "--pinned-memory-pool-byte-size=0",
        "--enable-peer-access=false",
        "--cuda-memory-pool-byte-size=0:0",
        "--cuda-memory-pool-byte-size=1:0",
    )
    environment = {"TRTLLM_ORCHESTRATOR": "1", "TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES": "1"}
    assert launch("--multi-model") == Launch(options=pools, mpi=True, environment=environment)
    assert launch("--multi-model", "--no-mpi") == Launch(options=pools, environment=environment)
    old = {"NVIDIA_TRITON_SERVER_VERSION": "24.06"}
    assert launch("--multi-model", environ=old) == Launch(mpi=True, environment=environment)


def test_several_models_on_the_same_ranks() -> None:
    given = ["--multi-model", "--disable-spawn-processes", "--world_size=2"]
    found = launch(*given, "--tensorrt_llm_model_name=draft,target")
    assert found == Launch(
        engine_models=("draft", "target"),
        environment={"TRTLLM_ORCHESTRATOR": "1", "TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES": "0"},
    )
    assert settings(*given).world_size == 2


def test_other_options_of_nvidias_script() -> None:
    assert launch("--multimodal_gpu0_cuda_mem_pool_bytes=300") == Launch(
        first_rank_options=("--cuda-memory-pool-byte-size=0:300",)
    )
    assert launch("--trtllm_llmapi_launch") == Launch(launcher=("trtllm-llmapi-launch",))


def test_a_rank_that_slurm_started() -> None:
    environ = {"SLURM_NTASKS": "2", "SLURM_PROCID": "1"}
    assert launch("--rank-from-slurm", environ=environ) == Launch(rank=1)


def make_repository(root: Path, **configs: str) -> Path:
    for model, config in configs.items():
        (root / model).mkdir(parents=True)
        (root / model / "config.pbtxt").write_text(config)
    return root


def test_variables_left_in_a_config_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repository = make_repository(
        tmp_path / "r",
        tensorrt_llm='name: "tensorrt_llm"\nmax_batch_size: ${size}\nx: "${engine_dir}" # ${no}\n',
        ensemble='name: "#${a}"',
        bls="# ${comment}",
    )
    assert script.main([f"--model_repo={repository}"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "launch_triton_server.py: variables without a value; fill them with scripts/fill_template.py:",
        f"  {repository}/ensemble/config.pbtxt: ${{a}}",
        f"  {repository}/tensorrt_llm/config.pbtxt: ${{engine_dir}}, ${{size}}",
    ]


def test_a_repository_without_what_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main([f"--model_repo={tmp_path}"]) == 2
    assert "no <model>/config.pbtxt in it" in capsys.readouterr().err
    repository = make_repository(tmp_path / "r", tensorrt_llm="")
    names = "--tensorrt_llm_model_name=tensorrt_llm,draft"
    assert script.main([f"--model_repo={repository}", "--world_size=2", names]) == 2
    assert "no draft in it, which every rank is to load" in capsys.readouterr().err


def test_a_dry_run_prints_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"]})
    triton = tmp_path / "bin" / "tritonserver"
    (tmp_path / "backends" / "python").mkdir(parents=True)
    triton.parent.mkdir()
    triton.touch()
    repository = make_repository(tmp_path / "r", draft="", target="")
    given = [f"--model_repo={repository}", f"--tritonserver={triton}", "--grpc_port=9001"]
    settings = read_settings({"TRITON_GRPC_PORT": "9001"})

    def expected(settings: Settings, launch: Launch = ALONE) -> list[str]:
        endpoints = Endpoints("127.0.0.1", 8000, 9001, 8002)
        backends = tmp_path / "backends"
        return command(triton, repository, backends, endpoints, "prefix", settings, launch)

    assert script.main([*given, "--dry-run", "--no-mpi"]) == 0
    assert shlex.split(capsys.readouterr().out) == expected(settings)
    group = [*given, "--dry-run", "--world_size=2", "--tensorrt_llm_model_name=draft,target"]
    assert script.main(group) == 0
    settings = settings.model_copy(update={"world_size": 2})
    launch = Launch(engine_models=("draft", "target"))
    assert shlex.split(capsys.readouterr().out) == expected(settings, launch)


def test_ports_in_use_are_refused_or_replaced() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        used = listener.getsockname()[1]
        ports = {"http_port": used, "grpc_port": 0, "metrics_port": 0}
        wanted = read_settings({}).model_copy(update=ports)
        with pytest.raises(ConfigurationError, match=f"TRITON_HTTP_PORT={used}: cannot listen"):
            script.with_usable_ports(wanted, force=False)
        assert script.with_usable_ports(wanted, force=True).http_port == 0
    assert script.with_usable_ports(wanted, force=True) == wanted


# Slurm


def test_the_batch_script_makes_one_srun(tmp_path: Path) -> None:
    """With an srun that prints its command line."""
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\nprintf "%s\\n" "$TRITON_HOST" "$@"\n')
    srun.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "MODEL_REPO": "/models/the repository",
        "COG_TRITON_DIR": "/src",
        "CONTAINER_IMAGE": "image",
        "CONTAINER_MOUNTS": "/models:/models",
    }
    batch = ROOT / "deploy" / "slurm" / "cog_triton.sbatch"

    def run(**environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(batch), "--log"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    assert run(**environment).stdout.splitlines() == [
        "",  # so that the default counts, the loopback address
        *("--mpi=pmix", "--kill-on-bad-exit=1", "--wait=30", "--label"),
        *("--container-image=image", "--container-workdir=/src"),
        "--container-mounts=/models:/models",
        *("python3", "/src/scripts/launch_triton_server.py", "--rank-from-slurm"),
        *("--model_repo=/models/the repository", "--log"),
    ]
    opened = run(**environment, TRITON_HOST="10.0.0.7")
    assert opened.stdout.splitlines()[0] == "10.0.0.7"
    without = run(PATH=environment["PATH"])
    assert without.returncode != 0
    assert "MODEL_REPO: set it to a model repository" in without.stderr
