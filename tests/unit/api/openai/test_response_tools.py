"""Tools and items of /v1/responses that agents send, and calls as these agents read them."""

import json
from typing import Any

import pytest

from cog_triton.errors import TritonUnavailable
from cog_triton.generation import Chunk
from tests.unit.api.openai.support import RESPONSES, Backend, events, post, talkative

RUN = {"type": "function", "name": "run", "parameters": {"type": "object"}}
ASK = {"type": "function", "name": "ask", "parameters": {"type": "object"}}
HELPERS = {"type": "namespace", "name": "helpers", "tools": [ASK, {"type": "file_search"}]}
PATCH = {
    "type": "custom",
    "name": "patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'},
}
TOOLS: list[dict[str, Any]] = [
    RUN,
    HELPERS,
    PATCH,
    {"type": "web_search", "external_web_access": False},
]
HI = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}


def answering(text: str) -> Backend:
    """A backend whose answer is a text, in small pieces."""
    pieces = [Chunk(letter, number, 3) for number, letter in enumerate(text, 1)]
    return talkative(*pieces, Chunk("", len(text), 3, "stop"))


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_what_can_be_called_is_offered_and_the_rest_is_named() -> None:
    backend = answering("Hello")
    reply = post(backend, RESPONSES, tools=TOOLS, input=[HI], tool_choice="auto")
    assert reply.status_code == 200, reply.text
    run, ask, patch = (tool["function"] for tool in backend.tokenizer.tools)
    assert (run["name"], ask["name"], patch["name"]) == ("run", "helpers__ask", "patch")
    assert patch["parameters"]["required"] == ["input"]
    assert "Edits files." in patch["description"]
    assert 'lark grammar:\nstart: "x"' in patch["description"]
    assert reply.headers["warning"] == (
        '199 cog-triton "left out: tool file_search, tool web_search"'
    )
    assert [tool["type"] for tool in reply.json()["tools"]] == [tool["type"] for tool in TOOLS]


@pytest.mark.parametrize(
    ("text", "item"),
    [
        pytest.param(
            call("run", cmd="ls"),
            {"type": "function_call", "name": "run", "arguments": '{"cmd": "ls"}'},
            id="function",
        ),
        pytest.param(
            call("helpers__ask", q=1),
            {
                "type": "function_call",
                "name": "ask",
                "namespace": "helpers",
                "arguments": '{"q": 1}',
            },
            id="function of a namespace",
        ),
        pytest.param(
            call("patch", input="*** Begin\n+x"),
            {"type": "custom_tool_call", "name": "patch", "input": "*** Begin\n+x"},
            id="custom tool",
        ),
        pytest.param(
            call("patch", text="x"),
            {"type": "custom_tool_call", "name": "patch", "input": '{"text": "x"}'},
            id="custom tool with other arguments than it has",
        ),
    ],
)
def test_calls_have_the_form_of_their_tools(text: str, item: dict[str, Any]) -> None:
    whole = post(answering(text), RESPONSES, tools=TOOLS, input=[HI]).json()["output"][-1]
    assert {name: whole.get(name) for name in item} == item
    assert ("arguments" in whole) != ("input" in whole)
    streamed = events(post(answering(text), RESPONSES, tools=TOOLS, input=[HI], stream=True))
    (done,) = [one["item"] for one in streamed if one["type"] == "response.output_item.done"]
    assert {name: done.get(name) for name in item} == item
    field = "input" if "input" in item else "arguments"
    kind = "custom_tool_call_input" if field == "input" else "function_call_arguments"
    deltas = [one["delta"] for one in streamed if one["type"] == f"response.{kind}.delta"]
    (end,) = [one for one in streamed if one["type"] == f"response.{kind}.done"]
    assert "".join(deltas) == end[field] == item[field]


def test_a_chosen_tool_is_found_by_the_names_of_its_kind() -> None:
    for choice, name in (
        ({"type": "custom", "name": "patch"}, "patch"),
        ({"type": "function", "name": "ask", "namespace": "helpers"}, "helpers__ask"),
    ):
        backend = answering("{}")
        assert post(backend, RESPONSES, tools=TOOLS, tool_choice=choice).status_code == 200
        guide = backend.asked[0][0].guide
        assert guide is not None
        assert json.loads(guide.text)["properties"]["name"] == {"const": name}


