"""Calls in a model's text: one description a format, and two parsers for all of them."""

from __future__ import annotations

import ast
import json
import re
import secrets
import string
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cog_triton.faces.openai.tools.events import (
    Arguments,
    CallStart,
    Event,
    Parser,
    Text,
    held_length,
    joined,
)

_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class Format:
    """How a family of models writes calls.

    Attributes:
        sign: by which the text of a chat template is known to ask for it.
        opening: before calls.
        closing: behind each of them.
        starts: what a text that is all calls begins with, without its white space; also where the text
            comes without its special tokens, as NVIDIA's postprocessing sends it.
        arguments: the name that they have in a call.
        short_ids: whether a call's id has nine letters, as Mistral's templates want it.
        named: whether a call may be its name and then only the arguments; see ``_HEAD``.
        marks: special tokens of calls, which the text has to have.
    """

    sign: str
    opening: str
    closing: str = ""
    starts: tuple[str, ...] = ()
    arguments: str = "arguments"
    short_ids: bool = False
    named: bool = False
    marks: tuple[str, ...] = ()

    def new_id(self) -> str:
        """An id of a call."""
        if self.short_ids:
            return "".join(secrets.choice(_LETTERS) for _ in range(9))
        return f"call_{''.join(secrets.choice(_LETTERS) for _ in range(24))}"


HERMES = Format("<tool_call>", "<tool_call>", "</tool_call>", marks=("<tool_call>", "</tool_call>"))
MISTRAL = Format(
    "[TOOL_CALLS]",
    "[TOOL_CALLS]",
    starts=('[{"name":',),
    short_ids=True,
    named=True,
    marks=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
)
# The sign is the example that Meta's prompts give, which has the calls' own names in it.
PYTHON = Format("(params_name1=", "<|python_start|>", "<|python_end|>")
LLAMA = Format(
    '"parameters":',
    "<|python_tag|>",
    starts=('{"name":', '{"type":"function","name":', '{"function":'),
    arguments="parameters",
    marks=("<|python_tag|>",),
)
FORMATS = (HERMES, MISTRAL, PYTHON, LLAMA)

# A call's beginning in Mistral's newer form: name[ARGS]{ or name[CALL_ID]id[ARGS]{
_HEAD = re.compile(r"(?P<name>[\w.-]{1,64})(\[CALL_ID\](?P<id>\w{1,64}))?(\[ARGS\]\s{0,8})?\{")
# What may still become one, each mark whole; behind it may be the beginning of another mark.
_HALF = re.compile(r"[\w.-]{1,64}(\[CALL_ID\]\w{0,64})?(\[ARGS\]\s{0,8})?")
# A call's beginning as an object, up to its name and up to its arguments.
_NAME = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")', re.DOTALL)
_ARGUMENTS = re.compile(rf'{_NAME.pattern}\s*,\s*"(arguments|parameters)"\s*:\s*[{{\[]', re.DOTALL)


def format_of(template: str) -> Format | None:
    """The format that a chat template asks its model for; None if it takes no tools."""
    if "tools" not in template:
        return None
    return next((known for known in FORMATS if known.sign in template), HERMES)


def call_parser(
    known: Format, *, guided: bool = False, new_id: Callable[[], str] | None = None
) -> Parser:
    """The parser of one answer; see ``CallParser`` for the arguments."""
    if known is PYTHON and not guided:
        return PythonCallParser(new_id or known.new_id)
    return CallParser(known, guided=guided, new_id=new_id)


