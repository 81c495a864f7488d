"""The forms in which families of models write calls of tools, and how a chat template is known for one.

The fields of a form are in ``formats.yaml``; ``blocks`` and ``call_parsers`` have the parsers of answers.
"""

import json
import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter

from cog_triton.api.openai.tool_calls.blocks import THINK, NewId, Parser, Thoughts
from cog_triton.api.openai.tool_calls.call_parsers import (
    ChannelParser,
    GuidedCallParser,
    ListedCallParser,
    MarkedCallParser,
    PythonCallParser,
    RecipientParser,
)
from cog_triton.api.openai.tool_calls.written_calls import Schemas

NO_TOOLS: Schemas = {}
LISTED_CALLS = '[{"name":'  # begins calls in JSON, without white space


@dataclass(frozen=True)
class Marks:
    """The texts before and behind calls; behind them there may be none."""

    opening: str
    closing: str = ""


@dataclass(frozen=True)
class Format:
    """The form in which a family of models writes calls."""

    signs: tuple[str, ...]  # texts by which a chat template is known to ask for this format
    opening: str  # mark before calls
    closing: str = ""  # mark behind each of them
    # Marks that belong to a call. Some models leave out those around it, others have none.
    call_marks: tuple[Marks, ...] = ()
    # Beginnings, without white space, of a text that is all calls; also where the text comes without
    # its special tokens, as NVIDIA's postprocessing sends it.
    starts: tuple[str, ...] = ()
    arguments: str = "arguments"  # their key in a call
    in_json: bool = True  # calls may be objects, whose arguments are sent as they come
    short_ids: bool = False  # of nine letters, as Mistral's templates want it
    named: bool = False  # a call may be its name and then only the arguments
    python: bool = False  # an answer may be a list of calls in Python, without marks
    channels: bool = False  # gpt-oss's messages, each with a channel
    recipients: bool = False  # Functionary's messages, each to a tool or to all
    special_tokens: tuple[str, ...] = ()  # those of calls, which the text has to have
    readers: tuple[str, ...] = ()  # of what stands between the marks, by their names in READERS

    @property
    def marks(self) -> Marks:
        return Marks(self.opening, self.closing)

    @property
    def marks_messages(self) -> bool:
        """Whether text that is no call has marks as well."""
        return self.channels or self.recipients

    def new_id(self, prefix: str = "call_", letters: str = "") -> str:
        """Return an id of a call, with the prefix unless the format has its own form."""
        letters = letters or secrets.token_hex(12)
        return letters[:9] if self.short_ids else prefix + letters

    def parser(
        self,
        new_id: NewId,
        prompt: str | None = None,
        *,
        guided: bool = False,
        guided_either: bool = False,
        schemas: Schemas = NO_TOOLS,
        thoughts: Thoughts = THINK,
    ) -> Parser:
        """Return the parser of one answer.

        Args:
            guided: a guide allows nothing but calls in JSON.
            guided_either: a guide allows nothing but a list of calls in JSON, or an answer in JSON.
            schemas: of the parameters of the tools that are offered, by their names.
        """
        if guided_either:
            listed = replace(self, starts=(LISTED_CALLS,), named=False, closing="")
            return ListedCallParser(prompt, new_id, listed, schemas, thoughts)
        if guided:
            return GuidedCallParser(prompt, new_id, self, schemas, thoughts)
        if self.channels:
            return ChannelParser(new_id)
        if self.recipients:
            return RecipientParser(new_id, prompt or "", schemas)
        if self.python:
            return PythonCallParser(prompt, new_id, schemas, thoughts)
        return MarkedCallParser(prompt, new_id, self, schemas, thoughts)

    def written_call(self, name: str, arguments: Any) -> str:
        """Return a call as a model of this format writes it, for a template that shows no calls."""
        if isinstance(arguments, dict) and (self.python or "python" in self.readers):
            keywords = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
            return f"{self.opening}[{name}({keywords})]{self.closing}"
        call = json.dumps({"name": name, self.arguments: arguments}, ensure_ascii=False)
        return f"{self.opening}{call}{self.closing}"


_FILE = Path(__file__).with_name("formats.yaml")
FORMATS = TypeAdapter(dict[str, Format]).validate_python(yaml.safe_load(_FILE.read_bytes()))
DEFAULT_FORMAT = FORMATS["unknown"]  # of templates without any sign


def format_of(template: str) -> Format | None:
    """Return the format that a chat template asks its model for; None if it takes no tools."""
    if "tools" not in template:
        return None
    for known in FORMATS.values():
        if any(sign in template for sign in known.signs):
            return known
    return DEFAULT_FORMAT
