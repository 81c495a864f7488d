"""Calls of tools in a model's text: a table of formats, and two parsers for all of them. Knows no I/O."""

from __future__ import annotations

import ast
import json
import re
import secrets
import string
import warnings
from collections.abc import Callable
from dataclasses import dataclass

from cog_triton.faces.openai.parsing import Arguments, CallStart, Event, Parser, Text, held_length


@dataclass(frozen=True)
class Format:
    """The form in which a family of models writes calls.

    Attributes:
        sign: text by which a chat template is known to ask for this format.
        opening, closing: marks before calls and behind each of them.
        starts: beginnings, without white space, of a text that is all calls; also where the text comes
            without its special tokens, as NVIDIA's postprocessing sends it.
        arguments: their key in a call.
        short_ids: ids of calls have nine letters, as Mistral's templates want it.
        named: a call may be its name and then only the arguments; see ``_NAMED_HEAD``.
        marks: special tokens of calls, which the text has to have.
    """

    sign: str
    opening: str = ""
    closing: str = ""
    starts: tuple[str, ...] = ()
    arguments: str = "arguments"
    short_ids: bool = False
    named: bool = False
    marks: tuple[str, ...] = ()

    def new_id(self, prefix: str = "call_") -> str:
        """Return an id of a call, with the prefix unless the format has its own form."""
        letters = string.ascii_letters + string.digits
        size, prefix = (9, "") if self.short_ids else (24, prefix)
        return prefix + "".join(secrets.choice(letters) for _ in range(size))

    def parser(self, new_id: Callable[[], str], *, guided: bool = False) -> Parser:
        """Return the parser of one answer; ``guided``: a guide allows nothing but calls in JSON."""
        if self is PYTHON and not guided:
            return PythonCallParser(new_id)
        return CallParser(self, new_id, guided=guided)


HERMES = Format("<tool_call>", "<tool_call>", "</tool_call>", marks=("<tool_call>", "</tool_call>"))
MISTRAL = Format(
    "[TOOL_CALLS]",
    "[TOOL_CALLS]",
    starts=('[{"name":',),
    short_ids=True,
    named=True,
    marks=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
)
# The sign is the example of Meta's prompts, which has the calls' own names in it.
PYTHON = Format("(params_name1=", "<|python_start|>", "<|python_end|>")
LLAMA = Format(
    '"parameters":',
    "<|python_tag|>",
    starts=('{"name":', '{"type":"function","name":', '{"function":'),
    arguments="parameters",
    marks=("<|python_tag|>",),
)

# The beginning of a call in Mistral's newer form: name[ARGS]{ or name[CALL_ID]id[ARGS]{
_NAMED_HEAD = re.compile(
    r"(?P<name>[\w.-]{1,64})(\[CALL_ID\](?P<id>\w{1,64}))?(\[ARGS\]\s{0,8})?\{"
)
# A text that may become one.
_NAMED_HALF = re.compile(r"[\w.-]{1,64}(\[CALL_ID\]\w{0,64})?(\[ARGS\]\s{0,8})?(\[[A-Z_]{0,7})?")
# The beginning of a call that is an object, up to its name and up to its arguments.
_NAME = re.compile(r'\{\s*"name"\s*:\s*"([^"\\]*)"')
_OBJECT_HEAD = re.compile(rf'{_NAME.pattern}\s*,\s*"(arguments|parameters)"\s*:\s*[{{\[]')


def format_of(template: str) -> Format | None:
    """Return the format that a chat template asks its model for; None if it takes no tools."""
    if "tools" not in template:
        return None
    formats = (HERMES, MISTRAL, PYTHON, LLAMA)
    return next((known for known in formats if known.sign in template), HERMES)


