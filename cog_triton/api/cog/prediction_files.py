"""The directories that coglet writes predictions' files to, made and removed here.

coglet 0.23 makes a directory for each prediction in ``DIRECTORY``, whatever TMPDIR is, and removes none. It
follows links, so each is made and checked here before coglet knows of its prediction.

A server marks its directories with the name of a file that it holds a lock on. The next server removes the
directories whose mark nobody holds: their server was killed.
"""

import contextlib
import fcntl
import fnmatch
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from cog_triton.api.cog.private_directory import PrivateDirectory, UnsafeDirectory
from cog_triton.server.guard import hold, process_name

logger = logging.getLogger(__name__)

DIRECTORY = Path("/tmp/coglet/predictions")
_LEAST_PRIORITY = 19


class PredictionFiles:
    """The directories of this server's predictions."""

    def __init__(self, directory: Path) -> None:
        """Take a mark, and begin to remove what killed servers left."""
        self._directory = PrivateDirectory(directory)
        self._mark = f"cog_triton_{process_name(os.getpid())}.{id(self)}.lock"
        # If there is no room, Cog's server cannot write there either, and says so.
        with contextlib.suppress(OSError, UnsafeDirectory), self._directory.opened() as opened:
            hold(_path(opened.parent) / self._mark)
        # A removal may take 1 ms, too long for an event loop.
        self._remover = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="remove",
            # Linux gives each thread a priority of its own.
            initializer=os.nice,
            initargs=(_LEAST_PRIORITY,),
        )
        self._submit(self._remove_abandoned)

    def problem(self) -> str:
        """Return why no prediction may have a directory; empty if it may."""
        return self._directory.problem()

    def make(self, identifier: str) -> str:
        """Make a prediction's directory; return why Cog's server may not write there, empty if it may."""
        try:
            self._directory.make(identifier, self._mark)
        except UnsafeDirectory as error:
            return str(error)
        except OSError:
            # The disk is full: Cog's server says so.
            return ""
        return ""

    def remove_soon(self, identifier: str) -> None:
        """Remove a prediction's directory, in a thread."""
        self._submit(self._directory.remove, identifier)

    def after_removals(self) -> "Future[int]":
        """Return a future that is done when all earlier removals are."""
        return self._remover.submit(int)

    def remove_all(self) -> None:
        """Remove the directories of this server, and its mark."""
        self._directory.remove_marked(self._mark)
        with contextlib.suppress(OSError, UnsafeDirectory), self._directory.opened() as opened:
            os.unlink(self._mark, dir_fd=opened.parent)

    def _submit(self, work: Callable[..., None], *args: str) -> None:
        """Do something in the thread, and log it if it fails."""
        self._remover.submit(work, *args).add_done_callback(_log_error)

    def _remove_abandoned(self) -> None:
        """Remove the directories of killed servers: nobody holds their marks."""
        with contextlib.suppress(OSError, UnsafeDirectory), self._directory.opened() as opened:
            for name in fnmatch.filter(os.listdir(opened.parent), "cog_triton_*.lock"):
                with contextlib.suppress(OSError), _locked(name, opened.parent):
                    self._directory.remove_marked(name)
                    os.unlink(name, dir_fd=opened.parent)


def _log_error(removal: "Future[None]") -> None:
    error = removal.exception()
    if error is not None:
        logger.error("files of predictions could not be removed", exc_info=error)


def _path(descriptor: int) -> Path:
    """Return a path that leads to an open directory, whatever has become of its name."""
    return Path(f"/proc/self/fd/{descriptor}")


@contextlib.contextmanager
def _locked(name: str, directory: int) -> Iterator[None]:
    """Lock a file of this user while nobody else holds it, or raise OSError."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    file = os.open(name, flags, dir_fd=directory)
    try:
        if os.fstat(file).st_uid != os.geteuid():
            raise PermissionError(name)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(file)
