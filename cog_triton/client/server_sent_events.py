"""Server-sent events (text/event-stream) out of bytes as they arrive.

As much of the format as Triton, Cog and others that stream JSON use: an event is one line of data, with a
line before it that names the event or none. So it is complete with the line, and needs no blank one.
"""

from __future__ import annotations

Event = tuple[str, bytes]  # its name, "message" if it has none, and its data

_UNNAMED = "message"


class EventParser:
    """Takes one stream apart into its events."""

    def __init__(self) -> None:
        self._unfinished = b""  # line
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
