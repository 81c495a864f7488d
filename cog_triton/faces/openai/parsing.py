"""A model's text to events: text, thoughts and calls of tools, in the formats that models write.

However a text is cut into pieces, the events are the same but for their cuts. Knows no I/O.
"""

from __future__ import annotations

import ast
import json
import re
import secrets
import warnings
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Reasoning:
    text: str


@dataclass(frozen=True)
class CallStart:
    """The beginning of a call; calls of one answer are counted from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class Arguments:
    """The next piece of a call's arguments, which join to one JSON value."""

    index: int
    text: str


Event = Text | Reasoning | CallStart | Arguments
Events = Iterator[Event | None]
"""None where the events that follow need more of the text."""


class Parser:
    """Reads a text in pieces; by itself, all of it is text."""

    def __init__(self) -> None:
        self._held = ""
        self._ended = False
        self._events = self._read()

    def feed(self, text: str) -> list[Event]:
        """Return the events that are certain with this piece."""
        self._held += text
        events: list[Event] = []
        for event in self._events:
            if event is None:
                break
            events.append(event)
        return events

    def flush(self) -> list[Event]:
        """Return the rest, at the end of the text."""
        self._ended = True
        return self.feed("")

    def _read(self) -> Events:
        while True:
            if text := self._take(len(self._held)):
                yield Text(text)
            if self._ended:
                return
            yield None

    def _take(self, count: int) -> str:
        taken, self._held = self._held[:count], self._held[count:]
        return taken

    def _space(self) -> Events:
        """Skip white space."""
        while not (text := self._held.lstrip()) and not self._ended:
            yield None
        self._held = text

    def _until(
        self, mark: str, kind: type[Text | Reasoning], *, strips: int = 0
    ) -> Generator[Event | None, None, bool]:
        """Read the text before a mark, without the space between them. Returns if the mark came.

        ``strips``: drop the space at the end of the text as well.
        """
        while True:
            text, found, rest = self._held.partition(mark)
            if not found and not self._ended:  # its end may be the beginning of the mark
                sizes = range(min(len(text), len(mark)), 0, -1)
                size = next((n for n in sizes if text.endswith(mark[:n])), 0)
                text, rest = text[: len(text) - size], text
            shown = text if self._ended and not found and not strips else text.rstrip()
            self._held = rest if found else rest[len(shown) :]
            if shown:
                yield kind(shown)
            if found or self._ended:
                return bool(found)
            yield None


class ReasoningParser(Parser):
    """Separates the thoughts at the beginning of a text, ``<think>…</think>``, from the answer."""

    OPENING, CLOSING = "<think>", "</think>"

    def __init__(self, prompt: str, answer: Parser) -> None:
        """Read the thoughts, which the prompt may have opened, and leave the rest to ``answer``."""
        super().__init__()
        self._opened = prompt.rstrip().endswith(self.OPENING)
        self._answer = answer

    def _read(self) -> Events:
        while not self._opened:
            start = self._held.lstrip()
            if start.startswith(self.OPENING):
                self._opened, self._held = True, start[len(self.OPENING) :]
            elif self._ended or not self.OPENING.startswith(start):
                break
            else:
                yield None
        if self._opened:
            yield from self._space()
            if (yield from self._until(self.CLOSING, Reasoning)):
                yield from self._space()
        while not self._ended:
            yield from self._answer.feed(self._take(len(self._held)))
            yield None
        yield from self._answer.feed(self._held) + self._answer.flush()


@dataclass(frozen=True)
class Format:
    """The form in which a family of models writes calls."""

    sign: str  # text by which a chat template is known to ask for this format
    opening: str  # mark before calls
    closing: str = ""  # mark behind each of them
    # Beginnings, without white space, of a text that is all calls; also where the text comes without
    # its special tokens, as NVIDIA's postprocessing sends it.
    starts: tuple[str, ...] = ()
    arguments: str = "arguments"  # their key in a call
    short_ids: bool = False  # of nine letters, as Mistral's templates want it
    named: bool = False  # a call may be its name and then only the arguments; see _NAMED_HEAD
    marks: tuple[str, ...] = ()  # special tokens of calls, which the text has to have

    def new_id(self, prefix: str = "call_") -> str:
        """Return an id of a call, with the prefix unless the format has its own form."""
        letters = secrets.token_hex(12)
        return letters[:9] if self.short_ids else prefix + letters

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


def format_of(template: str) -> Format | None:
    """Return the format that a chat template asks its model for; None if it takes no tools."""
    if "tools" not in template:
        return None
    formats = (HERMES, MISTRAL, PYTHON, LLAMA)
    return next((known for known in formats if known.sign in template), HERMES)