class CallParser:
    """Reads calls in JSON, and the text around them. See ``Parser``."""

    def __init__(
        self, known: Format, *, guided: bool = False, new_id: Callable[[], str] | None = None
    ) -> None:
        """At the beginning of a text.

        Args:
            guided: whether the text is nothing but calls in JSON, because a guide allows nothing else.
            new_id: makes an id of a call; None for ids of the format.
        """
        self._format = known
        self._new_id = new_id or known.new_id
        self._guided = guided
        # Reads from the held text what is certain; None where that takes more of it.
        self._state = self._between if guided else self._beginning
        self._held = ""
        self._space = ""  # behind the text, which is part of it if more follows
        self._call: JsonCall | None = None
        self._count = 0

    def feed(self, text: str) -> list[Event]:
        """See ``Parser``."""
        self._held += text
        events: list[Event] = []
        while self._held and (more := self._state()) is not None:
            events += more
        return joined(events)

    def flush(self) -> list[Event]:
        """See ``Parser``."""
        if self._guided:
            return []  # what was cut off is the beginning of a call
        rest = self._call.flush() if self._call else []
        rest += self._text(self._held)
        if self._space and not self._count and not (self._call and self._call.begun):
            rest.append(Text(self._space))
        return joined(rest)

    def _beginning(self) -> list[Event] | None:
        """As long as the text may be all calls."""
        squeezed = "".join(self._held.split())
        if squeezed.startswith(self._format.starts):
            self._state = self._between
        elif any(start.startswith(squeezed) for start in self._format.starts):
            return None
        else:
            self._state = self._outside
        return []

    def _outside(self) -> list[Event] | None:
        text, opening, rest = self._held.partition(self._format.opening)
        if opening:
            self._held, self._state = rest, self._between
            events = self._text(text)
            self._space = ""
            return events
        cut = len(text) - held_length(text, self._format.opening)
        self._held = text[cut:]
        return self._text(text[:cut]) if cut else None

    def _between(self) -> list[Event] | None:
        """Behind an opening or a call."""
        closing, opening = self._format.closing, "" if self._guided else self._format.opening
        for mark in filter(None, (closing, opening)):
            if self._held.startswith(mark):
                self._held = self._held[len(mark) :]
                self._state = self._outside if mark == closing else self._between
                return []
            if mark.startswith(self._held):
                return None
        if self._held[0] == "{":
            self._call, self._state = JsonCall(self._count, self._new_id()), self._in_call
        elif self._held[0].isspace() or self._held[0] in "[],;":
            self._held = self._held[1:]
        else:
            self._state = self._named if self._format.named else self._outside
        return []

    def _named(self) -> list[Event] | None:
        """In what may be the beginning of a call that is its name and then its arguments."""
        if head := _HEAD.match(self._held):
            self._held, self._state = self._held[head.end() - 1 :], self._in_call
            self._call = JsonCall(self._count, head["id"] or self._new_id(), head["name"])
            return [self._call.start(head["name"])]
        half = _HALF.match(self._held)
        rest = self._held[half.end() :] if half else ""
        if half and ("[CALL_ID]".startswith(rest) or "[ARGS]".startswith(rest)):
            return None
        self._state = self._outside
        return []

    def _in_call(self) -> list[Event]:
        call, events = self._call, list[Event]()
        assert call is not None
        for place, char in enumerate(self._held, 1):
            events += call.feed(char)
            if call.done:
                self._held, self._call, self._state = self._held[place:], None, self._between
                self._count += call.begun
                return events
        self._held = ""
        return events

    def _text(self, text: str) -> list[Event]:
        """Text, but for the white space at its end."""
        shown = text.rstrip()
        if not shown:
            self._space += text
            return []
        events: list[Event] = [Text(self._space + shown)]
        self._space = text[len(shown) :]
        return events


