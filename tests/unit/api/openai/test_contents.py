"""Parts that a model of text cannot read: refused where they are new, else words in their place."""

from typing import Any

import pytest

from tests.unit.api.openai.support import (
    ANTHROPIC,
    CHAT,
    CHUNKS,
    MESSAGES,
    RESPONSES,
    Backend,
    chat,
    post,
    talkative,
)

PICTURE = "data:image/png;base64,AAAA"
LOOK = "What is in it?"
CHAT_PARTS: dict[str, dict[str, Any]] = {
    "image_url": {"image_url": {"url": PICTURE}},
    "input_audio": {"input_audio": {"data": "AAAA", "format": "wav"}},
    "file": {"file": {"file_id": "file-1"}},
    "video_url": {"video_url": {"url": PICTURE}},
}
ITEM_PARTS: dict[str, dict[str, Any]] = {
    "input_image": {"image_url": PICTURE, "detail": "auto"},
    "input_file": {"file_id": "file-1"},
    "input_audio": {"input_audio": {"data": "AAAA", "format": "wav"}},
}


def chat_turn(kind: str) -> dict[str, Any]:
    return {
        "role": "user",
        "content": [{"type": "text", "text": LOOK}, {"type": kind, **CHAT_PARTS[kind]}],
    }


def item(kind: str) -> dict[str, Any]:
    return {
        "role": "user",
        "content": [{"type": "input_text", "text": LOOK}, {"type": kind, **ITEM_PARTS[kind]}],
    }


@pytest.mark.parametrize("kind", CHAT_PARTS)
def test_a_chat_is_refused_for_what_is_new(kind: str) -> None:
    reply = post(Backend(*CHUNKS), CHAT, messages=[chat_turn(kind)])
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["message"] == (
        f"messages[0].content: content of type {kind} is not supported: this model reads text only"
    )
    assert error["param"] == "messages[0].content"


@pytest.mark.parametrize("kind", CHAT_PARTS)
def test_a_chat_goes_on_after_it(kind: str) -> None:
    """As an agent asks again, with the refused message among the others."""
    backend = Backend(*CHUNKS)
    question = {"role": "user", "content": "Never mind."}
    reply = post(backend, CHAT, messages=[chat_turn(kind), question])
    assert reply.status_code == 200, reply.text
    assert reply.headers["warning"] == f'199 cog-triton "left out: content of type {kind}"'
    first, _ = backend.tokenizer.messages
    assert LOOK in str(first["content"])
    assert f"[{kind} left out: this model reads text only]" in str(first["content"])


def test_a_tools_result_with_a_picture_is_not_refused() -> None:
    backend = talkative(*CHUNKS)
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "c1", "content": chat_turn("image_url")["content"]}
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        result,
    ]
    reply = post(backend, CHAT, messages=messages)
    assert reply.status_code == 200, reply.text
    assert "left out" in str(backend.tokenizer.messages[-1]["content"])


@pytest.mark.parametrize("place", [0, 1])
def test_a_type_that_nobody_knows_is_refused_anywhere(place: int) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}] * 2
    messages[place] = {"role": "user", "content": [{"type": "txet", "text": "x"}]}
    reply = post(Backend(*CHUNKS), CHAT, messages=messages)
    assert reply.status_code == 400
    assert "txet is not supported" in reply.json()["error"]["message"]
    items = [{**message, "type": "message"} for message in messages]
    reply = post(Backend(*CHUNKS), RESPONSES, input=items)
    assert reply.status_code == 400
    assert "txet is not supported" in reply.json()["error"]["message"]


@pytest.mark.parametrize("kind", ITEM_PARTS)
def test_a_response_is_refused_for_what_is_new(kind: str) -> None:
    reply = post(Backend(*CHUNKS), RESPONSES, input=[item(kind)])
    assert reply.status_code == 400
    assert reply.json()["error"]["message"] == (
        f"input[0]: content of type {kind} is not supported: this model reads text only"
    )


@pytest.mark.parametrize("kind", ITEM_PARTS)
def test_a_response_goes_on_after_it(kind: str) -> None:
    backend = Backend(*CHUNKS)
    reply = post(backend, RESPONSES, input=[item(kind), {"role": "user", "content": "Go on."}])
    assert reply.status_code == 200, reply.text
    assert reply.headers["warning"] == f'199 cog-triton "left out: content of type {kind}"'
    first, _ = backend.tokenizer.messages
    assert first["content"] == f"{LOOK}\n[{kind} left out: this model reads text only]"


def test_anthropics_api_leaves_a_new_picture_out() -> None:
    backend = Backend(*CHUNKS)
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    content = [{"type": "image", "source": source}, {"type": "text", "text": LOOK}]
    reply = post(backend, ANTHROPIC, messages=[{"role": "user", "content": content}])
    assert reply.status_code == 200, reply.text
    assert "content of type image" in reply.headers["warning"]


@pytest.mark.parametrize(
    ("message", "content"),
    [
        pytest.param({"content": "Yes.", "reasoning_content": "So."}, "Yes.", id="DeepSeek's name"),
        pytest.param({"content": "Yes.", "reasoning": "So."}, "Yes.", id="vLLM's name"),
        pytest.param({"content": None, "reasoning": "So."}, "", id="nothing else"),
        pytest.param(
            {"content": [{"type": "reasoning", "text": "So."}, {"type": "text", "text": "Yes."}]},
            "Yes.",
            id="part of type reasoning",
        ),
        pytest.param(
            {
                "content": [
                    {"type": "thinking", "thinking": [{"type": "text", "text": "So."}]},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "Yes."},
                ]
            },
            "Yes.",
            id="Mistral's and Anthropic's parts",
        ),
    ],
)
def test_thoughts_of_earlier_answers_reach_the_template(message: Any, content: str) -> None:
    backend = talkative(*CHUNKS)
    messages = [*MESSAGES, {"role": "assistant", **message}, *MESSAGES]
    reply = chat(backend, messages=messages)
    assert reply.status_code == 200, reply.text
    _, answer, _ = backend.tokenizer.messages
    assert (answer["content"], answer["reasoning_content"]) == (content, "So.")
