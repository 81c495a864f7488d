from __future__ import annotations

import json
from typing import Any

import pytest

from cog_triton.engines.guides import without_others

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "size": {"type": "integer"}},
    "required": ["name"],
}
CLOSED = {**CITY, "additionalProperties": False}


def closed(schema: Any) -> Any:
    return json.loads(without_others(json.dumps(schema)))


@pytest.mark.parametrize(
    "around",
    [
        lambda city: city,
        lambda city: {"type": "array", "items": city},
        lambda city: {"type": "object", "additionalProperties": city},
        lambda city: {"anyOf": [city, {"type": "null"}]},
        lambda city: {"allOf": [city]},
        lambda city: {"$ref": "#/$defs/City", "$defs": {"City": city}},
        lambda city: {
            "definitions": {"City": city},
            "prefixItems": [{"$ref": "#/definitions/City"}],
        },
    ],
)
def test_an_object_has_its_listed_properties_alone(around: Any) -> None:
    assert closed(around(CITY)) == around(CLOSED)


def test_objects_in_objects() -> None:
    inner = {"type": "object", "properties": {"properties": CITY, "const": CITY}}
    wanted = {
        "type": "object",
        "properties": {"properties": CLOSED, "const": CLOSED},
        "additionalProperties": False,
    }
    assert closed(inner) == wanted


@pytest.mark.parametrize(
    "schema",
    [
        {**CITY, "additionalProperties": True},
        {**CITY, "additionalProperties": {"type": "string"}},
        {"type": "object"},
        {"type": "object", "properties": {}},
        {**CITY, "required": ["name", "country"]},
        {**CITY, "minProperties": 3},
        {"const": CITY},
        {"enum": [CITY], "default": CITY},
        {"allOf": [CITY, {"properties": {"country": {"type": "string"}}}]},
        {**CITY, "anyOf": [{"properties": {"country": {}}}]},
        {**CITY, "$ref": "#/$defs/Other", "$defs": {"Other": CITY}},
        {"anyOf": [CITY], "required": ["country"]},
        {**CITY, "dependentRequired": {"name": ["country"]}},
        {"oneOf": [CITY, {"properties": {"country": {}}}]},
        {"type": "array", "items": {**CITY, "not": {"properties": {"size": {"const": 1}}}}},
        {**CITY, "if": {"properties": {"size": {"const": 1}}}, "then": {"required": ["country"]}},
        {**CITY, "required": 5},
        [CITY],
        True,
        5,
    ],
)
def test_what_stays_as_it_is(schema: Any) -> None:
    text = json.dumps(schema)
    assert closed(schema) == schema
    assert json.loads(text) == schema


@pytest.mark.parametrize("text", ["{", "", '{"properties": {"a": {"maximum": 1e999}}}'])
def test_what_is_no_schema_stays_as_it_is(text: str) -> None:
    assert without_others(text) == text
