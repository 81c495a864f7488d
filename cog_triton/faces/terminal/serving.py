"""One life of Cog's server, from its start to the end of all that it started.

One thread waits for three things at once: what the server logs, the end of a process, and signals. The
first signal lets running predictions end, for a bounded time; the second, or one during the start, ends
all at once.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from cog_triton.faces.terminal.log_lines import LogLine, LogReader
from cog_triton.server import leftovers
from cog_triton.server.guard import adopt_orphans, kill_and_clean, signal_with_parent
from cog_triton.server.log import describe_status

READY = "Setup complete, now accepting requests"
FAILED = "Worker initialization failed"
FAILED_AGAIN = "Setup failed"  # without a reason, from a server that may have been stopped before
INTERRUPTED = 128 + signal.SIGINT
# Beyond what tritonserver may take to stop: for Cog's server and its worker.
STOP_MARGIN_SECONDS = 5.0
# Beyond what predictions may take to end: the front of Cog's server ends them then, which is gentler.
FRONT_MARGIN_SECONDS = 4.0
_STARTED = "Starting prediction"
_ENDED = "Prediction "
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Report(Protocol):
    """Where the log goes, and what is said beside it."""

    def log(self, line: LogLine) -> None:
        """A line of the server's log."""

    def say(self, text: str, level: int = logging.INFO) -> None:
        """Something of this process's own."""

    def ready(self) -> None:
        """The server takes requests."""


class Stage(enum.Enum):
    STARTING = enum.auto()
    READY = enum.auto()
    DRAINING = enum.auto()  # predictions may end
    STOPPING = enum.auto()  # none runs, and Triton is being stopped
    FAILED = enum.auto()


@dataclass(frozen=True)
class Bounds:
    """Seconds that an end may take.

    Attributes:
        drain: for running predictions.
        stop: for tritonserver, after them.
    """

    drain: float
    stop: float


class Signals:
    """Signals and ends of child processes, as something to read."""

    def __init__(self) -> None:
        self.reader, writer = os.pipe()
        for end in (self.reader, writer):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in (*_ENDING, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)

    def read(self) -> list[int]:
        """The numbers of those that have come."""
        with contextlib.suppress(BlockingIOError):
            return list(os.read(self.reader, 4096))
        return []


