"""What bodies ask of the engine and of the chat template; with vLLM's fields."""

import json
from dataclasses import replace
from typing import Any

import pytest

from cog_triton.api.openai.chats.sampling import UNKNOWN_CONTEXT
from cog_triton.api.openai.schemas.sampling import REFUSED
from cog_triton.request.request import Guide, GuideKind, Request
from tests.unit.api.openai.support import (
    ANTHROPIC,
    CHAT,
    CHUNKS,
    MESSAGES,
    RESPONSES,
    TEXT,
    Backend,
    ask,
    chat,
    complete,
    post,
    talkative,
)


def asked(backend: Backend, path: str, **fields: Any) -> Request:
    """The request that a body with seed 0 becomes, of which no field is unknown."""
    reply = post(backend, path, **{"seed": 0, **fields})
    assert (reply.status_code, reply.headers.get("warning")) == (200, None), reply.text
    return backend.asked[-1][0]


def of_chat(**fields: Any) -> Request:
    return asked(talkative(*CHUNKS), CHAT, **fields)


def test_openais_defaults() -> None:
    same: dict[str, Any] = {"seed": 0, "temperature": 1.0, "top_p": 1.0}
    expected = Request(prompt="<user>Hello", max_tokens=64, add_special_tokens=False, **same)
    assert asked(Backend(*CHUNKS), CHAT) == expected
    assert asked(Backend(*CHUNKS), TEXT) == Request(prompt="xy", max_tokens=16, **same)
    unlimited = Backend(*CHUNKS)
    unlimited.context_length = None
    assert asked(unlimited, CHAT).max_tokens == UNKNOWN_CONTEXT


SAME_NAMES = {
    "temperature": 0.5,
    "top_p": 0.25,
    "top_k": 4,
    "min_p": 0.125,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.75,
    "repetition_penalty": 1.5,
    "length_penalty": 0.5,
    "min_tokens": 2,
    "ignore_eos": True,
    "skip_special_tokens": False,
    "priority": -3,
}


@pytest.mark.parametrize(
    ("path", "fields", "place"),
    [
        pytest.param(CHAT, SAME_NAMES, SAME_NAMES, id="fields of the same names"),
        pytest.param(CHAT, {"max_tokens": 5}, {"max_tokens": 5}, id="max_tokens"),
        pytest.param(
            CHAT,
            {"max_completion_tokens": 9, "max_tokens": 5},
            {"max_tokens": 9},
            id="max_completion_tokens before max_tokens",
        ),
        pytest.param(CHAT, {"stop": "x"}, {"stop_sequences": ["x"]}, id="one stop sequence"),
        pytest.param(
            CHAT,
            {"include_stop_str_in_output": True},
            {"include_stop": True},
            id="stop sequence that is kept",
        ),
        pytest.param(CHAT, {"logit_bias": {"7": -1.5}}, {"logit_bias": [[7, -1.5]]}, id="biases"),
        pytest.param(CHAT, {"bad_words": ["bad"]}, {"bad_words": ["bad"]}, id="bad words"),
        pytest.param(
            CHAT, {"stop_token_ids": [5, 7]}, {"stop_token_ids": [5, 7]}, id="stop tokens"
        ),
        pytest.param(
            CHAT, {"allowed_token_ids": [5, 7]}, {"allowed_token_ids": [5, 7]}, id="allowed tokens"
        ),
        pytest.param(CHAT, {"logprobs": True}, {"log_probs": 0}, id="log probabilities"),
        pytest.param(
            CHAT, {"logprobs": True, "top_logprobs": 3}, {"log_probs": 3}, id="likeliest tokens"
        ),
        pytest.param(
            CHAT,
            {"prompt_logprobs": 0},
            {"log_probs": 0, "prompt_log_probs": True},
            id="log probabilities of the prompt",
        ),
        pytest.param(
            CHAT,
            {"prompt_logprobs": 2, "logprobs": True},
            {"log_probs": 2, "prompt_log_probs": True},
            id="likeliest tokens of the prompt",
        ),
        pytest.param(TEXT, {"logprobs": 0}, {"log_probs": 0}, id="log probabilities of a text"),
    ],
)
def test_every_field_has_its_place(
    path: str, fields: dict[str, Any], place: dict[str, Any]
) -> None:
    """``place`` has the fields of the engine's request that the body's fields change."""
    default = asked(Backend(*CHUNKS), path)
    assert asked(Backend(*CHUNKS), path, **fields) == replace(default, **place)


