"""What users of other servers with these APIs have reported as faults, tried here.

Each case is of a kind that was reported of vLLM, SGLang, llama.cpp, Ollama, LiteLLM or a gateway.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from cog_triton.generation import Chunk
from tests.unit.api.openai.support import (
    ANTHROPIC,
    CHAT,
    RESPONSES,
    Backend,
    ask,
    chat,
    events,
    post,
)

TEMPLATE = "tools <tool_call> </think>"
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
THOUGHTFUL = f"<think>Hm, yes.</think>\n\nFINAL: ABC\n{CALL}"
SCHEMA = {"type": "object"}
CHAT_TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
RESPONSE_TOOLS = [{"type": "function", "name": "f", "parameters": SCHEMA}]
ANTHROPIC_TOOLS = [{"name": "f", "input_schema": SCHEMA}]
USER = {"role": "user", "content": "Hi"}
CALLING = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}


def saying(text: str, size: int = 3, **environment: str) -> Backend:
    """A backend of a model that writes a text in pieces of a size."""
    pieces = [text[place : place + size] for place in range(0, len(text), size)]
    chunks = [Chunk(piece, number, 7) for number, piece in enumerate(pieces, 1)]
    last = Chunk("", len(pieces), 7, "stop")
    return Backend(*chunks, last, template=TEMPLATE, **environment)


# Streams


def test_items_of_a_streamed_response_are_announced_numbered_and_named_once() -> None:
    told = events(post(saying(THOUGHTFUL), RESPONSES, stream=True, tools=RESPONSE_TOOLS))
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    open_items: dict[int, str] = {}
    open_parts: set[int] = set()
    announced: list[str] = []
    for event in told:
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert event["output_index"] == len(announced)
                announced.append(event["item"]["id"])
                open_items[event["output_index"]] = event["item"]["id"]
            case "content_part.added":
                open_parts.add(event["output_index"])
            case "output_text.delta" | "reasoning_text.delta":
                assert event["output_index"] in open_parts
                assert event["item_id"] == open_items[event["output_index"]]
            case "content_part.done":
                open_parts.remove(event["output_index"])
            case "output_item.done":
                assert event["item"]["id"] == open_items.pop(event["output_index"])
    assert not open_items
    assert not open_parts
    assert [item["id"] for item in told[-1]["response"]["output"]] == announced


def test_blocks_of_a_streamed_message_are_what_the_model_wrote() -> None:
    told = events(post(saying(THOUGHTFUL), ANTHROPIC, stream=True, tools=ANTHROPIC_TOOLS))
    starts = [event for event in told if event["type"] == "content_block_start"]
    assert [(start["index"], start["content_block"]["type"]) for start in starts] == [
        (0, "thinking"),
        (1, "text"),
        (2, "tool_use"),
    ]
    deltas = [event["delta"] for event in told if event["type"] == "content_block_delta"]
    assert "".join(delta.get("text", "") for delta in deltas) == "FINAL: ABC"
    assert "".join(delta.get("thinking", "") for delta in deltas) == "Hm, yes."
    assert json.loads("".join(delta.get("partial_json", "") for delta in deltas)) == {"a": 1}
    assert told[0]["message"]["usage"]["input_tokens"] == 7
    assert told[-2]["usage"]["output_tokens"] > 0


def test_thoughts_have_a_signature_without_which_clients_do_not_send_them_back() -> None:
    told = events(post(saying(THOUGHTFUL), ANTHROPIC, stream=True, tools=ANTHROPIC_TOOLS))
    deltas = [event["delta"] for event in told if event["type"] == "content_block_delta"]
    (streamed,) = [delta["signature"] for delta in deltas if "signature" in delta]
    whole = post(saying(THOUGHTFUL), ANTHROPIC, tools=ANTHROPIC_TOOLS).json()["content"][0]
    assert whole == {"type": "thinking", "thinking": "Hm, yes.", "signature": streamed}
    assert streamed


def test_chunks_of_a_chat() -> None:
    usage = {"include_usage": True}
    told = events(chat(saying(THOUGHTFUL), tools=CHAT_TOOLS, stream=True, stream_options=usage))
    *chunks, last = told
    assert (last["choices"], last["usage"]["prompt_tokens"]) == ([], 7)
    assert all(chunk.get("usage") is None for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["delta"].get("role") for choice in choices][:2] == ["assistant", None]
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    assert reasons == ["tool_calls"]
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    assert {call["index"] for call in calls} == {0}
    assert [call["function"]["name"] for call in calls if call["function"].get("name")] == ["f"]
    assert [call["id"] for call in calls if call.get("id")] == [calls[0]["id"]]


def test_the_usage_of_a_stream_is_that_of_all_answers() -> None:
    usage = {"include_usage": True}
    told = events(chat(saying("abcdef"), n=3, stream=True, stream_options=usage))
    assert told[-1]["usage"]["completion_tokens"] == 6


def test_without_a_wish_for_usage_every_chunk_has_a_choice() -> None:
    assert all(chunk["choices"] for chunk in events(chat(saying("abc"), stream=True)))


def test_a_message_has_the_fields_that_strict_clients_ask_for() -> None:
    (choice,) = chat(saying("abc")).json()["choices"]
    assert choice["message"]["refusal"] is None
    assert "logprobs" in choice


# Bodies


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]},
        {
            "messages": [
                USER,
                {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
                {"role": "function", "name": "f", "content": "1"},
            ]
        },
        {"messages": [USER, {"role": "assistant", "content": ""}]},
        {"messages": [USER, {"role": "assistant", "content": None}]},
        {"messages": [USER, {**CALLING, "content": ""}, {"role": "tool", "tool_call_id": "a"}]},
        {
            "messages": [
                USER,
                CALLING,
                {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "x"}]},
            ],
            "tools": CHAT_TOOLS,
        },
        {"messages": [USER, {"role": "assistant", "content": "A", "reasoning_content": "h"}, USER]},
        {"messages": [{"role": "system", "content": "x"}]},
        {"messages": [{"role": "developer", "content": "x"}, USER]},
        {"tools": CHAT_TOOLS, "stream": True},
        {"tools": [], "tool_choice": "auto", "stop": [], "logit_bias": {}, "metadata": {}},
        {"tool_choice": "none"},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": None}}]},
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
            "tool_choice": "required",
        },
        {"prediction": {"type": "content", "content": "x"}},
        dict.fromkeys(
            (
                *("stop", "tools", "tool_choice", "response_format", "logit_bias", "max_tokens"),
                *("seed", "user", "stream_options", "parallel_tool_calls", "functions", "n"),
                *("function_call", "metadata", "logprobs", "top_logprobs", "modalities", "audio"),
                *("prediction", "reasoning_effort", "store", "service_tier", "temperature"),
                *("web_search_options", "verbosity", "max_completion_tokens", "frequency_penalty"),
            )
        ),
    ],
    ids=lambda fields: "-".join(fields)[:60],
)
def test_chats_that_openais_api_takes(fields: dict[str, Any]) -> None:
    reply = chat(saying("abc"), **fields)
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    ("fields", "warning"),
    [
        ({"truncation": "auto"}, "truncation auto"),
        ({"max_tool_calls": 3}, None),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice required"),
        ({"previous_response_id": ""}, None),
        ({"stream": True, "stream_options": {"include_obfuscation": False}}, None),
        ({"text": {"verbosity": "low"}}, None),
        ({"reasoning": {"effort": "low", "summary": None, "generate_summary": None}}, None),
        (
            {"input": [USER, {"type": "reasoning", "summary": [], "encrypted_content": "z"}, USER]},
            None,
        ),
        (
            {
                "input": [
                    USER,
                    {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": '},
                    {"type": "function_call_output", "call_id": "c", "output": "x"},
                ]
            },
            None,
        ),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, None),
        ({"tools": [{"type": "function", "name": "f", "parameters": None, "strict": None}]}, None),
    ],
    ids=str,
)
def test_responses_that_openais_api_makes(
    fields: dict[str, Any], warning: str | None, tmp_path: Path
) -> None:
    reply = post(saying("abc", STORE=str(tmp_path / "journal")), RESPONSES, **fields)
    assert reply.status_code == 200, reply.text
    assert (warning or "") in reply.headers.get("warning", "")
    if warning is None:
        assert "warning" not in reply.headers


@pytest.mark.parametrize(
    ("name", "status"), [(5, 400), ("", 200), ("x" * 100_000, 400), ("resp_\ud800", 400)], ids=ascii
)
def test_names_of_earlier_responses(name: Any, status: int, tmp_path: Path) -> None:
    body = json.dumps({"model": "m", "input": "Hi", "previous_response_id": name})
    headers = {"content-type": "application/json"}
    backend = saying("abc", STORE=str(tmp_path / "journal"))
    reply = ask(backend, "POST", RESPONSES, content=body, headers=headers)
    assert reply.status_code == status
    assert len(reply.content) < 5000


def test_a_conversation_goes_on_with_a_result_alone(tmp_path: Path) -> None:
    backend = saying(THOUGHTFUL, STORE=str(tmp_path / "journal"))
    first = post(backend, RESPONSES, tools=RESPONSE_TOOLS).json()
    (call,) = [item for item in first["output"] if item["type"] == "function_call"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    fields = {"previous_response_id": first["id"], "tools": RESPONSE_TOOLS}
    assert post(backend, RESPONSES, input=[result], **fields).status_code == 200
    roles = [message["role"] for message in backend.tokenizer.messages]
    assert roles == ["user", "assistant", "tool"]
    assert backend.tokenizer.messages[1]["tool_calls"]


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "thinking", "thinking": "Hm", "signature": ""}, {"type": "text", "text": "A"}],
        [{"type": "thinking", "thinking": "Hm"}, {"type": "text", "text": "A"}],
        [{"type": "thinking", "thinking": "Hm", "signature": "s"}],
        [],
    ],
    ids=["an empty signature", "no signature", "thoughts alone", "nothing"],
)
def test_thoughts_come_back(content: list[Any]) -> None:
    messages = [USER, {"role": "assistant", "content": content}, USER]
    reply = post(saying("abc"), ANTHROPIC, messages=messages)
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("path", [CHAT, RESPONSES, ANTHROPIC])
def test_an_answer_that_is_not_streamed_is_one_object(path: str) -> None:
    reply = post(saying("abc"), path, stream=False)
    assert reply.headers["content-type"] == "application/json"
    assert reply.json()["model"] == "m"
