"""Where a model's text has its calls: one description a format, and one parser for all."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass

from cog_triton.faces.openai.tools.events import (
    CallStart,
    Event,
    Parser,
    Text,
    held_length,
    joined,
)
from cog_triton.faces.openai.tools.json_call import JsonCall, NamedCall
from cog_triton.faces.openai.tools.python_calls import PythonCallParser

_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class Format:
    """How a family of models writes calls.

    Attributes:
        opening: before calls.
        closing: behind each of them.
        starts: what a text that is all calls begins with, without its white space; also where the text
            comes without its special tokens, as NVIDIA's postprocessing sends it.
        arguments: the name that they have in a call.
        short_ids: whether a call's id has nine letters, as Mistral's templates want it.
        named: whether a call may be its name and then the arguments alone; see ``_HEAD``.
        marks: special tokens that tell what is a call, which the text has to have.
    """

    name: str
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


HERMES = Format("hermes", "<tool_call>", "</tool_call>", marks=("<tool_call>", "</tool_call>"))
MISTRAL = Format(
    "mistral",
    "[TOOL_CALLS]",
    starts=('[{"name":',),
    short_ids=True,
    named=True,
    marks=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
)
LLAMA = Format(
    "llama3",
    "<|python_tag|>",
    starts=('{"name":', '{"type":"function","name":', '{"function":'),
    arguments="parameters",
    marks=("<|python_tag|>",),
)
PYTHON = Format("python", "<|python_start|>", "<|python_end|>")
# Told by the example that Meta's prompts give, which has the calls' own names in it.
FORMATS = (HERMES, MISTRAL, PYTHON, LLAMA)
_SIGNS = {
    "hermes": "<tool_call>",
    "mistral": "[TOOL_CALLS]",
    "python": "(params_name1=",
    "llama3": '"parameters":',
}

# A call's beginning in Mistral's newer form: name[ARGS]{ or name[CALL_ID]id[ARGS]{
_HEAD = re.compile(r"(?P<name>[\w.-]{1,64})(\[CALL_ID\](?P<id>\w{1,64}))?(\[ARGS\]\s{0,8})?\{")
# What may still become one, each mark whole; behind it may be the beginning of another mark.
_HALF = re.compile(r"[\w.-]{1,64}(\[CALL_ID\]\w{0,64})?(\[ARGS\]\s{0,8})?")
_MARKS = ("[CALL_ID]", "[ARGS]")


def format_of(template: str) -> Format | None:
    """The format that a chat template tells its model of, None if it takes no tools."""
    if "tools" not in template:
        return None
    return next((known for known in FORMATS if _SIGNS[known.name] in template), HERMES)


def call_parser(
    known: Format, *, guided: bool = False, new_id: Callable[[], str] | None = None
) -> Parser:
    """For one answer; see ``CallParser`` for the arguments."""
    if known is PYTHON and not guided:
        return PythonCallParser(new_id or known.new_id)
    return CallParser(known, guided=guided, new_id=new_id)


class CallParser:
    """Reads calls, and the text around them, a character at a time. See ``Parser``.

    Attributes:
        called: whether there was a call.
    """

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
        self._state = self._calls if guided else self._beginning
        self._opening = "" if guided else known.opening
        self._held = ""
        self._space = ""  # behind the text, which is part of it if more follows
        self._call: JsonCall | NamedCall | None = None
        self._count = 0
        self.called = False

    def feed(self, text: str) -> list[Event]:
        """See ``Parser``."""
        return joined(event for char in text for event in self._state(char))

    def flush(self) -> list[Event]:
        """See ``Parser``."""
        rest = self._call.flush() if self._call else []
        held, self._held = self._held, ""
        rest += self._text(held)
        if self._space and not self.called:
            rest.append(Text(self._space))
        # Of a text that is all calls, what was cut off is the beginning of one.
        return [] if self._guided else joined(rest)

    def _beginning(self, char: str) -> list[Event]:
        """As long as the text may be all calls."""
        self._held += char
        squeezed = "".join(self._held.split())
        if any(start == squeezed for start in self._format.starts):
            self._state = self._calls
        elif any(start.startswith(squeezed) for start in self._format.starts):
            return []
        else:
            self._state = self._outside
        held, self._held = self._held, ""
        return [event for char in held for event in self._state(char)]

    def _outside(self, char: str) -> list[Event]:
        self._held += char
        opening = self._format.opening
        if self._held.endswith(opening):
            text, self._held = self._held[: -len(opening)], ""
            self._state = self._calls
            events = self._text(text)
            self._space = ""
            return events
        cut = len(self._held) - held_length(self._held, opening)
        text, self._held = self._held[:cut], self._held[cut:]
        return self._text(text)

    def _calls(self, char: str) -> list[Event]:
        """Between calls, and in one."""
        if self._call is not None:
            return self._in_call(char)
        self._held += char
        if self._held == self._format.closing:
            self._held, self._state = "", self._outside
        elif self._held == self._opening:
            self._held = ""
        elif not self._format.closing.startswith(self._held) and not self._opening.startswith(
            self._held
        ):
            held, self._held = self._held, ""
            events = self._between(held[0])
            return [*events, *(event for char in held[1:] for event in self._state(char))]
        return []

    def _between(self, char: str) -> list[Event]:
        """Behind an opening or a call, with a character that belongs to no mark."""
        if char == "{":
            self._call = JsonCall(self._count, self._new_id())
            return self._in_call(char)
        if char.isspace() or char in "[],;":
            return []
        self._state = self._name if self._format.named else self._outside
        return self._state(char)

    def _name(self, char: str) -> list[Event]:
        """In what may be the beginning of a call that is its name and then its arguments."""
        self._held += char
        if head := _HEAD.fullmatch(self._held):
            self._held, self._state = "", self._calls
            self._call = NamedCall(self._count)
            start = CallStart(self._count, head["id"] or self._new_id(), head["name"])
            return [start, *self._in_call(char)]
        if _may_be_head(self._held):
            return []
        held, self._held, self._state = self._held, "", self._outside
        return [event for char in held for event in self._outside(char)]

    def _in_call(self, char: str) -> list[Event]:
        assert self._call is not None
        events = self._call.feed(char)
        if self._call.begun and not self.called:
            self.called = True
        if self._call.done:
            self._count += self._call.begun
            self._call = None
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


def _may_be_head(text: str) -> bool:
    """Whether more may make it the beginning of a call."""
    half = _HALF.match(text)
    rest = text[half.end() :] if half else text
    return half is not None and any(mark.startswith(rest) for mark in _MARKS)
