"""The guard, with real processes in the places of tritonserver, its stubs and its ranks."""

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

from cog_triton.server import guard
from cog_triton.server.command import guarded
from tests.support import ROOT, alive, wait_until


def start(directory: Path, role: str, *command: str, timeout: float = 5) -> subprocess.Popen[str]:
    """Run a command under a guard, whose starter ends with the test."""
    line, pipe = guarded(role, "cog_triton_no_such_", timeout, [*command]), subprocess.PIPE
    return subprocess.Popen(line, cwd=directory, text=True, stdin=pipe, stdout=pipe, stderr=pipe)


# A process that is killed, with shared memory of Python's multiprocessing; the name goes to the output.
WITH_MEMORY = """
import os, signal
from multiprocessing.shared_memory import SharedMemory
print(SharedMemory(create=True, size=64).name, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_shared_memory_of_pythons_goes_with_the_server(tmp_path: Path) -> None:
    with start(tmp_path, "server", sys.executable, "-c", WITH_MEMORY) as process:
        assert process.stdout is not None
        name = process.stdout.read()
        assert process.wait(60) == 128 + signal.SIGKILL
    assert name.startswith("psm_")
    assert not Path("/dev/shm", name.strip()).exists()


def test_a_guard_without_a_prefix_removes_no_shared_memory(tmp_path: Path) -> None:
    """As the engine builder's, which runs its commands under one."""
    (tmp_path / "other").touch()
    program = f"""
        import pathlib, sys
        from cog_triton.server import guard
        guard.SHARED_MEMORY = pathlib.Path({str(tmp_path)!r})
        sys.exit(guard.run("server", "", 1.0, "", ["true"]))
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT) as process:
        assert process.wait(60) == 0
    assert (tmp_path / "other").exists()


def test_a_server_ends_with_its_starter(tmp_path: Path) -> None:
    with start(tmp_path, "server", "sh", "-c", "echo $$; exec sleep 600") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        server = int(process.stdout.readline())
        assert alive(server)
        process.stdin.close()  # as where the starter is killed
        process.wait(60)
        assert not alive(server)


def test_descendants_in_process_groups_of_their_own_are_killed(tmp_path: Path) -> None:
    program = """
import os, subprocess
child = subprocess.Popen(["setsid", "sleep", "60"])
print(child.pid, flush=True)
os._exit(0)
"""
    pid, _ = start(tmp_path, "1", sys.executable, "-c", program).communicate(timeout=60)
    assert not alive(int(pid))


def test_a_stub_that_is_killed_before_its_exec_ends_its_server(tmp_path: Path) -> None:
    server = tmp_path / "another-server"
    server.symlink_to(sys.executable)
    code = "import os, signal\nif not os.fork(): os.kill(os.getpid(), 9)\nsignal.pause()"
    with start(tmp_path, "server", str(server), "-c", code) as process:
        assert process.stderr is not None
        errors = process.stderr.read()
    assert errors == f"{guard.STUB_ENDED.format(model=guard.UNKNOWN, status=-9)}\n"


# A server that waits for the end of a stub, as Triton does when it has told one to end.
WAITING_SERVER = """
import os, subprocess, sys
os.waitpid(subprocess.Popen(sys.argv[1:]).pid, 0)
"""


@pytest.mark.parametrize(
    ("stub", "is_ready", "is_killed"),
    [
        pytest.param("while time.process_time() < 2: pass", False, False, id="it is at work"),
        pytest.param("time.sleep(600)", False, True, id="it does nothing"),
        pytest.param("time.sleep(2)", True, False, id="it does nothing, and its model is unloaded"),
    ],
)
def test_a_server_that_waits_for_the_end_of_a_stub(
    stub: str, is_ready: bool, is_killed: bool, tmp_path: Path
) -> None:
    """The end of a stub that is unloaded takes seconds on a busy machine."""
    interpreters = [tmp_path / guard.SERVER, tmp_path / guard.STUB]
    for interpreter in interpreters:
        interpreter.symlink_to(sys.executable)
    file = tmp_path / "preprocessing" / "1" / "model.py"
    file.parent.mkdir(parents=True)
    file.write_text(f"import time\n{stub}\n")
    server, stub_interpreter = map(str, interpreters)
    command = [server, "-c", WAITING_SERVER, stub_interpreter, str(file)]
    program = f"""
        import sys
        from cog_triton.server import guard
        guard.LOOK_SECONDS = 0.05
        guard.COUNT_SECONDS = 0.5
        sys.exit(guard.run("server", "", 1.0, "", {command!r}))
    """
    guarding = [sys.executable, "-c", textwrap.dedent(program)]
    pipe = subprocess.PIPE
    with subprocess.Popen(guarding, stdin=pipe, stderr=pipe, cwd=ROOT, text=True) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        if is_ready:
            process.stdin.write(guard.READY.decode())
            process.stdin.flush()
        said = process.stderr.read()
        status = process.wait(60)
    assert (guard.GIVEN_UP in said) == is_killed, said
    assert (status == 0) != is_killed


def test_a_kill_tells_of_a_stub_that_failed_before(tmp_path: Path) -> None:
    """The starter may be quicker to see that the server cannot go on."""
    server = tmp_path / "another-server"
    server.symlink_to(sys.executable)
    code = """
