"""Two real ranks: under mpirun, under the launch script, and under a real Slurm of one node.

They are two tritonservers with the stand-in, whose rank 1 waits for rank 0 and ends with it, or with a
model that only loads: what an engine's ranks say to each other is not tested.
"""

import contextlib
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil  # type: ignore[import-untyped, unused-ignore]
import pytest

from cog_triton.errors import TritonStartError
from cog_triton.server.tritonserver import TritonServer
from cog_triton.settings import read_settings
from tests.integration.conftest import ANY_PORTS, make_server, settings_for
from tests.stand_in.servers import environment as stand_in_environment
from tests.support import (
    ROOT,
    SHARED_MEMORY,
    Server,
    children,
    free_port,
    left_of,
    limit,
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
pytestmark = pytest.mark.rare
FAKES = ROOT / "tests" / "fakes" / "ranks"
SECONDS = 60

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


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """One model called tensorrt_llm, for two ranks."""
    model = tmp_path / "repository" / "tensorrt_llm"
    (model / "1").mkdir(parents=True)
    (model / "1" / "model.py").write_text(MODEL)
    shutil.copy(FAKES / "config.pbtxt", model)
    (model.parent / "wait").touch()
    return model.parent


@pytest.fixture
def server(repository: Path, tmp_path: Path) -> Iterator[TritonServer]:
    """Two ranks that are not started yet."""
    server = two_ranks(repository, tmp_path)
    yield server
    server.stop()


def two_ranks(repository: Path, directory: Path) -> TritonServer:
    runtime = directory / "runtime"
    runtime.mkdir()
    settings = read_settings({**ANY_PORTS, "WORLD_SIZE": "2"})
    return TritonServer(repository, runtime, settings, temporary=True)


def named(text: str, *names: str) -> list[int]:
    """Ids of the processes with one of the names, whose command line has ``text``."""
    found = []
    for pid in processes(text):
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).name() in names:
                found.append(pid)
    return found


def rank(prefix: str, number: int) -> int:
    """The tritonserver of a rank."""
    (pid,) = named(f"{prefix}{number}_", "tritonserver")
    return pid


# Under mpirun


