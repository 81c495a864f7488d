"""Python's logging in a terminal: progress in a line that passes, what is wrong in lines that stay."""

from __future__ import annotations

import logging
from typing import TextIO

from cog_triton.errors import shortened
from cog_triton.faces.terminal.log_lines import OWN, LogLine, as_text, is_shown
from cog_triton.faces.terminal.style import PassingLine, Style
from cog_triton.server.log import LONGEST_RECORD


class TerminalHandler(logging.Handler):
    """Shows records as ``make serve`` shows the lines of its log, but for progress."""

    def __init__(self, stream: TextIO, style: Style, level: int, progress: PassingLine) -> None:
        super().__init__()
        self._stream = stream
        self._style = style
        self._shown = level
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        line = LogLine(record.levelno, record.name, shortened(record.getMessage(), LONGEST_RECORD))
        verbose = self._shown <= logging.DEBUG
        if not verbose and line.level < logging.WARNING:
            if line.target.partition(".")[0] == OWN:
                self._progress.show(line.message)
        elif is_shown(line, self._shown):
            self._progress.clear()
            self._stream.write(f"{as_text(line, self._style, verbose=verbose)}\n")
            self._stream.flush()
