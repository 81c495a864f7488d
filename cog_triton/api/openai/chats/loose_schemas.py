"""Schemas of tools, without what no engine can hold an answer to.

OpenAI's and Anthropic's APIs take any JSON Schema for a tool that is not strict, and agents pass on what
their libraries write. A keyword that an engine refuses would end the session, so it is left out of the
guide; the chat template still shows the schema as it came.
"""

import re
from typing import Any

# Keywords whose values are schemas: by names, in a list, or one.
_SCHEMAS_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_SCHEMA_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_SCHEMAS = frozenset({"items", "additionalProperties", "additionalItems"})
_UNENFORCEABLE = frozenset(
    {
        "contains",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "if",
        "maxContains",
        "minContains",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
    }
)
_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
_NULLABLE = frozenset({"const", "default"})  # keywords of which null is a value
# Engines compile patterns to automata, which cannot look around or refer back.
_UNCOMPILABLE_PATTERN = re.compile(r"\(\?<?[=!]|\\[1-9]|\\k<|\(\?P=")


def has_mistake(schema: Any) -> bool:
    """Return whether a schema has a type or a collection of schemas that JSON Schema does not know."""
    if not isinstance(schema, dict):
        return not isinstance(schema, bool)
    kinds = schema.get("type", [])
    if isinstance(kinds, str):
        kinds = [kinds]
    if kinds is not None and not (isinstance(kinds, list) and all(k in _TYPES for k in kinds)):
        return True
    parts: list[Any] = []
    for keyword, value in schema.items():
        if value is None or keyword not in _SCHEMAS_BY_NAME | _SCHEMA_LISTS:
            continue
        expected = dict if keyword in _SCHEMAS_BY_NAME else list
        if not isinstance(value, expected):
            return True
        parts += value.values() if isinstance(value, dict) else value
    if isinstance(schema.get("items"), dict):
        parts.append(schema["items"])
    return any(map(has_mistake, parts))


def loosened(schema: Any) -> Any:
    """Return a copy of a schema without the keywords that an engine may refuse."""
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for keyword, value in schema.items():
        if _is_enforceable(keyword, value):
            kept[keyword] = _loosened_value(keyword, value)
    return kept


def _is_enforceable(keyword: str, value: Any) -> bool:
    if keyword in _UNENFORCEABLE:
        return False
    if value is None:  # clients of some languages write what is not set as null
        return keyword in _NULLABLE
    if keyword == "pattern" and isinstance(value, str):
        return not _UNCOMPILABLE_PATTERN.search(value)
    return True


def _loosened_value(keyword: str, value: Any) -> Any:
    if keyword in _SCHEMAS_BY_NAME and isinstance(value, dict):
        return {
            name: loosened(inner)
            for name, inner in value.items()
            if keyword != "patternProperties" or not _UNCOMPILABLE_PATTERN.search(name)
        }
    if keyword in _SCHEMA_LISTS | _SCHEMAS and isinstance(value, list):
        return [loosened(inner) for inner in value]
    if keyword in _SCHEMAS:
        return loosened(value)
    return value
