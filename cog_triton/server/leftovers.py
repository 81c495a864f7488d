"""What a server leaves behind whose guard was killed, and its removal: by its starter, or the next start.

A server's shared memory begins with a prefix of its own. One file of it is a lock that the starter and the
guard hold: who can lock it knows that both have ended, also where /dev/shm is shared by containers whose
process ids mean nothing to each other. It holds the path of the server's temporary directory, if any.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

from cog_triton.server.guard import SHARED_MEMORY, remove_shared_memory

logger = logging.getLogger("tritonserver")

PREFIX = "cog_triton_"
LOCK = "lock"


def hold(prefix: str, directory: Path | None) -> int:
    """Makes the lock of a server that is about to start, and returns its descriptor.

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
    """Removes what servers of this user left whose starter and guard were both killed."""
    for file in SHARED_MEMORY.glob(f"{PREFIX}*_{LOCK}"):
        with contextlib.suppress(OSError), _locked(file):
            logger.warning("removing what a server left that was killed (%s)", file.stem)
            directory = os.fsdecode(file.read_bytes())
            remove(file.name.removesuffix(LOCK), Path(directory) if directory else None)


def remove(prefix: str, directory: Path | None) -> None:
    """Ends the processes of a server whose guard was killed, and removes what they had.

    Args:
        prefix: of the server's shared memory, which its processes have in their command lines.
        directory: is removed; None for none.
    """
    for pid in _processes_with(prefix):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    remove_shared_memory(prefix)
    if directory is not None:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Holds a lock that nobody holds; OSError if somebody does, or it is another user's."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        if os.fstat(descriptor).st_uid != os.getuid():
            raise PermissionError(file)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _processes_with(prefix: str) -> Iterator[int]:
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if prefix.encode() in Path("/proc", name, "cmdline").read_bytes():
                yield int(name)
