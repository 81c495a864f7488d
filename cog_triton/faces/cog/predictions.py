"""The predictions that run, their cancels, and their directories.

Cog's server makes a directory for each prediction and removes none.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import IO

from cog_triton.faces.cog.rules import IDENTIFIER

DIRECTORY = Path("/tmp/coglet/predictions")
"""Where coglet 0.23 makes them, whatever TMPDIR is."""
SWEEP_SECONDS = 5.0
LONG_LIST = 1 << 20  # bytes


class Predictions:
    """Predictions that began here, by id.

    A locked file beside their directories lists their ids, by which the next server finds what a killed one
    left.

    Args:
        send: sends a message to the predictor.
        directory: has a directory for each.

    Attributes:
        listening: the predictor takes messages.
        running: number of connections, by id.
        background: asynchronous predictions, which have no connection.
    """

    def __init__(self, send: Callable[..., None], directory: Path = DIRECTORY) -> None:
        self.listening = False
        self.running: Counter[str] = Counter()
        self.background: set[str] = set()
        self._send = send
        self._over: set[str] = set()  # the predictor's part has ended, and a connection not yet
        self._cancelled: set[str] = set()
        self._ended: list[str] = []
        self._directory = directory
        self._list = directory.parent / f"cog_triton_{os.getpid()}_{time.time_ns()}.ids"
        self._file = locked_file(self._list)

    def __len__(self) -> int:
        # Of a predictor that does not listen, the end of an asynchronous prediction is not seen.
        return len(self.running) + (len(self.background) if self.listening else 0)

    def begin(self, identifier: str) -> None:
        self.running[identifier] += 1
        with contextlib.suppress(OSError):  # the disk is full
            self._file.write(f"{identifier}\n".encode())

    def end(self, identifier: str, status: int | None) -> None:
        """Note the end of a prediction's connection.

        Args:
            status: of the response; None if that did not come to its end.
        """
        self.running[identifier] -= 1
        if self.running[identifier] == 0:
            del self.running[identifier]
            if status == 202 and identifier not in self._over:
                self.background.add(identifier)
            else:
                self._finish(identifier)

    def over(self, identifier: str) -> None:
        """Note that the predictor's part of a prediction has ended."""
        if identifier in self.background:
            self._finish(identifier)
        elif identifier in self.running:
            self._over.add(identifier)

    def cancel(self, identifier: str) -> bool:
        """Cancel a prediction, however early; return False if only Cog's server can do that."""
        if not self.listening or identifier not in self.running.keys() | self.background:
            return False
        self._cancelled.add(identifier)
        self._send("cancel", identifier)
        return True

    def _finish(self, identifier: str) -> None:
        self.background.discard(identifier)
        self._over.discard(identifier)
        if identifier in self._cancelled:
            self._cancelled.discard(identifier)
            self._send("forget", identifier)
        self._ended.append(identifier)

    def keep_sweeping(self) -> None:
        """Remove directories on a thread: one may take a millisecond."""
        threading.Thread(target=self._keep_sweeping, name="sweep", daemon=True).start()

    def _keep_sweeping(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # of this thread only
        self.sweep_abandoned()
        while True:
            time.sleep(SWEEP_SECONDS)
            self.sweep()

    def sweep(self) -> None:
        """Remove the directories of predictions that have ended."""
        ended, self._ended = self._ended, []
        for identifier in ended:
            if identifier not in self.running and identifier not in self.background:
                shutil.rmtree(self._directory / identifier, ignore_errors=True)
        with contextlib.suppress(OSError):
            if self._file.tell() > LONG_LIST:
                self._file.truncate(0)
                left = [*self._ended, *list(self.running), *list(self.background)]
                self._file.write("".join(f"{identifier}\n" for identifier in left).encode())

    def sweep_abandoned(self) -> None:
        """Remove the directories that killed servers left, and their lists."""
        for path in self._list.parent.glob("cog_triton_*.ids"):
            with contextlib.suppress(OSError), path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for identifier in file.read().decode(errors="replace").splitlines():
                    if IDENTIFIER.fullmatch(identifier):
                        shutil.rmtree(self._directory / identifier, ignore_errors=True)
                path.unlink()

    def remove_all(self) -> None:
        """Remove what is left, when nothing runs any more."""
        self._ended += [*self.running, *self.background]
        self.running.clear()
        self.background.clear()
        self.sweep()
        self._list.unlink(missing_ok=True)
        self._file.close()


def locked_file(path: Path) -> IO[bytes]:
    """Create a file that appears when it is locked."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unlocked = path.with_suffix(".new")
        file: IO[bytes] = unlocked.open("ab", buffering=0)
        fcntl.flock(file, fcntl.LOCK_EX)
        unlocked.rename(path)
        return file
    except OSError:  # Cog's server cannot write there either, and says so
        return tempfile.TemporaryFile(buffering=0)
