"""Lines of a log: as Cog's server writes them, and as a person or a machine gets them.

Cog's server, coglet, writes a JSON object a line. In some of them is a line that its worker printed, which
the predictor's logging has given a level and a name.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any, TextIO

from cog_triton.errors import shortened
from cog_triton.server.log import LONGEST_RECORD

CLEAR_LINE = "\r\x1b[K"
_OWN, _TRITON, _SERVE = "cog_triton", "tritonserver", "cog_triton.serve"
_LEVELS = {"TRACE": 5, "DEBUG": 10, "INFO": 20, "WARN": 30, "WARNING": 30, "ERROR": 40}
_LEVELS["CRITICAL"] = 50
_NAMES = {5: "TRACE", 10: "DEBUG", 20: "INFO", 30: "WARN", 40: "ERROR", 50: "ERROR"}
_PRINTED = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) ([\w.]+): (.*)", re.DOTALL)
_NO_WARNING = re.compile(r"predict\(\) is deprecated")  # the name that the project keeps
# The error that ends the start repeats these.
_REPEATED = re.compile(
    r"Failed to create instance|failed to load '|'[^']+' depends on '[^']+' which has no loaded version"
)
_SOURCE_OF_TRITON = re.compile(r"^\w+\.cc:\d+\] ")


@dataclass(frozen=True)
class LogLine:
    """One line of a log.

    Attributes:
        level: as in Python's logging.
        target: the name of its logger.
        fields: what coglet adds to the message, such as a prediction's id.
    """

    level: int
    target: str
    message: str
    timestamp: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)


class LogReader:
    """Read the lines of Cog's server, in their order."""

    def __init__(self) -> None:
        self._level = logging.INFO  # of the worker's last line that had one

    def read(self, raw: str) -> LogLine:
        """Parse a line. One that is not coglet's JSON is Python's; one of the worker without a level
        continues the one before."""
        try:
            given = json.loads(raw)
            fields = dict(given["fields"])
            message = shortened(str(fields.pop("message", "")), LONGEST_RECORD)
            level = logging.INFO if _NO_WARNING.search(message) else _LEVELS[given["level"]]
            line = LogLine(level, str(given["target"]), message, str(given["timestamp"]), fields)
        except (ValueError, KeyError, TypeError):
            return LogLine(logging.INFO, "python", shortened(raw, LONGEST_RECORD))
        if line.fields.get("source") not in ("Stdout", "Stderr"):
            return line
        if printed := _PRINTED.match(line.message):
            self._level = _LEVELS[printed[1]]
            return replace(line, level=self._level, target=printed[2], message=printed[3])
        warning = self._level >= logging.WARNING
        return replace(line, level=self._level, target="") if warning else line