@pytest.fixture
def stand_in(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[TritonServer]:
    """Two ranks of the stand-in that are not started yet; its pace and settings are the environment's."""
    environment = {**stand_in_environment(tmp_path, world_size=2), "STAND_IN_INTER_TOKEN_MS": "20"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    server = make_server(settings_for(demo_model, **environment), tmp_path)
    yield server
    server.stop()


@needs_mpirun
def test_a_stream_that_takes_too_long_is_cut_off(stand_in: TritonServer) -> None:
    """tritonserver gives up on it, and rank 1, which nobody tells to end then, is ended."""
    stand_in.start()
    with events_of(stand_in.endpoints.http_port, tokens=2000) as events:
        next(events)
        stand_in.stop()
    assert stand_in.status != 0
    assert not left_of(stand_in.shm_prefix)


@needs_mpirun
@pytest.mark.parametrize(
    ("number", "name", "reason"),
    [
        (1, signal.SIGKILL, "rank 1 of 2 ended by signal 9 (SIGKILL)"),
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
    assert list(SHARED_MEMORY.glob(f"{server.shm_prefix}{number}_*"))
    os.kill(rank(server.shm_prefix, number), name)
    wait_until(lambda: not server.alive, SECONDS, "the end of the group")
    assert server.wait() != 0
    assert not server.is_ready()
    (error,) = [r.message for r in caplog.records if r.message.startswith("tritonserver died")]
    assert error.splitlines()[0] == f"tritonserver died: {reason}"
    assert f"the last lines of rank {number}'s log:" in error
    assert f"loading on rank {number}" in error
    assert not left_of(server.shm_prefix)


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
    assert not left_of(server.shm_prefix)


@needs_mpirun
@pytest.mark.parametrize("generations", [1, 2, 3], ids=["a rank's guard", "mpirun", "the guard"])
def test_the_death_of_what_holds_the_ranks_ends_them(
    server: TritonServer, generations: int, tmp_path: Path
) -> None:
    server.start()
    pid = rank(server.shm_prefix, 1)
    for _ in range(generations):
        pid = psutil.Process(pid).ppid()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not server.alive, SECONDS, "the end of the group")
    wait_until(lambda: not processes(server.shm_prefix), SECONDS, "the end of the ranks")
    # Its starter removes both when the guard of the group is killed.
    wait_until(lambda: not left_of(server.shm_prefix), SECONDS, "the shared memory's removal")
    wait_until(lambda: not (tmp_path / "runtime").exists(), SECONDS, "the directory's removal")


@needs_mpirun
def test_all_ranks_die_with_a_starter_that_is_killed(repository: Path, tmp_path: Path) -> None:
    program = f"""
        import os, signal
        from pathlib import Path
        from tests.integration.test_ranks import two_ranks
        server = two_ranks(Path({str(repository)!r}), Path({str(tmp_path)!r}))
        server.start()
        print(server.shm_prefix, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    prefix = run_until_killed(program)
    wait_until(lambda: not processes(prefix), SECONDS, "the end of the ranks")
    assert not left_of(prefix)
    assert not (tmp_path / "runtime").exists()


# The launch script


class Launched(Server):
    """The launch script, on free ports but for HTTP's, which an option gives."""

    script = "launch_triton_server.py"


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """Runs the launch script on the repository."""
    repository, numbers = tmp_path / "repository", itertools.count()
    with contextlib.ExitStack() as running:

        def start(*options: str) -> Launched:
            log = tmp_path / f"log{next(numbers)}"
            launched = Launched({}, log, f"--model_repo={repository}", *options)
            launched.directory = tmp_path
            return running.enter_context(launched)

        yield start
    assert not processes(str(repository))


def test_a_single_rank(launch: Callable[..., Launched], repository: Path, tmp_path: Path) -> None:
    (repository / "wait").unlink()
    port = free_port()
    first = launch("--no-mpi", f"--http_port={port}", "--log", "--log-file=triton.txt")
    first.wait_for_line()
    assert f"HTTP on {port}" in first.log.read_text()
    assert httpx.get(f"http://127.0.0.1:{port}/v2/health/ready", trust_env=False).is_success
    assert "loading on rank 0" in (tmp_path / "triton.txt").read_text()

    refused = launch(f"--http_port={port}")
    assert refused.process.wait(limit(60)) == 2
    assert f"TRITON_HTTP_PORT={port}: cannot listen" in refused.log.read_text()
    (running,) = named(str(repository), "tritonserver")
    assert (
        str(running)
        in refused.log.read_text().partition("tritonserver is already running (process ")[2]
    )

    beside = launch(f"--http_port={port}", "--force")
    beside.wait_for_line()
    assert f"HTTP on {port}" not in beside.log.read_text()
    assert beside.stop(signal.SIGINT) == 0

    os.kill(running, signal.SIGABRT)
    assert first.process.wait(limit(60)) == 128 + signal.SIGABRT
    assert "tritonserver died, by signal 6 (SIGABRT)" in first.log.read_text()


@needs_mpirun
@pytest.mark.usefixtures("stand_in")
def test_two_ranks_in_front_stop_in_order(launch: Callable[..., Launched], tmp_path: Path) -> None:
    port = free_port()
    options = [f"--http_port={port}", "--world_size=2", "--multi-model"]
    assert launch(*options).process.wait(limit(60)) == 2
    launched = launch(*options, "--disable-spawn-processes")
    launched.wait_for_line()
    (first, _) = named(str(tmp_path / "repository"), "tritonserver")
    assert psutil.Process(first).environ()["TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES"] == "0"
    with events_of(port) as events:
        next(events)
        launched.process.send_signal(signal.SIGTERM)
        assert len(list(events)) == 49
    assert launched.process.wait(limit(60)) == 0
    assert "rank 1: " in launched.log.read_text()
    assert "died" not in launched.log.read_text()


@contextlib.contextmanager
def events_of(port: int, tokens: int = 50) -> Iterator[Iterator[str]]:
    """The events of a request."""
    body = {"text_input": "Hello", "max_tokens": tokens, "stream": True}
    url = f"http://127.0.0.1:{port}/v2/models/ensemble/generate_stream"
    with httpx.stream("POST", url, json=body, timeout=limit(60), trust_env=False) as reply:
        yield (line for line in reply.iter_lines() if line.startswith("data:"))


@needs_mpirun
def test_a_single_rank_under_mpirun(launch: Callable[..., Launched], repository: Path) -> None:
    (repository / "wait").unlink()
    launched = launch("--http_port=0", "--multi-model")
    launched.wait_for_line()
    assert len(named(str(repository), "mpirun", "prterun")) == 1  # the latter in Open MPI 5
    # A model of the LLM API spawns its workers itself, so it must not take itself for a rank.
    (triton,) = named(str(repository), "tritonserver")
    for pid in (triton, *children(triton)):
        names = psutil.Process(pid).environ()
        assert not {name for name in names if name.startswith(("OMPI_COMM_", "PMIX_RANK"))}
        assert "TRTLLM_ORCHESTRATOR" in names
    assert launched.stop() == 0


@needs_mpirun
def test_a_model_of_the_cpp_backend_stays_in_the_mpi_job(
    launch: Callable[..., Launched], repository: Path
) -> None:
    """Here it is one that does not load: there is no such backend. The other waits for a rank 1."""
    (repository / "other" / "1").mkdir(parents=True)
    config = (FAKES / "config.pbtxt").read_text().replace('"tensorrt_llm"', '"other"')
    config = config.replace('"python"', '"tensorrtllm"')
    engine = 'parameters { key: "gpt_model_path" value { string_value: "/engine" } }'
    (repository / "other" / "config.pbtxt").write_text(config + engine)
    launched = launch("--http_port=0", "--multi-model")
    triton = wait_until(lambda: named(str(repository), "tritonserver"), SECONDS, "the start")[0]
    assert "OMPI_COMM_WORLD_RANK" in psutil.Process(triton).environ()
    (repository / "loaded1").touch()
    assert launched.process.wait(limit(60)) == 1


# Slurm


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A Slurm of this machine alone; yields what its commands need in their environment."""
    directory = tmp_path_factory.mktemp("slurm")
    key, munge = directory / "munge.key", directory / "munge.socket"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    for name in ("state", "spool"):
        (directory / name).mkdir()
    config = directory / "slurm.conf"
    values = {
        "directory": directory,
        "munge": munge,
        "node": socket.gethostname().partition(".")[0],
        "port": free_port(),
        "node_port": free_port(),
        "cpus": os.cpu_count(),
    }
    config.write_text((FAKES / "slurm.conf").read_text().format(**values))
    given = {"SLURM_CONF": str(config)}
    environment = {**os.environ, **given}
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
        yield given
        subprocess.run(["scancel", "--user=root"], env=environment, check=True)
        wait_until(lambda: not output_of(["squeue", "--noheader"], environment), 60, "the last job")


def output_of(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    return done.stdout.strip()


class Job:
    """A job that the batch script makes of two ranks."""

    def __init__(
        self, slurm: dict[str, str], repository: Path, port: int, mpi: str = "none"
    ) -> None:
        self._environment = {
            **os.environ,
            **slurm,
            **ANY_PORTS,
            "TRITON_HTTP_PORT": str(port),
            "MODEL_REPO": str(repository),
            "COG_TRITON_DIR": str(ROOT),
            "PYTHON": sys.executable,
            "MPI": mpi,  # most ranks here are no MPI programs
        }
        self.log = repository.parent / "job"
        batch = ROOT / "deploy" / "slurm" / "cog_triton.sbatch"
        options = ["--parsable", "--ntasks-per-node=2", "--overcommit", f"--output={self.log}"]
        self.id = output_of(["sbatch", *options, str(batch)], self._environment)

    @property
    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    @property
    def ended(self) -> bool:
        states = ["squeue", "--noheader", f"--jobs={self.id}", "--format=%T"]
        return output_of(states, self._environment) not in ("PENDING", "RUNNING", "COMPLETING")

    def wait_until_ready(self) -> None:
        wait_until(lambda: "0: ready: " in self.said or self.ended, 60, "the start")
        assert "0: ready: " in self.said, self.said

    def cancel(self) -> None:
        subprocess.run(["scancel", self.id], env=self._environment, check=True)


@needs_slurm
@pytest.mark.usefixtures("stand_in")
def test_two_tasks_of_slurm_serve_and_stop_in_order(slurm: dict[str, str], tmp_path: Path) -> None:
    repository, port = tmp_path / "repository", free_port()
    job = Job(slurm, repository, port, mpi="pmi2")
    job.wait_until_ready()
    assert "1: rank 1 of 2 started" in job.said
    with pytest.raises(httpx.ConnectError):  # it would answer if it listened on all addresses
        httpx.get(f"http://127.0.0.2:{port}/v2/health/ready", trust_env=False)
    assert len(named(str(repository), "tritonserver")) == 2
    with events_of(port) as events:
        next(events)
        job.cancel()
        assert len(list(events)) == 49
    wait_until(lambda: job.ended, SECONDS, "the end of the job")
    wait_until(lambda: not processes(str(repository)), SECONDS, "the end of the ranks")
    assert "died" not in job.said


@needs_slurm
def test_the_death_of_a_task_ends_the_job(slurm: dict[str, str], repository: Path) -> None:
    job = Job(slurm, repository, free_port())
    job.wait_until_ready()
    (silent,) = set(named(str(repository), "tritonserver")) & set(processes("--allow-http=false"))
    os.kill(silent, signal.SIGTERM)
    wait_until(lambda: job.ended, SECONDS, "the end of the job")
    wait_until(lambda: not processes(str(repository)), SECONDS, "the end of the ranks")
    assert "tritonserver of rank 1 died, with exit status 0" in job.said
