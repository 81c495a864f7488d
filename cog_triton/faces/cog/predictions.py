"""The predictions that run, their cancels, and their directories.

Cog's server makes a directory for each prediction and removes none.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

DIRECTORY = Path("/tmp/coglet/predictions")
"""Where coglet 0.23 makes them, whatever TMPDIR is."""
REMOVE_SECONDS = 5.0  # after the end


class Predictions:
    """Predictions that began here, by id, and what the predictor says of them.

    Each directory is marked with the name of a locked file beside them, by which the next server finds
    what a killed one left.

    Args:
        send: sends a message to the predictor.
        directory: has a directory for each.

    Attributes:
        listening: the predictor takes messages.
        inputs: a prediction has to have one of them.
        connected: number of connections, by id.
        tasks: relay the responses of those.
        progress: when a prediction last began, sent something or ended.
    """

    def __init__(self, send: Callable[..., None], directory: Path = DIRECTORY) -> None:
        self.listening = False
        self.inputs: list[str] = []
        self.connected: Counter[str] = Counter()
        self.tasks: set[asyncio.Task[Any] | None] = set()
        self.progress = time.monotonic()
        self._unfinished: set[str] = set()  # in the predictor; asynchronous ones have no connection
        self._others_run = False  # requests that did not pass the front
        self._changed = asyncio.Event()
        self._cancelled: set[str] = set()
        self._send, self._directory = send, directory
        self._directories: set[str] = set()  # the names of those that are there
        self._remover = ThreadPoolExecutor(1, "remove", _be_nice)  # one may take a millisecond
        self._lock = directory.parent / f"cog_triton_{os.getpid()}_{time.time_ns()}.lock"
        with contextlib.suppress(OSError):  # Cog's server cannot write there either, and says so
            directory.mkdir(parents=True, exist_ok=True)
            self._file = self._lock.with_suffix(".new").open("wb")
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self._lock.with_suffix(".new").rename(self._lock)  # it appears when it is locked
        self._remover.submit(self.remove_abandoned)

    @property
    def running(self) -> set[str]:
        # Of a predictor that does not listen, the end of an asynchronous prediction is not seen.
        return self.connected.keys() | (self._unfinished if self.listening else set())

    def begin(self, identifier: str, task: asyncio.Task[Any] | None) -> None:
        self.connected[identifier] += 1
        self._unfinished.add(identifier)
        self.tasks.add(task)
        self.progress = time.monotonic()
        self._directories.add(identifier)
        with contextlib.suppress(OSError):  # it is there, or the disk is full
            (self._directory / identifier).mkdir()
            (self._directory / identifier / self._lock.name).touch()

    def end(self, identifier: str, task: asyncio.Task[Any] | None, status: int | None) -> None:
        """Note the end of a prediction's connection.

        Args:
            status: of the response; None if that did not come to its end.
        """
        self.tasks.discard(task)
        self.progress = time.monotonic()
        self.connected[identifier] -= 1
        if not self.connected[identifier]:
            del self.connected[identifier]
        if status != 202:
            self._unfinished.discard(identifier)
        self._settle(identifier)

    def receive(self, kind: str, *words: str) -> None:
        """Read a message of the predictor."""
        if kind == "hello":
            self.listening, self.inputs = True, list(words)
        elif kind in ("busy", "idle"):
            self._others_run = kind == "busy"
            self._changed.set()
        elif words[0] in self._unfinished:
            self._unfinished.discard(words[0])
            self._settle(words[0])

    def cancel(self, identifier: str) -> bool:
        """Cancel a prediction, however early; return False if only Cog's server can do that."""
        if identifier not in self.running or not self.listening:
            return False
        self._cancelled.add(identifier)
        self._send("cancel", identifier)
        return True

    def left(self) -> str:
        """Return what still runs, in words; empty for nothing."""
        count = len(self.running)
        left = [f"{count} prediction{'s' * (count > 1)}"] if count else []
        return " and ".join(left + ["requests of another face"] * self._others_run)

    async def idle_within(self, seconds: float) -> bool:
        """Wait until nothing runs, for a bounded time; return whether that is so."""
        deadline = time.monotonic() + seconds
        while self.left():
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), deadline - time.monotonic())
            except asyncio.TimeoutError:
                return False
        return True

    def _settle(self, identifier: str) -> None:
        if identifier not in self.connected and identifier not in self._unfinished:
            if identifier in self._cancelled:
                self._cancelled.discard(identifier)
                self._send("forget", identifier)
            loop = asyncio.get_running_loop()
            loop.call_later(REMOVE_SECONDS, self._remover.submit, self._remove, identifier)
        self._changed.set()

    def _remove(self, identifier: str) -> None:
        if identifier not in self.connected and identifier not in self._unfinished:
            self._directories.discard(identifier)
            shutil.rmtree(self._directory / identifier, ignore_errors=True)

    def remove_abandoned(self) -> None:
        """Remove the directories that killed servers left, and their locks."""
        for lock in self._directory.parent.glob("cog_triton_*.lock"):
            with contextlib.suppress(OSError), lock.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for mark in self._directory.glob(f"*/{lock.name}"):
                    shutil.rmtree(mark.parent, ignore_errors=True)
                lock.unlink()

    def remove_all(self) -> None:
        """Remove what is left, when nothing runs any more."""
        self.connected.clear()
        self._unfinished.clear()
        for identifier in list(self._directories):
            self._remove(identifier)
        self._lock.unlink(missing_ok=True)


def _be_nice() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # of this thread only
