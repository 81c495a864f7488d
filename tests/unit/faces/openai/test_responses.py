"""/v1/responses on a backend that answers with what it is told to: inputs, items, events, errors."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import httpx2
import openai
import pytest

from cog_triton.errors import TritonUnavailable
from cog_triton.faces.openai.app import create_app
from cog_triton.faces.openai.responses import ResponsesBody, chat_body, chat_messages
from cog_triton.generation import Chunk
from cog_triton.wire import TokenLogProb
from tests.unit.faces.openai.support import (
    CHUNKS,
    Backend,
    ask,
    served,
    talkative,
    typed_events,
)

TOOLS = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]


def respond(backend: Backend, **fields: Any) -> httpx.Response:
    body = {"model": "m", "input": "Hello", **fields}
    return ask(backend, "POST", "/v1/responses", json=body)


def body(**fields: Any) -> ResponsesBody:
    return ResponsesBody.model_validate({"model": "m", "input": "Hello", **fields})


def test_an_input_becomes_messages() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"type": "message", "role": "assistant", "content": "B"},
        {"type": "message", "role": "assistant", "content": "C"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "So"}]},
        {"type": "message", "role": "assistant", "content": "D"},
    ]

    def call(name: str, arguments: str) -> dict[str, Any]:
        function = {"name": "f", "arguments": arguments}
        return {"id": name, "type": "function", "function": function}

    assert chat_messages(body(instructions="Be kind", input=items)) == [
        {"role": "system", "content": "Be kind"},
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": "A",
            "reasoning_content": "Hm",
            "tool_calls": [call("c1", "{}"), call("c2", '{"a": 1}')],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "assistant", "content": "B"},
        {"role": "assistant", "content": "C"},
        {"role": "assistant", "content": "D", "reasoning_content": "So"},
    ]


def test_the_other_fields_of_a_chat() -> None:
    schema = {"type": "object"}
    chat = chat_body(
        body(
            tools=TOOLS,
            tool_choice={"type": "function", "name": "f"},
            text={"format": {"type": "json_schema", "name": "x", "schema": schema}},
            max_output_tokens=5,
            include=["message.output_text.logprobs"],
            top_logprobs=2,
        )
    )
    assert chat.max_completion_tokens == 5
    assert (chat.logprobs, chat.top_logprobs) == (True, 2)
    assert chat.response_format is not None
    assert chat.response_format.json_schema is not None
    assert chat.response_format.json_schema.schema_ == schema
    assert chat.tools is not None
    assert chat.tools[0].function.name == "f"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"reasoning": {"effort": "hihg"}}, "reasoning.effort"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"input": []}, "input"),
        ({"instructions": [{"role": "system", "content": "Be brief."}]}, "instructions"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text"),
    ],
)
def test_what_is_not_done_is_named(fields: dict[str, Any], param: str) -> None:
    reply = respond(Backend(*CHUNKS), **fields)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


def test_what_asks_for_nothing_is_no_error() -> None:
    fields: dict[str, Any] = {"store": False, "previous_response_id": None, "reasoning": None}
    reply = respond(Backend(*CHUNKS), **fields, truncation="disabled", service_tier="auto")
    assert reply.status_code == 200
    assert "warning" not in reply.headers


def test_a_whole_response() -> None:
    whole = respond(talkative(), tools=TOOLS, metadata={"a": "b"}).json()
    assert whole["id"].startswith("resp_")
    assert (whole["object"], whole["status"], whole["error"]) == ("response", "completed", None)
    assert (whole["store"], whole["metadata"], whole["temperature"]) == (False, {"a": "b"}, 1.0)
    assert whole["usage"] == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 13,
        "output_tokens_details": {"reasoning_tokens": len("Let me see")},
        "total_tokens": 16,
    }
    thought, message, call = whole["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Let me see"}]
    assert [part["text"] for part in message["content"]] == ["Well."]
    assert (call["name"], call["arguments"]) == ("f", '{"a": 1}')
    assert [item["id"].split("_")[0] for item in whole["output"]] == ["rs", "msg", "fc"]


def test_an_answer_that_was_cut_says_so() -> None:
    whole = respond(Backend(Chunk("a", 1, 3, "length"))).json()
    assert (whole["status"], whole["output"][0]["status"]) == ("incomplete", "incomplete")
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    stream = respond(Backend(Chunk("a", 1, 3, "length")), stream=True).text
    assert typed_events(stream)[-1][0] == "response.incomplete"


def test_events_come_in_their_published_order() -> None:
    reply = respond(talkative(), tools=TOOLS, stream=True)
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = typed_events(reply.text)
    assert [value["sequence_number"] for _, value in events] == list(range(len(events)))
    assert [name.removeprefix("response.") for name, _ in events] == [
        "created",
        "in_progress",
        *("output_item.added", "content_part.added"),
        *("reasoning_text.delta", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    final = events[-1][1]["response"]
    done = [value["item"] for name, value in events if name == "response.output_item.done"]
    assert final["output"] == done
    assert {value["output_index"] for _, value in events if "output_index" in value} == {0, 1, 2}
    assert final["id"] == events[0][1]["response"]["id"]


def test_an_error_in_the_stream_is_told_and_fails_the_response() -> None:
    reply = respond(Backend(CHUNKS[0], TritonUnavailable("gone")), stream=True)
    events = typed_events(reply.text)
    names = [name for name, _ in events]
    assert names[-3:] == ["response.output_item.done", "error", "response.failed"]
    assert events[-2][1]["message"] == "gone"
    failed = events[-1][1]["response"]
    assert (failed["status"], failed["usage"]) == ("failed", None)
    assert failed["error"] == {"code": "server_error", "message": "gone"}
    reply = respond(Backend(TritonUnavailable("gone")), stream=True)
    assert (reply.status_code, reply.json()["error"]["message"]) == (503, "gone")


def test_log_probabilities_stand_beside_the_text() -> None:
    token = TokenLogProb(ord("a"), -0.5)
    chunks = [Chunk("", 1, 3, log_probs=(token,)), Chunk("a", 1, 3), Chunk("", 1, 3, "stop")]
    fields: dict[str, Any] = {"include": ["message.output_text.logprobs"]}
    entry = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}
    (item,) = respond(Backend(*chunks), **fields).json()["output"]
    assert item["content"][0]["logprobs"] == [entry]
    events = dict(typed_events(respond(Backend(*chunks), **fields, stream=True).text))
    assert events["response.output_text.delta"]["logprobs"] == [entry]


def test_log_probabilities_of_thoughts_are_left_out() -> None:
    def tokens(text: str) -> tuple[TokenLogProb, ...]:
        return tuple(TokenLogProb(ord(char), -0.5) for char in text)

    texts = ("<think>", "a", "</think>", "b")
    chunks = [Chunk(text, 1, 3, log_probs=tokens(text)) for text in texts]
    backend = talkative(*chunks, Chunk("", 4, 3, "stop"))
    fields: dict[str, Any] = {"include": ["message.output_text.logprobs"]}
    _, message = respond(backend, **fields).json()["output"]
    assert [entry["token"] for entry in message["content"][0]["logprobs"]] == ["b"]


def test_what_cannot_be_text_is_a_users_mistake() -> None:
    tool = r'{"type": "function", "name": "f", "parameters": {"a": "\ud800"}}'
    body = f'{{"model": "m", "input": "x", "tool_choice": "none", "tools": [{tool}]}}'
    headers = {"content-type": "application/json"}
    reply = ask(Backend(*CHUNKS), "POST", "/v1/responses", content=body, headers=headers)
    assert (reply.status_code, "surrogates" in reply.text) == (400, True)


@pytest.mark.parametrize("cut", [False, True])
def test_openais_client_puts_the_stream_together(cut: bool) -> None:
    backend = talkative(Chunk("Well, ", 1, 3), Chunk("no", 2, 3, "length")) if cut else talkative()

    async def run() -> Any:
        transport = httpx2.ASGITransport(create_app(served(backend)))
        http = httpx2.AsyncClient(transport=transport)
        async with (
            openai.AsyncOpenAI(base_url="http://t/v1", api_key="k", http_client=http) as client,
            client.responses.stream(model="m", input="Hello", tools=TOOLS) as stream,  # type: ignore[arg-type]
        ):
            events = [event async for event in stream]
            return events[-1].response  # type: ignore[union-attr]

    final = asyncio.run(run())
    if cut:
        assert (final.status, final.output_text) == ("incomplete", "Well, no")
    else:
        thought, message, call = final.output
        assert thought.content[0].text == "Let me see"
        assert message.content[0].text == final.output_text == "Well."
        assert (call.name, json.loads(call.arguments)) == ("f", {"a": 1})