def test_items_of_earlier_turns_are_calls_and_results() -> None:
    backend = answering("Done")
    items = [
        HI,
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "So"}]},
        {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "patched"},
        {
            "type": "function_call",
            "call_id": "c2",
            "name": "ask",
            "namespace": "helpers",
            "arguments": "{}",
        },
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [
                {"type": "input_text", "text": "see"},
                {"type": "input_image", "image_url": "data:,"},
            ],
        },
        {"type": "local_shell_call", "call_id": "c3", "action": {"command": ["ls"]}},
        {"type": "local_shell_call_output", "call_id": "c3", "output": "README"},
        {"type": "web_search_call", "status": "completed", "action": {"type": "search"}},
        {"type": "compaction", "encrypted_content": "gAAA"},
        {"type": "item_reference", "id": "rs_1"},
    ]
    reply = post(backend, RESPONSES, input=items)
    assert reply.status_code == 200, reply.text
    _, patch, patched, ask, asked, shell, listed = backend.tokenizer.messages
    assert patch["reasoning_content"] == "So"
    assert patch["tool_calls"][0]["function"] == {"name": "patch", "arguments": {"input": "x"}}
    assert (patched["tool_call_id"], patched["content"]) == ("c1", "patched")
    assert ask["tool_calls"][0]["function"]["name"] == "helpers__ask"
    assert asked["content"] == "see\n[input_image left out: this model reads text only]"
    assert shell["tool_calls"][0]["function"]["arguments"] == {"command": ["ls"]}
    assert listed["content"] == "README"
    assert reply.headers["warning"] == (
        '199 cog-triton "left out: content of type input_image, input of type web_search_call, '
        'input of type compaction, input of type item_reference"'
    )


def test_what_may_be_included_and_is_not_known_is_named() -> None:
    reply = post(answering("Hello"), RESPONSES, include=["web_search_call.action.sources"])
    assert "include web_search_call.action.sources" in reply.headers["warning"]


def function_call(call_id: str) -> dict[str, Any]:
    return {"type": "function_call", "name": "run", "arguments": "{}", "call_id": call_id}


def output(call_id: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": "done"}


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}


SAID = {"role": "assistant", "content": "I look."}
THEN = {"role": "assistant", "content": "Then I act."}


@pytest.mark.parametrize(
    ("items", "content", "thoughts", "calls"),
    [
        pytest.param([SAID, function_call("1")], "I look.", None, ["1"], id="text before its call"),
        pytest.param([function_call("1"), SAID], "I look.", None, ["1"], id="text behind its call"),
        pytest.param(
            [function_call("1"), SAID, function_call("2")],
            "I look.",
            None,
            ["1", "2"],
            id="text between calls",
        ),
        pytest.param(
            [SAID, function_call("1"), THEN],
            "I look.\nThen I act.",
            None,
            ["1"],
            id="texts on both sides",
        ),
        pytest.param(
            [thought("One."), function_call("1"), thought("Two."), function_call("2")],
            "",
            "One.\nTwo.",
            ["1", "2"],
            id="thoughts between calls",
        ),
        pytest.param(
            [thought("One."), thought("Two."), SAID, function_call("1")],
            "I look.",
            "One.\nTwo.",
            ["1"],
            id="several thoughts",
        ),
    ],
)
def test_the_items_of_one_answer_are_one_turn(
    items: list[dict[str, Any]], content: str, thoughts: str | None, calls: list[str]
) -> None:
    """So that the results stand behind the turn that has their calls, as chat templates need it."""
    backend = answering("Hello")
    results = [output(call_id) for call_id in calls]
    reply = post(backend, RESPONSES, tools=[RUN], input=[HI, *items, *results])
    assert reply.status_code == 200, reply.text
    _, answer, *told = backend.tokenizer.messages
    assert answer["content"] == content
    assert answer.get("reasoning_content") == thoughts
    assert [call["id"] for call in answer["tool_calls"]] == calls
    assert [(turn["role"], turn["tool_call_id"]) for turn in told] == [
        ("tool", call_id) for call_id in calls
    ]


def test_two_answers_are_two_turns() -> None:
    backend = answering("Hello")
    assert post(backend, RESPONSES, input=[HI, SAID, thought("One."), THEN]).status_code == 200
    _, first, second = backend.tokenizer.messages
    assert first["content"] == "I look."
    assert (second["reasoning_content"], second["content"]) == ("One.", "Then I act.")


