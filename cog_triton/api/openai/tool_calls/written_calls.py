"""Calls of tools as families of models write them: a marked part of an answer in, its calls out.

Each function takes the text between two marks, as a whole, and returns the calls in it, or None where it is
not of its form. Arguments that a form has as text become values of the types that the tool's schema names.
Knows no I/O.
"""

import ast
import json
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cog_triton.api.openai.tool_calls.json_copier import mended_json

Schemas = Mapping[str, Mapping[str, Any]]  # of tools' parameters, by the names of the tools


@dataclass(frozen=True)
class WrittenCall:
    """One call, with its arguments as the text of a JSON object."""

    name: str
    arguments: str
    id: str | None = None  # where the model chose one


NAME = r"[\w.:/-]{1,128}"
# By some models a call's name and arguments have other keys.
_NAME_KEYS = ("name", "tool_name", "function")
ARGUMENT_KEYS = ("arguments", "parameters", "args")
_BETWEEN_VALUES = re.compile(r"[\s,;]*")


def _finite(text: str) -> float:
    """Return a number; a ValueError says that JSON has none that is as large."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a number of JSON")
    return number


# Takes control characters in strings, and refuses NaN and what is too large to be a number.
_DECODER = json.JSONDecoder(strict=False, parse_constant=_finite, parse_float=_finite)


# --- JSON


def json_calls(text: str, schemas: Schemas) -> list[WrittenCall] | None:
    """Read objects with a name and arguments: one, a list of them, or one behind another."""
    values = _json_values(text)
    if values is None:
        return None
    calls = []
    for value in values:
        call = object_call(value, schemas)
        if call is None:
            return None
        calls.append(call)
    return calls or None


def fenced_json_calls(text: str, schemas: Schemas) -> list[WrittenCall] | None:
    """Read calls in JSON between the marks of a block of code."""
    fence = _FENCE.match(text)
    return json_calls(fence[1], schemas) if fence else None


def _json_values(text: str) -> list[Any] | None:
    """Return the JSON values of a text, those of lists one by one."""
    values: list[Any] = []
    place = 0
    while True:
        separator = _BETWEEN_VALUES.match(text, place)
        place = separator.end() if separator else place
        if place == len(text):
            return values
        try:
            value, place = _DECODER.raw_decode(text, place)
        except (ValueError, RecursionError):
            mended = mended_json(text[place:])
            if mended is None:
                return None
            try:
                value = _DECODER.decode(mended)
            except (ValueError, RecursionError):
                return None
            place = len(text)
        values += value if isinstance(value, list) else [value]


def object_call(value: Any, schemas: Schemas) -> WrittenCall | None:
    """Return the call that a JSON object is, or None.

    It has a name and arguments, or is of one key, the name of a tool, with the arguments as its value.
    """
    if not isinstance(value, dict):
        return None
    if len(value) == 1:
        ((key, arguments),) = value.items()
        if key in schemas and isinstance(arguments, dict):
            return WrittenCall(key, dumps(arguments))
    if isinstance(value.get("function"), dict):
        value = {"id": value.get("id"), **value["function"]}
    name = next((value[key] for key in _NAME_KEYS if isinstance(value.get(key), str)), None)
    if name is None or not (name in schemas or re.fullmatch(NAME, name)):
        return None
    arguments = next((value[key] for key in ARGUMENT_KEYS if key in value), {})
    if isinstance(arguments, str):  # some models write the arguments as a text that has them
        try:
            arguments = _DECODER.decode(arguments or "{}")
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


def has_arguments(value: Any) -> bool:
    """Return whether an object has a place for a call's arguments."""
    if not isinstance(value, dict):
        return False
    function = value.get("function")
    keys = function if isinstance(function, dict) else value
    return any(key in keys for key in ARGUMENT_KEYS)


def json_value(text: str) -> Any:
    """Return the value of a JSON text; None where it is none."""
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        return None


def named_call(name: str, text: str) -> WrittenCall | None:
    """Return the call of a name with the text of its arguments, which may be empty."""
    return _call_of_object_text(name, text if text.strip() else "{}")