def test_padding_is_that_of_the_settings_and_the_end_is_the_deployments() -> None:
    request = asked(Backend(*CHUNKS, END_ID="7", PAD_ID="8"), CHAT)
    assert (request.end_id, request.pad_id) == (None, 8)


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_the_models_recommended_parameters_are_the_defaults(path: str) -> None:
    backend = Backend(*CHUNKS)
    backend.sampling_defaults = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1}
    request = asked(backend, path, top_p=0.5, temperature=0)
    assert (request.temperature, request.top_p) == (0, 0.5)
    assert (request.top_k, request.min_p) == (20, 0.1)


@pytest.mark.parametrize("seed", [None, -1])
def test_no_seed_is_drawn_where_that_costs_time(seed: int | None) -> None:
    backend = Backend(*CHUNKS)
    backend.draws_seeds = False
    assert complete(backend, prompt="a", n=2, seed=seed).status_code == 200
    assert complete(backend, prompt="a", n=2, seed=7).status_code == 200
    assert [request.seed for request, _ in backend.asked[:2]] == [None, None]
    assert {request.seed for request, _ in backend.asked[2:]} == {7, 8}


def test_a_seed_counts_up() -> None:
    backend = Backend(*CHUNKS)
    assert complete(backend, prompt=[[1, 2], [3]], n=2, seed=2**64 - 1).status_code == 200
    pairs = sorted((request.prompt_ids, request.seed) for request, _ in backend.asked)
    assert pairs == [((1, 2), 0), ((1, 2), 2**64 - 1), ((3,), 0), ((3,), 2**64 - 1)]


@pytest.mark.parametrize(
    ("fields", "guide"),
    [
        pytest.param({"response_format": {"type": "text"}}, None, id="text"),
        pytest.param(
            {"response_format": {"type": "json_object"}}, Guide(GuideKind.JSON, ""), id="JSON"
        ),
        pytest.param(
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": 1}}}},
            Guide(GuideKind.JSON_SCHEMA, '{"a": 1}'),
            id="schema",
        ),
        pytest.param(
            {"response_format": {"type": "json", "schema": {"a": 1}}},
            Guide(GuideKind.JSON_SCHEMA, '{"a": 1}'),
            id="schema beside its type",
        ),
        pytest.param(
            {"response_format": {"type": "regex", "regex": "a+"}},
            Guide(GuideKind.REGEX, "a+"),
            id="regular expression",
        ),
        pytest.param(
            {"response_format": {"type": "ebnf", "ebnf": "x"}},
            Guide(GuideKind.GRAMMAR, "x"),
            id="grammar",
        ),
        pytest.param(
            {"structured_outputs": {"json": {}}},
            Guide(GuideKind.JSON_SCHEMA, "{}"),
            id="structured_outputs, schema",
        ),
        pytest.param(
            {"structured_outputs": {"regex": "a+", "json": None}},
            Guide(GuideKind.REGEX, "a+"),
            id="structured_outputs, regular expression",
        ),
        pytest.param(
            {"structured_outputs": {"choice": ["a"]}},
            Guide(GuideKind.CHOICE, '["a"]'),
            id="structured_outputs, choice",
        ),
        pytest.param(
            {"structured_outputs": {"json_object": True, "disable_any_whitespace": False}},
            Guide(GuideKind.JSON, ""),
            id="structured_outputs, JSON",
        ),
        pytest.param(
            {"guided_json": {"a": 1}}, Guide(GuideKind.JSON_SCHEMA, '{"a": 1}'), id="guided_json"
        ),
        pytest.param(
            {"guided_json": '{"a": 1}'},
            Guide(GuideKind.JSON_SCHEMA, '{"a": 1}'),
            id="guided_json as a text",
        ),
        pytest.param({"guided_regex": "a+"}, Guide(GuideKind.REGEX, "a+"), id="guided_regex"),
        pytest.param(
            {"guided_grammar": "root ::= x"},
            Guide(GuideKind.GRAMMAR, "root ::= x"),
            id="guided_grammar",
        ),
        pytest.param(
            {"guided_choice": ["a", "b"]}, Guide(GuideKind.CHOICE, '["a", "b"]'), id="guided_choice"
        ),
    ],
)
def test_structured_output(fields: dict[str, Any], guide: Guide | None) -> None:
    assert of_chat(**fields).guide == guide