@dataclass(frozen=True)
class Style:
    """Capabilities of a stream.

    Attributes:
        terminal: it is one.
        colour: text may be coloured; see https://no-color.org.
    """

    terminal: bool
    colour: bool

    def dim(self, text: str) -> str:
        return self._in(2, text)

    def bold(self, text: str) -> str:
        return self._in(1, text)

    def red(self, text: str) -> str:
        return self._in(31, text)

    def yellow(self, text: str) -> str:
        return self._in(33, text)

    def _in(self, code: int, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.colour and text else text


def style_of(stream: TextIO, environ: Mapping[str, str]) -> Style:
    """Return the style of a stream, under the environment's NO_COLOR and TERM."""
    plain = bool(environ.get("NO_COLOR")) or environ.get("TERM") == "dumb"
    return Style(terminal=stream.isatty(), colour=stream.isatty() and not plain)


class Report:
    """The log of ``make serve``: short lines for a person, or an object a line.

    Args:
        style: of short lines; None for objects.
    """

    def __init__(self, stream: TextIO, style: Style | None, level: int, url: str) -> None:
        self._stream = stream
        self._style = style
        self._level = level
        self._url = url

    def log(self, line: LogLine) -> None:
        """Write a line of the server's log."""
        if self._style is None:
            if line.level >= self._level:
                self._write(as_json(line))
        elif is_shown(line, self._level):
            verbose = self._level <= logging.DEBUG
            text = as_text(line, self._style, verbose=verbose)
            dim = not verbose and line.level < logging.WARNING
            self._write(self._style.dim(text) if dim else text)

    def say(self, text: str, level: int = logging.INFO) -> None:
        """Write a line of this process's own."""
        line = LogLine(level, _SERVE, text)
        if self._style is None:
            self.log(line)
        else:  # a terminal has shown ^C at the beginning of the line
            start = CLEAR_LINE if self._style.terminal else ""
            self._write(start + as_text(line, self._style))

    def ready(self) -> None:
        if self._style is None:
            self.say(f"ready: {self._url}")
        else:
            self._write(f"{self._style.bold('ready:')} {self._url} (Ctrl-C stops it); try")
            self._write(f"  {example(self._url)}")

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the reader has gone
            self._stream.write(f"{text}\n")
            self._stream.flush()


class TerminalHandler(logging.Handler):
    """Python's logging as ``make serve`` shows its log, but progress in a line that the next replaces."""

    verbose = False

    def __init__(self, stream: TextIO, style: Style) -> None:
        super().__init__()
        self._stream = stream
        self._style = style
        self._in_progress = False

    def emit(self, record: logging.LogRecord) -> None:
        line = LogLine(record.levelno, record.name, shortened(record.getMessage(), LONGEST_RECORD))
        if not self.verbose and line.level < logging.WARNING:
            if line.target.partition(".")[0] == _OWN:
                self.show(line.message)
        elif is_shown(line, logging.DEBUG if self.verbose else logging.INFO):
            self.clear()
            self._write(f"{as_text(line, self._style, verbose=self.verbose)}\n")

    def show(self, text: str) -> None:
        """Show a line that the next one replaces; nothing where no terminal is."""
        if self._style.terminal:
            width = shutil.get_terminal_size().columns - 1
            self._write(CLEAR_LINE + self._style.dim(text[:width]))
            self._in_progress = True

    def clear(self) -> bool:
        """Remove that line; return whether there was one."""
        shown, self._in_progress = self._in_progress, False
        if shown:
            self._write(CLEAR_LINE)
        return shown

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def as_json(line: LogLine) -> str:
    """Write a line as coglet does, with the level and the name that the worker gave."""
    timestamp = line.timestamp or datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")
    level, fields = _NAMES.get(line.level, "INFO"), {"message": line.message, **line.fields}
    found = {"timestamp": timestamp, "level": level, "fields": fields, "target": line.target}
    return json.dumps(found, ensure_ascii=False)


def is_shown(line: LogLine, level: int) -> bool:
    """Return whether a person sees a line: warnings, errors, and the progress of this package."""
    if level <= logging.DEBUG:
        return True
    if line.target == _TRITON and _REPEATED.search(line.message):
        return False
    own = line.target.partition(".")[0] == _OWN
    return line.level >= max(level, logging.INFO if own else logging.WARNING)


def as_text(line: LogLine, style: Style, *, verbose: bool = False) -> str:
    """Write a line for a person: short, warnings and errors in colour.

    Args:
        verbose: with its logger's name, and all of what Triton wrote.
    """
    message = line.message
    if verbose:
        name = f"{line.target}: " if line.target else ""
        return f"{_NAMES.get(line.level, 'INFO'):5} {name}{message}"
    if line.target == _TRITON:
        # The first line, without the place in Triton's source and the quotes.
        message = _SOURCE_OF_TRITON.sub("", message)
        quoted = len(message) > 1 and message[0] == message[-1] == '"'
        message = (message[1:-1] if quoted else message).split("\\n")[0]
    if not line.target or line.level < logging.WARNING:
        return message
    error = line.level >= logging.ERROR
    return f"{style.red('error:') if error else style.yellow('warning:')} {message}"


def example(url: str) -> str:
    """Return a command that sends the server a prompt."""
    header = shlex.quote("Content-Type: application/json")
    body = json.dumps({"input": {"prompt": "What is machine learning?"}})
    return f"curl -s {url}/predictions -H {header} -d {shlex.quote(body)}"
