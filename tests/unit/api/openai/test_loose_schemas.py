"""Schemas of tools that agents send, and the guides that are made of them."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from cog_triton.api.openai.chats.loose_schemas import loosened
from cog_triton.engines.grammars import grammar
from tests.unit.api.openai.support import CHUNKS, chat, talkative

SCHEMAS = [
    pytest.param({"type": "array", "uniqueItems": True}, id="a set"),
    pytest.param({"type": "string", "not": {"const": "x"}}, id="not"),
    pytest.param({"if": {"type": "null"}, "then": {}, "else": {}}, id="if"),
    pytest.param({"type": "object", "propertyNames": {"pattern": "^x"}}, id="names"),
    pytest.param({"type": "array", "contains": {"const": 1}, "minContains": 1}, id="contains"),
    pytest.param({"type": "object", "dependentRequired": {"a": ["b"]}}, id="dependent"),
    pytest.param({"type": "object", "unevaluatedProperties": False}, id="unevaluated"),
    pytest.param({"type": "string", "pattern": "^(?!x)[a-z]+$"}, id="pattern that looks ahead"),
    pytest.param({"type": "string", "pattern": r"^(a|b)\1$"}, id="pattern that refers back"),
    pytest.param({"type": "object", "properties": None, "required": None}, id="nulls"),
    pytest.param({"type": "string", "enum": None, "anyOf": None, "default": None}, id="no enum"),
]


@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.parametrize("strict", [None, False])
def test_a_tool_may_have_any_schema_unless_it_is_strict(
    schema: dict[str, Any], strict: bool | None
) -> None:
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    function = {"name": "f", "parameters": parameters, "strict": strict}
    backend = talkative(*CHUNKS)
    tools = [{"type": "function", "function": function}]
    reply = chat(backend, tools=tools, tool_choice="required")
    assert reply.status_code == 200, reply.text
    assert backend.tokenizer.tools[0]["function"]["parameters"] == parameters
    guide = backend.asked[0][0].guide
    assert guide is not None
    assert not LLMatcher(LLTokenizer("byte"), grammar(guide)).is_error()


def test_a_strict_tool_keeps_its_schema() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    function = {"name": "f", "parameters": schema, "strict": True}
    backend = talkative(*CHUNKS)
    tools = [{"type": "function", "function": function}]
    assert chat(backend, tools=tools, tool_choice="required").status_code == 200
    guide = backend.asked[0][0].guide
    assert guide is not None
    assert '"uniqueItems": true' in guide.text


def test_what_can_be_enforced_stays() -> None:
    schema = {
        "type": "object",
        "properties": {
            "not": {"const": None},
            "if": {"type": ["string", "null"], "default": None, "pattern": "^[a-z]{2}$"},
            "list": {"type": "array", "items": [{"enum": [None, 1]}], "maxItems": 2},
        },
        "patternProperties": {"^x-": {"type": "integer"}},
        "$defs": {"then": {"anyOf": [{"type": "integer"}, {"type": "null"}]}},
        "additionalProperties": False,
    }
    assert json.dumps(loosened(schema)) == json.dumps(schema)
