"""Cog's server from its start to the end of all that it started, and its log for a person or a machine.

A first signal lets running predictions end, for a bounded time; a second, or one at the start, ends all.
"""

import asyncio
import contextlib
import json
import logging
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from typing import Any, TextIO

from cog_triton.server.guard import adopt_orphans, kill_and_clean, signal_with_parent, sweep
from cog_triton.server.log import describe_status
from cog_triton.terminal import ENDING

# For Cog's server and its worker, beyond what tritonserver may take.
STOP_MARGIN_SECONDS = 5.0
CLEAR_LINE = "\r\x1b[K"
# Codes of a terminal.
BOLD = 1
DIM = 2
RED = 31
YELLOW = 33
_LEVELS = {"TRACE": 5, "DEBUG": 10, "INFO": 20, "WARN": 30, "ERROR": 40}
_OF_LOGGING = {"WARNING": "WARN", "CRITICAL": "ERROR"}
_LABELS = {"WARN": (YELLOW, "warning:"), "ERROR": (RED, "error:")}
_LOGGED = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) ([\w.]+): (.*)", re.DOTALL)
# What Cog's server puts before the text of an error: words of its own, and the exception's class.
WRAPPING = re.compile(r".*setup failed: (\w+: )?", re.DOTALL)
# The error that ends the start repeats these.
_REPEATED = re.compile("Failed to create instance|failed to load '|' which has no loaded version")
# A line of Triton: the place in its source, and then the first line of a text, which may be quoted.
_OF_TRITON = re.compile(r'(?:\w+\.cc:\d+\] )?("?)(.*?)(?:\\n.*)?\1', re.DOTALL)
# Of a log, as coglet writes it.
Line = dict[str, Any]


def line_of(level: str, name: str, text: str) -> Line:
    time = datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")
    level = _OF_LOGGING.get(level, level)
    return {"timestamp": time, "level": level, "fields": {"message": text}, "target": name}


class LogReader:
    """Read coglet's lines in their order: JSON, and in some a line that the worker printed or logged."""

    # Of the worker's last line that had a level.
    _level = "INFO"

    def read(self, raw: str) -> Line:
        """Parse a line. One without a level continues the one before; one that is not JSON is Python's."""
        try:
            line: Line = json.loads(raw)
            fields = line["fields"]
            text = fields["message"]
        except (ValueError, KeyError, TypeError):
            return line_of("INFO", "python", raw)
        if "predict() is deprecated" in text:
            # The project keeps that name.
            line["level"] = "INFO"
        logged = _LOGGED.match(text)
        if "source" in fields or (logged and line.get("target") == "coglet::user"):
            # It comes after the set-up.
            if logged:
                level, line["target"], fields["message"] = logged.groups()
                self._level = _OF_LOGGING.get(level, level)
            elif self._level in _LABELS:
                line["target"] = ""
            line["level"] = self._level
        return line


# The loggers of the line that says what is served, and of the one that says why a start takes minutes;
# other lines of a start pass.
ANNOUNCEMENT = "cog_triton.deployment.announcement"
CONVERSION = "cog_triton.weights.gguf"


