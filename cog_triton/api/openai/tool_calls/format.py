"""The form in which a family of models writes calls, as data; ``formats.yaml`` has the known ones."""

import json
import secrets
from dataclasses import dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Marks:
    """The texts before and behind calls; there may be none behind them."""

    opening: str
    closing: str = ""


@dataclass(frozen=True)
class Format:
    """The form in which a family of models writes calls.

    Attributes:
        signs: texts by which a chat template is known to ask for this format.
        opening: the mark before calls.
        closing: the mark behind each of them; there may be none.
        call_marks: marks that are part of a call. Some models leave out the marks around it, and some forms
            have no others.
        starts: beginnings, without white space, of a text that is all calls. They are needed where the text
            comes without its special tokens, as from NVIDIA's postprocessing.
        arguments: the key of a call's arguments.
        in_json: calls may be JSON objects, whose arguments are passed on as they come.
        short_ids: ids of calls have nine letters, as Mistral's templates need them.
        named: a call may be its name and then only the arguments.
        python: an answer may be a list of calls in Python, without marks.
        channels: answers are gpt-oss's messages, each with a channel.
        recipients: answers are Functionary's messages, each to a tool or to all.
        special_tokens: the special tokens of calls, which the text must keep.
        readers: what reads the text between the marks, by names in ``readers.READERS``.
    """

    signs: tuple[str, ...]
    opening: str
    closing: str = ""
    call_marks: tuple[Marks, ...] = ()
    starts: tuple[str, ...] = ()
    arguments: str = "arguments"
    in_json: bool = True
    short_ids: bool = False
    named: bool = False
    python: bool = False
    channels: bool = False
    recipients: bool = False
    special_tokens: tuple[str, ...] = ()
    readers: tuple[str, ...] = ()

    @cached_property
    def marks_by_opening(self) -> dict[str, Marks]:
        """All marks that begin calls, with the marks that end them."""
        marks = (Marks(self.opening, self.closing), *self.call_marks)
        return {each.opening: each for each in marks}

    @property
    def marks_messages(self) -> bool:
        """Whether text that is not a call has marks as well."""
        return self.channels or self.recipients

    def new_id(self, prefix: str = "call_", letters: str = "") -> str:
        """Return an id of a call: the prefix and the letters, or the format's own form of an id."""
        letters = letters or secrets.token_hex(12)
        return letters[:9] if self.short_ids else prefix + letters

    def written_call(self, name: str, arguments: Any) -> str:
        """Return a call as a model of this format writes it, for a template that shows no calls."""
        if isinstance(arguments, dict) and (self.python or "python" in self.readers):
            keywords = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
            return f"{self.opening}[{name}({keywords})]{self.closing}"
        call = json.dumps({"name": name, self.arguments: arguments}, ensure_ascii=False)
        return f"{self.opening}{call}{self.closing}"
