"""Cog's server from its start to the end of all that it started.

The first signal lets running predictions end, for a bounded time; the second, or one during the start, ends
everything at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from cog_triton.faces.terminal import ENDING
from cog_triton.faces.terminal.report import BOLD, Line, LogReader, Report
from cog_triton.server.guard import adopt_orphans, kill_and_clean, signal_with_parent, sweep
from cog_triton.server.log import describe_status

STOP_MARGIN_SECONDS = 5.0
"""Beyond what tritonserver may take to stop: for Cog's server and its worker."""
WRAPPING = re.compile(r".*setup failed: (\w+: )?", re.DOTALL)
"""What Cog's server puts before the text of an error: words of its own, and the exception's class."""


class Serving:
    """Cog's server as a process group of its own, whose log goes to a report.

    Args:
        stop_seconds: that tritonserver may take to stop.
    """

    _server: subprocess.Popen[bytes]
    _deadline: asyncio.TimerHandle | None = None

    def __init__(self, report: Report, url: str, stop_seconds: float) -> None:
        self._report, self._url = report, url
        self._stop_seconds = stop_seconds
        self._stage = "starting"  # then "ready", "stopping" or "failed"
        self._interrupted = False
        self._last = ""  # of Python's lines: why the server ended, if it does
        self._error = ""

    async def run(self, command: Sequence[str], environ: Mapping[str, str], directory: Path) -> int:
        """Run the server until it, and all that it started, has ended; return the exit status.

        That is 130 after Ctrl-C, 0 after SIGTERM, and 1 if the server could not be set up.
        """
        adopt_orphans()  # to wait for them
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        for number in ENDING:
            self._loop.add_signal_handler(number, self._signalled, number)
        self._loop.add_signal_handler(signal.SIGCHLD, self._reap)
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
        lines, reader = asyncio.StreamReader(limit=1 << 30), LogReader()
        protocol = asyncio.StreamReaderProtocol(lines)
        await self._loop.connect_read_pipe(lambda: protocol, self._server.stdout)
        async for line in lines:  # until the last process that has the pipe has ended
            self._note(reader.read(line.decode(errors="replace").removesuffix("\n")))
        await self._ended.wait()
        if self._interrupted:
            return 128 + signal.SIGINT
        if self._stage == "failed":
            ended = f"Cog's server ended {describe_status(self._server.returncode)}"
            why = f": {self._last}" if self._last else ""
            self._report.say(self._error or ended + why, logging.ERROR)
        return int(self._stage == "failed")

    def _note(self, line: Line) -> None:
        if line.msg == "Worker initialization failed":
            # The server may have ended, and been noticed, before this was read.
            if self._stage in ("starting", "failed"):
                self._stage = "failed"
                self._error = WRAPPING.sub("", str(line.fields.get("error", line.msg)), 1)
                self._stop()
        elif (seconds := line.fields.get("stops_within")) is not None:  # the front, on SIGTERM
            self._end_after(seconds)
            self._report.say(f"{line.msg}; Ctrl-C again stops at once")
        elif line.msg != "Setup failed":  # again, without a reason
            if line.name == "python" and line.msg.strip():
                self._last = line.msg
            self._report.emit(line)
            if line.msg == "Setup complete, now accepting requests" and self._stage == "starting":
                self._stage = "ready"
                self._say_ready()

    def _signalled(self, number: int) -> None:
        self._interrupted |= number == signal.SIGINT
        if self._stage == "ready":
            self._stage = "stopping"
            self._stop()
        else:
            starting = self._stage == "starting"
            self._report.say("stopped before it was ready" if starting else "stopped at once")
            self._end_at_once()

    def _stop(self) -> None:
        self._end_after(self._stop_seconds)
        self._server.terminate()

    def _end_after(self, seconds: float) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self._loop.call_later(seconds, self._end_at_once)

    def _end_at_once(self) -> None:
        """Kill what descends from this process, and remove what it left, and what had ended before."""
        if self._stage != "failed":
            self._stage = "stopping"
        kill_and_clean()
        sweep()

    def _reap(self) -> None:
        """Take the statuses of what has ended."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._server.pid:
                    self._server.returncode = os.waitstatus_to_exitcode(ended[1])
                    if self._stage in ("starting", "ready"):  # nobody stopped it
                        self._stage = "failed"
                        self._end_at_once()  # a worker without its server has nobody to answer
                    # Triton's guard, which stops it, and a worker may still run.
                    self._end_after(self._stop_seconds + STOP_MARGIN_SECONDS)
            return
        self._ended.set()

    def _say_ready(self) -> None:
        if (style := self._report.style) is None:
            self._report.say(f"ready: {self._url}")
            return
        header = shlex.quote("Content-Type: application/json")
        body = shlex.quote(json.dumps({"input": {"prompt": "What is machine learning?"}}))
        self._report.write(f"{style.paint(BOLD, 'ready:')} {self._url} (Ctrl-C stops it); try")
        self._report.write(f"  curl -s {self._url}/predictions -H {header} -d {body}")
