"""Calls written as a Python list of them: ``[weather(city="Paris", days=2), time()]``.

A text is calls if all of it is such a list, its arguments named and literal. Anything else is text; one
that begins like calls is held back as long as it may still be them.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable
from typing import Any

from cog_triton.faces.openai.tools.events import Arguments, CallStart, Event, Text

# Bounded, because with each character those before it are looked at again.
_NAME = re.compile(r"[A-Za-z_][\w.]{0,255}\s{0,8}")
_JSON_NAMES = {"true": True, "false": False, "null": None}
_NO_CALLS = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)


class PythonCallParser:
    """Reads such a list, or a text that is none. See ``Parser``.

    It only looks for where the list ends; what is in it is Python's to say.
    """

    def __init__(self, new_id: Callable[[], str]) -> None:
        """At the beginning of a text."""
        self._new_id = new_id
        # What comes next; its result is whether the text may still be calls. None: it is not.
        self._state: Callable[[str], bool] | None = self._list
        self._held = ""
        self._name = ""
        self._quote = ""
        self._escaped = False
        self._depth = 0  # brackets in a value

    def feed(self, text: str) -> list[Event]:
        """See ``Parser``."""
        for place, char in enumerate(text):
            if self._state is None or not self._state(char):
                held, self._held, self._state = self._held, "", None
                return [Text(held + text[place:])]
            self._held += char
        return []

    def flush(self) -> list[Event]:
        """See ``Parser``."""
        if self._state != self._end:
            return [Text(self._held)] if self._held else []
        events: list[Event] = []
        for index, (name, arguments) in enumerate(python_calls(self._held) or []):
            events += [CallStart(index, self._new_id(), name), Arguments(index, arguments)]
        return events

    def _list(self, char: str) -> bool:
        if char == "[":
            self._state = self._function
        return char == "[" or char.isspace()

    def _function(self, char: str) -> bool:
        return self._named(char, "(", self._argument)

    def _argument(self, char: str) -> bool:
        if char == ")" and not self._name:
            self._state = self._behind_call
            return True
        return self._named(char, "=", self._value)

    def _named(self, char: str, end: str, then: Callable[[str], bool]) -> bool:
        """In a name, or in the white space around it."""
        if char == end and self._name:
            self._name, self._state = "", then
            return True
        self._name = (self._name + char).lstrip()
        return not self._name or _NAME.fullmatch(self._name) is not None

    def _value(self, char: str) -> bool:
        if self._quote:
            if self._escaped or char == "\\":
                self._escaped = not self._escaped
            elif char == self._quote:
                self._quote = ""
        elif char in "'\"":
            self._quote = char
        elif char in "([{":
            self._depth += 1
        elif self._depth:
            self._depth -= char in ")]}"
        elif char in ",)":
            self._state = self._argument if char == "," else self._behind_call
        return True

    def _behind_call(self, char: str) -> bool:
        if char == ",":
            self._state = self._function
        elif char == "]":
            self._state = self._end
            return python_calls(self._held + char) is not None
        return char in ",]" or char.isspace()

    def _end(self, char: str) -> bool:
        return char.isspace()


def python_calls(text: str) -> list[tuple[str, str]] | None:
    """The name of each call in a list of them, and its arguments as JSON; None if the text is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes that Python does not know
            body = ast.parse(text.strip(), mode="eval").body
        return [_call(call) for call in body.elts] if isinstance(body, ast.List) else None
    except _NO_CALLS:
        return None


def _call(node: ast.expr) -> tuple[str, str]:
    """
    Raises:
        ValueError, TypeError: it is no call whose arguments are named, and are what JSON has.
    """
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call with named arguments")
    values: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("no literal")
        values[keyword.arg] = ast.literal_eval(_JsonNames().visit(keyword.value))
    return ast.unparse(node.func), json.dumps(values, allow_nan=False)


class _JsonNames(ast.NodeTransformer):
    """Takes what JSON calls its values for Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node
