"""What the guard leaves of a server whose processes brought shared memory of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from cog_triton.server import guard

# A process that is killed, with shared memory of Python's multiprocessing; the name goes to the output.
SERVER = """
import os, signal
from multiprocessing.shared_memory import SharedMemory
print(SharedMemory(create=True, size=64).name, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
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
