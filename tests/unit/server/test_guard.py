"""What the guard leaves of a server whose processes brought shared memory of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cog_triton.server import guard

# A process that is killed, with shared memory of Python's multiprocessing; the name goes to the output.
SERVER = """
import os, signal
from multiprocessing.shared_memory import SharedMemory
print(SharedMemory(create=True, size=64).name, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""

# What stays for good, but stops its stub when it is told to stop.
LINGERING = """
import signal, subprocess, sys
stub = subprocess.Popen(sys.argv[1:])
def stop(*_):
    stub.terminate()
    stub.wait()
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
while True:
    signal.pause()
"""


def test_shared_memory_of_pythons_goes_with_the_server() -> None:
    command = [sys.executable, guard.__file__, "server", "", "1", "", sys.executable, "-c", SERVER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        name = process.stdout.readline().strip()
        assert process.wait(60) == 128 + 9
    assert name.startswith("psm_")
    assert not Path("/dev/shm", name).exists()


@contextmanager
def lingering(directory: Path, role: str, timeout: str) -> Iterator[subprocess.Popen[bytes]]:
    """The guard of such a server, which is ready."""
    stub = directory / guard.STUB
    os.symlink(sys.executable, stub)
    model = directory / "preprocessing" / "1" / "model.py"
    model.parent.mkdir(parents=True)
    model.write_text("import signal; signal.pause()")
    server = [sys.executable, "-c", LINGERING, str(stub), str(model)]
    with subprocess.Popen(
        [sys.executable, guard.__file__, role, "", timeout, "", *server],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"ready\n"
            yield process
        finally:
            process.kill()


def test_a_server_whose_stubs_have_ended_is_not_waited_for(tmp_path: Path) -> None:
    with lingering(tmp_path, "server", "3600") as process:
        assert process.stdin is not None
        process.stdin.close()  # as when the starter has ended, and cannot say what Triton has logged
        assert process.wait(60) == 0


def test_a_rank_whose_stubs_have_ended_has_its_time_and_ends_well(tmp_path: Path) -> None:
    with lingering(tmp_path, "0", "1") as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
