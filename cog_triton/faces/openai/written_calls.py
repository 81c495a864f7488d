"""Calls of tools as families of models write them: a marked part of an answer in, its calls out.

Each reader takes the text between two marks, as a whole, and returns the calls in it, or None where it is
not of its form. Arguments that a form has as text become values of the types that the tool's schema names.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Schemas = Mapping[str, Mapping[str, Any]]  # of tools' parameters, by the names of the tools
Reader = Callable[[str, Schemas], "list[WrittenCall] | None"]


@dataclass(frozen=True)
class WrittenCall:
    """One call, with its arguments as the text of a JSON object."""

    name: str
    arguments: str
    id: str | None = None  # where the model chose one


_NAME = r"[\w.:-]{1,128}"
# By some models a call's name and arguments have other keys.
_NAME_KEYS = ("name", "tool_name", "function")
ARGUMENT_KEYS = ("arguments", "parameters", "args")


def json_calls(text: str, _schemas: Schemas) -> list[WrittenCall] | None:
    """Read objects with a name and arguments: one, a list of them, or one behind another."""
    values = _json_values(text)
    if values is None:
        return None
    calls = []
    for value in values:
        call = object_call(value)
        if call is None:
            return None
        calls.append(call)
    return calls or None


def _json_values(text: str) -> list[Any] | None:
    """Return the JSON values of a text, those of lists one by one."""
    decoder = json.JSONDecoder(strict=False)
    values: list[Any] = []
    place = 0
    while True:
        separator = re.compile(r"[\s,;]*").match(text, place)
        place = separator.end() if separator else place
        if place == len(text):
            return values
        try:
            value, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            repaired = _closed(text[place:])
            if repaired is None:
                return None
            value, place = repaired, len(text)
        values += value if isinstance(value, list) else [value]


def _closed(text: str) -> Any:
    """Return the value of a text whose last brackets are missing; None where more is wrong with it."""
    closers = missing_closers(text)
    if not closers:
        return None
    try:
        return json.loads(text.rstrip().rstrip(",") + closers, strict=False)
    except (ValueError, RecursionError):
        return None


def missing_closers(text: str) -> str:
    """Return the brackets that would close those that a JSON text leaves open; empty within a string."""
    open_brackets: list[str] = []
    quoted = False
    escaped = False
    for letter in text:
        if escaped:
            escaped = False
        elif letter == "\\":
            escaped = quoted
        elif letter == '"':
            quoted = not quoted
        elif quoted:
            continue
        elif letter in "{[":
            open_brackets.append("}" if letter == "{" else "]")
        elif letter in "}]" and open_brackets:
            open_brackets.pop()
    return "" if quoted else "".join(reversed(open_brackets))


def object_call(value: Any) -> WrittenCall | None:
    """Return the call that a JSON object is, or None."""
    if not isinstance(value, dict):
        return None
    if isinstance(value.get("function"), dict):
        value = value["function"]
    name = next((value[key] for key in _NAME_KEYS if isinstance(value.get(key), str)), None)
    if name is None:
        return None
    arguments: Any = next((value[key] for key in ARGUMENT_KEYS if key in value), {})
    if isinstance(arguments, str):  # some models write the arguments as a text that has them
        try:
            arguments = json.loads(arguments or "{}", strict=False)
        except (ValueError, RecursionError):
            return None
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict | list):
        return None
    identifier = value.get("id")
    return WrittenCall(
        name, dumps(arguments), identifier if isinstance(identifier, str) and identifier else None
    )


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


# Qwen3-Coder: <function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>
_FUNCTION = re.compile(rf"<function=({_NAME})\s*>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(
    r"<parameter=([^>\s]+)\s*>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL
)


def function_tag_calls(text: str, schemas: Schemas) -> list[WrittenCall] | None:
    """Read ``<function=NAME>`` with ``<parameter=NAME>`` or a JSON object in it."""
    calls = []
    for name, body in _FUNCTION.findall(text):
        if body.strip().startswith("{"):
            values = _json_values(body)
            if values is None or len(values) != 1 or not isinstance(values[0], dict):
                return None
            calls.append(WrittenCall(name, dumps(values[0])))
        else:
            texts = {key: _unwrapped(value) for key, value in _PARAMETER.findall(body)}
            calls.append(_typed_call(name, texts, schemas))
    if _FUNCTION.sub("", text).strip():
        return None
    return calls or None


# GLM 4.5: weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>
_ARGUMENT = re.compile(
    r"<arg_key>\s*(.*?)\s*</arg_key>\s*<arg_value>(.*?)(?:</arg_value>|\Z)", re.DOTALL
)
_ARGUMENTS_CALL = re.compile(rf"\s*({_NAME})\s*((?:<arg_key>.*)?)\Z", re.DOTALL)


def argument_tag_calls(text: str, schemas: Schemas) -> list[WrittenCall] | None:
    """Read a name and ``<arg_key>``, ``<arg_value>`` behind it."""
    match = _ARGUMENTS_CALL.match(text)
    if match is None or (not match[2] and match[1] not in schemas):
        return None
    texts = dict(_ARGUMENT.findall(match[2]))
    return [_typed_call(match[1], texts, schemas)]


# MiniMax M2 and DeepSeek V3.2: <invoke name="weather"><parameter name="city">Paris</parameter></invoke>
_INVOKE = re.compile(
    rf'<(?:｜DSML｜)?invoke name="({_NAME})"\s*>(.*?)(?:</(?:｜DSML｜)?invoke>|\Z)', re.DOTALL
)
_NAMED_PARAMETER = re.compile(
    r'<(?:｜DSML｜)?parameter name="([^"]+)"(?: string="(?P<string>true|false)")?\s*>'
    r"(.*?)(?:</(?:｜DSML｜)?parameter>|\Z)",
    re.DOTALL,
)


def invoke_tag_calls(text: str, schemas: Schemas) -> list[WrittenCall] | None:
    """Read ``<invoke name="NAME">`` with ``<parameter name="NAME">`` in it."""
    calls = []
    for name, body in _INVOKE.findall(text):
        texts = {key: _unwrapped(value) for key, _, value in _NAMED_PARAMETER.findall(body)}
        calls.append(_typed_call(name, texts, schemas))
    return calls or None


# DeepSeek R1 and V3: function<｜tool▁sep｜>weather\n```json\n{…}\n```; V3.1: weather<｜tool▁sep｜>{…}
_DEEPSEEK_BEGIN = "<｜tool▁call▁begin｜>"
_DEEPSEEK_END = "<｜tool▁call▁end｜>"
_DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
_FENCE = re.compile(r"\A\s*```(?:json)?\s*(.*?)\s*(?:```\s*)?\Z", re.DOTALL)


def deepseek_calls(text: str, _schemas: Schemas) -> list[WrittenCall] | None:
    """Read the calls of DeepSeek's models up to V3.1."""
    calls = []
    for part in text.split(_DEEPSEEK_BEGIN):
        body = part.replace(_DEEPSEEK_END, "").strip()
        if not body:
            continue
        kind, separator, rest = body.partition(_DEEPSEEK_SEPARATOR)
        if not separator:
            return None
        if kind.strip() == "function" and not rest.lstrip().startswith("{"):
            name, _, rest = rest.partition("\n")
        else:
            name = kind
        call = _call_of_object_text(name, _unfenced(rest))
        if call is None:
            return None
        calls.append(call)
    return calls or None


