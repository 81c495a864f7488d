"""The known forms of calls: how a chat template is known for one, and the parser of its answers."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import yaml
from pydantic import TypeAdapter

from cog_triton.api.openai.tool_calls.blocks import AnswerStart, Parser
from cog_triton.api.openai.tool_calls.channel_parser import ChannelParser
from cog_triton.api.openai.tool_calls.format import Format
from cog_triton.api.openai.tool_calls.marked_parser import (
    GuidedCallParser,
    ListedCallParser,
    MarkedCallParser,
)
from cog_triton.api.openai.tool_calls.python_parser import PythonCallParser
from cog_triton.api.openai.tool_calls.recipient_parser import RecipientParser

LISTED_CALLS = '[{"name":'  # begins a list of calls in JSON, without white space
# What a guide limits an answer to: calls in JSON, or a list of calls in JSON and else an answer in JSON.
GuidedTo = Literal["calls", "calls or an answer"]

_FILE = Path(__file__).with_name("formats.yaml")
FORMATS = TypeAdapter(dict[str, Format]).validate_python(yaml.safe_load(_FILE.read_bytes()))
DEFAULT_FORMAT = FORMATS["unknown"]  # the format of templates without any sign


def format_of(template: str) -> Format | None:
    """Return the format that a chat template asks its model for; None if it takes no tools."""
    if "tools" not in template:
        return None
    for known in FORMATS.values():
        if any(sign in template for sign in known.signs):
            return known
    return DEFAULT_FORMAT


def new_parser(format: Format, start: AnswerStart, guided_to: GuidedTo | None = None) -> Parser:
    """Return the parser of one answer in a format.

    Args:
        guided_to: None if no guide is in force, or it does not ask for calls.
    """
    if guided_to == "calls or an answer":
        listed = replace(format, starts=(LISTED_CALLS,), named=False, closing="")
        return ListedCallParser(start, listed)
    if guided_to == "calls":
        return GuidedCallParser(start, format)
    if format.channels:
        return ChannelParser(replace(start, thoughts=None))  # thoughts have a channel
    if format.recipients:
        return RecipientParser(replace(start, thoughts=None))
    if format.python:
        return PythonCallParser(start)
    return MarkedCallParser(start, format)
