"""One call as a JSON object, read a character at a time: {"name": "f", "arguments": {...}}."""

from __future__ import annotations

import json

from cog_triton.faces.openai.tools.events import Arguments, CallStart, Event, Text

ARGUMENTS = ("arguments", "parameters")


class JsonCall:
    """Reads one call; its name and arguments may come in any order.

    An object without a name is no call: it becomes text.

    Attributes:
        done: whether the object has ended.
        begun: whether its name is known.
    """

    def __init__(self, index: int, call_id: str) -> None:
        self._index = index
        self._id = call_id
        self._raw = ""
        self._depth = 0
        self._string: int | None = None  # where the one begins that has not ended
        self._escaped = False
        self._key: str | None = None  # of the value that comes, in the outermost object
        self._waiting = ""  # arguments that came before the name
        self._sent = False
        self.done = False
        self.begun = False

    def feed(self, char: str) -> list[Event]:
        """Takes the object's next character."""
        self._raw += char
        before = self._depth
        read = self._outside_strings if self._string is None else self._in_string
        events = read(char)
        # What is inside of the arguments' brackets, and these.
        if self._key in ARGUMENTS and max(before, self._depth) > 1:
            events = [*events, *self._argument(char)]
        return [*events, *self._end()] if self._depth == 0 else events

    def flush(self) -> list[Event]:
        """What is to be said of an object that was cut off."""
        return [] if self.begun else [Text(self._raw)]

    def _in_string(self, char: str) -> list[Event]:
        if self._escaped or char == "\\":
            self._escaped = not self._escaped
        elif char == '"':
            text, self._string = self._raw[self._string :], None
            if self._depth == 1:
                return self._string_ended(_decoded(text))
        return []

    def _outside_strings(self, char: str) -> list[Event]:
        if char == '"':
            self._string = len(self._raw) - 1
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        elif char == "," and self._depth == 1:
            self._key = None
        return []

    def _string_ended(self, text: str) -> list[Event]:
        if self._key is None:
            self._key = text
            return []
        if self._key == "name" and not self.begun:
            self.begun = True
            waiting, self._waiting = self._waiting, ""
            start = CallStart(self._index, self._id, text)
            return [start, Arguments(self._index, waiting)] if waiting else [start]
        # Some models write the arguments as a text that has them.
        return self._argument(text) if self._key in ARGUMENTS else []

    def _argument(self, text: str) -> list[Event]:
        self._sent = True
        if self.begun:
            return [Arguments(self._index, text)]
        self._waiting += text
        return []

    def _end(self) -> list[Event]:
        self.done = True
        if not self.begun:
            return [Text(self._raw)]
        return [] if self._sent else [Arguments(self._index, "{}")]


def _decoded(literal: str) -> str:
    try:
        return str(json.loads(literal, strict=False))
    except ValueError:  # a bad escape
        return literal[1:-1]
