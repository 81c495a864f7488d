"""Bodies: counted before they are parsed, validated off the event loop, their mistakes named."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from cog_triton.api.openai import body_route, validation
from cog_triton.api.openai.errors import ApiError
from cog_triton.errors import InvalidParameter, PromptTooLong
from cog_triton.web import bodies
from tests.support import load_cases
from tests.unit.api.openai.support import (
    ANTHROPIC,
    CHAT,
    CHUNKS,
    RESPONSES,
    TEXT,
    Backend,
    ask,
    chat,
    complete,
    post,
)

MISTAKES = load_cases(__file__, "mistakes.yaml")
MESSAGE = {"role": "user", "content": "x"}
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("value", "limit"),
    [
        ({"messages": [MESSAGE] * 300_000}, "131072 strings"),
        ({"prompt": [[7]] * 70_000}, "65536 objects and lists"),
        ({"prompt": [7] * 2**21}, "1048576 values"),
        ({"logit_bias": {f'"\\{n}': 1 for n in range(200_000)}}, "131072 strings"),
    ],
)
def test_too_much_is_refused_before_it_is_parsed(
    value: Any, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "orjson", None)
    with pytest.raises(ApiError, match=f"the body must have at most {limit}"):
        validation.parsed(json.dumps(value).encode())


@pytest.mark.parametrize(
    "value",
    [
        {"prompt": '{"[,' * 200_000},
        {"prompt": "\\\\" * 300_000 + '"'},
        {"prompt": [7] * 2**20},
        {"a": [[[]]] * 100, "b": "[" * 1000},
    ],
)
def test_what_is_in_a_text_does_not_count(value: Any) -> None:
    assert validation.parsed(json.dumps(value).encode()) == value


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_nesting_has_a_bound(opening: str, closing: str) -> None:
    with pytest.raises(ApiError, match="at most 128 levels of nesting"):
        validation.parsed((opening * 129 + "1" + closing * 129).encode())
    validation.parsed((opening * 127 + "1" + closing * 127).encode())


@pytest.mark.parametrize(("path", "body", "status"), MISTAKES["unreadable"])
def test_what_cannot_be_read_is_a_users_mistake(path: str, body: Any, status: int) -> None:
    half = r"\ud800"  # of a surrogate pair: valid as JSON, and no text
    text = body if isinstance(body, str) else json.dumps(body).replace("HALF", half)
    headers = {"content-type": "application/json"}
    reply = ask(Backend(), "POST", path, content=text.encode("latin-1"), headers=headers)
    assert reply.status_code == status, reply.text
    assert reply.json()["error"]["message"]


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES, ANTHROPIC])
def test_a_body_that_is_not_sent_as_json(path: str) -> None:
    reply = ask(Backend(), "POST", path, content="{}", headers={"content-type": "text/plain"})
    assert reply.status_code == 415
    assert path == ANTHROPIC or reply.json()["error"]["code"] == "unsupported_content_type"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"tools": [TOOL] * 4000}),
        (TEXT, {"prompt": [7] * 40_000}),
        (RESPONSES, {"input": [MESSAGE] * 4000}),
        (ANTHROPIC, {"messages": [MESSAGE] * 4000}),
    ],
)
def test_a_large_body_is_validated_beside_the_loop(
    path: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the streams of others go on."""
    threads, validated = [], validation.validated

    def noted(*args: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return validated(*args)

    monkeypatch.setattr(f"{body_route.__name__}.validated", noted)
    for more in ({}, fields):
        backend = Backend(*CHUNKS, template="tools <tool_call>")
        backend.context_length = 100_000
        assert post(backend, path, **more).is_success
    assert threads == [True, False]


TOO_MANY, TOO_LONG = "array_above_max_length", "context_length_exceeded"
LARGE: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, {"messages": [MESSAGE] * 4097}, "messages", TOO_MANY),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 2**21}]}, "messages", TOO_LONG),
    (CHAT, {"tools": [TOOL] * 4097}, "tools", TOO_MANY),
    (TEXT, {"prompt": ["x"] * 1025}, "prompt", TOO_MANY),
    (TEXT, {"stop": ["x" * 300]}, "stop", "E1103"),
    (TEXT, {"logit_bias": {str(n): 0 for n in range(4097)}}, "logit_bias", TOO_MANY),
    (RESPONSES, {"input": "x" * 2**21}, "input", TOO_LONG),
    (RESPONSES, {"input": [MESSAGE] * 4097}, "input", TOO_MANY),
]
OPENAIS = [(path, *row) for path in (CHAT, TEXT, RESPONSES) for row in MISTAKES[path]]


@pytest.mark.parametrize("row", [*OPENAIS, *LARGE])
def test_a_mistake_has_its_field_and_openais_code(row: Any) -> None:
    path, fields, param, code, *texts = row
    reply = post(Backend(*CHUNKS), path, **fields)
    told = reply.json()["error"]
    assert (reply.status_code, told["type"]) == (400, "invalid_request_error")
    assert (told["param"], told["code"]) == (param, code)
    assert all(text in told["message"] for text in texts)
    assert "['" not in told["message"]


TURNS = {"messages": [MESSAGE] * 4097}, "messages must have at most 4096 items"


@pytest.mark.parametrize(("fields", "text"), [*MISTAKES[ANTHROPIC], TURNS])
def test_a_mistake_in_anthropics_form(fields: dict[str, Any], text: str) -> None:
    reply = post(Backend(*CHUNKS), ANTHROPIC, **fields)
    told = reply.json()
    assert (reply.status_code, [*told]) == (400, ["type", "error", "request_id"])
    assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
    assert text in told["error"]["message"]


@pytest.mark.parametrize(("text", "chat_param", "text_param"), MISTAKES["refused"])
def test_what_the_engine_refuses_has_the_name_that_the_body_has(
    text: str, chat_param: str | None, text_param: str | None
) -> None:
    error = (PromptTooLong if text.startswith("the prompt has") else InvalidParameter)(text)
    more = {"guided_regex": "a", "max_tokens": 5}
    told = chat(Backend(error), **more, max_completion_tokens=5).json()["error"]
    assert told["param"] == chat_param
    assert complete(Backend(error), **more).json()["error"]["param"] == text_param


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES, ANTHROPIC])
def test_the_model_may_be_left_out_where_there_is_one(path: str, tmp_path: Path) -> None:
    reply = post(Backend(*CHUNKS), path, model=None)
    assert (reply.status_code, reply.json()["model"]) == (200, "m")
    (tmp_path / "french").mkdir()
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / "french" / file).touch()
    reply = post(Backend(*CHUNKS, LORA_DIR=str(tmp_path)), path, model=None)
    assert reply.status_code == 400
    assert "you must provide model: one of m, other, french" in reply.json()["error"]["message"]
