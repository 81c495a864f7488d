"""Arguments that a model wrote as bare text, and the values that the tool's schema makes of them.

Many forms write ``<parameter=days>3</parameter>``: only the schema says whether that is 3 or "3".
"""

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any

from cog_triton.api.openai.tool_calls.json_values import decode_json
from cog_triton.api.openai.tool_calls.written_call import Schemas, WrittenCall, dumps


def unwrapped(text: str) -> str:
    """Return a value without the line breaks around it, where the form has them."""
    return text[1:].removesuffix("\n") if text.startswith("\n") else text


def mapping_or_empty(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def properties_of(name: str, schemas: Schemas) -> Mapping[str, Any]:
    """Return the schemas of a tool's arguments, by their names; references in them are followed."""
    root = mapping_or_empty(schemas.get(name))
    properties = mapping_or_empty(root.get("properties"))
    return {key: _resolved(schema, root) for key, schema in properties.items()}


def _resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return the schema that a reference within the root means, or the schema itself."""
    reference = mapping_or_empty(schema).get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return schema
    found: Any = root
    for key in reference[2:].split("/"):
        found = mapping_or_empty(found).get(key)
    return found


def typed_call(name: str, texts: Mapping[str, str], schemas: Schemas) -> WrittenCall:
    """Return a call whose arguments have the types that the tool's schema names."""
    properties = properties_of(name, schemas)
    values = {key: typed_value(text, properties.get(key)) for key, text in texts.items()}
    return WrittenCall(name, dumps(values))


def typed_value(text: str, schema: Any) -> Any:
    """Return the value that a text stands for, of a type that the schema allows; else the text.

    Without a schema, a text that is JSON of any other type than a string is that value.
    """
    kinds = types_of(schema)
    if kinds == {"string"}:
        return text
    try:
        value = decode_json(text)
    except (ValueError, RecursionError):
        return _python_value(text, kinds)
    is_scalar = not isinstance(value, dict | list)
    if "string" in kinds and is_scalar and _kind_of(value) not in kinds:
        return text  # such as 3, where a string or null is allowed
    if not kinds and isinstance(value, str):
        return text
    return value


def _python_value(text: str, kinds: set[str]) -> Any:
    """Return the value of a text in Python, which some models write, if its type is one of these."""
    names = {"true": True, "false": False, "none": None}
    lowered = text.strip().lower()
    if lowered in names and kinds & {"boolean", "null"}:
        return names[lowered]
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


def types_of(schema: Any) -> set[str]:
    """Return the names of the types that a schema allows; an empty set if it allows any."""
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
            found |= types_of(option)
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