class Report(logging.Handler):
    """Lines for a person: warnings, errors, and the progress of this package; all of them at level DEBUG.

    With ``machine`` each is an object of JSON; with ``passing`` the next one replaces a line of
    progress on a terminal.
    Colours are for terminals, but for NO_COLOR (https://no-color.org) and TERM=dumb.
    """

    # Whether a line of progress is shown.
    _in_progress = False

    def __init__(
        self, stream: TextIO, env: Mapping[str, str], machine: bool = False, passing: bool = False
    ) -> None:
        super().__init__(logging.INFO)
        self.machine = machine
        self._stream = stream
        self._passing = passing
        self._terminal = stream.isatty()
        self._colour = self._terminal and not (env.get("NO_COLOR") or env.get("TERM") == "dumb")

    def paint(self, code: int, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._colour and text else text

    def emit(self, record: logging.LogRecord) -> None:
        self.add(line_of(record.levelname, record.name, record.getMessage()))

    def add(self, line: Line) -> None:
        level = line["level"]
        name = line["target"]
        text = line["fields"]["message"]
        if _LEVELS.get(level, logging.INFO) < self.level:
            return
        if self.machine:
            self.write(json.dumps(line, ensure_ascii=False))
        elif self.level <= logging.DEBUG:
            self.write(f"{level:5} {name + ': ' if name else ''}{text}")
        elif level in _LABELS:
            if name != "tritonserver":
                self.write(self._labelled(level, text) if name else text)
            elif not _REPEATED.search(text):
                brief = _OF_TRITON.fullmatch(text)
                self.write(self._labelled(level, brief[2] if brief else text))
        elif name in (ANNOUNCEMENT, CONVERSION):
            self.write(text)
        elif name.partition(".")[0] == "cog_triton":
            self.show(text) if self._passing else self.write(self.paint(DIM, text))

    def say(self, text: str, level: str = "INFO") -> None:
        if self.machine:
            self.add(line_of(level, "cog_triton.serve", text))
        else:
            # Clear the line: after Ctrl-C, a terminal shows ^C at its beginning.
            self._in_progress = self._terminal
            self.write(self._labelled(level, text))

    def write(self, text: str, end: str = "\n") -> None:
        """Write a text in place of a line of progress."""
        start = CLEAR_LINE if self._in_progress else ""
        self._in_progress = False
        with contextlib.suppress(OSError):
            # The reader has gone.
            print(start + text, end=end, file=self._stream, flush=True)

    def show(self, text: str) -> None:
        """Show a line of progress; on a terminal, in place of the one before."""
        if not self._terminal:
            self.write(text)
        else:
            self._in_progress = True
            self.write(self.paint(DIM, text[: shutil.get_terminal_size().columns - 1]), end="")
            self._in_progress = True

    def clear(self) -> bool:
        """Remove that line; return whether there was one."""
        shown = self._in_progress
        self.write("", end="")
        return shown

    def _labelled(self, level: str, text: str) -> str:
        return f"{self.paint(*_LABELS[level])} {text}" if level in _LABELS else text


class Serving:
    """Cog's server as a process group of its own, whose log goes to a report."""

    _server: subprocess.Popen[bytes]
    _deadline: asyncio.TimerHandle | None = None

    def __init__(self, report: Report, url: str, stop_seconds: float) -> None:
        self._report = report
        self._url = url
        # That tritonserver may take to stop.
        self._stop_seconds = stop_seconds
        # Later "ready", "stopping" or "failed".
        self._stage = "starting"
        self._interrupted = False
        # The line that says that all was stopped at once.
        self._has_said_last = False
        # Why the server ended: the last line of Python's, and the error of Cog's.
        self._last = ""
        self._error = ""

    async def run(self, command: Sequence[str], environ: Mapping[str, str]) -> int:
        """Run the server until all that it started has ended; return 130 after Ctrl-C, 1 after an error."""
        # To wait for all that the server starts.
        adopt_orphans()
        # Of ``sweep``, which also finds what other servers left.
        logging.getLogger("tritonserver").addHandler(self._report)
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        for number in ENDING:
            self._loop.add_signal_handler(number, self._signalled, number)
        self._loop.add_signal_handler(signal.SIGCHLD, self._reap)
        self._server = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # Ctrl-C reaches this process only, which passes it on.
            start_new_session=True,
            preexec_fn=partial(signal_with_parent, signal.SIGTERM),
        )
        reader = LogReader()
        # A line may be long, and is read whole.
        lines = asyncio.StreamReader(limit=1 << 30)
        protocol = asyncio.StreamReaderProtocol(lines)
        await self._loop.connect_read_pipe(lambda: protocol, self._server.stdout)
        async for line in lines:
            # Until the last process that has the pipe has ended.
            self._note(reader.read(line.decode(errors="replace").removesuffix("\n")))
        await self._ended.wait()
        if self._interrupted:
            return 128 + signal.SIGINT
        if self._stage == "failed":
            ended = f"Cog's server ended {describe_status(self._server.returncode)}"
            self._report.say(self._error or ": ".join(filter(None, [ended, self._last])), "ERROR")
        return int(self._stage == "failed")

    def _note(self, line: Line) -> None:
        if self._has_said_last:
            return
        fields = line["fields"]
        text = fields["message"]
        if text == "Worker initialization failed":
            # The server may have ended, and been noticed, before this was read.
            if self._stage in ("starting", "failed"):
                self._stage = "failed"
                self._error = WRAPPING.sub("", fields.get("error", text), 1)
                self._stop()
        elif "stops_within" in fields:
            # The front says so on SIGTERM.
            self._end_after(fields["stops_within"])
            self._report.say(f"{text}; Ctrl-C again stops at once")
        elif text != "Setup failed":
            # Coglet says it again, without a reason.
            if line["target"] == "python" and text.strip():
                self._last = text
            self._report.add(line)
            if text == "Setup complete, now accepting requests" and self._stage == "starting":
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
            # The log and ``sweep`` may have more.
            self._has_said_last = True
            self._report.setLevel(logging.CRITICAL)
            self._end_at_once()

    def _stop(self) -> None:
        self._end_after(self._stop_seconds)
        self._server.terminate()

    def _end_after(self, seconds: float) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self._loop.call_later(seconds, self._end_at_once)

    def _end_at_once(self) -> None:
        if self._stage != "failed":
            self._stage = "stopping"
        kill_and_clean()
        sweep()

    def _reap(self) -> None:
        """Wait for the processes that have ended, and note when there are none left."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == self._server.pid:
                    self._note_end(status)
                if not pid:
                    # The others run.
                    return
        # waitpid raised ChildProcessError: there are no others.
        self._ended.set()

    def _note_end(self, status: int) -> None:
        """Note that the server has ended, with a status of waitpid."""
        self._server.returncode = os.waitstatus_to_exitcode(status)
        if self._stage in ("starting", "ready"):
            # Nobody stopped it. A worker without its server has nobody to answer.
            self._stage = "failed"
            self._end_at_once()
        # Triton's guard, which stops it, and a worker may still run.
        self._end_after(self._stop_seconds + STOP_MARGIN_SECONDS)

    def _say_ready(self) -> None:
        if self._report.machine:
            self._report.say(f"ready: {self._url}")
            return
        ready = self._report.paint(BOLD, "ready:")
        self._report.write(f"{ready} {self._url} (Ctrl-C stops it); try")
        header = "-H 'Content-Type: application/json'"
        body = """'{"input": {"prompt": "What is machine learning?"}}'"""
        self._report.write(f"  curl -s {self._url}/predictions {header} -d {body}")
