"""Calls whose arguments are JSON, read a character at a time.

``JsonCall`` is one object, {"name": "f", "arguments": {...}}; of ``NamedCall`` the name is known, and only
the arguments are to come.
"""

from __future__ import annotations

import json

from cog_triton.faces.openai.tools.events import Arguments, CallStart, Event, Text

ARGUMENTS = ("arguments", "parameters")


class Brackets:
    """Where in a JSON text its reader is.

    Attributes:
        depth: in how many brackets.
        in_string: whether in a string.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.in_string = False
        self._escaped = False

    def feed(self, char: str) -> None:
        """Takes the text's next character."""
        if self.in_string:
            if self._escaped or char == "\\":
                self._escaped = not self._escaped
            elif char == '"':
                self.in_string = False
        elif char == '"':
            self.in_string = True
        elif char in "{[":
            self.depth += 1
        elif char in "}]":
            self.depth -= 1


class NamedCall:
    """Reads the arguments of a call that has begun: one object.

    Attributes:
        done: whether it has ended.
        begun: as of ``JsonCall``.
    """

    begun = True

    def __init__(self, index: int) -> None:
        self._index = index
        self._brackets = Brackets()
        self.done = False

    def feed(self, char: str) -> list[Event]:
        """Takes the object's next character."""
        self._brackets.feed(char)
        self.done = self._brackets.depth == 0
        return [Arguments(self._index, char)]

    def flush(self) -> list[Event]:
        """What is to be said of an object that was cut off."""
        return []


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
        self._brackets = Brackets()
        self._string = 0  # where the last one of the outermost object begins
        self._key: str | None = None  # of the value that comes, in the outermost object
        self._waiting = ""  # arguments that came before the name
        self._sent = False
        self.done = False
        self.begun = False

    def feed(self, char: str) -> list[Event]:
        """Takes the object's next character."""
        self._raw += char
        depth, in_string = self._brackets.depth, self._brackets.in_string
        self._brackets.feed(char)
        events = self._outermost(char, in_string) if depth == 1 else []
        # What is inside of the arguments' brackets, and these.
        if self._key in ARGUMENTS and max(depth, self._brackets.depth) > 1:
            events = [*events, *self._argument(char)]
        return [*events, *self._end()] if self._brackets.depth == 0 else events

    def flush(self) -> list[Event]:
        """What is to be said of an object that was cut off."""
        return [] if self.begun else [Text(self._raw)]

    def _outermost(self, char: str, in_string: bool) -> list[Event]:
        """Keys, and values that are texts."""
        if in_string and not self._brackets.in_string:
            return self._string_ended(_decoded(self._raw[self._string :]))
        if not in_string and self._brackets.in_string:
            self._string = len(self._raw) - 1
        elif not in_string and char == ",":
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
