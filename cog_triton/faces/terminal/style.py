"""Colours and a line that passes, where a stream is a terminal."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TextIO

CLEAR_LINE = "\r\x1b[K"
_RESET = "\x1b[0m"


@dataclass(frozen=True)
class Style:
    """What a stream can show.

    Attributes:
        terminal: whether somebody looks at it.
        colour: whether text may be coloured; see https://no-color.org.
    """

    terminal: bool
    colour: bool

    def dim(self, text: str) -> str:
        return self._in("\x1b[2m", text)

    def bold(self, text: str) -> str:
        return self._in("\x1b[1m", text)

    def red(self, text: str) -> str:
        return self._in("\x1b[31m", text)

    def yellow(self, text: str) -> str:
        return self._in("\x1b[33m", text)

    def _in(self, code: str, text: str) -> str:
        return f"{code}{text}{_RESET}" if self.colour and text else text


def style_of(stream: TextIO, environ: Mapping[str, str]) -> Style:
    """The style of a stream, under the environment's NO_COLOR and TERM."""
    terminal = stream.isatty()
    plain = bool(environ.get("NO_COLOR")) or environ.get("TERM") == "dumb"
    return Style(terminal=terminal, colour=terminal and not plain)


class PassingLine:
    """A line at the bottom of a terminal that the next one takes the place of; nothing elsewhere."""

    def __init__(self, stream: TextIO, style: Style) -> None:
        self._stream = stream
        self._style = style
        self._shown = False

    def show(self, text: str) -> None:
        if self._style.terminal:
            width = shutil.get_terminal_size().columns - 1
            self._stream.write(CLEAR_LINE + self._style.dim(text[:width]))
            self._stream.flush()
            self._shown = True

    def clear(self) -> bool:
        """Takes the line away; returns whether there was one."""
        shown, self._shown = self._shown, False
        if shown:
            self._stream.write(CLEAR_LINE)
            self._stream.flush()
        return shown
