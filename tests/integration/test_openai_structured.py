"""Structured output, enforced calls and log probabilities through OpenAI's API, on the embedded engine."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from tests.late import openai
from tests.openai_server import MESSAGES, OpenAIServer
from tests.support import wait_until


class Verdict(BaseModel):
    sure: bool
    grade: int


SWITCH = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}},
    "required": ["on"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": SWITCH}}
    for name in ("light", "heat")
]


def content(reply: httpx.Response) -> str:
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["message"]["content"])


def test_a_pydantic_model_is_what_comes_back(client: openai.OpenAI) -> None:
    for seed in range(3):
        answer = client.chat.completions.parse(
            model="demo", messages=MESSAGES, response_format=Verdict, seed=seed, max_tokens=200
        )
        assert isinstance(answer.choices[0].message.parsed, Verdict)


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        pytest.param({"guided_choice": ["red", "blue"]}, "red|blue", id="choice"),
        pytest.param({"guided_regex": r"\d{3}-[ab]"}, r"\d{3}-[ab]", id="regular expression"),
        pytest.param({"guided_grammar": 'root ::= "yes" | "no"'}, "yes|no", id="grammar"),
        pytest.param(
            {"guided_json": {"type": "integer", "minimum": 0, "maximum": 9}}, r"\d", id="schema"
        ),
        pytest.param(
            {"response_format": {"type": "json_object"}, "max_tokens": 99},
            r"\s*\{(?s:.*)",
            id="any object",
        ),
    ],
)
def test_what_vllms_users_write(server: OpenAIServer, fields: dict[str, Any], form: str) -> None:
    assert re.fullmatch(form, content(server.chat(**fields)))


def test_a_bad_schema_is_refused_with_its_reason(server: OpenAIServer) -> None:
    reply = server.chat(guided_json={"type": "nothing"})
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")


def test_a_required_call_is_made(client: openai.OpenAI) -> None:
    fields: Any = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    answer = client.chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=300, seed=1, **fields
    )
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (call,) = choice.message.tool_calls or []
    assert call.function.name in ("light", "heat")
    assert [*json.loads(call.function.arguments)] == ["on"]


def test_a_named_call_is_that_one(client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "heat"}}
    with client.chat.completions.stream(
        model="demo", messages=MESSAGES, tools=TOOLS, tool_choice=named, max_tokens=300, seed=1
    ) as stream:
        final = stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls or []
    assert call.function.name == "heat"
    assert final.choices[0].finish_reason == "stop"


def test_log_probabilities_of_a_chat(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "temperature": 0}
    fields |= {"max_tokens": 6, "logprobs": True, "top_logprobs": 3}
    (choice,) = client.chat.completions.create(**fields).choices
    assert choice.logprobs is not None
    tokens = choice.logprobs.content or []
    assert len(tokens) == 6
    assert "".join(token.token for token in tokens) == choice.message.content
    for token in tokens:
        assert len(token.top_logprobs) == 3
        # Greedy: the most likely token is the one that was taken.
        assert token.top_logprobs[0].token == token.token
        assert token.logprob <= 0
        assert sum(math.exp(top.logprob) for top in token.top_logprobs) <= 1.0001
        assert bytes(token.bytes or []).decode() == token.token
    streamed = [
        token
        for chunk in client.chat.completions.create(**fields, stream=True)
        for token in (chunk.choices[0].logprobs.content or [] if chunk.choices[0].logprobs else [])
    ]
    assert [t.token for t in streamed] == [t.token for t in tokens]


def test_a_token_of_the_request_ends_the_answer(server: OpenAIServer) -> None:
    """And frees its place in the engine, which would have gone on."""
    fields: dict[str, Any] = {"temperature": 0, "logprobs": 0, "ignore_eos": True}
    fields |= {"return_token_ids": True}
    whole = server.complete(**fields, max_tokens=8).json()["choices"][0]
    ids, stopped = whole["token_ids"], server.engine["stopped"]
    # So many that the engine is not done before it is told to stop.
    reply = server.complete(**fields, max_tokens=1500, stop_token_ids=[ids[3]]).json()
    (choice,) = reply["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ids[3])
    cut = ids.index(ids[3])
    assert choice["text"] == "".join(whole["logprobs"]["tokens"][:cut])
    assert reply["usage"]["completion_tokens"] == cut + 1
    wait_until(lambda: server.engine["stopped"] > stopped, 60, "the end of the request")


@pytest.mark.parametrize("seed", [1, 2])
def test_tools_beside_a_form_give_calls_or_that_form(client: openai.OpenAI, seed: int) -> None:
    answer = client.chat.completions.parse(
        model="demo",
        messages=MESSAGES,
        tools=[openai.pydantic_function_tool(Verdict, name="light")],
        response_format=Verdict,
        parallel_tool_calls=False,  # the demo model would call until max_tokens
        max_tokens=300,
        seed=seed,
    )
    (choice,) = answer.choices
    if choice.message.tool_calls:
        assert isinstance(choice.message.tool_calls[0].function.parsed_arguments, Verdict)
        assert choice.finish_reason == "tool_calls"
    else:
        assert isinstance(choice.message.parsed, Verdict)
