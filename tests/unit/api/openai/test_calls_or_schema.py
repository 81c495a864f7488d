"""Tools that may be called, beside a response_format: the answer is calls, or a text of that form."""

import json
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from llguidance import LLMatcher

from cog_triton.engines.grammars import grammar
from cog_triton.generation import Chunk
from tests.unit.api.openai.support import CHAT, RESPONSES, Backend, chat, events, post

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
ANSWER = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
PERSON = {
    "$defs": {"person": ANSWER},
    "type": "object",
    "properties": {"who": {"$ref": "#/$defs/person"}},
    "required": ["who"],
}
CALLS = '[{"name": "weather", "arguments": {"city": "Paris <tool_call>"}}]'
TEXT = '{"name": "weather", "note": "<tool_call>{}</tool_call>"}'
LIST = '[{"name": "Ada", "arguments": {}}, {"name": "Alan"}]'
TEMPLATES = ("tools <tool_call> </think>", "tools [TOOL_CALLS]", "tools <|channel|>", "tools")


def form(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def answering(text: str, size: int, template: str) -> Backend:
    """A backend of a model that writes a text in pieces of a size."""
    pieces = [text[place : place + size] for place in range(0, len(text), size)]
    chunks = [Chunk(piece, number, 3) for number, piece in enumerate(pieces, 1)]
    return Backend(*chunks, Chunk("", len(pieces), 3, "stop"), template=template)


def guide_of(**fields: Any) -> Any:
    backend = Backend(Chunk("", 1, 3, "stop"), template=TEMPLATES[0])
    assert chat(backend, tools=TOOLS, **fields).status_code == 200
    ((request, _),) = backend.asked
    return request.guide


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_calls_are_calls_however_they_are_cut(size: int, template: str) -> None:
    backend = answering(CALLS, size, template)
    (choice,) = chat(backend, tools=TOOLS, response_format=form(ANSWER)).json()["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris <tool_call>"}


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("text", [TEXT, LIST], ids=["an object", "a list"])
def test_an_answer_of_the_form_is_text_however_it_is_cut(
    text: str, size: int, template: str
) -> None:
    backend = answering(text, size, template)
    (choice,) = chat(backend, tools=TOOLS, response_format=form(ANSWER)).json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == text
    assert not choice["message"].get("tool_calls")


def test_a_streamed_call_has_its_name_first() -> None:
    backend = answering(CALLS, 2, TEMPLATES[0])
    told = events(chat(backend, tools=TOOLS, response_format=form(ANSWER), stream=True))
    deltas = [event["choices"][0]["delta"] for event in told if event["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert calls[0]["function"]["name"] == "weather"
    arguments = "".join(call["function"].get("arguments", "") for call in calls)
    assert json.loads(arguments) == {"city": "Paris <tool_call>"}
    assert not any(delta.get("content") for delta in deltas)


@pytest.mark.parametrize("schema", [ANSWER, PERSON], ids=["plain", "with references"])
def test_the_guide_allows_both_and_nothing_else(schema: Any) -> None:
    guide = guide_of(response_format=form(schema))
    assert LLMatcher.validate_grammar(grammar(guide)) == ""
    validator = jsonschema.Draft202012Validator(json.loads(guide.text))
    right: Any = {"name": "Ada"} if schema is ANSWER else {"who": {"name": "Ada"}}
    assert validator.is_valid(right)
    assert validator.is_valid(json.loads(CALLS))
    wrong: Any = {"name": 5} if schema is ANSWER else {"who": {}}
    assert not validator.is_valid(wrong)
    assert not validator.is_valid([{"name": "other", "arguments": {}}])
    assert not validator.is_valid([])


def test_one_call_where_calls_may_not_be_parallel() -> None:
    guide = guide_of(response_format={"type": "json_object"}, parallel_tool_calls=False)
    validator = jsonschema.Draft202012Validator(json.loads(guide.text))
    calls = json.loads(CALLS)
    assert validator.is_valid(calls)
    assert not validator.is_valid(calls * 2)
    assert validator.is_valid({"anything": 1})


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_a_call_that_has_to_be_made_sets_the_form_aside(choice: Any) -> None:
    guide = guide_of(response_format=form(ANSWER), tool_choice=choice)
    assert "anyOf" not in json.loads(guide.text)
    assert guide == guide_of(tool_choice=choice)


def test_without_tools_that_may_be_called_the_form_is_all() -> None:
    assert json.loads(guide_of(response_format=form(ANSWER), tool_choice="none").text) == ANSWER
    assert guide_of(response_format={"type": "text"}) is None


@pytest.mark.parametrize(
    ("path", "fields", "has_call"),
    [
        (CHAT, {"tools": TOOLS, "response_format": form(ANSWER)}, "tool_calls"),
        (
            RESPONSES,
            {
                "tools": [{"type": "function", "name": "weather", "parameters": PARAMETERS}],
                "text": {"format": {"type": "json_schema", "name": "a", "schema": ANSWER}},
            },
            "function_call",
        ),
        (
            "/v1/messages",
            {
                "tools": [{"name": "weather", "input_schema": PARAMETERS}],
                "output_config": {"format": {"type": "json_schema", "schema": ANSWER}},
            },
            "tool_use",
        ),
    ],
)
def test_every_api_has_it(path: str, fields: dict[str, Any], has_call: str) -> None:
    assert f'"{has_call}"' in post(answering(CALLS, 3, TEMPLATES[0]), path, **fields).text
    assert f'"{has_call}"' not in post(answering(TEXT, 3, TEMPLATES[0]), path, **fields).text


def test_calls_that_were_cut_off_are_text() -> None:
    chunk = Chunk('[{"name": "weather", "arguments": {"ci', 1, 3, "length")
    reply = chat(Backend(chunk, template="tools"), tools=TOOLS, response_format=form(ANSWER))
    (choice,) = reply.json()["choices"]
    assert choice["finish_reason"] == "length"
    assert not choice["message"].get("tool_calls")
    assert '"ci' in choice["message"]["content"]
