"""Parses server-sent events (text/event-stream) as their bytes arrive.

It knows as much of the format as servers that stream JSON use: an event has one line of data, and may have
a line before it with its name. So an event is complete with its data line.
"""

from __future__ import annotations

Event = tuple[str, bytes]  # its name, "message" if it has none, and its data

_UNNAMED = "message"


class EventParser:
    """Splits one stream into its events."""

    def __init__(self) -> None:
        self._unfinished = b""  # the line that is not complete yet
        self._name = _UNNAMED

    def feed(self, data: bytes) -> list[Event]:
        """Return the events that these bytes complete. White space around their data may be left."""
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                events.append((self._name, line[5:]))
            elif line.startswith(b"event:"):
                self._name = line[6:].strip().decode()
            elif line in (b"", b"\r"):
                self._name = _UNNAMED
        return events
