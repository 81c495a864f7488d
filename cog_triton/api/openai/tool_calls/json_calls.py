"""Calls that are JSON objects: ``{"name": "weather", "arguments": {"city": "Paris"}}``."""

import re
from typing import Any

from cog_triton.api.openai.tool_calls.json_values import decode_json, json_values
from cog_triton.api.openai.tool_calls.written_call import (
    NAME,
    Schemas,
    WrittenCall,
    all_or_none,
    dumps,
)

# Models call a call's name and arguments by several keys.
_NAME_KEYS = ("name", "tool_name", "function")
_ARGUMENT_KEYS = ("arguments", "parameters", "args")
_FENCE = re.compile(r"\A\s*```(?:json)?\s*(.*?)\s*(?:```\s*)?\Z", re.DOTALL)


def json_calls(text: str, schemas: Schemas) -> list[WrittenCall] | None:
    """Read objects with a name and arguments: one, a list of them, or one behind another."""
    values = json_values(text)
    if values is None:
        return None
    return all_or_none([object_call(value, schemas) for value in values])


def fenced_json_calls(text: str, schemas: Schemas) -> list[WrittenCall] | None:
    r"""Read calls in JSON in a block of code: ``` ```json\n{"name": …}\n``` ```."""
    fence = _FENCE.match(text)
    return json_calls(fence[1], schemas) if fence else None


def without_fence(text: str) -> str:
    """Return what is in a block of code, or the text itself if it is none."""
    fence = _FENCE.match(text)
    return fence[1] if fence else text


def object_call(value: Any, schemas: Schemas) -> WrittenCall | None:
    """Return the call that a JSON value is, or None.

    These are calls of the tool ``weather``:

        {"name": "weather", "arguments": {"city": "Paris"}}
        {"id": "call_1", "function": {"name": "weather", "arguments": "{\\"city\\": \\"Paris\\"}"}}
        {"weather": {"city": "Paris"}}
    """
    if not isinstance(value, dict):
        return None
    if len(value) == 1:
        ((key, arguments),) = value.items()
        if key in schemas and isinstance(arguments, dict):
            return WrittenCall(key, dumps(arguments))
    if isinstance(value.get("function"), dict):
        value = {"id": value.get("id"), **value["function"]}
    name = _name_of(value)
    if name is None or not (name in schemas or re.fullmatch(NAME, name)):
        return None
    arguments = _arguments_of(value)
    if arguments is None:
        return None
    identifier = value.get("id")
    if not isinstance(identifier, str) or not identifier:
        identifier = None
    return WrittenCall(name, dumps(arguments), identifier)


def _name_of(value: dict[str, Any]) -> str | None:
    for key in _NAME_KEYS:
        if isinstance(value.get(key), str):
            name: str = value[key]
            return name
    return None


def _arguments_of(value: dict[str, Any]) -> dict[str, Any] | list[Any] | None:
    """Return the arguments of a call, which may have none; None if they are of another type."""
    present = [value[key] for key in _ARGUMENT_KEYS if key in value]
    arguments = present[0] if present else {}
    if isinstance(arguments, str):  # some models write them as a text of JSON
        try:
            arguments = decode_json(arguments or "{}")
        except (ValueError, RecursionError):
            return None
    if arguments is None:
        return {}
    return arguments if isinstance(arguments, dict | list) else None


def has_arguments(value: Any) -> bool:
    """Return whether an object has a key for a call's arguments."""
    if not isinstance(value, dict):
        return False
    function = value.get("function")
    keys = function if isinstance(function, dict) else value
    return any(key in keys for key in _ARGUMENT_KEYS)


def named_call(name: str, text: str) -> WrittenCall | None:
    """Return the call of a tool with the text of its arguments, which may be empty."""
    return call_of_object_text(name, text if text.strip() else "{}")


def call_of_object_text(name: str, text: str, identifier: str | None = None) -> WrittenCall | None:
    """Return the call of a tool whose arguments are the text of one JSON object, or None."""
    values = json_values(text)
    if values is None or len(values) != 1 or not isinstance(values[0], dict):
        return None
    if re.fullmatch(NAME, name.strip()) is None:
        return None
    return WrittenCall(name.strip(), dumps(values[0]), identifier)
