"""Removal of what a server leaves behind whose guard was killed: by its starter, or the next start.

A server's shared memory begins with a prefix of its own. One file of it is a lock that the starter and the
guard hold: whoever can lock it knows that both have ended, also where /dev/shm is shared by containers
whose process ids mean nothing to each other. It holds the path of the server's temporary directory, if any.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import signal
from pathlib import Path

from cog_triton.server.guard import SHARED_MEMORY, remove_shared_memory

logger = logging.getLogger("tritonserver")

PREFIX = "cog_triton_"
LOCK = "lock"


def hold(prefix: str, directory: Path | None) -> int:
    """Make and hold the lock of a server that is about to start; return its descriptor.

    Args:
        prefix: of the server's shared memory.
        directory: what is to be removed with it.
    """
    new = SHARED_MEMORY / f".{prefix}{LOCK}"  # a name that nobody looks for until it is locked
    descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.write(descriptor, b"" if directory is None else os.fsencode(directory))
    new.rename(SHARED_MEMORY / f"{prefix}{LOCK}")
    return descriptor


def sweep() -> None:
    """Remove what this user's servers left whose starter and guard were both killed."""
    for file in SHARED_MEMORY.glob(f"{PREFIX}*_{LOCK}"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            descriptor = os.open(file, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            if os.fstat(descriptor).st_uid != os.getuid():
                continue
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            logger.warning("removing what a server left that was killed (%s)", file.stem)
            directory = os.fsdecode(file.read_bytes())
            remove(file.name.removesuffix(LOCK), Path(directory) if directory else None)


def remove(prefix: str, directory: Path | None) -> None:
    """Kill the processes of a server whose guard was killed, and remove their files.

    Args:
        prefix: of the server's shared memory, which its processes have in their command lines.
        directory: removed as well; None for none.
    """
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if prefix.encode() in Path("/proc", pid, "cmdline").read_bytes():
                os.kill(int(pid), signal.SIGKILL)
    remove_shared_memory(prefix)
    if directory is not None:
        shutil.rmtree(directory, ignore_errors=True)
