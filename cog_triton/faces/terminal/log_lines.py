"""A line of a log: as Cog's server writes it, as text for a person, as JSON for a machine.

Cog's server, coglet, writes a JSON object a line. In some of them is a line that its worker printed, which
the predictor's logging has given a level and a name.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

from cog_triton.errors import shortened
from cog_triton.faces.terminal.style import Style
from cog_triton.server.log import LONGEST_RECORD

OWN = "cog_triton"
TRITON = "tritonserver"
_LEVELS = {
    "TRACE": 5,
    "DEBUG": 10,
    "INFO": 20,
    "WARN": 30,
    "WARNING": 30,
    "ERROR": 40,
    "CRITICAL": 50,
}
_NAMES = {5: "TRACE", 10: "DEBUG", 20: "INFO", 30: "WARN", 40: "ERROR", 50: "ERROR"}
_PRINTED = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) ([\w.]+): (.*)", re.DOTALL)
# `predict` is the name that the project keeps.
_NO_NEWS = re.compile(r"predict\(\) is deprecated")
# What the error that ends the start will say once more.
_REPEATED = re.compile(
    r"Failed to create instance|failed to load '|'[^']+' depends on '[^']+' which has no loaded version"
)
_TRITONS_PLACE = re.compile(r"^\w+\.cc:\d+\] ")


@dataclass(frozen=True)
class LogLine:
    """One line of a log.

    Attributes:
        level: as in Python's logging.
        target: who said it.
        fields: what coglet adds to the message, such as a prediction's id.
    """

    level: int
    target: str
    message: str
    timestamp: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)


class LogReader:
    """Reads the lines of Cog's server, in their order."""

    def __init__(self) -> None:
        self._level = logging.INFO  # of the worker's last line that had one

    def read(self, raw: str) -> LogLine:
        """The line; one of the worker without a level continues the one before."""
        line = parse(raw)
        if line.fields.get("source") not in ("Stdout", "Stderr"):
            return line
        if printed := _PRINTED.match(line.message):
            self._level = _LEVELS[printed[1]]
            return replace(line, level=self._level, target=printed[2], message=printed[3])
        if self._level >= logging.WARNING:
            return replace(line, level=self._level, target="")
        return line


def parse(raw: str) -> LogLine:
    """A line as coglet writes it; one that is none of its JSON objects is a message of Python's."""
    try:
        given = json.loads(raw)
        fields = dict(given["fields"])
        message = shortened(str(fields.pop("message", "")), LONGEST_RECORD)
        level = logging.INFO if _NO_NEWS.search(message) else _LEVELS[given["level"]]
        return LogLine(level, str(given["target"]), message, str(given["timestamp"]), fields)
    except (ValueError, KeyError, TypeError):
        return LogLine(logging.INFO, "python", shortened(raw, LONGEST_RECORD))


def as_json(line: LogLine) -> str:
    """The line as coglet writes its own, with the level and the name that the worker gave."""
    timestamp = line.timestamp or datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")
    return json.dumps(
        {
            "timestamp": timestamp,
            "level": _NAMES.get(line.level, "INFO"),
            "fields": {"message": line.message, **line.fields},
            "target": line.target,
        },
        ensure_ascii=False,
    )


def is_shown(line: LogLine, level: int) -> bool:
    """Whether a person wants to see the line: what is wrong, and what this package says of its progress."""
    if level <= logging.DEBUG:
        return True
    if line.target == TRITON and _REPEATED.search(line.message):
        return False
    own = line.target.partition(".")[0] == OWN
    return line.level >= max(level, logging.INFO if own else logging.WARNING)


def as_text(line: LogLine, style: Style, *, verbose: bool = False) -> str:
    """The line for a person: short, what is wrong in colour.

    Args:
        verbose: with the name of who said it, and all of what Triton said.
    """
    if verbose:
        name = f"{line.target}: " if line.target else ""
        return f"{_NAMES.get(line.level, 'INFO'):5} {name}{line.message}"
    message = short(line.message) if line.target == TRITON else line.message
    if not line.target or line.level < logging.WARNING:
        return message
    if line.level < logging.ERROR:
        return f"{style.yellow('warning:')} {message}"
    return f"{style.red('error:')} {message}"


def short(message: str) -> str:
    """The first line of a message of Triton's, without the place in its source and its quotes."""
    text = _TRITONS_PLACE.sub("", message)
    quoted = len(text) > 1 and text[0] == text[-1] == '"'
    return (text[1:-1] if quoted else text).split("\\n")[0]
