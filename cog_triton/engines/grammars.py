"""Guides as llguidance's grammars."""

import json
from collections.abc import Iterator
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from cog_triton.request.guide import Guide, GuideKind, ascii_classes

# Between the parts of JSON. A model that may indent as well can spend all of max_tokens on that.
WHITESPACE = " ?"
ANY_OBJECT = '{"type": "object"}'

# Keywords whose value holds schemas: an object of schemas, a list of schemas, or one schema.
_OBJECTS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties")
# The formats of strings that llguidance enforces. In JSON Schema, all others are annotations.
_FORMATS = frozenset(
    ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")
)
# Keywords by which a schema describes a part of an object, or what it must not be.
_PARTS = frozenset(
    (
        "not",
        "if",
        "oneOf",
        "dependencies",
        "dependentSchemas",
        "dependentRequired",
        "unevaluatedProperties",
    )
)
# Keywords that refer to other schemas; beside those of an object, they describe parts of it.
_REFERENCES = frozenset(("$ref", "allOf", "anyOf"))
_OBJECT_KEYWORDS = frozenset(
    ("properties", "patternProperties", "additionalProperties", "required", "minProperties")
)


def grammar(guide: Guide) -> str:
    """Return a guide as llguidance's grammar; a ValueError says why there is none."""
    try:
        if guide.kind is GuideKind.JSON:
            return _json_grammar(ANY_OBJECT)
        if guide.kind is GuideKind.JSON_SCHEMA:
            return _json_grammar(without_others(guide.text))
        if guide.kind is GuideKind.REGEX:
            return LLMatcher.grammar_from_regex(guide.text)
        if guide.kind is GuideKind.GRAMMAR:
            return LLMatcher.grammar_from_lark(gbnf_to_lark(guide.text))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except Exception as error:
        # The errors of llguidance have no class of their own.
        raise ValueError(str(error)) from None
    raise ValueError("the embedded engine does not support this type")


def _json_grammar(schema: str) -> str:
    overrides: Any = {"whitespace_pattern": WHITESPACE}
    return LLMatcher.grammar_from_json_schema(schema, overrides=overrides)


def without_others(text: str) -> str:
    """Return a JSON schema whose objects have only the properties that are listed.

    A schema that says nothing of other properties allows any, and some models never stop adding them.
    xgrammar, the default of vLLM and TensorRT-LLM, makes only those that are listed; llguidance makes any.
    An object put together from parts is left as it is, and so is what is not a schema. Besides, patterns
    get ASCII character classes, and formats that llguidance does not enforce are removed.
    """
    try:
        schema = json.loads(text)
        nodes = list(_nodes(schema))
        for node in nodes:
            if isinstance(node.get("pattern"), str):
                node["pattern"] = ascii_classes(node["pattern"])
            if isinstance(node.get("format"), str) and node["format"] not in _FORMATS:
                del node["format"]
        if not any(_describes_parts(node) for node in nodes):
            for node in nodes:
                if _may_be_closed(node):
                    node["additionalProperties"] = False
        return json.dumps(schema, allow_nan=False)
    except (ValueError, TypeError, AttributeError):
        return text


def _nodes(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield a schema and all schemas in it, but for those that are only true or false."""
    remaining = [schema]
    while remaining:
        node = remaining.pop()
        if not isinstance(node, dict):
            continue
        yield node
        for keyword, value in node.items():
            if keyword in _OBJECTS_OF_SCHEMAS and isinstance(value, dict):
                remaining += value.values()
            elif keyword in _LISTS_OF_SCHEMAS and isinstance(value, list):
                remaining += value
            elif keyword in _SCHEMAS:
                remaining.append(value)


def _describes_parts(node: dict[str, Any]) -> bool:
    """Return whether a schema describes only a part of an object: other parts may add properties."""
    if not _PARTS.isdisjoint(node) or len(node.get("allOf", ())) > 1:
        return True
    return not _REFERENCES.isdisjoint(node) and not _OBJECT_KEYWORDS.isdisjoint(node)


def _may_be_closed(node: dict[str, Any]) -> bool:
    """Return whether an object can do with the properties that its schema lists."""
    listed = node.get("properties", {})
    if not listed or "additionalProperties" in node:
        return False
    required = set(node.get("required", ()))
    minimum = node.get("minProperties", 0)
    return bool(required <= listed.keys() and minimum <= len(listed))
