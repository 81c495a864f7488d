"""The predictions that run, their cancels, and their directories.

Cog's server makes a directory for each prediction and removes none.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import math
import os
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

from cog_triton.faces.cog.rules import IDENTIFIER

DIRECTORY = Path("/tmp/coglet/predictions")
"""Where coglet 0.23 makes them, whatever TMPDIR is."""
SWEEP_SECONDS = 5.0
CANCELLED_SECONDS = 60.0
UNSEEN_SECONDS = 900.0


class Predictions:
    """Those that began here, by id, and their directories.

    Args:
        send: sends a message to the predictor.
        directory: has a directory for each.
    """

    def __init__(self, send: Callable[..., None], directory: Path = DIRECTORY) -> None:
        self.running: Counter[str] = Counter()
        """By connection."""
        self.background: set[str] = set()
        """Asynchronous ones, which have no connection."""
        self.listening = False
        """Whether the predictor takes messages."""
        self._send = send
        self._over: set[str] = set()  # the predictor's part has ended
        self._cancelled: set[str] = set()
        self._directory = directory
        self._lock = threading.Lock()
        self._journal = Journal(directory.parent)
        # A heap: when each may be removed, its id, and whether with its files.
        self._ended: list[tuple[float, str, bool]] = []

    def __len__(self) -> int:
        return len(self.running) + len(self.background)

    def begin(self, identifier: str) -> None:
        self.running[identifier] += 1
        self._journal.add(identifier)

    def end(self, identifier: str, status: int | None) -> None:
        """Note the end of a prediction's connection.

        Args:
            status: of the response; None if that did not come to its end.
        """
        self.running[identifier] -= 1
        if self.running[identifier] > 0:
            return
        del self.running[identifier]
        if status == 202 and self.listening and identifier not in self._over:
            self.background.add(identifier)
            return
        # Of a predictor that does not listen, an asynchronous prediction's end is not seen, and one
        # without a response is being cancelled.
        seen = identifier in self._over or status not in (202, None)
        wait = 0.0 if seen else UNSEEN_SECONDS if status == 202 else CANCELLED_SECONDS
        self._finish(identifier, wait, files=seen or status is None)

    def over(self, identifier: str) -> None:
        """Note that the predictor's part of a prediction has ended."""
        if identifier in self.background:
            self.background.discard(identifier)
            self._finish(identifier, 0.0, files=True)
        elif identifier in self.running:
            self._over.add(identifier)

    def cancel(self, identifier: str) -> bool:
        """Cancel a prediction, however early; return False if only Cog's server can do that."""
        if not self.listening or not (identifier in self.running or identifier in self.background):
            return False
        self._cancelled.add(identifier)
        self._send("cancel", identifier)
        return True

    def _finish(self, identifier: str, wait: float, *, files: bool) -> None:
        self._over.discard(identifier)
        if identifier in self._cancelled:
            self._cancelled.discard(identifier)
            self._send("forget", identifier)
        with self._lock:
            heapq.heappush(self._ended, (time.monotonic() + wait, identifier, files))

    def keep_sweeping(self) -> None:
        """Sweep from now on, on a thread of its own: a directory may take a millisecond."""
        threading.Thread(target=self._keep_sweeping, name="sweep", daemon=True).start()

    def sweep(self, now: float) -> None:
        """Remove the directories of predictions that have ended.

        One that may still run, because its end was not seen, loses its directory only if it is empty.

        Args:
            now: of the monotonic clock; infinite when none can run any more.
        """
        while due := self._due(now):
            _, identifier, files = due
            if identifier not in self.running and identifier not in self.background:
                remove(self._directory / identifier, files=files or now == math.inf)
        with self._lock:
            left = [identifier for _, identifier, _ in self._ended]
        self._journal.shorten(lambda: {*left, *list(self.running), *list(self.background)})

    def sweep_abandoned(self) -> None:
        """Remove the directories that killed servers left."""
        for identifier in self._journal.abandoned():
            remove(self._directory / identifier, files=True)

    def remove_all(self) -> None:
        """Remove what is left, when nothing runs any more."""
        for identifier in self.background:
            self._finish(identifier, 0.0, files=True)
        self.background.clear()
        self.sweep(math.inf)
        self._journal.close()

    def _due(self, now: float) -> tuple[float, str, bool] | None:
        with self._lock:
            due = self._ended and self._ended[0][0] <= now
            return heapq.heappop(self._ended) if due else None

    def _keep_sweeping(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # of this thread only
        self.sweep_abandoned()
        while True:
            time.sleep(SWEEP_SECONDS)
            self.sweep(time.monotonic())


def remove(directory: Path, *, files: bool) -> None:
    """Remove a directory and those in it; without ``files``, only those that hold none."""
    if files:
        shutil.rmtree(directory, ignore_errors=True)
        return
    for root, _, _ in os.walk(directory, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(root)


class Journal:
    """The ids of a server's predictions, in a locked file: another server finds what a killed one left.

    Args:
        directory: for the files of all servers.
    """

    _PATTERN = "cog_triton_{}.ids"
    _LONG = 1 << 20

    def __init__(self, directory: Path) -> None:
        self._path = directory / self._PATTERN.format(f"{os.getpid()}_{time.time_ns()}")
        try:
            directory.mkdir(parents=True, exist_ok=True)
            unlocked = self._path.with_suffix(".new")
            self._file: IO[bytes] = unlocked.open("ab", buffering=0)
            fcntl.flock(self._file, fcntl.LOCK_EX)
            unlocked.rename(self._path)
        except OSError:  # Cog's server cannot write there either, and says so
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115

    def add(self, identifier: str) -> None:
        with contextlib.suppress(OSError):  # the disk is full
            self._file.write(f"{identifier}\n".encode())

    def shorten(self, left: Callable[[], Iterable[str]]) -> None:
        """Drop all ids but those that are ``left``, if the file has become long."""
        with contextlib.suppress(OSError):
            if self._file.tell() > self._LONG:
                self._file.truncate(0)
                self._file.write("".join(f"{identifier}\n" for identifier in left()).encode())

    def abandoned(self) -> Iterable[str]:
        """Yield the ids of servers that have ended, and remove their files."""
        for path in self._path.parent.glob(self._PATTERN.format("*")):
            with contextlib.suppress(OSError), path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                lines = file.read().decode(errors="replace").splitlines()
                yield from (line for line in lines if IDENTIFIER.fullmatch(line))
                path.unlink()

    def close(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)
        self._file.close()