def dumps(value: Any) -> str:
    """Return a value as JSON that can be sent: half of a surrogate pair stays escaped."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


# --- Tags that have the name of a function or an argument in them

# Qwen3-Coder: <function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>
# MiniCPM5: <function name="weather"><param name="city">Paris</param></function>
# It may have a value in <![CDATA[…]]>.
# A closing tag counts where another tag or the end follows: values are code, which may have tags in it.
_FUNCTION = re.compile(
    rf"<function(?:=|\s+name=)[\"']?({NAME})[\"']?\s*>(.*?)"
    r"(?:</function>(?=\s*(?:<function|\Z))|\Z)",
    re.DOTALL,
)
_PARAMETER = re.compile(
    r"<param(?:eter)?(?:=|\s+name=)[\"']?([^>\s\"']+)[\"']?\s*>(.*?)"
    r"(?:</param(?:eter)?>(?=\s*(?:<param|</function>|\Z))|(?=\n<parameter=)|\Z)",
    re.DOTALL,
)
_CHARACTER_DATA = re.compile(r"\s*<!\[CDATA\[(.*)\]\]>\s*", re.DOTALL)
_FUNCTION_END = re.compile(r"\s*(?:</function>\s*)?")


def function_tag_calls(text: str, schemas: Schemas) -> list[WrittenCall] | None:
    """Read ``<function=NAME>`` with ``<parameter=NAME>`` or a JSON object in it."""
    calls = []
    for name, body in _FUNCTION.findall(text):
        if body.strip().startswith("{"):
            call = _call_of_object_text(name, body)
            if call is None:
                return None
            calls.append(call)
            continue
        if not _FUNCTION_END.fullmatch(_PARAMETER.sub("", body)):
            return None
        texts = {key: _argument_text(value) for key, value in _PARAMETER.findall(body)}
        calls.append(_typed_call(name, texts, schemas))
    if _FUNCTION.sub("", text).strip():
        return None
    return calls or None


def _argument_text(value: str) -> str:
    quoted = _CHARACTER_DATA.fullmatch(value)
    return quoted[1] if quoted else _unwrapped(value)


# MiniMax M2: <invoke name="weather"><parameter name="city">Paris</parameter></invoke>
# The tags begin with ｜DSML｜ at DeepSeek V3.2, and with steptml: at Step 3.
_INVOKE = re.compile(
    rf'<(｜DSML｜|\w+:|)invoke name="({NAME})"\s*>(.*?)'
    r"(?:</\1invoke>(?=\s*(?:<|\Z))|\Z)",
    re.DOTALL,
)
_NAMED_PARAMETER = re.compile(
    r'<(｜DSML｜|\w+:|)parameter name="([^"]+)"(?: string="(true|false)")?\s*>'
    r"(.*?)(?:</\1parameter>(?=\s*(?:<|\Z))|\Z)",
    re.DOTALL,
)


def invoke_tag_calls(text: str, schemas: Schemas) -> list[WrittenCall] | None:
    """Read ``<invoke name="NAME">`` with ``<parameter name="NAME">`` in it."""
    calls = []
    for _, name, body in _INVOKE.findall(text):
        properties = _properties(name, schemas)
        values: dict[str, Any] = {}
        for _, key, is_string, value in _NAMED_PARAMETER.findall(body):
            schema = properties.get(key)
            if is_string == "true" and not _types(schema):
                schema = {"type": "string"}
            values[key] = typed_value(_unwrapped(value), schema)
        calls.append(WrittenCall(name, dumps(values)))
    return calls or None


# MiniMax M3 has this before each tag, and arguments in tags of their names.
_MINIMAX = re.escape("]<]minimax[>[")
_MINIMAX_INVOKE = re.compile(
    rf'{_MINIMAX}<invoke name="({NAME})">(.*?){_MINIMAX}</invoke>', re.DOTALL
)
_MINIMAX_ARGUMENT = re.compile(rf"{_MINIMAX}<([\w.-]+)>(.*?){_MINIMAX}</\1>", re.DOTALL)


def minimax_tag_calls(text: str, schemas: Schemas) -> list[WrittenCall] | None:
    """Read ``<invoke name="NAME">`` with ``<NAME>`` in it, each behind MiniMax M3's mark."""
    calls = [
        _typed_call(name, dict(_MINIMAX_ARGUMENT.findall(body)), schemas)
        for name, body in _MINIMAX_INVOKE.findall(text)
    ]
    return calls or None


# --- Tags around the names and values of arguments

# GLM 4.5: weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>
_ARGUMENT = re.compile(
    r"<arg_key>\s*(.*?)\s*</arg_key>\s*<arg_value>(.*?)(?:</arg_value>(?=\s*(?:<arg_key>|\Z))|\Z)",
    re.DOTALL,
)
_ARGUMENTS_CALL = re.compile(rf"\s*({NAME})\s*((?:<arg_key>.*)?)\Z", re.DOTALL)


def argument_tag_calls(text: str, schemas: Schemas) -> list[WrittenCall] | None:
    """Read a name and ``<arg_key>``, ``<arg_value>`` behind it."""
    match = _ARGUMENTS_CALL.match(text)
    if match is None or (not match[2] and match[1] not in schemas):
        return None
    if _ARGUMENT.sub("", match[2]).strip():
        return None
    return [_typed_call(match[1], dict(_ARGUMENT.findall(match[2])), schemas)]