# The beginning of a call in Mistral's newer form: name[ARGS]{ or name[CALL_ID]id[ARGS]{
_NAMED_HEAD = re.compile(
    r"(?P<name>[\w.-]{1,64})(\[CALL_ID\](?P<id>\w{1,64}))?(\[ARGS\]\s{0,8})?\{"
)
# A text that may become one.
_NAMED_HALF = re.compile(r"[\w.-]{1,64}(\[CALL_ID\]\w{0,64})?(\[ARGS\]\s{0,8})?(\[[A-Z_]{0,7})?")
# The beginning of a call that is an object, up to its name and up to its arguments.
_NAME = re.compile(r'\{\s*"name"\s*:\s*"([^"\\]*)"')
_OBJECT_HEAD = re.compile(rf'{_NAME.pattern}\s*,\s*"(arguments|parameters)"\s*:\s*[{{\[]')


class CallParser(Parser):
    """Reads calls in JSON, and the text around them.

    Arguments behind the name are sent as they come, others when the call's object has ended. An object
    without a name is text.
    """

    def __init__(self, known: Format, new_id: Callable[[], str], *, guided: bool = False) -> None:
        super().__init__()
        self._format, self._new_id, self._guided = known, new_id, guided
        self._calls = 0

    def _read(self) -> Events:
        calls = self._guided or (yield from self._is_all_calls())
        while calls or (yield from self._until(self._format.opening, Text, strips=self._calls)):
            yield from self._read_calls()
            calls = False

    def _is_all_calls(self) -> Generator[Event | None, None, bool]:
        while True:
            squeezed, starts = "".join(self._held.split()), self._format.starts
            if squeezed.startswith(starts):
                return True
            if self._ended or not any(start.startswith(squeezed) for start in starts):
                return False
            yield None

    def _read_calls(self) -> Events:
        """Read calls behind an opening, up to the closing or to what cannot be a call."""
        opening, closing, named = self._format.opening, self._format.closing, self._format.named
        while True:
            yield from self._space()
            if not (held := self._held):
                return
            if held.startswith(opening):
                self._take(len(opening))
            elif closing and held.startswith(closing):
                self._take(len(closing))
                return
            elif not self._ended and (opening.startswith(held) or closing.startswith(held)):
                yield None
            elif held[0] in "[],;":
                self._take(1)
            elif held[0] == "{":
                yield from self._read_object()
            elif self._guided:
                self._guided = False  # the engine does not hold the text to the guide
            elif named and (head := _NAMED_HEAD.match(held)):
                self._take(head.end() - 1)
                yield self._start(head["name"], head["id"])
                yield from self._read_json()
            elif named and not self._ended and _NAMED_HALF.fullmatch(held):
                yield None
            else:
                return

    def _read_object(self) -> Events:
        """Read a call; one that is cut off before its arguments has none."""
        json_end, seen = JsonEnd(), ""
        while True:
            seen += self._take(json_end.find(self._held))
            if head := _OBJECT_HEAD.match(seen):
                self._held = seen[head.end() - 1 :] + self._held
                yield self._start(head[1])
                yield from self._read_json()
                yield from self._read_json(skips=True)
                return
            if json_end.found or self._ended:
                break
            yield None
        if call := object_call(seen):
            yield self._start(call[0])
            if json_end.found:
                yield Arguments(self._calls - 1, call[1])
        elif json_end.found or not self._guided:
            yield Text(seen)

    def _read_json(self, *, skips: bool = False) -> Events:
        """Read arguments as they come, or skip the rest of the object that they are in."""
        json_end = JsonEnd(depth=1 if skips else 0)
        while True:
            piece = self._take(json_end.find(self._held))
            if piece and not skips:
                yield Arguments(self._calls - 1, piece)
            if json_end.found or self._ended:
                return
            yield None

    def _start(self, name: str, call_id: str | None = None) -> Event:
        self._calls += 1
        return CallStart(self._calls - 1, call_id or self._new_id(), name)


class JsonEnd:
    """Finds the end of an object or a list in JSON that comes in pieces, by its brackets."""

    def __init__(self, depth: int = 0) -> None:
        self.found = False
        self._depth = depth  # of brackets that are open
        self._quoted = self._escaped = False

    def find(self, text: str) -> int:
        """Return how many characters of the next piece are before the end."""
        for place, char in enumerate(text, 1):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = char == "\\", char != '"'
            elif char == '"':
                self._quoted = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self.found = True
                    return place
        return len(text)


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
    """Reads a text that is calls in a Python list: ``[weather(city="Paris", days=2), time()]``.

    A text that begins so is held until its end: only Python can say where a value ends.
    """

    def __init__(self, new_id: Callable[[], str]) -> None:
        super().__init__()
        self._new_id = new_id

    def _read(self) -> Events:
        while (start := _PYTHON_START.match(self._held)) and not self._ended:
            if not start["call"] and start.end() < len(self._held):
                break
            yield None
        calls = python_calls(self._held) if self._ended else None
        for index, (name, arguments) in enumerate(calls or ()):
            yield CallStart(index, self._new_id(), name)
            yield Arguments(index, arguments)
        if calls is None:
            yield from super()._read()


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
