"""What agents that were written for Anthropic's API send, and what becomes of it here."""

import json
from typing import Any

import httpx
import pytest

from cog_triton.api.openai.chats import from_messages
from cog_triton.api.openai.schemas.messages import MessageTurn
from cog_triton.errors import PromptTooLong
from tests.unit.api.openai.support import (
    ANTHROPIC,
    CHUNKS,
    MESSAGES,
    Backend,
    ask,
    post,
    talkative,
)

HI = {"role": "user", "content": "Hi"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
PDF = {
    "type": "document",
    "source": {"type": "base64", "media_type": "application/pdf", "data": "A"},
}
IMAGE_TEXT = "[image left out: this model reads text only]"
PDF_TEXT = "[document left out: this model reads text only]"


def asked(**fields: Any) -> tuple[httpx.Response, list[Any]]:
    """The reply to a body, and the messages that the chat template got."""
    backend = talkative(*CHUNKS)
    reply = post(backend, ANTHROPIC, **fields)
    assert reply.status_code == 200, reply.text
    return reply, backend.tokenizer.messages


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def result(content: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "t1", "content": content}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


CALL = {
    "role": "assistant",
    "content": [{"type": "tool_use", "id": "t1", "name": "f", "input": {}}],
}


def test_turns_of_one_role_are_joined_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of them, joined one by one, took a processor's second."""
    made: list[MessageTurn] = []

    def make(**fields: Any) -> MessageTurn:
        made.append(MessageTurn(**fields))
        return made[-1]

    monkeypatch.setattr(from_messages, "MessageTurn", make)
    _, messages = asked(messages=[HI] * 50)
    assert messages == [{"role": "user", "content": "\n".join(["Hi"] * 50)}]
    assert len(made) == 1


@pytest.mark.parametrize(
    ("messages", "last", "warning"),
    [
        pytest.param([user(result("sun"))], {"role": "tool", "content": "sun"}, None, id="text"),
        pytest.param(
            [user(result([text("sun"), text("rain")]))],
            {"role": "tool", "content": "sun\nrain"},
            None,
            id="blocks of text",
        ),
        pytest.param(
            [user(result([text("see"), IMAGE]))],
            {"role": "tool", "content": f"see\n{IMAGE_TEXT}"},
            "content of type image",
            id="a picture in a result",
        ),
        pytest.param([user(result(None))], {"role": "tool", "content": ""}, None, id="nothing"),
        pytest.param(
            [user(result("sun"), text("So?"))],
            {"role": "user", "content": "So?"},
            None,
            id="text behind a result",
        ),
    ],
)
def test_results_of_tools(messages: list[Any], last: Any, warning: str | None) -> None:
    reply, template = asked(messages=[HI, CALL, *messages])
    assert {name: template[-1][name] for name in last} == last
    assert reply.headers.get("warning") == (warning and f'199 cog-triton "left out: {warning}"')


def test_content_that_a_model_of_text_cannot_read_is_named_to_it_and_to_the_client() -> None:
    document = {"type": "document", "title": "Notes", "source": {"type": "text", "data": "One."}}
    reply, template = asked(messages=[user(text("See"), IMAGE, PDF, document)])
    assert template[-1]["content"] == f"See\n{IMAGE_TEXT}\n{PDF_TEXT}\nNotes\nOne."
    assert reply.headers["warning"] == (
        '199 cog-triton "left out: content of type image, content of type document"'
    )


def test_a_system_turn_between_others_reaches_the_template() -> None:
    _, template = asked(messages=[HI, {"role": "system", "content": "Two helpers are at hand."}])
    assert template[-1] == {"role": "system", "content": "Two helpers are at hand."}


def test_turns_of_one_role_are_one() -> None:
    answer = {"role": "assistant", "content": "A"}
    _, template = asked(messages=[HI, HI, answer, answer, user(text("x")), HI])
    assert [(turn["role"], turn["content"]) for turn in template] == [
        ("user", "Hi\nHi"),
        ("assistant", "A\nA"),
        ("user", "x\nHi"),
    ]


@pytest.mark.parametrize(
    "line", ["x-anthropic-billing-header: cc_version=2.1; cch=1;", " x-anthropic-billing-header:"]
)
def test_a_line_for_the_bill_does_not_reach_the_prompt(line: str) -> None:
    _, template = asked(system=[text(line), text("You help.")])
    assert template[0] == {"role": "system", "content": "You help."}


def test_tools_that_only_anthropic_can_run_are_left_out() -> None:
    own = {"name": "mcp__" + "x" * 123, "input_schema": {"type": "object"}}
    backend = talkative(*CHUNKS)
    tools = [own, {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}]
    reply = post(backend, ANTHROPIC, tools=tools, tool_choice={"type": "auto"})
    assert [tool["function"]["name"] for tool in backend.tokenizer.tools] == [own["name"]]
    assert reply.headers["warning"] == '199 cog-triton "left out: tool web_search_20250305"'


@pytest.mark.parametrize("choice", [None, {"type": "auto"}, {"type": "any"}])
def test_tools_for_a_template_without_any_are_left_out(choice: Any) -> None:
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    reply = post(Backend(*CHUNKS), ANTHROPIC, tools=tools, tool_choice=choice)
    assert reply.status_code == 200, reply.text
    assert "tools since the chat template does not support them" in reply.headers["warning"]


@pytest.mark.parametrize("field", ["container", "mcp_servers", "something_new"])
def test_fields_that_cannot_be_honoured_are_named(field: str) -> None:
    reply, _ = asked(**{field: ["x"]})
    assert reply.headers["warning"] == f'199 cog-triton "ignored fields: {field}"'


def test_the_served_model_answers_for_anthropics_models() -> None:
    reply, _ = asked(model="claude-haiku-4-5")
    assert reply.json()["model"] == "claude-haiku-4-5"
    assert reply.headers["warning"] == '199 cog-triton "left out: model claude-haiku-4-5"'
    body = {"model": "claude-haiku-4-5", "messages": MESSAGES}
    assert ask(Backend(), "POST", f"{ANTHROPIC}/count_tokens", json=body).status_code == 200
    assert post(Backend(*CHUNKS), ANTHROPIC, model="gpt-5").status_code == 404


def test_models_as_anthropics_clients_read_them() -> None:
    headers = {"anthropic-version": "2023-06-01"}
    models = ask(Backend(), "GET", "/v1/models?limit=1000", headers=headers).json()
    card = {"type": "model", "id": "m", "display_name": "m", "created_at": "1970-01-01T00:00:01Z"}
    assert models["data"][0] == card
    assert (models["has_more"], models["first_id"], models["last_id"]) == (False, "m", "other")
    assert ask(Backend(), "GET", "/v1/models/m", headers=headers).json() == card
    assert ask(Backend(), "GET", "/v1/models/m").json()["object"] == "model"


# What agents send beside the conversation


TOOL = {"name": "f", "description": "Does f.", "input_schema": {"type": "object"}}
THOUGHTFUL = {
    "role": "assistant",
    "content": [
        {"type": "thinking", "thinking": "Hm.", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
    ],
}
CACHED = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
COUNTED: dict[str, dict[str, Any]] = {
    "a text": {},
    "tools": {"tools": [TOOL]},
    "a choice of tools": {"tools": [TOOL], "tool_choice": {"type": "any"}},
    "no tool to be called": {"tools": [TOOL], "tool_choice": {"type": "none"}},
    "a system list": {"system": [CACHED, text("Answer in French.")]},
    "results of tools": {"messages": [HI, CALL, user(result([text("sun"), IMAGE]), text("So?"))]},
    "thoughts": {"messages": [HI, THOUGHTFUL, user(result("sun"))]},
    "thinking": {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    "a turn of the system": {"messages": [HI, {"role": "system", "content": "Two helpers."}, HI]},
    "an answer that is begun": {"messages": [HI, {"role": "assistant", "content": "Well,"}]},
    "a model of Anthropic's": {"model": "claude-sonnet-4-5", "system": "Be brief."},
}


@pytest.mark.parametrize("fields", COUNTED.values(), ids=COUNTED)
def test_a_count_is_that_of_the_prompt_of_the_same_request(fields: dict[str, Any]) -> None:
    backend = talkative(*CHUNKS)
    reply = post(backend, ANTHROPIC, **fields)
    assert reply.status_code == 200, reply.text
    ((request, _),) = backend.asked
    counted = post(backend, f"{ANTHROPIC}/count_tokens", **{"messages": MESSAGES, **fields})
    assert counted.json() == {"input_tokens": len(request.prompt)}  # a character is a token here
    assert request.add_special_tokens is False


THINKS = "tools <tool_call> </think> {% if enable_thinking is defined %}"
EFFORT = "tools <tool_call> reasoning_effort"


@pytest.mark.parametrize(
    ("thinking", "switches", "warning"),
    [
        ({"type": "enabled", "budget_tokens": 1024}, True, "thinking.budget_tokens"),
        ({"type": "adaptive"}, True, None),
        ({"type": "disabled"}, False, None),
        ({"type": "interleaved"}, None, "thinking of type interleaved"),
        (None, None, None),
    ],
)
def test_thinking_is_the_switch_of_the_template(
    thinking: Any, switches: bool | None, warning: str | None
) -> None:
    backend = Backend(*CHUNKS, template=THINKS)
    reply = post(backend, ANTHROPIC, thinking=thinking)
    assert reply.status_code == 200, reply.text
    wanted = {} if switches is None else {"enable_thinking": switches}
    assert backend.tokenizer.switches == wanted
    assert reply.headers.get("warning") == (warning and f'199 cog-triton "left out: {warning}"')


@pytest.mark.parametrize(
    ("template", "effort", "switches", "warned"),
    [
        (EFFORT, "low", {"reasoning_effort": "low"}, False),
        (THINKS, "medium", {"enable_thinking": True}, False),
        (EFFORT, "utmost", {}, True),
        ("tools", "low", {}, True),
    ],
)
def test_an_effort_is_what_the_template_takes(
    template: str, effort: str, switches: dict[str, Any], warned: bool
) -> None:
    backend = Backend(*CHUNKS, template=template)
    reply = post(backend, ANTHROPIC, output_config={"effort": effort})
    assert reply.status_code == 200, reply.text
    assert backend.tokenizer.switches == switches
    assert ("output_config.effort" in reply.headers.get("warning", "")) is warned


@pytest.mark.parametrize("place", ["output_config", "output_format"])
def test_an_output_format_is_a_guide(place: str) -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    backend = talkative(*CHUNKS)
    post(backend, ANTHROPIC, **{place: {"format": form} if place == "output_config" else form})
    ((request, _),) = backend.asked
    assert request.guide is not None
    assert json.loads(request.guide.text) == SCHEMA


def test_an_output_format_that_is_not_known_is_named() -> None:
    reply, _ = asked(output_config={"format": {"type": "xml"}})
    assert reply.headers["warning"] == '199 cog-triton "left out: output format of type xml"'


@pytest.mark.parametrize(
    ("fields", "warning"),
    [
        ({"metadata": {"user_id": "u"}}, None),
        ({"service_tier": "auto"}, None),
        ({"cache_control": {"type": "ephemeral"}}, None),
        ({"context_management": {"edits": []}}, None),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            "left out: context_management",
        ),
        ({"mcp_servers": [{"type": "url", "url": "http://x", "name": "x"}]}, "mcp_servers"),
        ({"container": {"skills": []}}, "container"),
    ],
)
def test_no_field_of_an_agent_ends_its_session(fields: dict[str, Any], warning: str | None) -> None:
    reply, _ = asked(**fields)
    if warning is None:
        assert "warning" not in reply.headers
    else:
        assert warning in reply.headers["warning"]
    counted = post(talkative(), f"{ANTHROPIC}/count_tokens", messages=MESSAGES, **fields)
    assert counted.status_code == 200, counted.text


@pytest.mark.parametrize("path", [ANTHROPIC, f"{ANTHROPIC}/count_tokens"])
def test_any_beta_is_passed_over(path: str) -> None:
    body = {"model": "m", "messages": MESSAGES, "max_tokens": 9}
    headers = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "context-1m-2025-08-07,interleaved-thinking-2025-05-14,never-heard-of-it",
        "anthropic-dangerous-direct-browser-access": "true",
    }
    reply = ask(talkative(*CHUNKS), "POST", f"{path}?beta=true", json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    assert "warning" not in reply.headers


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "the prompt has 70 tokens, but this model's maximum context length is 63 tokens",
            "prompt is too long: 70 tokens > 63 maximum",
        ),
        (
            "Prompt length (70) exceeds maximum input length (63)",
            "prompt is too long: 70 tokens > 63 maximum",
        ),
        (
            "the chat has 900 characters; the limit is 256",
            "prompt is too long: the chat has 900 characters; the limit is 256",
        ),
    ],
    ids=["tokens", "tensorrt-llm", "characters"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_agents_learn_in_anthropics_words_that_a_prompt_is_too_long(
    text: str, shown: str, stream: bool
) -> None:
    """They shorten the conversation then, and know that by these words."""
    reply = post(talkative(PromptTooLong(text)), ANTHROPIC, stream=stream)
    assert reply.status_code == 400
    assert reply.json()["error"] == {"type": "invalid_request_error", "message": shown}


def test_the_choice_of_a_tool_that_only_anthropic_can_run_is_left_out() -> None:
    mine = {"name": "f", "input_schema": {"type": "object"}}
    search = {"type": "web_search_20250305", "name": "web_search"}
    backend = talkative(*CHUNKS)
    choice = {"type": "tool", "name": "web_search"}
    reply = post(backend, ANTHROPIC, tools=[mine, search], tool_choice=choice)
    assert reply.status_code == 200, reply.text
    assert "tool_choice web_search" in reply.headers["warning"]
    assert backend.asked[0][0].guide is None