# Hunyuan 3 has a name in each tag: <tool_call:opensource>weather<tool_sep:opensource>…
_TAG_NAME = re.compile(r"(</?(?:tool_call|tool_sep|arg_key|arg_value)):\w+>")
_TAGGED_CALL = re.compile(r"<tool_call>(.*?)<tool_sep>(.*?)</tool_call>", re.DOTALL)


def named_tag_calls(text: str, schemas: Schemas) -> list[WrittenCall] | None:
    """Read ``<tool_call:X>`` with ``<arg_key:X>``, ``<arg_value:X>`` in it."""
    calls = []
    for name, arguments in _TAGGED_CALL.findall(_TAG_NAME.sub(r"\1>", text)):
        is_name = re.fullmatch(NAME, name.strip()) is not None
        if not is_name or _ARGUMENT.sub("", arguments).strip():
            return None
        calls.append(_typed_call(name.strip(), dict(_ARGUMENT.findall(arguments)), schemas))
    return calls or None


# --- Special tokens between a call's parts

_DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
_FENCE = re.compile(r"\A\s*```(?:json)?\s*(.*?)\s*(?:```\s*)?\Z", re.DOTALL)


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
        fence = _FENCE.match(arguments)
        calls.append(_call_of_object_text(name, fence[1] if fence else arguments))
    return _all_or_none(calls)


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
        calls.append(_call_of_object_text(match[1], arguments, identifier.strip()))
    return _all_or_none(calls)


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
        call = _call_of_object_text(match["name"], match["arguments"], match["id"] or None)
        calls.append(call)
    return _all_or_none(calls)


def _parts(text: str, begin: str, end: str) -> Iterator[str]:
    """Return what stands between two marks, the last also without the second."""
    for part in text.split(begin):
        body = part.replace(end, "").strip()
        if body:
            yield body


def _all_or_none(calls: Sequence[WrittenCall | None]) -> list[WrittenCall] | None:
    found = [call for call in calls if call is not None]
    return found if found and len(found) == len(calls) else None


def _call_of_object_text(name: str, text: str, identifier: str | None = None) -> WrittenCall | None:
    values = _json_values(text)
    if values is None or len(values) != 1 or not isinstance(values[0], dict):
        return None
    if re.fullmatch(NAME, name.strip()) is None:
        return None
    return WrittenCall(name.strip(), dumps(values[0]), identifier)


# --- Gemma's form, which is JSON with other quotes

_GEMMA_HEAD = re.compile(rf"\s*call:({NAME})\{{")
_GEMMA_QUOTES = ("<escape>", '<|"|>')
_GEMMA_KEY = re.compile(r"\s*(?P<quote><\|\"\|>|<escape>)?([^:{}\[\],]+?)(?(quote)(?P=quote))\s*:")
_GEMMA_BARE = re.compile(r"[^,{}\[\]]*")
_GEMMA_SPACE = re.compile(r"\s*")


def gemma_calls(text: str, schemas: Schemas) -> list[WrittenCall] | None:
    """Read ``call:NAME{key:value}``, where texts stand between ``<escape>`` or ``<|"|>``."""
    calls = []
    place = 0
    while place < len(text.rstrip()):
        head = _GEMMA_HEAD.match(text, place)
        if head is None:
            return None
        reader = _GemmaReader(text, head.end())
        try:
            values = reader.read_object(_properties(head[1], schemas))
        except (ValueError, RecursionError):
            return None
        calls.append(WrittenCall(head[1], dumps(values)))
        place = reader.place
    return calls or None


class _GemmaReader:
    """Reads values from a place on; a ValueError says that there is none."""

    def __init__(self, text: str, place: int) -> None:
        self.place = place
        self._text = text

    def read_object(self, properties: Mapping[str, Any]) -> dict[str, Any]:
        """Read what follows an opening brace, with the closing one."""
        values: dict[str, Any] = {}
        while not self._skip("}"):
            key = _GEMMA_KEY.match(self._text, self.place)
            if key is None:
                raise ValueError("no key")
            self.place = key.end()
            values[key[2]] = self._read_value(properties.get(key[2]))
            self._skip(",")
        return values

    def _read_list(self) -> list[Any]:
        values = []
        while not self._skip("]"):
            start = self.place
            values.append(self._read_value(None))
            if not self._skip(",") and self.place == start:
                raise ValueError("no value")
        return values

    def _read_value(self, schema: Any) -> Any:
        for quote in _GEMMA_QUOTES:
            if self._skip(quote):
                end = self._text.find(quote, self.place)
                if end < 0:
                    raise ValueError("a text without an end")
                value = self._text[self.place : end]
                self.place = end + len(quote)
                return typed_value(value, schema) if _types(schema) else value
        if self._skip("{"):
            return self.read_object(_mapping(_mapping(schema).get("properties")))
        if self._skip("["):
            return self._read_list()
        bare = _GEMMA_BARE.match(self._text, self.place)
        assert bare is not None  # it matches the empty text
        self.place = bare.end()
        return typed_value(bare[0].strip(), schema)

    def _skip(self, text: str) -> bool:
        """Pass over white space and a text; return False where another text stands."""
        space = _GEMMA_SPACE.match(self._text, self.place)
        start = space.end() if space else self.place
        if not self._text.startswith(text, start):
            if start >= len(self._text):
                raise ValueError("the text ends")
            return False
        self.place = start + len(text)
        return True


