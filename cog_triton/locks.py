"""One process at a time in a directory."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


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
