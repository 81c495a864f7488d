"""One process at a time in a directory, a file written in one step, a process that ends with its parent."""

import fcntl
import os
import select
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def end_with_parent() -> None:
    """End this process when its parent ends, however it does."""
    # Not by a parent-death signal: that comes when the thread of the parent ends that started this.
    parent = os.pidfd_open(os.getppid())

    def wait() -> None:
        select.select([parent], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="end-with-parent", daemon=True).start()


def write_whole(file: Path, text: str) -> None:
    """Write a file in one step: whoever reads it sees the old or the new text."""
    new = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        new.write_text(text, encoding="utf-8")
        if file.exists():
            shutil.copymode(file, new)
        new.replace(file)
    finally:
        new.unlink(missing_ok=True)


@contextmanager
def locked(directory: Path, waiting: Callable[[], object]) -> Iterator[None]:
    """Hold the lock on a directory; ``waiting`` is called if another process has it.

    Not filelock: it needs a lock file, and the directory itself leaves none behind.
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
