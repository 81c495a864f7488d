"""Requests in the shapes that Open WebUI, LibreChat, Continue, Cline and Roo Code send them.

The shapes were read in the public source of these clients in November 2026, or recorded from their command
lines; texts and schemas are shortened.
"""

import json
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from cog_triton.generation import Chunk
from tests.unit.api.openai.support import CHAT, TEXT, Backend, ask, events, talkative

PICTURE = "data:image/png;base64,iVBORw0KGgo="
QUESTION = "How is the weather in Rome?"
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
ANSWER = "It is sunny."
WEATHER = {
    "name": "weather",
    "description": "Returns the weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "The city"}},
        "required": ["city"],
    },
}
STRICT_WEATHER = {
    **WEATHER,
    "strict": True,
    "parameters": {**WEATHER["parameters"], "additionalProperties": False},  # type: ignore[dict-item]
}


@dataclass(frozen=True)
class Client:
    """What a client sends.

    Attributes:
        fields: what goes with each question.
        tools: what goes with a question that may be answered by a call.
        silent: the text of a turn of the assistant that only calls.
        call_fields: further fields of its calls.
    """

    fields: dict[str, Any]
    tools: dict[str, Any]
    headers: dict[str, str]
    system: Any = "You are a helpful assistant."
    question: Any = QUESTION

    silent: Any = None
    call_fields: tuple[tuple[str, Any], ...] = ()


