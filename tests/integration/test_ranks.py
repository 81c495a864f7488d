"""Two real ranks: under mpirun, under the launch script, and under a real Slurm of one node.

They are two tritonservers without TensorRT-LLM: what an engine's ranks say to each other is not tested.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from cog_triton.errors import TritonStartError
from cog_triton.server.tritonserver import TritonServer
from cog_triton.settings import Settings, read_settings
from tests.integration.conftest import ANY_PORTS, make_server, settings_for
from tests.support import (
    ROOT,
    SHARED_MEMORY,
    alive,
    children,
    free_port,
    processes,
    run_until_killed,
    wait_until,
)

needs_mpirun = pytest.mark.skipif(
    shutil.which("mpirun") is None, reason="no mpirun in PATH (Debian: apt-get install openmpi-bin)"
)
needs_slurm = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("slurmctld", "slurmd", "munged", "sbatch"))),
    reason="needs root and a Slurm to start (Debian: apt-get install slurm-wlm munge)",
)
SCRIPT = ROOT / "scripts" / "launch_triton_server.py"
SECONDS = 20

# Loads like an engine of two ranks: rank 0 is ready no sooner than rank 1, and one may fail.
MODEL = """
import os
import time
from pathlib import Path

import triton_python_backend_utils as pb_utils

REPOSITORY = Path(__file__).resolve().parents[2]


