"""What bodies ask of the engine and of the chat template; with vLLM's fields."""

import json
from dataclasses import replace
from typing import Any

import pytest

from cog_triton.api.openai.chats.sampling import UNKNOWN_CONTEXT
from cog_triton.api.openai.schemas.sampling import REFUSED
from cog_triton.request.request import Guide, GuideKind, Request
from tests.support import load_cases
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

TABLES = load_cases(__file__, "requests.yaml")


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


@pytest.mark.parametrize(("path", "fields", "place"), TABLES["places"])
def test_every_field_has_its_place(
    path: str, fields: dict[str, Any], place: dict[str, Any]
) -> None:
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


@pytest.mark.parametrize(("fields", "kind", "text"), TABLES["guides"])
def test_structured_output(fields: dict[str, Any], kind: str | None, text: str) -> None:
    assert of_chat(**fields).guide == (kind and Guide(GuideKind[kind], text))


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


@pytest.mark.parametrize(("path", "fields", "same"), TABLES["same"])
def test_the_newer_apis_ask_for_what_a_chat_asks_for(
    path: str, fields: dict[str, Any], same: dict[str, Any]
) -> None:
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


@pytest.mark.parametrize(("fields", "ids"), TABLES["cut"])
def test_a_prompt_is_cut_to_its_last_tokens(fields: dict[str, Any], ids: list[int]) -> None:
    """The tokens that begin a text stay. The context has 64."""
    assert list(asked(Backend(*CHUNKS), TEXT, **fields).prompt_ids) == ids
    whole: dict[str, Any] = {"prompt": [5] * 99, "truncate_prompt_tokens": -1}
    assert len(asked(Backend(*CHUNKS), TEXT, **whole, max_tokens=4).prompt_ids) == 60
    assert "".join(map(chr, of_chat(truncate_prompt_tokens=4).prompt_ids)) == "ello"


@pytest.mark.parametrize("case", TABLES["conversations"])
def test_messages_as_the_template_gets_them(case: dict[str, Any]) -> None:
    backend = talkative(*CHUNKS)
    asked(backend, case["path"], **case["fields"])
    assert backend.tokenizer.messages == case["messages"]


def test_tokens_are_counted_as_the_model_sees_them() -> None:
    fields = {"model": "m", "messages": MESSAGES}
    reply = ask(Backend(), "POST", f"{ANTHROPIC}/count_tokens", json=fields)
    assert reply.json() == {"input_tokens": len("<user>Hello")}


@pytest.mark.parametrize(("path", "fields", "begins", "continues"), TABLES["begun"])
def test_an_answer_begins_or_is_continued(
    path: str, fields: dict[str, Any], begins: bool, continues: bool
) -> None:
    backend = Backend(*CHUNKS)
    asked(backend, path, messages=[*MESSAGES, {"role": "assistant", "content": "The"}], **fields)
    options = backend.tokenizer.options
    assert options["add_generation_prompt"] is begins
    assert options["continue_final_message"] is continues


@pytest.mark.parametrize(("template", "effort", "switches"), TABLES["efforts"])
def test_an_effort_is_the_templates_switch(
    template: str, effort: str, switches: dict[str, Any]
) -> None:
    backend, own = Backend(*CHUNKS, template=template), {"enable_thinking": None}
    asked(backend, RESPONSES, reasoning={"effort": effort})
    assert backend.tokenizer.switches == switches
    asked(backend, CHAT, reasoning_effort=effort, chat_template_kwargs=own)
    assert backend.tokenizer.switches == {**switches, **own}
