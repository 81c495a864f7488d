"""The log of Cog's server, and Python's own, as text for a person or JSON for a machine."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import shutil
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any, NamedTuple, TextIO

from cog_triton.errors import shortened
from cog_triton.server.log import LONGEST_RECORD

CLEAR_LINE = "\r\x1b[K"
BOLD, DIM, RED, YELLOW = 1, 2, 31, 33
_NAMES = {5: "TRACE", 10: "DEBUG", 20: "INFO", 30: "WARN", 40: "ERROR", 50: "ERROR"}
_LEVELS = {name: level for level, name in _NAMES.items() if level < logging.CRITICAL}
_LOGGED = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) ([\w.]+): (.*)", re.DOTALL)
_NO_WARNING = re.compile(r"predict\(\) is deprecated")  # the name that the project keeps
# The error that ends the start repeats these.
_REPEATED = re.compile(
    r"Failed to create instance|failed to load '|'[^']+' depends on '[^']+' which has no loaded version"
)
# A line of Triton: the place in its source, and then the first line of a text, which may be quoted.
_OF_TRITON = re.compile(r'(?:\w+\.cc:\d+\] )?("?)(.*?)(?:\\n.*)?\1', re.DOTALL)


class Line(logging.LogRecord):
    """A line of a log, with what coglet adds to the message, such as a prediction's id."""

    def __init__(self, level: int, name: str, text: str, time: str = "", **fields: Any) -> None:
        super().__init__(name, level, "", 0, shortened(text, LONGEST_RECORD), None, None)
        self.timestamp, self.fields = time, fields


class LogReader:
    """Read the lines of Cog's server, coglet, in their order.

    Each is a JSON object. Some hold a line that the worker printed, with the level and name of its logging.
    """

    _level = logging.INFO  # of the worker's last line that had one

    def read(self, raw: str) -> Line:
        """Parse a line. One without a level continues the one before; one that is not JSON is Python's."""
        try:
            given = json.loads(raw)
            fields = dict(given["fields"])
            text = str(fields.pop("message", ""))
            level = logging.INFO if _NO_WARNING.search(text) else _LEVELS[given["level"]]
            line = Line(level, str(given["target"]), text, str(given["timestamp"]), **fields)
        except (ValueError, KeyError, TypeError):
            return Line(logging.INFO, "python", raw)
        if fields.get("source") in ("Stdout", "Stderr"):
            if logged := _LOGGED.match(text):
                self._level = int(logging.getLevelName(logged[1]))
                line.name, line.msg = logged[2], shortened(logged[3], LONGEST_RECORD)
            elif self._level >= logging.WARNING:
                line.name = ""
            line.levelno = self._level
        return line


class Style(NamedTuple):
    """The capabilities of a stream: whether it is a terminal, and one that shows colours."""

    terminal: bool
    colour: bool

    def paint(self, code: int, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.colour and text else text


def style_of(stream: TextIO, environ: Mapping[str, str]) -> Style:
    """Return the style of a stream, under NO_COLOR (https://no-color.org) and TERM."""
    plain = bool(environ.get("NO_COLOR")) or environ.get("TERM") == "dumb"
    return Style(stream.isatty(), colour=stream.isatty() and not plain)


class Report(logging.Handler):
    """Lines for a person: warnings, errors, and the progress of this package; all of them at level DEBUG.

    Args:
        style: None for a machine, which gets an object a line.
        passing: progress stands in a line that the next one replaces.
    """

    _in_progress = False  # such a line is shown

    def __init__(
        self, stream: TextIO, style: Style | None, level: int = logging.INFO, passing: bool = False
    ) -> None:
        super().__init__(level)
        self._stream, self.style, self._passing = stream, style, passing

    def emit(self, record: logging.LogRecord) -> None:
        text, level = record.getMessage(), record.levelno
        if level < self.level:
            return
        if self.style is None:
            self.write(as_json(record))
        elif self.level <= logging.DEBUG:
            name = f"{record.name}: " if record.name else ""
            self.write(f"{_NAMES.get(level, 'INFO'):5} {name}{text}")
        elif level >= logging.WARNING:
            if record.name == "tritonserver":
                if _REPEATED.search(text):
                    return
                line = _OF_TRITON.fullmatch(text)
                text = line[2] if line else text
            self.write(self._labelled(level, text) if record.name else text)
        elif record.name.partition(".")[0] == "cog_triton":
            if self._passing:
                self.show(text)
            else:
                self.write(self.style.paint(DIM, text))

    def say(self, text: str, level: int = logging.INFO) -> None:
        """Write a line of this process's own."""
        if self.style is None:
            self.emit(Line(level, "cog_triton.serve", text))
        else:  # a terminal has shown ^C at the beginning of the line
            self._in_progress = self.style.terminal
            self.write(self._labelled(level, text))

    def write(self, text: str) -> None:
        self.clear()
        self._print(f"{text}\n")

    def show(self, text: str) -> None:
        """Show a line that the next one replaces; nothing where no terminal is."""
        if self.style is not None and self.style.terminal:
            self._in_progress = True
            width = shutil.get_terminal_size().columns - 1
            self._print(CLEAR_LINE + self.style.paint(DIM, text[:width]))

    def clear(self) -> bool:
        """Remove that line; return whether there was one."""
        shown, self._in_progress = self._in_progress, False
        if shown:
            self._print(CLEAR_LINE)
        return shown

    def _labelled(self, level: int, text: str) -> str:
        if self.style is None or level < logging.WARNING:
            return text
        error = level >= logging.ERROR
        label = self.style.paint(RED, "error:") if error else self.style.paint(YELLOW, "warning:")
        return f"{label} {text}"

    def _print(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the reader has gone
            print(text, end="", file=self._stream, flush=True)


def as_json(record: logging.LogRecord) -> str:
    """Return a line as coglet writes one, with the level and the name that the worker gave."""
    now = datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")
    time, level = getattr(record, "timestamp", "") or now, _NAMES.get(record.levelno, "INFO")
    fields = {"message": record.getMessage(), **getattr(record, "fields", {})}
    found = {"timestamp": time, "level": level, "fields": fields, "target": record.name}
    return json.dumps(found, ensure_ascii=False)