def function(value: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": value}


CACHED = {"cache_control": {"type": "ephemeral"}}
CLIENTS = {
    "open-webui": Client(
        fields={
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.7,
            "max_tokens": 1000,
            "logit_bias": {},
        },
        tools={"tools": [function(WEATHER)]},
        headers={"X-OpenWebUI-User-Name": "Ann", "X-OpenWebUI-Chat-Id": "c-1"},
        silent="",
        call_fields=(("index", 0),),
    ),
    "librechat": Client(
        fields={
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 1,
            "top_p": 1,
            "presence_penalty": 0,
            "frequency_penalty": 0,
            "user": "6650c0ffee",
            "max_completion_tokens": 1000,
        },
        tools={"tools": [function(WEATHER)]},
        headers={"x-stainless-lang": "js"},
        question=[{"type": "text", "text": QUESTION}],
        silent="",
    ),
    "continue": Client(
        fields={"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 4096},
        tools={"tools": [function(WEATHER)], "parallel_tool_calls": False},
        headers={"x-api-key": "any", "api-key": "any"},  # for Azure, with each request
        question=[{"type": "text", "text": QUESTION}],
        silent="",
    ),
    "cline": Client(
        fields={
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            "max_tokens": None,
            "reasoning_effort": None,
        },
        tools={"tools": [function(STRICT_WEATHER)], "tool_choice": "auto"},
        headers={"HTTP-Referer": "https://cline.bot", "X-Title": "Cline"},
        question=[{"type": "text", "text": QUESTION}, {"type": "text", "text": "<details/>"}],
    ),
    "roo-code": Client(
        fields={
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            "max_completion_tokens": 8192,
            "reasoning_effort": "medium",
        },
        tools={
            "tools": [function(STRICT_WEATHER)],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
        },
        headers={"HTTP-Referer": "https://github.com/RooVetGit/Roo-Cline", "X-Title": "Roo Code"},
        system=[{"type": "text", "text": "You are Roo.", **CACHED}],
        question=[{"type": "text", "text": QUESTION}, {"type": "text", "text": "...", **CACHED}],
    ),
}
EVERY_CLIENT = pytest.mark.parametrize("client", CLIENTS.values(), ids=CLIENTS)


def backend(text: str) -> Backend:
    chunks = [Chunk(letter, number, 9) for number, letter in enumerate(text, 1)]
    return talkative(*chunks, Chunk("", len(text), 9, "stop"))


def send(
    server: Backend, client: Client, messages: list[dict[str, Any]], **fields: Any
) -> httpx.Response:
    body = {"model": "m", "messages": messages, **client.fields, **fields}
    return ask(server, "POST", CHAT, json=body, headers=client.headers)


def beginning(client: Client) -> list[dict[str, Any]]:
    return [
        {"role": "system", "content": client.system},
        {"role": "user", "content": client.question},
    ]


@EVERY_CLIENT
def test_a_streamed_answer_with_its_usage(client: Client) -> None:
    chunks = events(send(backend(ANSWER), client, beginning(client)))
    *answer, usage = chunks
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in answer)
    assert text == ANSWER
    assert answer[-1]["choices"][0]["finish_reason"] == "stop"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(ANSWER)


@EVERY_CLIENT
def test_a_streamed_call(client: Client) -> None:
    reply = send(backend(CALL), client, beginning(client), **client.tools)
    deltas = [chunk["choices"][0] for chunk in events(reply) if chunk["choices"]]
    calls = [call for choice in deltas for call in choice["delta"].get("tool_calls") or []]
    assert calls[0]["function"]["name"] == "weather"
    assert calls[0]["id"]
    arguments = "".join(call["function"].get("arguments") or "" for call in calls)
    assert json.loads(arguments) == {"city": "Rome"}
    assert deltas[-1]["finish_reason"] == "tool_calls"


@EVERY_CLIENT
def test_the_turn_after_a_call(client: Client) -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
        **dict(client.call_fields),
    }
    messages = [
        *beginning(client),
        {"role": "assistant", "content": client.silent, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    server = backend(ANSWER)
    chunks = events(send(server, client, messages, **client.tools))
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
    assert text == ANSWER
    called, result = server.tokenizer.messages[-2:]
    assert called["tool_calls"][0]["function"]["arguments"] == {"city": "Rome"}
    assert result["content"] == "sunny"


@EVERY_CLIENT
def test_a_picture_is_refused_clearly_and_the_session_goes_on(client: Client) -> None:
    picture = {
        "role": "user",
        "content": [
            {"type": "text", "text": "What is this?"},
            {"type": "image_url", "image_url": {"url": PICTURE, "detail": "auto"}},
        ],
    }
    messages = [*beginning(client), {"role": "assistant", "content": ANSWER}, picture]
    refused = send(backend(ANSWER), client, messages)
    assert refused.status_code == 400
    assert "image_url is not supported: this model reads text only" in refused.text
    server = backend(ANSWER)
    again = send(server, client, [*messages, {"role": "user", "content": "Never mind."}])
    assert events(again)
    assert "image_url left out" in str(server.tokenizer.messages)


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_open_webui_asks_for_a_title(limit: str) -> None:
    """Without a stream, and with a limit that is larger than the context."""
    prompt = "### Task:\nGenerate a concise, 3-5 word title with an emoji."
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": prompt}],
        "stream": False,
        limit: 1000,
    }
    reply = ask(backend('{"title": "Rome"}'), "POST", CHAT, json=body)
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["message"]["content"] == '{"title": "Rome"}'


def test_librechat_asks_for_a_title_by_a_function() -> None:
    title = {
        "name": "output",
        "description": "The title of the conversation.",
        "parameters": {
            "type": "object",
            "properties": {"title": {"type": "string"}},
            "required": ["title"],
            "additionalProperties": False,
            "$schema": "http://json-schema.org/draft-07/schema#",
        },
    }
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "Name this conversation."}],
        "stream": False,
        "temperature": 0.2,
        "max_tokens": 75,
        "tools": [function(title)],
        "tool_choice": {"type": "function", "function": {"name": "output"}},
        "parallel_tool_calls": False,
    }
    server = backend('{"name": "output", "arguments": {"title": "Rome"}}')
    reply = ask(server, "POST", CHAT, json=body)
    assert reply.status_code == 200, reply.text
    (call,) = reply.json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"title": "Rome"}


def test_continue_completes_code() -> None:
    body = {
        "model": "m",
        "prompt": "<fim_prefix>def f(<fim_suffix>)<fim_middle>",
        "max_tokens": 4096,
        "temperature": 0.01,
        "stop": ["<fim_prefix>", "<fim_suffix>", "\n\n", "/src/"],
        "stream": True,
    }
    reply = ask(backend("x"), "POST", TEXT, json=body)
    assert "".join(chunk["choices"][0]["text"] for chunk in events(reply)) == "x"


def test_roo_code_improves_a_prompt_with_nothing_but_a_message() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Improve this prompt."}]}
    reply = ask(backend(ANSWER), "POST", CHAT, json=body)
    assert reply.json()["choices"][0]["message"]["content"] == ANSWER