def test_an_enforced_call_is_a_guide() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    enforced: dict[str, Any] = {"tools": tools, "tool_choice": "required"}
    request = of_chat(**enforced)
    assert request.guide is not None
    assert json.loads(request.guide.text)["items"]["properties"]["name"] == {"const": "f"}
    assert request.shown_tokens == ("<tool_call>", "</tool_call>")
    # Of a text, of which there is none.
    assert of_chat(**enforced, response_format={"type": "json_object"}).guide == request.guide
    reply = chat(talkative(), **enforced, guided_regex="a")
    assert "tool_choice and guided_regex cannot be combined" in reply.text


TOOL_F = {"type": "function", "function": {"name": "f"}}
TOOL_G = {"type": "function", "function": {"name": "g"}}
TOOL_F_WITH_PARAMETERS = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object"}},
}
RESPONSES_F = {"type": "function", "name": "f"}
RESPONSES_G = {"type": "function", "name": "g"}
ANTHROPICS_F = {"name": "f", "input_schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("path", "fields", "same"),
    [
        pytest.param(
            CHAT,
            {
                "tools": [TOOL_F, TOOL_G],
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [TOOL_G]},
                },
            },
            {"tools": [TOOL_G]},
            id="chat: tools that are allowed",
        ),
        pytest.param(
            CHAT,
            {
                "tools": [TOOL_F, TOOL_G],
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "required", "tools": [TOOL_G]},
                },
            },
            {"tools": [TOOL_G], "tool_choice": "required"},
            id="chat: tools of which one is required",
        ),
        pytest.param(
            RESPONSES,
            {
                "tools": [RESPONSES_F, RESPONSES_G],
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [RESPONSES_G]},
            },
            {"tools": [TOOL_G]},
            id="response: tools that are allowed",
        ),
        pytest.param(
            RESPONSES,
            {
                "tools": [RESPONSES_F, RESPONSES_G],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "required",
                    "tools": [RESPONSES_G],
                },
            },
            {"tools": [TOOL_G], "tool_choice": "required"},
            id="response: tools of which one is required",
        ),
        pytest.param(
            RESPONSES, {"max_output_tokens": 5}, {"max_completion_tokens": 5}, id="response: tokens"
        ),
        pytest.param(
            RESPONSES,
            {"top_logprobs": 2},
            {"logprobs": True, "top_logprobs": 2},
            id="response: likeliest tokens",
        ),
        pytest.param(
            RESPONSES,
            {
                "text": {
                    "format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
                }
            },
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "object"}},
                }
            },
            id="response: schema",
        ),
        pytest.param(
            RESPONSES,
            {"tools": [RESPONSES_F, RESPONSES_G], "tool_choice": RESPONSES_F},
            {"tools": [TOOL_F, TOOL_G], "tool_choice": TOOL_F},
            id="response: named tool",
        ),
        pytest.param(
            ANTHROPIC,
            {"max_tokens": 9, "stop_sequences": ["x"], "top_k": 5},
            {"max_tokens": 9, "stop": "x", "top_k": 5},
            id="message: tokens, stop sequence, top_k",
        ),
        pytest.param(
            ANTHROPIC,
            {
                "max_tokens": 9,
                "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
            },
            {
                "max_tokens": 9,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "object"}},
                },
            },
            id="message: schema",
        ),
        pytest.param(
            ANTHROPIC,
            {"max_tokens": 9, "thinking": {"type": "disabled"}},
            {"max_tokens": 9, "reasoning_effort": "none"},
            id="message: no thoughts",
        ),
        pytest.param(
            ANTHROPIC,
            {"max_tokens": 9, "tools": [ANTHROPICS_F], "tool_choice": {"type": "any"}},
            {"max_tokens": 9, "tools": [TOOL_F_WITH_PARAMETERS], "tool_choice": "required"},
            id="message: any tool",
        ),
        pytest.param(
            ANTHROPIC,
            {
                "max_tokens": 9,
                "tools": [ANTHROPICS_F],
                "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
            },
            {
                "max_tokens": 9,
                "tools": [TOOL_F_WITH_PARAMETERS],
                "tool_choice": TOOL_F,
                "parallel_tool_calls": False,
            },
            id="message: named tool, and one call",
        ),
    ],
)
def test_the_newer_apis_ask_for_what_a_chat_asks_for(
    path: str, fields: dict[str, Any], same: dict[str, Any]
) -> None:
    """``same`` has the fields of a chat that ask for the same."""
    template = "tools <tool_call> {% if enable_thinking is defined %}"
    newer, older = Backend(*CHUNKS, template=template), Backend(*CHUNKS, template=template)
    assert asked(newer, path, **fields) == asked(older, CHAT, **same)
    assert newer.tokenizer.switches == older.tokenizer.switches
    names = [tool["function"]["name"] for tool in newer.tokenizer.tools]
    assert names == [tool["function"]["name"] for tool in older.tokenizer.tools]


