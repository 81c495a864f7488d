"""Which process runs a background response or a batch."""

import fcntl
import os
import secrets
from pathlib import Path


class Lease:
    """The right of this process to run rows, and what it knows of the rights of others.

    - A process draws a random number and locks the byte of that number in a file beside the journal. The
      operating system releases the lock when the process ends, however it ends.
    - A process takes a row by writing its number into the row's column ``runner``, if the column still has
      the value that it has read. So only one of several processes gets the row.
    - A row whose ``runner`` is 0, or a number that no process holds, may be taken.
    """

    def __init__(self, path: Path) -> None:
        """Take nothing yet; ``path`` is the file of the locks."""
        self.worker = secrets.randbits(62)
        self._path = path
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Lock the byte of this process until it ends; do nothing if that is done."""
        if self._descriptor is not None:
            return
        descriptor = os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.lockf(descriptor, fcntl.LOCK_EX, 1, self.worker)
        self._descriptor = descriptor

    def is_held_by_another(self, worker: int) -> bool:
        """Return whether another process with this number is running.

        Before ``acquire`` nobody knows, and the answer is True.
        """
        if worker == self.worker:
            return False
        if self._descriptor is None:
            return True
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, worker)
        except OSError:
            return True
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, worker)
        return False

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