@pytest.mark.parametrize(
    "item",
    [
        pytest.param(
            {
                "type": "shell_call_output",
                "call_id": "c",
                "output": [{"stdout": "a", "stderr": ""}],
            },
            id="output of a shell",
        ),
        pytest.param(
            {
                "type": "computer_call_output",
                "call_id": "c",
                "output": {"type": "computer_screenshot", "image_url": "data:,"},
            },
            id="screenshot",
        ),
        pytest.param(
            {"type": "tool_search_call", "call_id": "c", "arguments": {"goal": "x"}},
            id="arguments that are an object",
        ),
        pytest.param(
            {"type": "mcp_call", "output": None, "error": {"code": 1}}, id="call that failed"
        ),
        pytest.param({"type": "program", "call_id": "c", "code": "x"}, id="program"),
    ],
)
def test_an_item_that_cannot_be_read_is_left_out_whatever_its_fields_are(
    item: dict[str, Any],
) -> None:
    backend = answering("Done")
    reply = post(backend, RESPONSES, tools=[RUN], input=[HI, item, HI])
    assert reply.status_code == 200, reply.text
    assert f"input of type {item['type']}" in reply.headers["warning"]
    assert [message["role"] for message in backend.tokenizer.messages] == ["user", "user"]


@pytest.mark.parametrize(
    ("allowed", "offered"),
    [
        pytest.param([{"type": "function", "name": "run"}, {"type": "web_search"}], 1, id="beside"),
        pytest.param([{"type": "web_search"}], 0, id="alone"),
    ],
)
def test_tools_that_cannot_run_here_may_be_among_those_that_are_allowed(
    allowed: list[Any], offered: int
) -> None:
    backend = answering("Done")
    choice = {"type": "allowed_tools", "mode": "auto", "tools": allowed}
    reply = post(backend, RESPONSES, tools=TOOLS, tool_choice=choice)
    assert reply.status_code == 200, reply.text
    assert "tool_choice web_search" in reply.headers["warning"]
    assert len(backend.tokenizer.tools) == offered


def test_tools_that_the_input_adds_are_offered_and_called() -> None:
    added = {
        "type": "additional_tools",
        "role": "developer",
        "tools": [{"type": "namespace", "name": "functions", "tools": [PATCH]}],
    }
    backend = answering(call("functions__patch", input="x"))
    reply = post(backend, RESPONSES, tools=[RUN], input=[added, HI])
    assert reply.status_code == 200, reply.text
    names = [tool["function"]["name"] for tool in backend.tokenizer.tools]
    assert names == ["run", "functions__patch"]
    (item,) = reply.json()["output"]
    assert (item["type"], item["namespace"]) == ("custom_tool_call", "functions")
    assert (item["name"], item["input"]) == ("patch", "x")


def unfinished(name: str, *end: Chunk | Exception) -> Backend:
    text = f'<tool_call>{{"name": "{name}", "arguments": {{"input": "*** Beg'
    pieces = [Chunk(letter, number, 3) for number, letter in enumerate(text, 1)]
    return talkative(*pieces, *end)


@pytest.mark.parametrize("name", ["run", "patch"])
@pytest.mark.parametrize(
    ("end", "last"),
    [
        pytest.param(Chunk("", 9, 3, "length"), "response.incomplete", id="max_output_tokens"),
        pytest.param(
            Chunk("", 9, 3, "stop", stop_sequence="X"), "response.completed", id="stop sequence"
        ),
        pytest.param(TritonUnavailable("gone"), "response.failed", id="failure"),
    ],
)
def test_a_call_that_was_cut_off_does_not_look_complete(
    name: str, end: Chunk | Exception, last: str
) -> None:
    backend = unfinished(name, end)
    streamed = events(post(backend, RESPONSES, tools=TOOLS, input=[HI], stream=True))
    kinds = [one["type"] for one in streamed]
    assert "response.function_call_arguments.done" not in kinds
    assert "response.custom_tool_call_input.done" not in kinds
    done = [one["item"] for one in streamed if one["type"] == "response.output_item.done"]
    assert all(item["status"] == "incomplete" for item in done)
    assert streamed[-1]["type"] == last
    (item,) = streamed[-1]["response"]["output"]
    assert (item["type"].removeprefix("custom_").removeprefix("function_"), item["status"]) in (
        ("tool_call", "incomplete"),
        ("call", "incomplete"),
    )
    if last == "response.failed":
        assert not done
    else:
        whole = post(unfinished(name, end), RESPONSES, tools=TOOLS, input=[HI]).json()
        assert whole["output"][-1]["status"] == "incomplete"