def _unfenced(text: str) -> str:
    fence = _FENCE.match(text)
    return fence[1] if fence else text


# Kimi K2: functions.weather:0<|tool_call_argument_begin|>{…}
_KIMI_BEGIN, _KIMI_END = "<|tool_call_begin|>", "<|tool_call_end|>"
_KIMI_SEPARATOR = "<|tool_call_argument_begin|>"
_KIMI_ID = re.compile(rf"(?:functions\.)?({_NAME}?)(?::\d+)?")


def kimi_calls(text: str, _schemas: Schemas) -> list[WrittenCall] | None:
    """Read the calls of Kimi K2, whose ids have the names in them."""
    calls = []
    for part in text.split(_KIMI_BEGIN):
        body = part.replace(_KIMI_END, "").strip()
        if not body:
            continue
        identifier, separator, arguments = body.partition(_KIMI_SEPARATOR)
        match = _KIMI_ID.fullmatch(identifier.strip())
        if not separator or match is None:
            return None
        call = _call_of_object_text(match[1], arguments)
        if call is None:
            return None
        calls.append(WrittenCall(call.name, call.arguments, identifier.strip()))
    return calls or None


def _call_of_object_text(name: str, text: str) -> WrittenCall | None:
    values = _json_values(text)
    if values is None or len(values) != 1 or not isinstance(values[0], dict):
        return None
    if re.fullmatch(_NAME, name.strip()) is None:
        return None
    return WrittenCall(name.strip(), dumps(values[0]))


