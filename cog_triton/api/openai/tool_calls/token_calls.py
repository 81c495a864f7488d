"""Calls whose parts special tokens separate: the forms of DeepSeek, Kimi and Solar."""

import re
from collections.abc import Iterator

from cog_triton.api.openai.tool_calls.json_calls import call_of_object_text, without_fence
from cog_triton.api.openai.tool_calls.written_call import NAME, Schemas, WrittenCall, all_or_none

_DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"


def deepseek_calls(text: str, _schemas: Schemas) -> list[WrittenCall] | None:
    r"""Read the calls of DeepSeek's models up to V3.1.

    R1 and V3 write ``function<｜tool▁sep｜>weather\n```json\n{…}\n``` ``, V3.1
    ``weather<｜tool▁sep｜>{…}``.
    """
    calls: list[WrittenCall | None] = []
    for part in _parts(text, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"):
        name, separator, arguments = part.partition(_DEEPSEEK_SEPARATOR)
        if not separator:
            return None
        if name.strip() == "function" and not arguments.lstrip().startswith("{"):
            name, _, arguments = arguments.partition("\n")
        calls.append(call_of_object_text(name, without_fence(arguments)))
    return all_or_none(calls)


_KIMI_ID = re.compile(rf"(?:functions\.)?({NAME}?)(?::\d+)?")


def kimi_calls(text: str, _schemas: Schemas) -> list[WrittenCall] | None:
    """Read the calls of Kimi K2, whose ids have the names in them.

    They are of the form ``functions.weather:0<|tool_call_argument_begin|>{…}``.
    """
    calls: list[WrittenCall | None] = []
    for part in _parts(text, "<|tool_call_begin|>", "<|tool_call_end|>"):
        identifier, separator, arguments = part.partition("<|tool_call_argument_begin|>")
        match = _KIMI_ID.fullmatch(identifier.strip())
        if not separator or match is None:
            return None
        calls.append(call_of_object_text(match[1], arguments, identifier.strip()))
    return all_or_none(calls)


_SOLAR_CALL = re.compile(
    rf"(?P<id>\w*)<\|tool_call:name\|>(?P<name>{NAME})<\|tool_call:args\|>(?P<arguments>.*)",
    re.DOTALL,
)


def solar_calls(text: str, _schemas: Schemas) -> list[WrittenCall] | None:
    """Read the calls of Solar Open: ``ID<|tool_call:name|>weather<|tool_call:args|>{…}``."""
    calls: list[WrittenCall | None] = []
    for part in _parts(text, "<|tool_call:begin|>", "<|tool_call:end|>"):
        match = _SOLAR_CALL.fullmatch(part)
        if match is None:
            return None
        call = call_of_object_text(match["name"], match["arguments"], match["id"] or None)
        calls.append(call)
    return all_or_none(calls)


def _parts(text: str, begin: str, end: str) -> Iterator[str]:
    """Yield the text of each pair of marks. The closing mark of the last pair may be missing."""
    for part in text.split(begin):
        body = part.replace(end, "").strip()
        if body:
            yield body
