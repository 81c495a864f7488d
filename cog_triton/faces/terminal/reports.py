"""Where the log of ``make serve`` goes: to a person, or to a machine."""

from __future__ import annotations

import contextlib
import json
import logging
import shlex
from typing import TextIO

from cog_triton.faces.terminal.log_lines import LogLine, as_json, as_text, is_shown
from cog_triton.faces.terminal.style import CLEAR_LINE, Style

_OWN = "cog_triton.serve"
_EXAMPLE = {"input": {"prompt": "What is machine learning?"}}


class TextReport:
    """Short lines for a person."""

    def __init__(self, stream: TextIO, style: Style, level: int, url: str) -> None:
        self._stream = stream
        self._style = style
        self._level = level
        self._url = url

    def log(self, line: LogLine) -> None:
        if is_shown(line, self._level):
            verbose = self._level <= logging.DEBUG
            text = as_text(line, self._style, verbose=verbose)
            dim = not verbose and line.level < logging.WARNING
            self._write(self._style.dim(text) if dim else text)

    def say(self, text: str, level: int = logging.INFO) -> None:
        line = as_text(LogLine(level, _OWN, text), self._style)
        # The terminal has shown ^C at the beginning of the line.
        self._write(f"{CLEAR_LINE}{line}" if self._style.terminal else line)

    def ready(self) -> None:
        self._write(f"{self._style.bold('ready:')} {self._url} (Ctrl-C stops it); try")
        self._write(f"  {example(self._url)}")

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the terminal has gone
            self._stream.write(f"{text}\n")
            self._stream.flush()


class JsonReport:
    """An object a line, as Cog's server writes its own."""

    def __init__(self, stream: TextIO, level: int, url: str) -> None:
        self._stream = stream
        self._level = level
        self._url = url

    def log(self, line: LogLine) -> None:
        if line.level >= self._level:
            with contextlib.suppress(OSError):  # nobody reads it any more
                self._stream.write(f"{as_json(line)}\n")
                self._stream.flush()

    def say(self, text: str, level: int = logging.INFO) -> None:
        self.log(LogLine(level, _OWN, text))

    def ready(self) -> None:
        self.say(f"ready: {self._url}")


def example(url: str) -> str:
    """A command that asks the server something."""
    header = shlex.quote("Content-Type: application/json")
    return f"curl -s {url}/predictions -H {header} -d {shlex.quote(json.dumps(_EXAMPLE))}"
