"""JSON schemas of structured output, whose objects have the properties that are listed.

A schema that lists properties and says nothing of others allows any, and a model that likes to go on has
no end of them. xgrammar, which vLLM and TensorRT-LLM take by default, makes none that are not listed;
llguidance does. What is made without them keeps to the schema as it is written, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from cog_triton.request.guide import ascii_classes

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_ONES = ("items", "additionalProperties")
# With these a part of a schema tells a part of an object, or what it must not be: each of them has to stay
# open for the others.
_PARTED = {
    "not",
    "if",
    "oneOf",
    "dependentSchemas",
    "dependentRequired",
    "dependencies",
    "unevaluatedProperties",
}
_ELSEWHERE = {"$ref", "allOf", "anyOf"}
_OBJECT = {"properties", "patternProperties", "additionalProperties", "required", "minProperties"}


def without_others(text: str) -> str:
    """The schema, in which listed properties are all that their objects have, unless it says otherwise.

    One that puts objects together from parts is left as it is, and so is what is no schema.
    """
    try:
        schema = json.loads(text)
        nodes = list(_schemas(schema))
        for node in nodes:
            if isinstance(node.get("pattern"), str):
                node["pattern"] = ascii_classes(node["pattern"])
        whole = not any(_is_parted(node) for node in nodes)
        for node in nodes:
            if whole and _may_be_closed(node):
                node["additionalProperties"] = False
        return json.dumps(schema, allow_nan=False)
    except (ValueError, TypeError):
        return text


def _schemas(root: Any) -> Iterator[dict[str, Any]]:
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if not isinstance(node, dict):
            continue
        yield node
        for key, value in node.items():
            if key in _MAPS and isinstance(value, dict):
                waiting += value.values()
            elif key in _LISTS and isinstance(value, list):
                waiting += value
            elif key in _ONES:
                waiting.append(value)


def _is_parted(node: dict[str, Any]) -> bool:
    both = not _ELSEWHERE.isdisjoint(node) and not _OBJECT.isdisjoint(node)
    return both or not _PARTED.isdisjoint(node) or len(node.get("allOf", ())) > 1


def _may_be_closed(node: dict[str, Any]) -> bool:
    listed = node.get("properties")
    if not listed or not isinstance(listed, dict) or "additionalProperties" in node:
        return False
    return set(node.get("required", ())) <= listed.keys() and (
        node.get("minProperties", 0) <= len(listed)
    )
