"""What agents that were written for Anthropic's API send, and what becomes of it here."""

from typing import Any

import httpx
import pytest

from tests.unit.faces.openai.support import (
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
    assert "tools since the chat template has no place" in reply.headers["warning"]


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
