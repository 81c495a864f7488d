"""Custom tools in Chat Completions: offered as functions of one text, and called in the client's form."""

import json
from typing import Any

import pytest

from cog_triton.errors import InvalidParameter
from cog_triton.generation import Chunk
from tests.unit.api.openai.support import (
    CHAT,
    MESSAGES,
    RESPONSES,
    Backend,
    chat,
    events,
    post,
    talkative,
)

RUN = {"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}
PATCH = {
    "type": "custom",
    "custom": {
        "name": "patch",
        "description": "Edits files.",
        "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "x"'}},
    },
}
TOOLS = [{"type": "web_search"}, RUN, PATCH]


def answering(text: str, reason: Any = "stop") -> Backend:
    """A backend whose answer is a text, in small pieces."""
    pieces = [Chunk(letter, number, 3) for number, letter in enumerate(text, 1)]
    return talkative(*pieces, Chunk("", len(text), 3, reason))


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_custom_tools_are_offered_and_hosted_ones_are_named() -> None:
    backend = answering("Hello")
    reply = chat(backend, tools=TOOLS)
    assert reply.status_code == 200, reply.text
    run, patch = (tool["function"] for tool in backend.tokenizer.tools)
    assert (run["name"], patch["name"]) == ("run", "patch")
    assert patch["parameters"]["properties"] == {"input": {"type": "string"}}
    assert "Edits files." in patch["description"]
    assert 'lark grammar:\nstart: "x"' in patch["description"]
    assert reply.headers["warning"] == '199 cog-triton "left out: tool web_search"'


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        pytest.param({"input": "*** Begin\n+x"}, "*** Begin\n+x", id="text"),
        pytest.param({"text": "x"}, '{"text": "x"}', id="other arguments than it has"),
    ],
)
def test_a_call_has_the_form_of_its_tool(arguments: dict[str, Any], text: str) -> None:
    written = call("patch", **arguments) + call("run", cmd="ls")
    choice = chat(answering(written), tools=TOOLS).json()["choices"][0]
    custom, function = choice["message"]["tool_calls"]
    assert (custom["type"], custom["custom"]) == ("custom", {"name": "patch", "input": text})
    assert "function" not in custom
    assert (function["type"], function["function"]["name"]) == ("function", "run")
    assert choice["finish_reason"] == "tool_calls"

    streamed = events(chat(answering(written), tools=TOOLS, stream=True))
    deltas = [one["choices"][0]["delta"].get("tool_calls", ()) for one in streamed]
    (first,) = [one for calls in deltas for one in calls if one["index"] == 0]
    assert (first["type"], first["custom"]) == ("custom", {"name": "patch", "input": text})
    assert first["id"]
    arguments_of_second = "".join(
        one["function"]["arguments"] for calls in deltas for one in calls if one["index"] == 1
    )
    assert json.loads(arguments_of_second) == {"cmd": "ls"}
    assert streamed[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_custom_call_that_is_cut_off_is_text() -> None:
    written = '<tool_call>{"name": "patch", "arguments": {"input": "*** Beg'
    streamed = events(chat(answering(written, "length"), tools=TOOLS, stream=True))
    deltas = [one["choices"][0]["delta"] for one in streamed]
    assert not any("tool_calls" in delta for delta in deltas)
    assert "".join(delta.get("content") or "" for delta in deltas) == written
    assert streamed[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    "choice",
    [
        pytest.param({"type": "custom", "custom": {"name": "patch"}}, id="named"),
        pytest.param(
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [
                        {"type": "web_search"},
                        {"type": "custom", "custom": {"name": "patch"}},
                    ],
                },
            },
            id="allowed",
        ),
    ],
)
def test_a_custom_tool_may_be_chosen(choice: dict[str, Any]) -> None:
    backend = answering("{}")
    reply = chat(backend, tools=TOOLS, tool_choice=choice)
    assert reply.status_code == 200, reply.text
    guide = backend.asked[0][0].guide
    assert guide is not None
    assert '"const": "patch"' in guide.text
    assert '"const": "run"' not in guide.text


@pytest.mark.parametrize("choice", ["required", {"type": "web_search"}], ids=str)
def test_a_choice_of_what_cannot_run_here_is_left_out(choice: Any) -> None:
    backend = answering("Hello")
    reply = chat(backend, tools=[{"type": "web_search"}], tool_choice=choice)
    assert reply.status_code == 200, reply.text
    assert "tool_choice" in reply.headers["warning"]
    assert backend.asked[0][0].guide is None


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_earlier_custom_calls_are_calls_of_functions(path: str) -> None:
    backend = answering("Done")
    called = {"id": "c1", "type": "custom", "custom": {"name": "patch", "input": "+x"}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c1", "content": "patched"},
    ]
    reply = post(backend, path, messages=messages, tools=TOOLS)
    assert reply.status_code == 200, reply.text
    _, answer, result = backend.tokenizer.messages
    (plain,) = answer["tool_calls"]
    assert (plain["id"], plain["type"]) == ("c1", "function")
    assert plain["function"] == {"name": "patch", "arguments": {"input": "+x"}}
    assert "custom" not in plain
    assert result["content"] == "patched"
    assert [tool["function"]["name"] for tool in backend.tokenizer.tools] == ["run", "patch"]


def test_a_tool_without_a_name_is_refused_by_its_place() -> None:
    reply = chat(answering(""), tools=[{"type": "custom", "custom": {}}])
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "tools[0].custom.name"


BAD = {"type": "object", "properties": {"city": {"type": "strin"}}}
BAD_TOOL = {"type": "function", "function": {"name": "bad", "parameters": BAD}}
FLAT_BAD = {"type": "function", "name": "bad", "parameters": BAD}


@pytest.mark.parametrize(
    ("path", "tools", "param"),
    [
        pytest.param(CHAT, [BAD_TOOL], "tools[0].function.parameters", id="alone"),
        pytest.param(CHAT, [*TOOLS, BAD_TOOL], "tools[3].function.parameters", id="behind others"),
        pytest.param(CHAT, [RUN, PATCH], "tools", id="which of several is not known"),
        pytest.param(
            RESPONSES, [{"type": "web_search"}, FLAT_BAD], "tools[1].parameters", id="responses"
        ),
        pytest.param(
            RESPONSES,
            [{"type": "namespace", "name": "n", "tools": [FLAT_BAD]}],
            "tools[0].tools[0].parameters",
            id="namespace",
        ),
    ],
)
def test_a_schema_that_an_engine_refuses_is_named_as_that_of_its_tool(
    path: str, tools: list[Any], param: str
) -> None:
    backend = talkative(InvalidParameter("guided_decoding_guide: Invalid type: strin"))
    reply = post(backend, path, tools=tools, tool_choice="required")
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param