# --- Python

_PYTHON_NAME = re.compile(r"[A-Za-z_][\w.]*")


def python_calls(
    text: str, schemas: Schemas, *, one_list: bool = False
) -> list[WrittenCall] | None:
    """Read calls by keywords: a list of them, or one behind another."""
    try:
        statements = _python_statements(text.strip())
        calls = []
        for statement in statements:
            if not isinstance(statement, ast.Expr):
                return None
            value = statement.value
            if one_list and (len(statements) > 1 or not isinstance(value, ast.List)):
                return None
            nodes = value.elts if isinstance(value, ast.List) else [value]
            calls += [_python_call(node, schemas) for node in nodes]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return calls or None


def _python_statements(text: str) -> list[ast.stmt]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about escapes that Python does not know
        try:
            return ast.parse(text).body
        except SyntaxError:
            return ast.parse(_with_escaped_breaks(text)).body


# A string in one kind of quotes, in which a quote or a backslash may be escaped.
_PYTHON_STRING = re.compile(r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'", re.DOTALL)


def _with_escaped_breaks(text: str) -> str:
    """Return a Python text whose strings have escapes for line breaks, which models leave out."""
    return _PYTHON_STRING.sub(
        lambda string: string[0].replace("\r", "\\r").replace("\n", "\\n"), text
    )


def _python_call(node: ast.expr, schemas: Schemas) -> WrittenCall:
    name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    if not isinstance(node, ast.Call) or not _PYTHON_NAME.fullmatch(name):
        raise ValueError("not a call")
    # Arguments without a name are those of the schema, in its order.
    keys = list(_properties(name, schemas))
    if len(node.args) > len(keys):
        raise ValueError("arguments without a name")
    values = {key: _python_value(each) for key, each in zip(keys, node.args, strict=False)}
    for word in node.keywords:
        if word.arg is None:
            raise ValueError("keywords of a dictionary")
        values[word.arg] = _python_value(word.value)
    json.dumps(values, allow_nan=False)  # raises what JSON does not have
    return WrittenCall(name, dumps(values))


def _python_value(node: ast.expr) -> Any:
    return ast.literal_eval(_JsonNames().visit(node))


class _JsonNames(ast.NodeTransformer):
    """Takes JSON's names of values for Python's."""

    NAMES = {"true": True, "false": False, "null": None}  # noqa: RUF012

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self.NAMES[node.id]) if node.id in self.NAMES else node


# --- Values that a form has as text


def _unwrapped(text: str) -> str:
    """Return a value without the line breaks around it, where the form has them."""
    return text[1:].removesuffix("\n") if text.startswith("\n") else text


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _properties(name: str, schemas: Schemas) -> Mapping[str, Any]:
    """Return the schemas of a tool's arguments, those that stand elsewhere in its schema as well."""
    root = _mapping(schemas.get(name))
    properties = _mapping(root.get("properties"))
    return {key: _resolved(schema, root) for key, schema in properties.items()}


def _resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return the schema that a reference within the root means, or the schema itself."""
    reference = _mapping(schema).get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return schema
    found: Any = root
    for key in reference[2:].split("/"):
        found = _mapping(found).get(key)
    return found


def _typed_call(name: str, texts: Mapping[str, str], schemas: Schemas) -> WrittenCall:
    properties = _properties(name, schemas)
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
        value = _DECODER.decode(text)
    except (ValueError, RecursionError):
        return _spoken_value(text, kinds)
    if "string" in kinds and not isinstance(value, dict | list) and _kind_of(value) not in kinds:
        return text
    if not kinds and isinstance(value, str):
        return text
    return value


def _spoken_value(text: str, kinds: set[str]) -> Any:
    """Return the value that a text is in Python, which some models write, if it is of some types."""
    names = {"true": True, "false": False, "none": None}
    spoken = text.strip().lower()
    if spoken in names and kinds & {"boolean", "null"}:
        return names[spoken]
    if kinds & {"object", "array"}:
        try:
            value = ast.literal_eval(text.strip())
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            return text
        if _kind_of(value) in kinds and _is_json_value(value):
            return value
    return text


def _is_json_value(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


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
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, dict) else "array"
