"""Which predictions run, and what they leave: Cog's server makes a directory for each and removes none."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import threading
import time
from collections import Counter, deque
from pathlib import Path

DIRECTORY = Path("/tmp/coglet/predictions")
"""Where coglet 0.23 makes them, whatever TMPDIR is."""
SWEEP_SECONDS = 5.0
CANCELLED_SECONDS = 60.0
UNSEEN_SECONDS = 900.0
ABANDONED_SECONDS = 24 * 3600.0


class Predictions:
    """Those whose connection passes here, by id, and the directories of all that began here.

    Args:
        directory: has a directory for each.
    """

    def __init__(self, directory: Path = DIRECTORY) -> None:
        self.running: Counter[str] = Counter()
        self._directory = directory
        self._lock = threading.Lock()
        # By the time from which on each may be removed, which is in order within a queue.
        self._ended: deque[tuple[float, str]] = deque()
        self._cancelled: deque[tuple[float, str]] = deque()
        self._unseen: deque[tuple[float, str]] = deque()

    def begin(self, identifier: str) -> None:
        self.running[identifier] += 1

    def end(self, identifier: str, status: int | None) -> None:
        """Its connection has ended.

        Args:
            status: of the response; None if that did not come to its end.
        """
        self.running[identifier] -= 1
        if self.running[identifier] > 0:
            return
        del self.running[identifier]
        now = time.monotonic()
        if status == 202:  # asynchronous: nobody says here when it ends
            self._unseen.append((now + UNSEEN_SECONDS, identifier))
        elif status is None:  # Cog's server is ending it
            self._cancelled.append((now + CANCELLED_SECONDS, identifier))
        else:
            self._ended.append((now, identifier))

    def keep_sweeping(self) -> None:
        """Sweeps from now on, on a thread of its own: a directory may take a millisecond."""
        threading.Thread(target=self._keep_sweeping, name="sweep", daemon=True).start()

    def sweep(self, now: float) -> None:
        """Removes the directories of predictions that have ended.

        One that may still run, because its end was not seen, loses its directory only if it is empty.

        Args:
            now: of the monotonic clock; infinite when none can run any more.
        """
        for queue in (self._ended, self._cancelled, self._unseen):
            files = queue is not self._unseen or now == math.inf
            while identifier := self._due(queue, now):
                if identifier not in self.running:
                    remove(self._directory / identifier, files=files)

    def sweep_abandoned(self) -> None:
        """Removes empty directories that an earlier server left; another may be using younger ones."""
        with contextlib.suppress(OSError), os.scandir(self._directory) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if time.time() - entry.stat().st_mtime > ABANDONED_SECONDS:
                        remove(Path(entry), files=False)

    def remove_all(self) -> None:
        """Removes what is left, when nothing runs any more."""
        self.sweep(math.inf)

    def _due(self, queue: deque[tuple[float, str]], now: float) -> str | None:
        with self._lock:
            return queue.popleft()[1] if queue and queue[0][0] <= now else None

    def _keep_sweeping(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # of this thread alone
        self.sweep_abandoned()
        while True:
            time.sleep(SWEEP_SECONDS)
            self.sweep(time.monotonic())


def remove(directory: Path, *, files: bool) -> None:
    """Removes a directory and those in it; without ``files`` only those that hold none."""
    if files:
        shutil.rmtree(directory, ignore_errors=True)
        return
    for root, _, _ in os.walk(directory, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(root)