class CallParser(Parser):
    """Reads calls in JSON, and the text around them.

    Arguments behind the name are sent as they come, others when the call's object has ended. An object
    without a name is text.
    """

    def __init__(self, known: Format, new_id: Callable[[], str], *, guided: bool = False) -> None:
        super().__init__()
        self._format = known
        self._new_id = new_id
        self._guided = guided
        self._state = self._between if guided else self._beginning
        self._calls = 0
        self._nesting = Nesting()
        self._object = ""  # the part of an object that has been looked at

    def flush(self) -> list[Event]:
        if named := _NAME.match(self._object):
            return [self._start(named[1])]
        if self._guided:
            return []  # the beginning of a call that was cut off
        text = self._object + self._held
        text = text.rstrip() if self._calls else text
        return [Text(text)] if text else []

    def _beginning(self) -> list[Event] | None:
        """Decide if the text is all calls."""
        squeezed, starts = "".join(self._held.split()), self._format.starts
        calls = squeezed.startswith(starts)
        if not calls and any(start.startswith(squeezed) for start in starts):
            return None
        self._state = self._between if calls else self._outside
        return []

    def _outside(self) -> list[Event] | None:
        mark = self._format.opening
        text, opening, rest = self._held.partition(mark)
        if opening:
            self._held, self._state = rest, self._between
            return [Text(shown)] if (shown := text.rstrip()) else []
        # White space is held as well: it is dropped before a call.
        shown = text[: len(text) - held_length(text, mark)].rstrip()
        self._held = text[len(shown) :]
        return [Text(shown)] if shown else None

    def _between(self) -> list[Event] | None:
        """Read what is behind an opening or a call."""
        marks = {self._format.closing: self._outside, self._format.opening: self._between}
        for mark, state in marks.items() if not self._guided else ():
            if mark and self._held.startswith(mark):
                self._held, self._state = self._held[len(mark) :], state
                return []
            if mark.startswith(self._held):
                return None
        if self._held[0] == "{":
            self._nesting, self._state = Nesting(), self._in_object
        elif self._held[0].isspace() or self._held[0] in "[],;":
            self._held = self._held[1:]
        elif self._guided:
            self._guided = False  # the engine does not hold the text to the guide
        elif not self._format.named:
            self._state = self._outside
        elif head := _NAMED_HEAD.match(self._held):
            self._held = self._held[head.end() - 1 :]
            self._nesting, self._state = Nesting(), self._in_arguments
            return [self._start(head["name"], head["id"])]
        elif _NAMED_HALF.fullmatch(self._held):
            return None
        else:
            self._state = self._outside
        return []

    def _in_object(self) -> list[Event] | None:
        piece, self._held = self._nesting.split(self._held)
        self._object += piece
        if head := _OBJECT_HEAD.match(self._object):
            self._held = self._object[head.end() - 1 :] + self._held
            self._object = ""
            self._nesting, self._state = Nesting(outer=1), self._in_arguments
            return [self._start(head[1])]
        if not self._nesting.ended:
            return None
        text, self._object, self._state = self._object, "", self._between
        if (call := object_call(text)) is None:
            return [Text(text)]
        return [self._start(call[0]), Arguments(self._calls - 1, call[1])]

    def _in_arguments(self) -> list[Event]:
        piece, self._held = self._nesting.split(self._held)
        if self._nesting.ended:
            self._state = self._behind_arguments if self._nesting.outer else self._between
        return [Arguments(self._calls - 1, piece)]

    def _behind_arguments(self) -> list[Event]:
        """Skip the rest of the call's object."""
        self._nesting.outer = 0
        _, self._held = self._nesting.split(self._held)
        if self._nesting.ended:
            self._state = self._between
        return []

    def _start(self, name: str, call_id: str | None = None) -> Event:
        self._calls += 1
        return CallStart(self._calls - 1, call_id or self._new_id(), name)


class Nesting:
    """Finds the end of an object or a list in JSON that comes in pieces, by its brackets.

    Attributes:
        outer: number of the brackets around it, which are open already.
    """

    def __init__(self, outer: int = 0) -> None:
        self.outer = self._depth = outer
        self._quoted = self._escaped = self._begun = False

    @property
    def ended(self) -> bool:
        return self._begun and self._depth <= self.outer

    def split(self, text: str) -> tuple[str, str]:
        """Return the part of the next piece up to the end, and the part behind it."""
        for place, char in enumerate(text, 1):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = char == "\\", char != '"'
            elif char == '"':
                self._quoted = True
            elif char in "{[":
                self._depth, self._begun = self._depth + 1, True
            elif char in "}]":
                self._depth -= 1
                if self.ended:
                    return text[:place], text[place:]
        return text, ""


def object_call(text: str) -> tuple[str, str] | None:
    """Return the name of a call that is an object, and its arguments as JSON; None if it is not a call."""
    try:
        value = json.loads(text, strict=False)
        arguments = value.get("arguments", value.get("parameters"))
        # Some models write the arguments as a text that has them.
        written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    except (ValueError, RecursionError):
        named = _NAME.match(text)
        return (named[1], "{}") if named else None
    if not isinstance(name := value.get("name"), str):
        return None
    return name, written if isinstance(arguments, str | dict | list) else "{}"


# The beginning of a list of calls, or what may become one. Bounded, because it is looked at again.
_PYTHON_START = re.compile(r"\s*(\[\s{0,8}([A-Za-z_][\w.]{0,255}\s{0,8}(?P<call>\()?)?)?")


class PythonCallParser(Parser):
    """Reads calls written as a Python list: ``[weather(city="Paris", days=2), time()]``.

    A text is calls if all of it is such a list, with named and literal arguments. One that begins so is
    held until its end, because only Python can say where a value ends.
    """

    def __init__(self, new_id: Callable[[], str]) -> None:
        super().__init__()
        self._new_id = new_id
        self._state = self._list

    def flush(self) -> list[Event]:
        if (calls := python_calls(self._held)) is None:
            return super().flush()
        events: list[Event] = []
        for index, (name, arguments) in enumerate(calls):
            events += [CallStart(index, self._new_id(), name), Arguments(index, arguments)]
        return events

    def _list(self) -> list[Event] | None:
        start = _PYTHON_START.match(self._held)
        if start and (start["call"] or start.end() == len(self._held)):
            return None
        self._state = self._plain
        return []


def python_calls(text: str) -> list[tuple[str, str]] | None:
    """Return the names of calls in a list and their arguments as JSON; None if the text is not one."""
    calls = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes that Python does not know
            body = ast.parse(text.strip(), mode="eval").body
        if not isinstance(body, ast.List):
            return None
        for node in body.elts:
            if not isinstance(node, ast.Call) or node.args:
                return None
            values = {
                word.arg: ast.literal_eval(_JsonNames().visit(word.value)) for word in node.keywords
            }
            name = ast.unparse(node.func)
            if None in values or not re.fullmatch(r"[A-Za-z_][\w.]*", name):
                return None
            calls.append((name, json.dumps(values, allow_nan=False)))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return calls


class _JsonNames(ast.NodeTransformer):
    """Takes JSON's names of values for Python's."""

    NAMES = {"true": True, "false": False, "null": None}  # noqa: RUF012

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self.NAMES[node.id]) if node.id in self.NAMES else node
