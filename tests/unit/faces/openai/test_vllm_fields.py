"""Fields of vLLM's API that change an answer, and the forms of what they ask for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cog_triton.faces.openai.fields import REFUSED
from cog_triton.generation import Chunk
from cog_triton.request.request import Request
from cog_triton.text.tokenizer import load_tokenizer
from cog_triton.wire import TokenLogProb
from tests.unit.faces.openai.support import MESSAGES, Backend, ask, chat, complete, events

A, B = ord("a"), ord("b")
ANSWER = (Chunk("a", 1, 3, ids=(A,)), Chunk("b", 2, 3, ids=(B,)), Chunk("", 3, 3, "stop", ids=(0,)))
PREFILL = [*MESSAGES, {"role": "assistant", "content": "The answer"}]


def asked(reply: Any, backend: Backend) -> Request:
    assert reply.status_code == 200, reply.text
    assert "warning" not in reply.headers
    return backend.asked[-1][0]


def param(reply: Any) -> Any:
    assert reply.status_code == 400, reply.text
    return reply.json()["error"]["param"]


@pytest.mark.parametrize("send", [chat, complete])
def test_what_goes_to_the_engine_as_it_is(send: Any) -> None:
    backend = Backend(*ANSWER)
    fields = {"allowed_token_ids": [5, 7], "priority": -3, "skip_special_tokens": False}
    request = asked(send(backend, include_stop_str_in_output=True, **fields), backend)
    assert request.allowed_token_ids == (5, 7)
    assert (request.include_stop, request.skip_special_tokens) == (True, False)
    assert backend.tenants[-1] is not None
    assert backend.tenants[-1].priority == -3
    request = asked(send(backend), backend)
    assert request.allowed_token_ids == ()
    assert (request.include_stop, request.skip_special_tokens) == (False, True)
    assert param(send(backend, allowed_token_ids=[])) == "allowed_token_ids"
    assert param(send(backend, allowed_token_ids=[-1])) == "allowed_token_ids"


@pytest.mark.parametrize("name", sorted(REFUSED))
@pytest.mark.parametrize("send", [chat, complete])
def test_what_is_not_done_is_refused_by_name(send: Any, name: str) -> None:
    if send is complete or name != "suffix":
        assert param(send(Backend(*ANSWER), **{name: "something"})) == name
    for nothing in REFUSED[name]:
        asked(send(backend := Backend(*ANSWER), **{name: nothing}), backend)


# Prompts


@pytest.mark.parametrize(
    ("fields", "ids"),
    [
        ({"truncate_prompt_tokens": 3}, [0, ord("x"), ord("y")]),
        ({"truncate_prompt_tokens": 2}, [0, ord("y")]),
        ({"truncate_prompt_tokens": 2, "add_special_tokens": False}, [ord("x"), ord("y")]),
        ({"truncate_prompt_tokens": 1, "add_special_tokens": False}, [ord("y")]),
        ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, [0, ord("x")]),
        ({"truncate_prompt_tokens": 2, "prompt": [5, 6, 7]}, [6, 7]),
        ({"truncate_prompt_tokens": -1, "prompt": [5] * 99, "max_tokens": 4}, [5] * 60),
    ],
)
def test_a_prompt_is_cut_to_its_last_tokens(fields: dict[str, Any], ids: list[int]) -> None:
    """The tokens that begin a text stay. The context has 64."""
    backend = Backend(*ANSWER)
    assert list(asked(complete(backend, **fields), backend).prompt_ids) == ids


def test_a_chat_is_cut_as_well() -> None:
    backend = Backend(*ANSWER)
    request = asked(chat(backend, truncate_prompt_tokens=4), backend)
    assert "".join(map(chr, request.prompt_ids)) == "ello"
    assert param(chat(backend, truncate_prompt_tokens=-2)) == "truncate_prompt_tokens"


def test_the_ids_of_prompt_and_answer() -> None:
    prompt, ids = [0, ord("x"), ord("y")], [A, B, 0]
    (choice,) = complete(Backend(*ANSWER), return_token_ids=True).json()["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (prompt, ids)
    told = events(complete(Backend(*ANSWER), return_token_ids=True, stream=True))
    choices = [event["choices"][0] for event in told]
    assert choices[0]["prompt_token_ids"] == prompt
    assert not any("prompt_token_ids" in choice for choice in choices[1:])
    assert [choice["token_ids"] for choice in choices] == [[A], [B], [0]]

    backend = Backend(*ANSWER)
    whole = chat(backend, return_token_ids=True).json()
    prompt = list(backend.asked[0][0].prompt_ids)
    assert "".join(map(chr, prompt)) == "<user>Hello"
    assert (whole["prompt_token_ids"], whole["choices"][0]["token_ids"]) == (prompt, ids)
    told = events(chat(Backend(*ANSWER), return_token_ids=True, stream=True))
    assert [event.get("prompt_token_ids") for event in told][:2] == [prompt, None]
    choices = [choice for event in told for choice in event["choices"]]
    assert [token for choice in choices for token in choice.get("token_ids", ())] == ids
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "ab"


# Chats that begin an answer


@pytest.fixture
def demo(demo_model: Path) -> Backend:
    backend = Backend(*ANSWER)
    backend.tokenizer = load_tokenizer(str(demo_model))
    return backend


def test_an_answer_is_continued(demo: Backend) -> None:
    prompt = asked(chat(demo, messages=PREFILL, continue_final_message=True), demo).prompt
    assert prompt.endswith("The answer")
    assert not asked(chat(demo, messages=PREFILL), demo).prompt.endswith("The answer")
    message = {"model": "m", "max_tokens": 5, "messages": PREFILL}
    assert asked(ask(demo, "POST", "/v1/messages", json=message), demo).prompt == prompt
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert param(chat(demo, messages=PREFILL, **both)) == "continue_final_message"


def test_without_what_begins_an_answer(demo: Backend) -> None:
    begun = asked(chat(demo), demo).prompt
    bare = asked(chat(demo, add_generation_prompt=False), demo).prompt
    assert begun.startswith(bare)
    assert begun != bare


def test_a_message_without_text_is_not_continued(demo: Backend) -> None:
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    for content in ([call], " ", [{"type": "text", "text": "Well"}, call]):
        messages = [*MESSAGES, {"role": "assistant", "content": content}]
        body = {"model": "m", "max_tokens": 5, "messages": messages}
        reply = ask(demo, "POST", "/v1/messages", json=body)
        assert reply.status_code == 400
        assert "no text that an answer could continue" in reply.json()["error"]["message"]


def test_the_echo_of_a_chat() -> None:
    fields = {"messages": PREFILL, "echo": True}
    whole = chat(Backend(*ANSWER), **fields).json()
    assert whole["choices"][0]["message"]["content"] == "The answerab"
    told = events(chat(Backend(*ANSWER), **fields, stream=True))
    pieces = [choice["delta"].get("content", "") for event in told for choice in event["choices"]]
    assert [piece for piece in pieces if piece] == ["The answer", "a", "b"]
    assert chat(Backend(*ANSWER), echo=True).json()["choices"][0]["message"]["content"] == "ab"


# Counts and log probabilities


@pytest.mark.parametrize("send", [chat, complete])
def test_every_event_has_the_usage_so_far(send: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    told = events(send(Backend(*ANSWER), stream=True, stream_options=options))
    counts = [event["usage"]["completion_tokens"] for event in told]
    assert counts == ([0, 1, 2, 3, 3] if send is chat else [1, 2, 3, 3])
    assert {event["usage"]["prompt_tokens"] for event in told} == {3}
    without = {"continuous_usage_stats": True}
    assert not any(
        "usage" in e for e in events(send(Backend(), stream=True, stream_options=without))
    )


def test_a_text_that_looks_like_usage_stays() -> None:
    text = '"usage":null}\n\n'
    options = {"include_usage": True, "continuous_usage_stats": True}
    backend = Backend(Chunk(text, 1, 3, "stop"))
    told = events(complete(backend, stream=True, stream_options=options))
    assert told[0]["choices"][0]["text"] == text


PROMPT = (
    TokenLogProb(0, 0.0),
    TokenLogProb(A, -0.5, ((A, -0.5), (B, -1.5))),
    TokenLogProb(B, -2.0),
)
WITH_PROMPT = (
    Chunk("a", 1, 3, log_probs=(TokenLogProb(A, -3.0, ((B, -0.25),)),), prompt_log_probs=PROMPT),
    Chunk("", 1, 3, "length"),
)
ENTRIES = [
    None,
    {str(A): {"logprob": -0.5, "rank": 1, "decoded_token": "a"}},
    {str(B): {"logprob": -2.0, "rank": None, "decoded_token": "b"}},
]


def test_the_prompts_log_probabilities() -> None:
    backend = Backend(*WITH_PROMPT)
    reply = chat(backend, prompt_logprobs=0)
    request = asked(reply, backend)
    assert (request.log_probs, request.prompt_log_probs) == (0, True)
    assert reply.json()["prompt_logprobs"] == ENTRIES
    assert reply.json()["choices"][0]["logprobs"] is None
    reply = chat(backend, prompt_logprobs=2, logprobs=True, top_logprobs=0)
    assert asked(reply, backend).log_probs == 2
    second = {**(ENTRIES[1] or {}), str(B): {"logprob": -1.5, "rank": 2, "decoded_token": "b"}}
    assert reply.json()["prompt_logprobs"] == [None, second, ENTRIES[2]]
    (entry,) = reply.json()["choices"][0]["logprobs"]["content"]
    assert (entry["logprob"], entry["top_logprobs"]) == (-3.0, [])
    (choice,) = complete(backend, prompt_logprobs=0).json()["choices"]
    assert (choice["prompt_logprobs"], choice["logprobs"]) == (ENTRIES, None)
    assert param(complete(backend, prompt_logprobs=1, stream=True)) == "prompt_logprobs"
    assert param(complete(backend, prompt_logprobs=21)) == "prompt_logprobs"


def test_the_tokens_own_entry_is_among_the_alternatives() -> None:
    for logprobs, entry in ((0, {"a": -3.0}), (1, {"b": -0.25, "a": -3.0})):
        top = ((B, -0.25),)[:logprobs]
        backend = Backend(Chunk("a", 1, 3, "stop", log_probs=(TokenLogProb(A, -3.0, top),)))
        (choice,) = complete(backend, logprobs=logprobs).json()["choices"]
        assert choice["logprobs"]["top_logprobs"] == [entry]


def test_the_echo_has_the_special_tokens_of_the_request() -> None:
    prompt = [TokenLogProb(token, -1.0) for token in (A, 0, B)]
    chunk = Chunk("c", 1, 3, "stop", log_probs=(TokenLogProb(ord("c"), -1.0),))
    for given, text, offsets in (
        ([A, 0, B], "a\0b", [0, 1, 2, 3]),
        ("a\0b", "a\0b", [0, 1, 2, 3]),
        ("ab", "ab", [0, 1, 1, 2]),  # the tokenizer added the one between
    ):
        backend = Backend(replace(chunk, prompt_log_probs=tuple(prompt)))
        (choice,) = complete(backend, prompt=given, echo=True, logprobs=0).json()["choices"]
        assert choice["text"] == text + "c"
        assert choice["logprobs"]["text_offset"] == offsets
        assert choice["logprobs"]["token_logprobs"][0] is None
        assert choice["logprobs"]["top_logprobs"][0] is None
