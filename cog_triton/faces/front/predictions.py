"""Which predictions run, and what they leave: Cog's server makes a directory for each and removes none."""

from __future__ import annotations

import contextlib
import heapq
import math
import os
import shutil
import threading
import time
from collections import Counter
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
        # A heap: when each may be removed, its id, and whether with its files.
        self._ended: list[tuple[float, str, bool]] = []

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
        # Of an asynchronous one, 202, nobody says here when it ends; Cog's server is ending one of None.
        wait = {202: UNSEEN_SECONDS, None: CANCELLED_SECONDS}.get(status, 0.0)
        with self._lock:
            heapq.heappush(self._ended, (time.monotonic() + wait, identifier, status != 202))

    def keep_sweeping(self) -> None:
        """Sweeps from now on, on a thread of its own: a directory may take a millisecond."""
        threading.Thread(target=self._keep_sweeping, name="sweep", daemon=True).start()

    def sweep(self, now: float) -> None:
        """Removes the directories of predictions that have ended.

        One that may still run, because its end was not seen, loses its directory only if it is empty.

        Args:
            now: of the monotonic clock; infinite when none can run any more.
        """
        while due := self._due(now):
            _, identifier, files = due
            if identifier not in self.running:
                remove(self._directory / identifier, files=files or now == math.inf)

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

    def _due(self, now: float) -> tuple[float, str, bool] | None:
        with self._lock:
            due = self._ended and self._ended[0][0] <= now
            return heapq.heappop(self._ended) if due else None

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