# FunctionGemma: call:weather{city:<escape>Paris<escape>,days:2}
_GEMMA_CALL = re.compile(rf"\s*call:({_NAME})\{{(.*)\}}\s*", re.DOTALL)
_GEMMA_VALUE = re.compile(
    r"\s*(\w+)\s*:\s*(?:<escape>(.*?)<escape>|([^,{}\[\]]*))\s*(?:,|\Z)", re.DOTALL
)


def gemma_calls(text: str, schemas: Schemas) -> list[WrittenCall] | None:
    """Read ``call:NAME{key:value}``."""
    match = _GEMMA_CALL.fullmatch(text)
    if match is None:
        return None
    texts: dict[str, str] = {}
    place = 0
    while place < len(match[2]):
        value = _GEMMA_VALUE.match(match[2], place)
        if value is None or value.end() == place:
            return None
        texts[value[1]] = value[2] if value[2] is not None else value[3].strip()
        place = value.end()
    return [_typed_call(match[1], texts, schemas)]


def first_of(*readers: Reader) -> Reader:
    """Return a reader that takes what the first of several can read."""

    def read(text: str, schemas: Schemas) -> list[WrittenCall] | None:
        for reader in readers:
            calls = reader(text, schemas)
            if calls:
                return calls
        return None

    return read


def _unwrapped(text: str) -> str:
    """Return a value without the line breaks that the form has around it."""
    if text.startswith("\n"):
        text = text[1:]
    if text.endswith("\n"):
        text = text[:-1]
    return text


def _typed_call(name: str, texts: Mapping[str, str], schemas: Schemas) -> WrittenCall:
    properties = schemas.get(name, {}).get("properties")
    if not isinstance(properties, Mapping):
        properties = {}
    values = {key: typed_value(text, properties.get(key)) for key, text in texts.items()}
    return WrittenCall(name, dumps(values))


def typed_value(text: str, schema: Any) -> Any:
    """Return the value that a text stands for, of a type that the schema allows; else the text.

    Without a schema, a text that is JSON of any other type than a string is that value.
    """
    kinds = _types(schema)
    if kinds == {"string"}:
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        # Some models write Python's names.
        spoken = {"true": True, "false": False, "none": None}.get(text.strip().lower(), text)
        return spoken if kinds & {"boolean", "null"} else text
    if "string" in kinds and not isinstance(value, dict | list) and _kind_of(value) not in kinds:
        return text
    if not kinds and isinstance(value, str):
        return text
    return value


def _types(schema: Any) -> set[str]:
    """Return the types that a schema names; none where it names none."""
    if not isinstance(schema, Mapping):
        return set()
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return {kinds}
    if isinstance(kinds, Sequence):
        return {kind for kind in kinds if isinstance(kind, str)}
    found: set[str] = set()
    for key in ("anyOf", "oneOf", "allOf"):
        for option in schema.get(key) or ():
            found |= _types(option)
    values = schema.get("enum")
    if not found and isinstance(values, list) and values:
        found = {_kind_of(value) for value in values}
    return found


def _kind_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if value is None:
        return "null"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    return "string" if isinstance(value, str) else "object" if isinstance(value, dict) else "array"