def test_unknown_fields_are_named() -> None:
    assert "warning" not in chat(Backend(*CHUNKS), store=True, best_of=1).headers
    unknown = chat(Backend(*CHUNKS), zebra=1, **{'a"\r\nb': 2, "é" * 50: 3}).headers["warning"]
    assert unknown == f'199 cog-triton "ignored fields: ab, zebra, {"?" * 40}"'
    known = post(Backend(*CHUNKS), ANTHROPIC, context_management={"edits": []})
    assert "warning" not in known.headers
    stored = post(Backend(*CHUNKS), RESPONSES, store=True)
    assert (stored.json()["store"], "warning" in stored.headers) == (False, False)


@pytest.mark.parametrize("name", sorted(REFUSED))
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_what_is_not_done_is_refused_by_name(path: str, name: str) -> None:
    if path == TEXT or name != "suffix":
        reply = post(Backend(*CHUNKS), path, **{name: "something"})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, name)
    for nothing in REFUSED[name]:
        asked(Backend(*CHUNKS), path, **{name: nothing})


# Prompts and templates


@pytest.mark.parametrize(
    ("fields", "ids"),
    [
        pytest.param({"truncate_prompt_tokens": 2}, [0, 121], id="two tokens"),
        pytest.param(
            {"truncate_prompt_tokens": 1, "add_special_tokens": False},
            [121],
            id="one token without the first",
        ),
        pytest.param(
            {"truncate_prompt_tokens": 2, "truncation_side": "right"}, [0, 120], id="from the right"
        ),
        pytest.param({"truncate_prompt_tokens": 2, "prompt": [5, 6, 7]}, [6, 7], id="ids"),
    ],
)
def test_a_prompt_is_cut_to_its_last_tokens(fields: dict[str, Any], ids: list[int]) -> None:
    """The tokens that begin a text stay. The context has 64."""
    assert list(asked(Backend(*CHUNKS), TEXT, **fields).prompt_ids) == ids
    whole: dict[str, Any] = {"prompt": [5] * 99, "truncate_prompt_tokens": -1}
    assert len(asked(Backend(*CHUNKS), TEXT, **whole, max_tokens=4).prompt_ids) == 60
    assert "".join(map(chr, of_chat(truncate_prompt_tokens=4).prompt_ids)) == "ello"


