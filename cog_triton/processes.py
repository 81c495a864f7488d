"""Directories of one process at a time, a file written in one step, a process that ends with its parent."""

import fcntl
import os
import select
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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


@contextmanager
def temporary_directory(prefix: str) -> Iterator[str]:
    """Make a directory that goes with this process; remove those of processes that were killed."""
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > 60:  # a younger one may not be locked yet
                with locked(left, left.read_bytes):  # which raises: it is a directory
                    shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=prefix) as new, locked(Path(new), list):
        yield new