class JsonCall:
    """Reads one call that is an object, or of which only the arguments are to come.

    Arguments behind the name are sent as they come, others when the object has ended. An object without
    a name is text.

    Attributes:
        done: whether the object has ended.
        begun: whether the call's start was sent.
    """

    def __init__(self, index: int, call_id: str, name: str = "") -> None:
        self._index = index
        self._id = call_id
        self._raw: list[str] = []
        self._depth = 0
        self._quoted = self._escaped = False
        self._around = 0 if name else 1  # brackets around the arguments
        self._sending = bool(name)
        self._sent = False
        self.done = False
        self.begun = bool(name)

    def start(self, name: str) -> Event:
        """The event of its beginning."""
        self.begun = True
        return CallStart(self._index, self._id, name)

    def feed(self, char: str) -> list[Event]:
        """Take the object's next character."""
        self._raw.append(char)
        before = self._depth
        self._count(char)
        self.done = self._depth == 0
        events: list[Event] = []
        if char == '"' and not self._quoted and not self.begun:
            if named := _NAME.fullmatch("".join(self._raw)):
                events = [self.start(json.loads(named[1], strict=False))]
        elif self.begun and not self._sent and (before, self._depth) == (1, 2):
            self._sending = _ARGUMENTS.fullmatch("".join(self._raw)) is not None
        if self._sending:
            self._sent = True
            self._sending = self._depth > self._around
            events.append(Arguments(self._index, char))
        return events + self._rest() if self.done and not self._sent else events

    def flush(self) -> list[Event]:
        """The rest of an object that was cut off."""
        return [] if self.begun else [Text("".join(self._raw))]

    def _count(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif self._quoted and char == "\\":
            self._escaped = True
        elif char == '"':
            self._quoted = not self._quoted
        elif not self._quoted:
            self._depth += (char in "{[") - (char in "}]")

    def _rest(self) -> list[Event]:
        """The call of the whole object, as far as it was not sent."""
        raw = "".join(self._raw)
        try:
            value = json.loads(raw, strict=False)
            name = value.get("name")
            arguments = value.get("arguments", value.get("parameters"))
            # Some models write the arguments as a text that has them.
            given = arguments if isinstance(arguments, str) else json.dumps(arguments)
        except (ValueError, RecursionError):
            name, arguments, given = None, None, ""
        if not self.begun and not isinstance(name, str):
            return [Text(raw)]
        text = given if isinstance(arguments, str | dict | list) else "{}"
        start = [] if self.begun else [self.start(str(name))]
        return [*start, Arguments(self._index, text)]


# The beginning of a list of calls, or what may become one. Bounded, because it is looked at again.
_PYTHON = re.compile(r"\s*(\[\s{0,8}([A-Za-z_][\w.]{0,255}\s{0,8}(?P<call>\()?)?)?")
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*")
_JSON_NAMES = {"true": True, "false": False, "null": None}


class PythonCallParser:
    """Reads calls written as a Python list: ``[weather(city="Paris", days=2), time()]``. See ``Parser``.

    A text is calls if all of it is such a list, its arguments named and literal. One that begins so is held
    until its end, because only Python can say where a value ends.
    """

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self._held: str | None = ""  # None: the text is not calls
        self._begun = False

    def feed(self, text: str) -> list[Event]:
        """See ``Parser``."""
        if self._held is None:
            return [Text(text)]
        self._held += text
        if not self._begun:
            start = _PYTHON.match(self._held)
            self._begun = start is not None and start["call"] is not None
            if not self._begun and (start is None or start.end() < len(self._held)):
                held, self._held = self._held, None
                return [Text(held)]
        return []

    def flush(self) -> list[Event]:
        """See ``Parser``."""
        if not self._held:
            return []
        if (calls := python_calls(self._held)) is None:
            return [Text(self._held)]
        events: list[Event] = []
        for index, (name, arguments) in enumerate(calls):
            events += [CallStart(index, self._new_id(), name), Arguments(index, arguments)]
        return events


def python_calls(text: str) -> list[tuple[str, str]] | None:
    """The name of each call in a list of them, and its arguments as JSON; None if the text is not one."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes that Python does not know
            body = ast.parse(text.strip(), mode="eval").body
        return [_python_call(call) for call in body.elts] if isinstance(body, ast.List) else None
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _python_call(node: ast.expr) -> tuple[str, str]:
    """
    Raises:
        ValueError, TypeError: it is not a call whose arguments are named, and are what JSON has.
    """
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with named arguments")
    if not _FUNCTION.fullmatch(name := ast.unparse(node.func)):
        raise ValueError("not a function's name")
    values: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("not a literal")
        values[keyword.arg] = ast.literal_eval(_JsonNames().visit(keyword.value))
    return name, json.dumps(values, allow_nan=False)


class _JsonNames(ast.NodeTransformer):
    """Takes JSON's names of values for Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node