import os, signal
child = os.fork()
if not child:
    signal.pause()
print(child, flush=True)
signal.pause()
"""
    with start(tmp_path, "server", str(server), "-c", code) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        stub = int(process.stdout.readline())
        os.kill(process.pid, signal.SIGSTOP)  # so that it looks no earlier than it is told to kill
        os.kill(stub, signal.SIGKILL)
        wait_until(lambda: not alive(stub), 60, "the stub's end")
        process.stdin.write(guard.KILL.decode())
        process.stdin.flush()
        os.kill(process.pid, signal.SIGCONT)
        said = process.stderr.read()
    assert said == f"{guard.STUB_ENDED.format(model=guard.UNKNOWN, status=-9)}\n"


def test_empty_environments_go_unless_a_living_server_may_have_made_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "ENVIRONMENTS", tmp_path)
    # Of this test alone, also among those of other runs on the machine; Linux keeps 15 characters.
    name = f"triton_{os.getpid()}"
    monkeypatch.setattr(guard, "SERVER", name)
    left = tmp_path / "python_env_aBcD12"
    used = tmp_path / "python_env_eFgH34"
    kept = [used, tmp_path / "python_env_full12", tmp_path / "another_directory"]
    for directory in (left, *kept):
        directory.mkdir()
    (tmp_path / "python_env_full12" / "file").touch()
    os.utime(left, (1, 1))
    server = tmp_path / name
    server.symlink_to(shutil.which("sleep") or "")
    with subprocess.Popen([server, "60"]) as process:
        try:
            wait_until(lambda: read_name(process.pid) == name, 60, "the exec")
            just_before = time.time() - 0.5
            os.utime(used, (just_before, just_before))
            guard.remove_environments()
            assert not left.exists()
            assert all(directory.exists() for directory in kept)
        finally:
            process.kill()
    guard.remove_environments()
    assert not used.exists()


def read_name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def test_a_guard_removes_the_environment_of_its_server(tmp_path: Path) -> None:
    made = tempfile.mkdtemp(prefix="python_env_", dir="/tmp")
    environment = Path(made[:-8] + made[-6:])  # of six characters, as mkdtemp of C makes them
    Path(made).rename(environment)
    os.utime(environment, (1, 1))  # older than any server that lives beside this test
    with start(tmp_path, "server", "sh", "-c", "kill -9 $$") as process:
        assert process.wait(60) == 128 + signal.SIGKILL
    assert not environment.exists()


def test_a_lock_that_cannot_be_written_leaves_no_file_and_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while /dev/shm is full, when a supervisor starts again and again."""

    def write_to_full_disk(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", write_to_full_disk)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="No space left"):
        guard.hold(tmp_path / "cog_triton_1_lock", "/tmp/runtime")
    assert len(os.listdir("/proc/self/fd")) == before
    assert os.listdir(tmp_path) == []


def test_a_sweep_removes_a_server_only_when_nobody_holds_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(guard, "SHARED_MEMORY", tmp_path)
    prefix = f"{guard.PREFIX}swept_{os.getpid()}_"
    lock = guard.hold(tmp_path / f"{prefix}{guard.LOCK}")
    (tmp_path / f"{prefix}region").touch()
    guard.sweep()
    assert len(os.listdir(tmp_path)) == 2
    assert caplog.messages == []
    os.close(lock)
    guard.sweep()
    assert os.listdir(tmp_path) == []
    assert caplog.messages == [f"cleaning up after a killed server ({prefix}{guard.LOCK})"]


def test_what_another_sweep_has_just_removed_is_not_removed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / f"{guard.PREFIX}swept_{os.getpid()}_{guard.LOCK}"
    file.touch()

    def lock_after_removal(*_: object) -> None:
        file.unlink()

    monkeypatch.setattr(guard, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(fcntl, "flock", lock_after_removal)
    guard.sweep()
    assert caplog.messages == []


def test_a_rank_that_ends_by_itself_has_failed(tmp_path: Path) -> None:
    """The others would wait for it forever, so mpirun has to end them."""
    rank = start(tmp_path, "1", "true")
    _, said = rank.communicate(timeout=60)
    assert rank.returncode == 1
    assert guard.RANK_ENDED.format(rank=1, status=0) in said


@pytest.mark.parametrize(("role", "ignores"), [("server", False), ("0", False), ("1", True)])
def test_only_a_rank_above_0_begins_with_sigterm_ignored(
    role: str, ignores: bool, tmp_path: Path
) -> None:
    """TensorRT-LLM's handles it later, and until then rank 0 is finishing."""
    with start(tmp_path, role, "grep", "^SigIgn:", "/proc/self/status") as process:
        assert process.stdout is not None
        _, mask = process.stdout.read().split()
    ignored = int(mask, 16)
    assert bool(ignored & 1 << (signal.SIGTERM - 1)) is ignores
