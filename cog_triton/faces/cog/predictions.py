"""The predictions that run, their directories, and messages about them to and from the predictor.

The front is in the process of Cog's server, the predictor in its worker, which inherits one of a pair of
sockets. Signals would not do: Python runs their handlers in a process's main thread, and that of the worker
never returns from coglet.

To the predictor: ``drain`` (take no new requests that do not pass the front), ``stop`` (fail what runs),
``cancel ID``, ``forget ID`` (that prediction has ended: a cancel of it is not for the next with this id).
From it: ``hello INPUT …`` (it listens, and needs one of these inputs), ``busy`` and ``idle`` (it answers
requests that did not pass the front, or none), ``ended ID``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cog_triton.server.guard import process_name

VARIABLE = "COG_TRITON_CONTROL"
DIRECTORY = Path("/tmp/coglet/predictions")
"""Where coglet 0.23 makes a directory for each prediction, whatever TMPDIR is, and removes none."""
REMOVE_SECONDS = 5.0  # after the end
_MARK = "cog_triton_"  # then the name of the process whose directory it is
_POLL_SECONDS = 0.01
_LARGEST = 1024  # a message: an id has at most 128 letters


class Channel:
    """One end of the pair of sockets."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end

    def send(self, *words: str) -> None:
        """Send a message, from any thread. One to an end that is closed is lost."""
        with contextlib.suppress(OSError):
            self._end.send(" ".join(words).encode())

    def listen(self, handle: Callable[..., object]) -> None:
        """Call ``handle`` with the words of each message, on the running event loop."""
        asyncio.get_running_loop().add_reader(self._end, self._read, handle)

    def _read(self, handle: Callable[..., object]) -> None:
        with contextlib.suppress(OSError):
            if message := self._end.recv(_LARGEST):
                handle(*message.decode().split(" "))
            else:
                asyncio.get_running_loop().remove_reader(self._end)  # the other end is closed


@dataclass
class Entry:
    """A prediction that runs, or whose directory is still there.

    Attributes:
        tasks: relay its responses; more than one if several requests name its id.
        in_predictor: it has not ended there. Asynchronous ones run without a response.
        cancelled: the predictor was sent a cancel.
    """

    tasks: set[asyncio.Task[Any] | None] = field(default_factory=set)
    in_predictor: bool = True
    cancelled: bool = False

    @property
    def ended(self) -> bool:
        return not self.tasks and not self.in_predictor


class Predictions:
    """The predictions that began here, by id. To be made before Cog's server starts its worker.

    Each directory is marked with the name of this process, by which the next server finds what a killed
    one left.

    Attributes:
        listening: the predictor takes messages.
        inputs: a prediction has to have one of them.
        progress: when a prediction last began, sent something or ended.
    """

    def __init__(self, directory: Path = DIRECTORY) -> None:
        self.listening = False
        self.inputs: list[str] = []
        self.progress = time.monotonic()
        self._table: dict[str, Entry] = {}
        self._others_run = False  # requests that did not pass the front
        self._directory, self._mark = directory, f"{_MARK}{process_name(os.getpid())}"
        self._remover = ThreadPoolExecutor(1, "remove", _be_nice)  # one may take a millisecond
        self._remover.submit(self.remove_abandoned)
        ours, workers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        os.set_inheritable(workers.fileno(), True)
        os.environ[VARIABLE] = str(workers.detach())
        channel = Channel(ours)
        self.send, self._listen = channel.send, channel.listen

    def listen(self) -> None:
        """Read the predictor's messages, on the running event loop."""
        self._listen(self.receive)

    def receive(self, kind: str, *words: str) -> None:
        if kind == "hello":
            self.listening, self.inputs = True, list(words)
        elif kind in ("busy", "idle"):
            self._others_run = kind == "busy"
        elif (entry := self._table.get(words[0])) is not None and entry.in_predictor:
            entry.in_predictor = False
            self._settle(words[0], entry)

    def begin(self, identifier: str) -> None:
        """Note a prediction whose response the current task relays, until ``end``."""
        entry = self._table.setdefault(identifier, Entry())
        entry.tasks.add(asyncio.current_task())
        entry.in_predictor = True
        self.progress = time.monotonic()
        directory = self._directory / identifier
        with contextlib.suppress(OSError):  # it is there, or the disk is full
            directory.mkdir(parents=True)
            (directory / self._mark).touch()

    def end(self, identifier: str, status: int) -> None:
        entry = self._table[identifier]
        entry.tasks.discard(asyncio.current_task())
        entry.in_predictor &= status == 202  # the predictor has begun it, and no response waits
        self.progress = time.monotonic()
        self._settle(identifier, entry)

    def runs(self, identifier: str) -> bool:
        entry = self._table.get(identifier)
        # Of a predictor that does not listen, the end of an asynchronous prediction is not seen.
        return entry is not None and bool(entry.tasks or (entry.in_predictor and self.listening))

    def cancel(self, identifier: str) -> bool:
        """Cancel a prediction, however early; return False if only Cog's server can do that."""
        if not self.listening or not self.runs(identifier):
            return False
        self._table[identifier].cancelled = True
        self.send("cancel", identifier)
        return True

    def cancel_relays(self) -> None:
        for task in [task for entry in self._table.values() for task in entry.tasks if task]:
            task.cancel()

    def left(self) -> str:
        """Return what still runs, in words; empty for nothing."""
        count = sum(map(self.runs, self._table))
        left = [f"{count} prediction{'s' * (count > 1)}"] if count else []
        return " and ".join(left + ["requests of another face"] * self._others_run)

    async def idle_within(self, seconds: float) -> bool:
        """Wait until nothing runs, for a bounded time; return whether that is so."""
        deadline = time.monotonic() + seconds
        while (left := self.left()) and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_SECONDS)
        return not left

    def _settle(self, identifier: str, entry: Entry) -> None:
        if entry.ended:
            if entry.cancelled:
                entry.cancelled = False
                self.send("forget", identifier)
            asyncio.get_running_loop().call_later(REMOVE_SECONDS, self._remove, identifier)

    def _remove(self, identifier: str) -> None:
        if (entry := self._table.get(identifier)) is not None and entry.ended:
            del self._table[identifier]
            self._remover.submit(shutil.rmtree, self._directory / identifier, ignore_errors=True)

    def remove_abandoned(self) -> None:
        """Remove the directories that killed servers left."""
        for mark in self._directory.glob(f"*/{_MARK}*_*"):
            name = mark.name.removeprefix(_MARK)
            with contextlib.suppress(OSError):
                if process_name(int(name.partition("_")[0])) == name:
                    continue
            shutil.rmtree(mark.parent, ignore_errors=True)

    def remove_all(self) -> None:
        """Remove what is left, when nothing runs any more."""
        for identifier in self._table:
            shutil.rmtree(self._directory / identifier, ignore_errors=True)


def _be_nice() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # of this thread only
