"""Directories of one process at a time, a file written in one step, a process that ends with its parent."""

import fcntl
import gc
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

YOUNG_SECONDS = 60


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
def without_collections() -> Iterator[None]:
    """Import large packages without looking for garbage meanwhile.

    They make many objects and drop none, so the collections find nothing: a tenth of the import's time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def locked(directory: Path, waiting: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Hold the lock on a directory; ``waiting`` is called if another process has it.

    Not filelock: it needs a lock file, and the directory itself leaves none behind.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        if not _lock_at_once(descriptor):
            waiting()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def try_lock(directory: Path) -> Iterator[bool]:
    """Yield whether the lock on a directory was free; it is held until the end then."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        yield _lock_at_once(descriptor)
    finally:
        os.close(descriptor)


def _lock_at_once(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def temporary_directory(prefix: str) -> Iterator[str]:
    """Make a directory that goes with this process; remove those of processes that were killed."""
    for directory in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):
            # Another process removes it at the same time.
            _remove_if_left(directory)
    with tempfile.TemporaryDirectory(prefix=prefix) as new, locked(Path(new)):
        yield new


def _remove_if_left(directory: Path) -> None:
    """Remove a temporary directory that no process has locked."""
    if time.time() - directory.stat().st_mtime <= YOUNG_SECONDS:
        # Its process may not have locked it yet.
        return
    with try_lock(directory) as is_free:
        if is_free:
            shutil.rmtree(directory)