class TritonPythonModel:
    def initialize(self, args):
        rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("SLURM_PROCID") or "0"
        print("loading on rank", rank, flush=True)
        if (REPOSITORY / f"fail{rank}").exists():
            raise RuntimeError(f"rank {rank} has no GPU")
        (REPOSITORY / f"loaded{rank}").touch()
        while (REPOSITORY / "wait").exists() and not (REPOSITORY / "loaded1").exists():
            time.sleep(0.01)

    def execute(self, requests):
        tensors = [pb_utils.get_input_tensor_by_name(r, "x").as_numpy() for r in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", t)]) for t in tensors]
"""
CONFIG = """
name: "tensorrt_llm"
backend: "python"
input { name: "x" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "y" data_type: TYPE_INT32 dims: [ 1 ] }
instance_group { count: 1 kind: KIND_CPU }
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """One model called tensorrt_llm, for two ranks."""
    model = tmp_path / "repository" / "tensorrt_llm"
    (model / "1").mkdir(parents=True)
    (model / "1" / "model.py").write_text(MODEL)
    (model / "config.pbtxt").write_text(CONFIG)
    (model.parent / "wait").touch()
    return model.parent


@pytest.fixture
def server(repository: Path, tmp_path: Path) -> Iterator[TritonServer]:
    """Two ranks that are not started yet."""
    server = make_group(repository, tmp_path, two_ranks())
    yield server
    server.stop()


def two_ranks(**environment: str) -> Settings:
    return read_settings({**ANY_PORTS, "WORLD_SIZE": "2", **environment})


def make_group(repository: Path, directory: Path, settings: Settings) -> TritonServer:
    runtime = directory / "runtime"
    runtime.mkdir()
    return TritonServer(repository, runtime, settings, temporary=True)


def named(text: str, *names: str) -> list[int]:
    """Ids of the processes with one of the names, whose command line has ``text``."""
    found = []
    for pid in processes(text):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().strip() in names:
                found.append(pid)
    return found


def rank(prefix: str, number: int) -> int:
    """The tritonserver of a rank."""
    (pid,) = named(f"{prefix}{number}_", "tritonserver")
    return pid


def assert_nothing_left(prefix: str) -> None:
    assert not processes(prefix)
    assert not list(SHARED_MEMORY.glob(f"{prefix}*"))


# Under mpirun


@needs_mpirun
def test_two_ranks_serve_and_stop(demo_model: Path, tmp_path: Path) -> None:
    settings = settings_for(demo_model, ENGINE="simulated", WORLD_SIZE="2")
    server = make_server(settings, tmp_path)
    server.start()
    try:
        assert server.is_ready()
        request = {"text_input": "What is machine learning?", "max_tokens": 5}
        url = f"http://{server.endpoints.http}/v2/models/ensemble/generate"
        reply = httpx.post(url, json=request, timeout=30, trust_env=False)
        assert reply.json()["text_output"]
        regions = [SHARED_MEMORY.glob(f"{server.shm_prefix}{number}_*") for number in range(2)]
        assert all(map(any, regions))
        started = processes(server.shm_prefix)
        for number in range(2):
            pid = rank(server.shm_prefix, number)
            assert os.sched_getaffinity(pid) == os.sched_getaffinity(0)
        listening = Path(f"/proc/{rank(server.shm_prefix, 1)}/cmdline").read_bytes().split(b"\0")
        assert b"--allow-http=false" in listening
    finally:
        server.stop()
    assert server.status == 0
    assert not server.is_ready()
    assert not [pid for pid in started if alive(pid)]
    assert_nothing_left(server.shm_prefix)


@needs_mpirun
@pytest.mark.parametrize(
    ("number", "name", "reason"),
    [
        (1, signal.SIGKILL, "rank 1 of 2 ended by signal 9 (SIGKILL)"),
        (1, signal.SIGTERM, "rank 1 of 2 ended with exit status 0"),
        (0, signal.SIGSEGV, "rank 0 of 2 ended by signal 11 (SIGSEGV)"),
    ],
)
def test_the_death_of_a_rank_ends_the_group(
    server: TritonServer,
    caplog: pytest.LogCaptureFixture,
    number: int,
    name: signal.Signals,
    reason: str,
) -> None:
    server.start()
    started = processes(server.shm_prefix)
    os.kill(rank(server.shm_prefix, number), name)
    wait_until(lambda: not server.alive, SECONDS, "the end of the group")
    assert server.wait() != 0
    assert not server.is_ready()
    (error,) = [r.message for r in caplog.records if r.message.startswith("tritonserver died")]
    assert error.splitlines()[0] == f"tritonserver died: {reason}"
    assert f"the last lines of rank {number}'s log:" in error
    assert f"loading on rank {number}" in error
    assert not [pid for pid in started if alive(pid)]
    assert_nothing_left(server.shm_prefix)


@needs_mpirun
def test_a_rank_that_fails_while_starting_is_named_with_its_reason(
    server: TritonServer, repository: Path
) -> None:
    (repository / "fail1").touch()
    with pytest.raises(TritonStartError) as caught:
        server.start()
    first, *_, last = caught.value.message.splitlines()
    assert first == "tritonserver died while starting: rank 1 of 2 ended with exit status 1"
    assert last.startswith("model tensorrt_llm on rank 1: ")
    assert "rank 1 has no GPU" in last
    assert_nothing_left(server.shm_prefix)


@needs_mpirun
@pytest.mark.parametrize("victim", ["mpirun", "the guard of a rank", "the guard of the group"])
def test_the_death_of_what_holds_the_ranks_ends_them(
    server: TritonServer, victim: str, tmp_path: Path
) -> None:
    server.start()
    triton = rank(server.shm_prefix, 1)
    parent = int(stat(triton)[1])
    mpirun = int(stat(parent)[1])
    pids = {
        "the guard of a rank": parent,
        "mpirun": mpirun,
        "the guard of the group": int(stat(mpirun)[1]),
    }
    os.kill(pids[victim], signal.SIGKILL)
    wait_until(lambda: not server.alive, SECONDS, "the end of the group")
    wait_until(lambda: not processes(server.shm_prefix), SECONDS, "the end of the ranks")
    assert_nothing_left(server.shm_prefix)
    # Its starter removes it when the guard of the group is killed.
    wait_until(lambda: not (tmp_path / "runtime").exists(), SECONDS, "the directory's removal")


@needs_mpirun
def test_a_rank_that_hangs_is_killed(repository: Path, tmp_path: Path) -> None:
    server = make_group(repository, tmp_path, two_ranks(TRITON_STOP_TIMEOUT="1"))
    server.start()
    os.kill(rank(server.shm_prefix, 1), signal.SIGSTOP)
    server.stop()
    assert_nothing_left(server.shm_prefix)


@needs_mpirun
def test_all_ranks_die_with_a_starter_that_is_killed(repository: Path, tmp_path: Path) -> None:
    program = f"""
        import os, signal
        from pathlib import Path
        from tests.integration.test_ranks import make_group, two_ranks
        server = make_group(Path({str(repository)!r}), Path({str(tmp_path)!r}), two_ranks())
        server.start()
        print(server.shm_prefix, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    prefix = run_until_killed(program)
    wait_until(lambda: not processes(prefix), SECONDS, "the end of the ranks")
    assert_nothing_left(prefix)
    assert not (tmp_path / "runtime").exists()


def stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; the parent comes second."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


# The launch script


class Launched:
    """A launch script that runs, and what it has said."""

    def __init__(self, log: Path, *options: str) -> None:
        self.log = log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(SCRIPT), *options],
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=log.parent,
            )

    @property
    def said(self) -> str:
        return self.log.read_text()

    def wait_until_ready(self) -> None:
        wait_until(lambda: "ready: " in self.said or self.ended, 60, "the start")
        assert "ready: " in self.said, self.said

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def end(self, name: signal.Signals | None = None) -> int:
        if name is not None:
            self.process.send_signal(name)
        return self.process.wait(timeout=60)


@pytest.fixture
def launch(repository: Path, tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """Runs the launch script on the repository; --http_port is to be given."""
    running: list[Launched] = []

    def start(*options: str) -> Launched:
        log = tmp_path / f"log{len(running)}"
        ports = ["--grpc_port=0", "--metrics_port=0"]
        running.append(Launched(log, f"--model_repo={repository}", *ports, *options))
        return running[-1]

    yield start
    for launched in running:
        if not launched.ended:
            launched.end(signal.SIGTERM)
    assert not processes(str(repository))


def test_one_server_without_mpirun(
    launch: Callable[..., Launched], repository: Path, tmp_path: Path
) -> None:
    (repository / "wait").unlink()
    port = free_port()
    first = launch("--no-mpi", f"--http_port={port}", "--log", "--log-file=triton.txt")
    first.wait_until_ready()
    assert f"HTTP on {port}" in first.said
    assert httpx.get(f"http://127.0.0.1:{port}/v2/health/ready", trust_env=False).is_success
    assert "loading on rank 0" in (tmp_path / "triton.txt").read_text()

    refused = launch(f"--http_port={port}")
    assert refused.end() == 2
    assert f"TRITON_HTTP_PORT={port}: cannot listen" in refused.said
    (running,) = named(str(repository), "tritonserver")
    assert str(running) in refused.said.partition("tritonserver runs already, as process ")[2]

    beside = launch(f"--http_port={port}", "--force")
    beside.wait_until_ready()
    assert f"HTTP on {port}" not in beside.said
    assert beside.end(signal.SIGINT) == 0

    os.kill(running, signal.SIGABRT)
    assert first.end() == 128 + signal.SIGABRT
    assert "tritonserver died, by signal 6 (SIGABRT)" in first.said


@needs_mpirun
def test_two_ranks_in_the_foreground(launch: Callable[..., Launched], repository: Path) -> None:
    port = free_port()
    launched = launch("--world_size=2", f"--http_port={port}", "--multi-model")
    assert launched.end() == 2
    launched = launch(
        *("--world_size=2", f"--http_port={port}", "--multi-model", "--disable-spawn-processes")
    )
    launched.wait_until_ready()
    assert "rank 1: loading on rank 1" in launched.said
    (first, _) = named(str(repository), "tritonserver")
    environment = Path(f"/proc/{first}/environ").read_bytes().split(b"\0")
    assert b"TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES=0" in environment
    assert launched.end(signal.SIGTERM) == 0


@needs_mpirun
def test_a_single_rank_under_mpirun(launch: Callable[..., Launched], repository: Path) -> None:
    (repository / "wait").unlink()
    launched = launch("--http_port=0", "--multi-model")
    launched.wait_until_ready()
    assert len(named(str(repository), "mpirun", "prterun")) == 1  # the latter in Open MPI 5
    # A model of the LLM API spawns its workers itself, so it must not take itself for a rank.
    (triton,) = named(str(repository), "tritonserver")
    for pid in (triton, *children(triton)):
        names = {entry.partition(b"=")[0] for entry in environ(pid)}
        assert not {name for name in names if name.startswith((b"OMPI_COMM_", b"PMIX_RANK"))}
        assert b"TRTLLM_ORCHESTRATOR" in names
    assert launched.end(signal.SIGTERM) == 0


@needs_mpirun
def test_a_model_of_the_cpp_backend_stays_in_the_mpi_job(
    launch: Callable[..., Launched], repository: Path
) -> None:
    """Here it is one that does not load: there is no such backend. The other waits for a rank 1."""
    (repository / "other" / "1").mkdir(parents=True)
    config = CONFIG.replace('"tensorrt_llm"', '"other"').replace('"python"', '"tensorrtllm"')
    engine = 'parameters { key: "gpt_model_path" value { string_value: "/engine" } }'
    (repository / "other" / "config.pbtxt").write_text(config + engine)
    launched = launch("--http_port=0", "--multi-model")
    triton = wait_until(lambda: named(str(repository), "tritonserver"), SECONDS, "the start")[0]
    assert any(entry.startswith(b"OMPI_COMM_WORLD_RANK=") for entry in environ(triton))
    (repository / "loaded1").touch()
    assert launched.end() == 1


def environ(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def test_a_model_that_does_not_load_ends_the_script(
    launch: Callable[..., Launched], repository: Path
) -> None:
    (repository / "fail0").touch()
    launched = launch("--http_port=0", "--quiet")
    assert launched.end() == 1
    assert "tritonserver died while starting, with exit status 1" in launched.said
    assert "rank 0 has no GPU" in launched.said


# Slurm


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A Slurm of this machine alone; yields the environment of its commands."""
    directory = tmp_path_factory.mktemp("slurm")
    key, munge = directory / "munge.key", directory / "munge.socket"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    config = directory / "slurm.conf"
    config.write_text(slurm_config(directory, munge))
    environment = {**os.environ, "SLURM_CONF": str(config)}
    with contextlib.ExitStack() as daemons:

        def start(*command: str) -> None:
            with (directory / f"{command[0]}.out").open("w") as output:
                process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
            daemons.callback(process.wait, 20)
            daemons.callback(process.terminate)

        start(
            *("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={munge}"),
            *(f"--{name}-file={directory / name}" for name in ("pid", "log", "seed")),
        )
        wait_until(munge.exists, SECONDS, "the start of munged")
        start("slurmctld", "-D")
        start("slurmd", "-D")
        idle = ["sinfo", "--noheader", "--states=idle", "--format=%n"]
        wait_until(lambda: output_of(idle, environment), 60, "an idle node")
        yield environment
        subprocess.run(["scancel", "--user=root"], env=environment, check=True)
        wait_until(lambda: not output_of(["squeue", "--noheader"], environment), 60, "the last job")


def slurm_config(directory: Path, munge: Path) -> str:
    node = socket.gethostname().partition(".")[0]
    for name in ("state", "spool"):
        (directory / name).mkdir()
    return f"""
        ClusterName=test
        SlurmctldHost={node}(127.0.0.1)
        SlurmUser=root
        SlurmctldPort={free_port()}
        SlurmdPort={free_port()}
        AuthType=auth/munge
        AuthInfo=socket={munge}
        CredType=cred/munge
        StateSaveLocation={directory}/state
        SlurmdSpoolDir={directory}/spool
        SlurmctldPidFile={directory}/slurmctld.pid
        SlurmdPidFile={directory}/slurmd.pid
        SlurmctldLogFile={directory}/slurmctld.log
        SlurmdLogFile={directory}/slurmd.log
        ProctrackType=proctrack/linuxproc
        TaskPlugin=task/none
        SelectType=select/cons_tres
        SelectTypeParameters=CR_CPU
        SchedulerType=sched/builtin
        MpiDefault=none
        NodeName={node} NodeAddr=127.0.0.1 CPUs={os.cpu_count()} State=UNKNOWN
        PartitionName=test Nodes={node} Default=YES State=UP OverSubscribe=FORCE:4
    """.replace("        ", "")


def output_of(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    return done.stdout.strip()


class Job:
    """A job that the batch script makes of two ranks."""

    def __init__(
        self,
        slurm: dict[str, str],
        repository: Path,
        port: int,
        mpi: str = "none",
        **environment: str,
    ) -> None:
        self._environment = {
            **slurm,
            **ANY_PORTS,
            "TRITON_HTTP_PORT": str(port),
            "MODEL_REPO": str(repository),
            "COG_TRITON_DIR": str(ROOT),
            "PYTHON": sys.executable,
            "MPI": mpi,  # most ranks here are no MPI programs
            **environment,
        }
        self._log = repository.parent / "job"
        batch = ROOT / "deploy" / "slurm" / "cog_triton.sbatch"
        self.id = output_of(
            [
                *("sbatch", "--parsable", "--ntasks-per-node=2", "--overcommit"),
                *(f"--output={self._log}", str(batch)),
            ],
            self._environment,
        )

    @property
    def said(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def wait_until_ready(self) -> None:
        wait_until(lambda: "0: ready: " in self.said or self.ended, 60, "the start of the job")
        assert "0: ready: " in self.said, self.said

    @property
    def ended(self) -> bool:
        states = ["squeue", "--noheader", f"--jobs={self.id}", "--format=%T"]
        return output_of(states, self._environment) not in ("PENDING", "RUNNING", "COMPLETING")

    def cancel(self) -> None:
        subprocess.run(["scancel", self.id], env=self._environment, check=True)


@needs_slurm
def test_two_tasks_of_slurm(slurm: dict[str, str], repository: Path) -> None:
    port = free_port()
    job = Job(slurm, repository, port)
    job.wait_until_ready()
    assert "1: rank 1 of 2 started" in job.said
    assert httpx.get(f"http://127.0.0.1:{port}/v2/health/ready", trust_env=False).is_success
    with pytest.raises(httpx.ConnectError):  # it would answer if it listened on all addresses
        httpx.get(f"http://127.0.0.2:{port}/v2/health/ready", trust_env=False)
    assert len(named(str(repository), "tritonserver")) == 2
    job.cancel()
    wait_until(lambda: job.ended, SECONDS, "the end of the job")
    wait_until(lambda: not processes(str(repository)), SECONDS, "the end of the ranks")


@needs_slurm
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (signal.SIGKILL, "by signal 9 (SIGKILL)"),
        (signal.SIGTERM, "with exit status 0"),
    ],
)
def test_the_death_of_a_task_ends_the_job(
    slurm: dict[str, str], repository: Path, name: signal.Signals, reason: str
) -> None:
    job = Job(slurm, repository, free_port())
    job.wait_until_ready()
    (silent,) = [
        pid
        for pid in named(str(repository), "tritonserver")
        if b"--allow-http=false" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    os.kill(silent, name)
    wait_until(lambda: job.ended, SECONDS, "the end of the job")
    wait_until(lambda: not processes(str(repository)), SECONDS, "the end of the ranks")
    assert f"tritonserver of rank 1 died, {reason}" in job.said
