"""Server-sent events of servers that stream JSON: an event is a line of data, maybe after its name."""

from __future__ import annotations


class EventParser:
    def __init__(self) -> None:
        self._unfinished = b""  # the line that is not complete yet
        self._name = "message"

    def feed(self, data: bytes) -> list[tuple[str, bytes]]:
        """Return the name, or "message", and the data of each event that these bytes complete."""
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                events.append((self._name, line[5:]))
            elif line.startswith(b"event:"):
                self._name = line[6:].strip().decode()
            elif line in (b"", b"\r"):
                self._name = "message"
        return events