@pytest.mark.parametrize(
    ("path", "fields", "messages"),
    [
        pytest.param(
            RESPONSES,
            {
                "instructions": "Be kind",
                "input": [
                    {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
                    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm"}]},
                    {
                        "type": "message",
                        "role": "assistant",
                        "content": [{"type": "output_text", "text": "A"}],
                    },
                    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
                    {
                        "type": "function_call",
                        "call_id": "c2",
                        "name": "f",
                        "arguments": '{"a": 1}',
                    },
                    {"type": "function_call_output", "call_id": "c1", "output": "one"},
                    {"type": "message", "role": "assistant", "content": "B"},
                    {"type": "message", "role": "assistant", "content": "C"},
                    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "So"}]},
                    {"type": "message", "role": "assistant", "content": "D"},
                ],
            },
            [
                {"role": "system", "content": "Be kind"},
                {"role": "user", "content": "Hi"},
                {
                    "role": "assistant",
                    "content": "A",
                    "reasoning_content": "Hm",
                    "tool_calls": [
                        {
                            "id": "c1",
                            "type": "function",
                            "function": {"name": "f", "arguments": {}},
                        },
                        {
                            "id": "c2",
                            "type": "function",
                            "function": {"name": "f", "arguments": {"a": 1}},
                        },
                    ],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "one"},
                {"role": "assistant", "content": "B"},
                {"role": "assistant", "content": "C"},
                {"role": "assistant", "content": "D", "reasoning_content": "So"},
            ],
            id="items of a response",
        ),
        pytest.param(
            ANTHROPIC,
            {
                "system": [{"type": "text", "text": "Be"}, {"type": "text", "text": "kind"}],
                "messages": [
                    {"role": "user", "content": "Hi"},
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "thinking", "thinking": "Hm", "signature": ""},
                            {"type": "text", "text": "A"},
                            {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
                        ],
                    },
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "tool_use_id": "t1",
                                "content": [{"type": "text", "text": "1"}],
                            },
                            {"type": "text", "text": "So?", "cache_control": {"type": "ephemeral"}},
                        ],
                    },
                ],
            },
            [
                {"role": "system", "content": "Be\nkind"},
                {"role": "user", "content": "Hi"},
                {
                    "role": "assistant",
                    "content": "A",
                    "reasoning_content": "Hm",
                    "tool_calls": [
                        {
                            "id": "t1",
                            "type": "function",
                            "function": {"name": "f", "arguments": {"a": 1}},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "t1", "content": "1"},
                {"role": "user", "content": "So?"},
            ],
            id="blocks of messages",
        ),
        pytest.param(
            CHAT,
            {
                "messages": [
                    {"role": "user", "content": "Hi"},
                    {"role": "assistant", "content": None, "refusal": "I must not."},
                ]
            },
            [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "I must not."}],
            id="refusal",
        ),
        pytest.param(
            CHAT,
            {
                "messages": [
                    {"role": "user", "content": "Hi"},
                    {
                        "role": "assistant",
                        "content": [{"type": "refusal", "refusal": "I must not."}],
                    },
                ]
            },
            [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "I must not."}],
            id="refusal in the content",
        ),
    ],
)
def test_messages_as_the_template_gets_them(
    path: str, fields: dict[str, Any], messages: list[dict[str, Any]]
) -> None:
    backend = talkative(*CHUNKS)
    asked(backend, path, **fields)
    assert backend.tokenizer.messages == messages


def test_tokens_are_counted_as_the_model_sees_them() -> None:
    fields = {"model": "m", "messages": MESSAGES}
    reply = ask(Backend(), "POST", f"{ANTHROPIC}/count_tokens", json=fields)
    assert reply.json() == {"input_tokens": len("<user>Hello")}


@pytest.mark.parametrize(
    ("path", "fields", "begins", "continues"),
    [
        pytest.param(CHAT, {}, True, False, id="chat: begins another"),
        pytest.param(CHAT, {"add_generation_prompt": False}, False, False, id="chat: neither"),
        pytest.param(CHAT, {"continue_final_message": True}, False, True, id="chat: goes on"),
        pytest.param(ANTHROPIC, {}, False, True, id="message: goes on"),
    ],
)
def test_an_answer_begins_or_is_continued(
    path: str, fields: dict[str, Any], begins: bool, continues: bool
) -> None:
    backend = Backend(*CHUNKS)
    asked(backend, path, messages=[*MESSAGES, {"role": "assistant", "content": "The"}], **fields)
    options = backend.tokenizer.options
    assert options["add_generation_prompt"] is begins
    assert options["continue_final_message"] is continues


@pytest.mark.parametrize(
    ("template", "effort", "switches"),
    [
        pytest.param("{{ reasoning_effort }}", "low", {"reasoning_effort": "low"}, id="efforts"),
        pytest.param(
            "{% if enable_thinking is defined %}",
            "none",
            {"enable_thinking": False},
            id="enable_thinking, off",
        ),
        pytest.param(
            "{% if enable_thinking is defined %}",
            "high",
            {"enable_thinking": True},
            id="enable_thinking, on",
        ),
        pytest.param(
            "{% if not thinking is defined %}", "none", {"thinking": False}, id="thinking, off"
        ),
        pytest.param("{{ messages }} thinking of it", "high", {}, id="no switch"),
    ],
)
def test_an_effort_is_the_templates_switch(
    template: str, effort: str, switches: dict[str, Any]
) -> None:
    backend, own = Backend(*CHUNKS, template=template), {"enable_thinking": None}
    asked(backend, RESPONSES, reasoning={"effort": effort})
    assert backend.tokenizer.switches == switches
    asked(backend, CHAT, reasoning_effort=effort, chat_template_kwargs=own)
    assert backend.tokenizer.switches == {**switches, **own}