class Serving:
    """Cog's server as a process group of its own, and what becomes of it."""

    def __init__(self, report: Report, bounds: Bounds) -> None:
        self._report = report
        self._bounds = bounds
        self._reader = LogReader()
        self._unfinished = b""
        self._running: set[str] = set()
        self._stage = Stage.STARTING
        self._deadline: float | None = None
        self._interrupted = False
        self._last = ""  # of what Python printed, which is why the server ended, if it does

    def run(self, command: Sequence[str], environ: Mapping[str, str], directory: Path) -> int:
        """Runs the server until it, and all that it started, has ended; returns the exit status.

        That is 130 after Ctrl-C, 0 after SIGTERM, and 1 if the server could not be set up.
        """
        signals = Signals()
        adopt_orphans()  # to wait for them
        self._server = subprocess.Popen(
            command,
            cwd=directory,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches this process alone, which passes it on
            preexec_fn=partial(signal_with_parent, signal.SIGTERM),
        )
        assert self._server.stdout is not None
        log = self._server.stdout.fileno()
        sources = [signals.reader, log]
        while self._reap():
            ready = select.select(sources, [], [], self._seconds_left())[0]
            if log in ready and not self._read(log):
                sources.remove(log)
            for number in signals.read():
                self._signalled(number)
            if self._seconds_left() == 0:
                self._late()
        while log in sources and self._read(log):
            pass  # what was in the pipe
        return self._exit_status()

    def _read(self, log: int) -> bool:
        """Takes what is in the pipe; returns whether there may be more."""
        data = os.read(log, 1 << 16)
        if not data and self._unfinished:
            data = b"\n"  # the last line's
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        for line in lines:
            self._note(self._reader.read(line.decode(errors="replace")))
        return bool(data)

    def _note(self, line: LogLine) -> None:
        if identifier := line.fields.get("prediction_id"):
            if line.message == _STARTED:
                self._running.add(identifier)
            elif line.message.startswith(_ENDED):
                self._running.discard(identifier)
        if line.message == FAILED:
            # The server may have ended, and been noticed, before this was read.
            if self._stage in (Stage.STARTING, Stage.FAILED):
                self._fail(line)
            return
        if line.message == FAILED_AGAIN:
            return
        if line.target == "python" and line.message.strip():
            self._last = line.message
        self._report.log(line)
        if line.message == READY and self._stage is Stage.STARTING:
            self._stage = Stage.READY
            self._report.ready()

    def _fail(self, line: LogLine) -> None:
        """Setup failed. Cog's server would go on to say so to those who ask; here somebody is told."""
        self._stage = Stage.FAILED
        self._last = str(line.fields.get("error", line.message))
        self._stop(self._bounds.stop)

    def _signalled(self, number: int) -> None:
        if number not in _ENDING:
            return
        self._interrupted |= number == signal.SIGINT
        if self._stage is Stage.READY:
            self._stage = Stage.DRAINING
            self._report.say(waiting(len(self._running), self._bounds))
            drain = self._bounds.drain + FRONT_MARGIN_SECONDS
            self._stop(drain if self._running else self._bounds.stop)
        else:
            starting = self._stage is Stage.STARTING
            self._report.say("stopped before it was ready" if starting else "stopped at once")
            self._end_at_once()

    def _stop(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds
        self._server.terminate()

    def _late(self) -> None:
        if self._stage is Stage.DRAINING and self._running:
            text = f"{counted(len(self._running))} did not end in {self._bounds.drain:g} s"
            self._report.say(f"{text}: stopped at once", logging.WARNING)
        self._end_at_once()

    def _end_at_once(self) -> None:
        if self._stage is not Stage.FAILED:
            self._stage = Stage.STOPPING
        self._deadline = None
        _kill_all()

    def _reap(self) -> bool:
        """Takes the statuses of what has ended; returns whether something still runs."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return True
                if pid == self._server.pid:
                    self._server.returncode = os.waitstatus_to_exitcode(status)
                    self._server_ended(self._server.returncode)
        return False

    def _server_ended(self, status: int) -> None:
        """What is left is Triton's guard, which stops it, and a worker that may still be at it."""
        if self._stage in (Stage.STARTING, Stage.READY):  # nobody asked it to
            self._stage = Stage.FAILED
            why = f": {self._last}" if self._last else ""
            self._last = f"Cog's server ended {describe_status(status)}{why}"
            _kill_all()  # a worker without its server has nobody to answer
        elif self._stage is not Stage.FAILED:
            self._stage = Stage.STOPPING
        self._deadline = time.monotonic() + self._bounds.stop + STOP_MARGIN_SECONDS

    def _seconds_left(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def _exit_status(self) -> int:
        if self._interrupted:
            return INTERRUPTED
        if self._stage is Stage.FAILED:
            self._report.say(cause(self._last), logging.ERROR)
            return 1
        return 0


def _kill_all() -> None:
    """Kills what descends from this process, and removes what it left, and what had ended before."""
    kill_and_clean()
    leftovers.sweep()


def waiting(running: int, bounds: Bounds) -> str:
    """What the first Ctrl-C is answered with."""
    what = f"waiting for {counted(running)}, at most {bounds.drain:g} s (DRAIN_SECONDS)"
    if running == 0:
        what = f"waiting for Triton to stop, at most {bounds.stop:g} s (TRITON_STOP_TIMEOUT)"
    return f"{what}; Ctrl-C again stops at once"


def counted(predictions: int) -> str:
    return "1 prediction" if predictions == 1 else f"{predictions} predictions"


def cause(error: str) -> str:
    """Why setup failed, without what Cog's server puts in front of it."""
    _, mark, text = error.rpartition("setup failed: ")
    name, colon, rest = text.partition(": ")
    # Cog puts the exception's class in front of its text.
    return rest if mark and colon and name.isidentifier() else text
