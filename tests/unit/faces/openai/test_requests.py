"""Bodies to requests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cog_triton.faces.openai.completions import prompt_requests
from cog_triton.faces.openai.errors import ApiError
from cog_triton.faces.openai.fields import UNKNOWN_CONTEXT, ChatBody, CompletionBody, check_fields
from cog_triton.faces.openai.turns import chat_turn
from cog_triton.request.request import Guide, GuideKind, Request
from tests.unit.faces.openai.support import CHUNKS, MESSAGES, Backend, ask, chat, served, talkative


def of_chat(backend: Backend | None = None, **fields: Any) -> Request:
    body = {"model": "m", "messages": MESSAGES, "seed": 0, **fields}
    return chat_turn(ChatBody.model_validate(body), served(backend or Backend())).request


def of_text(**fields: Any) -> list[Request]:
    body = {"model": "m", "prompt": "Hello", "seed": 0, **fields}
    return prompt_requests(CompletionBody.model_validate(body), served(Backend()))


def test_openais_defaults() -> None:
    assert of_chat() == Request(
        prompt="<user>Hello",
        seed=0,
        max_tokens=64,
        temperature=1.0,
        top_p=1.0,
        add_special_tokens=False,
    )
    expected = Request(prompt="Hello", seed=0, max_tokens=16, temperature=1.0, top_p=1.0)
    assert of_text() == [expected]
    unlimited = Backend()
    unlimited.context_length = None
    assert of_chat(unlimited).max_tokens == UNKNOWN_CONTEXT


def test_every_field_has_its_place() -> None:
    same: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.25,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.75,
        "top_k": 4,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "min_tokens": 2,
        "ignore_eos": True,
    }
    request = of_chat(
        **same,
        max_completion_tokens=9,
        max_tokens=5,
        stop="x",
        logit_bias={"7": -1.5},
        bad_words=["bad"],
        stop_token_ids=[5, 7],
        logprobs=True,
        top_logprobs=3,
        guided_regex="a+",
    )
    assert request == Request(
        **same,
        prompt="<user>Hello",
        seed=0,
        max_tokens=9,
        stop_sequences=("x",),
        logit_bias=((7, -1.5),),
        bad_words=("bad",),
        stop_token_ids=(5, 7),
        log_probs=3,
        guide=Guide(GuideKind.REGEX, "a+"),
        add_special_tokens=False,
    )


def test_the_settings_end_token_is_that_of_every_request() -> None:
    assert of_chat(Backend(END_ID="7", PAD_ID="8")).end_id == 7
    assert of_chat(Backend(END_ID="7", PAD_ID="8")).pad_id == 8


def test_a_seed_counts_up() -> None:
    last = Backend(*CHUNKS)
    assert chat(last, n=2, seed=2**64 - 1).status_code == 200
    assert sorted(request.seed for request, _ in last.asked) == [0, 2**64 - 1]
    backend = Backend(*CHUNKS)
    body = {"model": "m", "prompt": [[1, 2], [3]], "n": 2, "seed": 5}
    assert ask(backend, "POST", "/v1/completions", json=body).status_code == 200
    asked = [(request.prompt_ids, request.seed) for request, _ in backend.asked]
    assert sorted(asked) == [((1, 2), 5), ((1, 2), 6), ((3,), 5), ((3,), 6)]


def test_logprobs_without_alternatives() -> None:
    assert of_chat(logprobs=True).log_probs == 0
    assert of_text(logprobs=0)[0].log_probs == 0


SCHEMA = Guide(GuideKind.JSON_SCHEMA, '{"a": 1}')
REGEX = Guide(GuideKind.REGEX, "a+")


@pytest.mark.parametrize(
    ("name", "value", "guide"),
    [
        ("response_format", {"type": "text"}, None),
        ("response_format", {"type": "json_object"}, Guide(GuideKind.JSON)),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"a": 1}}}, SCHEMA),
        ("response_format", {"type": "json", "schema": {"a": 1}}, SCHEMA),
        ("response_format", {"type": "regex", "regex": "a+"}, REGEX),
        ("response_format", {"type": "ebnf", "ebnf": "x"}, Guide(GuideKind.GRAMMAR, "x")),
        ("structured_outputs", {"json": {}}, Guide(GuideKind.JSON_SCHEMA, "{}")),
        ("structured_outputs", {"regex": "a+", "json": None}, REGEX),
        ("structured_outputs", {"choice": ["a"]}, Guide(GuideKind.CHOICE, '["a"]')),
        (
            "structured_outputs",
            {"json_object": True, "disable_any_whitespace": False},
            Guide(GuideKind.JSON),
        ),
        ("guided_json", {"a": 1}, SCHEMA),
        ("guided_json", '{"a": 1}', SCHEMA),
        ("guided_grammar", "root ::= x", Guide(GuideKind.GRAMMAR, "root ::= x")),
        ("guided_choice", ["a", "b"], Guide(GuideKind.CHOICE, '["a", "b"]')),
    ],
)
def test_structured_output(name: str, value: Any, guide: Guide | None) -> None:
    assert of_chat(**{name: value}).guide == guide


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "must say what"),
        ({"json_object": False}, "must say what"),
        ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern is not supported"),
        ({"structural_tag": "{}"}, "structural_tag is not supported"),
        ({"regex": "a", "choice": ["a"]}, r"regex and structured_outputs.choice contradict"),
    ],
)
def test_structured_outputs_that_cannot_be_had(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError, match=f"structured_outputs.*{message}") as raised:
        of_chat(structured_outputs=given)
    assert str(raised.value.param).startswith("structured_outputs")


@pytest.mark.parametrize("kind", ["json_schema", "json", "regex", "ebnf"])
def test_a_format_without_its_text_is_refused(kind: str) -> None:
    with pytest.raises(ApiError, match="response_format must have") as raised:
        of_chat(response_format={"type": kind})
    assert raised.value.param == "response_format"


def test_an_enforced_call_is_a_guide() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    body = {"model": "m", "messages": MESSAGES, "tools": [tool], "tool_choice": "required"}
    backend = served(talkative())
    request = chat_turn(ChatBody.model_validate(body), backend).request
    assert request.guide is not None
    assert json.loads(request.guide.text)["items"]["properties"]["name"] == {"const": "f"}
    assert request.shown_tokens == ("<tool_call>", "</tool_call>")
    # Of a text, of which there is none.
    formatted = ChatBody.model_validate({**body, "response_format": {"type": "json_object"}})
    assert chat_turn(formatted, backend).request.guide == request.guide
    both = ChatBody.model_validate({**body, "guided_regex": "a"})
    with pytest.raises(ApiError, match="tool_choice and guided_regex contradict"):
        chat_turn(both, backend)


def test_unknown_fields_are_named_and_known_ones_refused() -> None:
    def checked(**fields: Any) -> dict[str, str]:
        return check_fields(ChatBody.model_validate({"model": "m", "messages": MESSAGES, **fields}))

    assert checked(store=True, best_of=1, modalities=["text"]) == {}
    warning = checked(zebra=1, **{'a"\r\nb': 2, "é" * 50: 3})["Warning"]
    assert warning == f'199 cog-triton "ignored fields: ab, zebra, {"?" * 40}"'
    for name, value in (("best_of", 3), ("functions", [{}]), ("modalities", ["audio"])):
        with pytest.raises(ApiError) as raised:
            checked(**{name: value})
        assert (raised.value.status, raised.value.param) == (400, name)
