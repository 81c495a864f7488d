"""Cog's server from its start to the end of all that it started.

One thread waits for the server's log, the end of a process, and signals. The first signal lets running
predictions end, for a bounded time; the second, or one during the start, ends all at once.
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
from functools import partial
from pathlib import Path

from cog_triton.faces.terminal.interrupt import ENDING
from cog_triton.faces.terminal.report import LogReader, Report
from cog_triton.server import leftovers
from cog_triton.server.guard import adopt_orphans, kill_and_clean, signal_with_parent
from cog_triton.server.log import describe_status

READY = "Setup complete, now accepting requests"
FAILED = "Worker initialization failed"
FAILED_AGAIN = "Setup failed"  # without a reason, from a server that may have been stopped before
# Beyond what tritonserver may take to stop: for Cog's server and its worker.
STOP_MARGIN_SECONDS = 5.0


class Stage(enum.Enum):
    STARTING = enum.auto()
    READY = enum.auto()
    STOPPING = enum.auto()
    FAILED = enum.auto()


class Serving:
    """Cog's server as a process group of its own.

    Args:
        stop_seconds: that tritonserver may take to stop.
    """

    def __init__(self, report: Report, stop_seconds: float) -> None:
        self._report = report
        self._stop_seconds = stop_seconds
        self._reader = LogReader()
        self._unfinished = b""
        self._stage = Stage.STARTING
        self._deadline: float | None = None
        self._interrupted = False
        self._last = ""  # of Python's lines: why the server ended, if it does

    def run(self, command: Sequence[str], environ: Mapping[str, str], directory: Path) -> int:
        """Run the server until it, and all that it started, has ended; return the exit status.

        That is 130 after Ctrl-C, 0 after SIGTERM, and 1 if the server could not be set up.
        """
        signals, writer = os.pipe()
        for end in (signals, writer):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in (*ENDING, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        adopt_orphans()  # to wait for them
        self._server = subprocess.Popen(
            command,
            cwd=directory,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches this process only, which passes it on
            preexec_fn=partial(signal_with_parent, signal.SIGTERM),
        )
        assert self._server.stdout is not None
        log = self._server.stdout.fileno()
        sources = [signals, log]
        while self._reap():
            left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            ready = select.select(sources, [], [], left)[0]
            if log in ready and not self._read(log):
                sources.remove(log)
            if signals in ready:
                for received in os.read(signals, 4096):
                    self._signalled(received)
            if self._deadline is not None and time.monotonic() >= self._deadline:
                self._end_at_once()
        while log in sources and self._read(log):
            pass  # what was in the pipe
        if self._interrupted:
            return 128 + signal.SIGINT
        if self._stage is Stage.FAILED:
            self._report.say(cause(self._last), logging.ERROR)
        return int(self._stage is Stage.FAILED)

    def _read(self, log: int) -> bool:
        """Take what is in the pipe; return whether there may be more."""
        data = os.read(log, 1 << 16)
        if not data and self._unfinished:
            data = b"\n"  # the last line's
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        for line in lines:
            self._note(line.decode(errors="replace"))
        return bool(data)

    def _note(self, raw: str) -> None:
        line = self._reader.read(raw)
        if line.message == FAILED:
            # The server may have ended, and been noticed, before this was read.
            if self._stage in (Stage.STARTING, Stage.FAILED):
                self._stage = Stage.FAILED
                self._last = str(line.fields.get("error", line.message))
                self._stop(self._stop_seconds)
        elif (seconds := line.fields.get("stops_within")) is not None:  # the front, on SIGTERM
            self._deadline = time.monotonic() + seconds
            self._report.say(f"{line.message}; Ctrl-C again stops at once")
        elif line.message != FAILED_AGAIN:
            if line.target == "python" and line.message.strip():
                self._last = line.message
            self._report.log(line)
            if line.message == READY and self._stage is Stage.STARTING:
                self._stage = Stage.READY
                self._report.ready()

    def _signalled(self, number: int) -> None:
        if number not in ENDING:
            return
        self._interrupted |= number == signal.SIGINT
        if self._stage is Stage.READY:
            self._stage = Stage.STOPPING
            self._stop(self._stop_seconds)
        else:
            starting = self._stage is Stage.STARTING
            self._report.say("stopped before it was ready" if starting else "stopped at once")
            self._end_at_once()

    def _stop(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds
        self._server.terminate()

    def _end_at_once(self) -> None:
        """Kill what descends from this process, and remove what it left, and what had ended before."""
        if self._stage is not Stage.FAILED:
            self._stage = Stage.STOPPING
        self._deadline = None
        kill_and_clean()
        leftovers.sweep()

    def _reap(self) -> bool:
        """Take the statuses of what has ended; return whether something still runs."""
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
        """Wait for Triton's guard, which stops it, and a worker that may still run."""
        if self._stage in (Stage.STARTING, Stage.READY):  # nobody stopped it
            why = f": {self._last}" if self._last else ""
            self._last = f"Cog's server ended {describe_status(status)}{why}"
            self._stage = Stage.FAILED
            self._end_at_once()  # a worker without its server has nobody to answer
        self._deadline = time.monotonic() + self._stop_seconds + STOP_MARGIN_SECONDS


def cause(error: str) -> str:
    """Return why setup failed, without the words that Cog's server puts in front of it."""
    _, mark, text = error.rpartition("setup failed: ")
    name, colon, rest = text.partition(": ")
    # Cog puts the exception's class in front of its text.
    return rest if mark and colon and name.isidentifier() else text
