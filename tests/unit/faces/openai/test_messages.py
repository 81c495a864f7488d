"""/v1/messages on a backend that answers with what it is told to: inputs, blocks, events, errors."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import httpx
import httpx2
import pytest

from cog_triton import errors
from cog_triton.faces.openai.app import create_app
from cog_triton.faces.openai.fields import NamedTool
from cog_triton.faces.openai.messages import MessagesBody, chat_body, chat_messages
from cog_triton.generation import Chunk
from tests.unit.faces.openai.support import (
    CHUNKS,
    MESSAGES,
    Backend,
    ask,
    served,
    talkative,
    typed_events,
)

TOOLS = [{"name": "f", "description": "does", "input_schema": {"type": "object"}}]


def say(backend: Backend, **fields: Any) -> httpx.Response:
    body = {"model": "m", "messages": MESSAGES, "max_tokens": 9, **fields}
    return ask(backend, "POST", "/v1/messages", json=body)


def body(**fields: Any) -> MessagesBody:
    base = {"model": "m", "messages": MESSAGES, "max_tokens": 9}
    return MessagesBody.model_validate({**base, **fields})


def test_blocks_become_messages() -> None:
    answer = [
        {"type": "thinking", "thinking": "Hm", "signature": ""},
        {"type": "text", "text": "A"},
        {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
    ]
    result = [{"type": "text", "text": "1"}]
    question = [
        {"type": "tool_result", "tool_use_id": "t1", "content": result},
        {"type": "text", "text": "So?", "cache_control": {"type": "ephemeral"}},
    ]
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": question},
    ]
    system = [{"type": "text", "text": "Be"}, {"type": "text", "text": "kind"}]
    call = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    assert chat_messages(body(system=system, messages=turns)) == [
        {"role": "system", "content": "Be\nkind"},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "A", "reasoning_content": "Hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "1"},
        {"role": "user", "content": "So?"},
    ]


def test_the_other_fields_of_a_chat() -> None:
    choice = {"type": "tool", "name": "f", "disable_parallel_tool_use": True}
    chat = chat_body(body(tools=TOOLS, tool_choice=choice, stop_sequences=["x"], top_k=5))
    assert isinstance(chat.tool_choice, NamedTool)
    assert (chat.tool_choice.function.name, chat.parallel_tool_calls) == ("f", False)
    assert chat.tools is not None
    assert chat.tools[0].function.parameters == {"type": "object"}
    assert (chat.stop, chat.top_k, chat.max_tokens) == (["x"], 5, 9)
    assert chat_body(body(tool_choice={"type": "any"})).tool_choice == "required"
    switches = chat_body(body(thinking={"type": "disabled"})).chat_template_kwargs
    assert switches == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "role"),
        ({"messages": [*MESSAGES, {"role": "assistant", "content": " "}]}, "has no text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "type image is not"),
        ({"container": "c"}, "container is not supported"),
        ({"tools": [{"name": "two words", "input_schema": {}}]}, "tools[0].name"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "a tool_use_id"),
        ({"tools": TOOLS}, "takes none"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_a_users_mistake_is_named(fields: dict[str, Any], text: str) -> None:
    reply = say(Backend(*CHUNKS), **fields)
    assert reply.status_code == 400
    told = reply.json()
    assert [*told] == ["type", "error", "request_id"]
    assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
    assert text in told["error"]["message"]


def test_errors_have_anthropics_form() -> None:
    for error, status, kind in (
        (errors.PromptTooLong("x"), 400, "invalid_request_error"),
        (errors.TritonOverloaded("x"), 429, "rate_limit_error"),
        (errors.TritonUnavailable("x"), 503, "overloaded_error"),
        (errors.TritonTimeout("x"), 500, "api_error"),
    ):
        reply = say(Backend(error), stream=True)
        assert reply.status_code == status
        assert reply.json() == {
            "type": "error",
            "error": {"type": kind, "message": "x"},
            "request_id": reply.headers["request-id"],
        }
    assert say(Backend(), model="none").json()["error"]["type"] == "not_found_error"
    for path in ("/v1/messages", "/v1/messages/nothing"):
        assert ask(Backend(), "GET", path).json()["type"] == "error"
    last = typed_events(say(Backend(CHUNKS[0], errors.TritonTimeout("x")), stream=True).text)[-1]
    assert last == ("error", {"type": "error", "error": {"type": "api_error", "message": "x"}})


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"model": "none"}])
def test_a_request_has_its_id_in_anthropics_header_too(fields: dict[str, Any]) -> None:
    body = {"model": "m", "max_tokens": 9, "messages": MESSAGES, **fields}
    sent = {"x-request-id": "mine"}
    reply = ask(Backend(*CHUNKS), "POST", "/v1/messages", json=body, headers=sent)
    assert reply.headers["request-id"] == reply.headers["x-request-id"] == "mine"
    assert "request-id" not in ask(Backend(), "GET", "/v1/models").headers


def test_a_whole_message() -> None:
    whole = say(talkative(), tools=TOOLS).json()
    assert whole["content"][2].pop("id").startswith("toolu_")
    assert whole.pop("id").startswith("msg_")
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    assert whole == {
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [
            {"type": "thinking", "thinking": "Let me see", "signature": ""},
            {"type": "text", "text": "Well."},
            {"type": "tool_use", "name": "f", "input": {"a": 1}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {"input_tokens": 3, **cached, "output_tokens": 13},
    }


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (r'{"a": "\ud800"}', {}),
        ('{"a": ', {}),
        ('{"a": 98765432109876543210}', {"a": 98765432109876543210}),
    ],
)
def test_arguments_that_are_no_object_are_none(text: str, arguments: dict[str, Any]) -> None:
    call = f'<tool_call>{{"name": "f", "arguments": {text}'
    backend = talkative(Chunk(call, 5, 3), Chunk("", 5, 3, "length"))
    (block,) = say(backend, tools=TOOLS).json()["content"]
    assert block["input"] == pytest.approx(arguments)


@pytest.mark.parametrize(
    ("last", "reason", "sequence"),
    [
        (Chunk("", 2, 3, "stop"), "end_turn", None),
        (Chunk("", 2, 3, "length"), "max_tokens", None),
        (Chunk("", 2, 3, "stop", stop_sequence="x"), "stop_sequence", "x"),
    ],
)
def test_why_a_message_ends(last: Chunk, reason: str, sequence: str | None) -> None:
    whole = say(Backend(CHUNKS[0], last)).json()
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)
    events = dict(typed_events(say(Backend(CHUNKS[0], last), stream=True).text))
    assert events["message_delta"]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


def test_events_come_in_their_published_order() -> None:
    events = typed_events(say(talkative(), tools=TOOLS, stream=True).text)
    assert [name for name, _ in events] == [
        *("message_start", "ping"),
        *("content_block_start", "content_block_delta", "content_block_delta"),
        *("content_block_stop", "content_block_start", "content_block_delta"),
        *("content_block_stop", "content_block_start", "content_block_delta"),
        *("content_block_delta", "content_block_stop", "message_delta", "message_stop"),
    ]
    start = events[0][1]["message"]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"]["input_tokens"] == 3
    deltas = [value["delta"]["type"] for name, value in events if name == "content_block_delta"]
    assert deltas == ["thinking_delta"] * 2 + ["text_delta"] + ["input_json_delta"] * 2
    assert events[-2][1]["usage"]["output_tokens"] == 13


def test_tokens_are_counted_as_the_model_sees_them() -> None:
    fields = {"model": "m", "messages": MESSAGES}
    reply = ask(Backend(), "POST", "/v1/messages/count_tokens", json=fields)
    assert reply.json() == {"input_tokens": len("<user>Hello")}


def test_anthropics_client_puts_the_stream_together() -> None:
    async def run() -> Any:
        http = httpx2.AsyncClient(transport=httpx2.ASGITransport(create_app(served(talkative()))))
        async with (
            anthropic.AsyncAnthropic(base_url="http://t", api_key="k", http_client=http) as client,
            client.messages.stream(
                model="m",
                max_tokens=9,
                messages=MESSAGES,  # type: ignore[arg-type]
                tools=TOOLS,  # type: ignore[arg-type]
            ) as stream,
        ):
            return await stream.get_final_message()

    message = asyncio.run(run())
    thought, text, call = message.content
    assert (thought.thinking, text.text, call.input) == ("Let me see", "Well.", {"a": 1})
    assert message.stop_reason == "tool_use"
    assert message.usage.output_tokens == 13


def test_context_management_is_passed_over() -> None:
    edits = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    reply = say(Backend(*CHUNKS), context_management=edits)
    assert (reply.status_code, reply.headers.get("warning")) == (200, None)
