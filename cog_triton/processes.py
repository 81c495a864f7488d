"""One process at a time in a directory, and a process that ends with its parent."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def end_with_parent() -> None:
    """Ends this process when its parent ends, however it does.

    By a thread that waits for it: a parent-death signal would come as well when only that thread of the
    parent ends which started this process.
    """
    parent = os.pidfd_open(os.getppid())
    threading.Thread(target=_end_after, args=[parent], name="end-with-parent", daemon=True).start()


def _end_after(process: int) -> None:
    select.select([process], [], [])
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def locked(directory: Path, waiting: Callable[[], object]) -> Iterator[None]:
    """Holds the lock on a directory; waits while another process has it.

    Args:
        directory: is locked itself, so that no lock file is left behind.
        waiting: called once if another process has it.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
