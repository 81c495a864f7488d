"""Bodies: counted before they are parsed, validated off the event loop, their mistakes named."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest

from cog_triton.errors import CogTritonError, InvalidParameter, PromptTooLong
from cog_triton.faces.openai import bodies
from cog_triton.faces.openai.app import create_app
from cog_triton.faces.openai.errors import ApiError
from tests.unit.faces.openai.support import (
    CHUNKS,
    MESSAGES,
    Backend,
    ask,
    chat,
    served,
)

MESSAGE = {"role": "user", "content": "x"}
TOOL = {"type": "function", "function": {"name": "f"}}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TWO_WORDS = {"type": "function", "function": {"name": "two words"}}
MISSING = "missing_required_parameter"
LONG, TOO_LONG = "x" * 2**21, "context_length_exceeded"
RESPONSES, ANTHROPIC = "/v1/responses", "/v1/messages"


@pytest.mark.parametrize(
    ("value", "limit"),
    [
        ({"messages": [MESSAGE] * 300_000}, "131072 strings"),
        ({"tools": [TOOL] * 50_000}, "131072 strings"),
        ({"prompt": [[7]] * 70_000}, "65536 objects and lists"),
        ({"prompt": [7] * 2**21}, "1048576 values"),
        ({"logit_bias": {f'"\\{n}': 1 for n in range(200_000)}}, "131072 strings"),
    ],
)
def test_too_much_is_refused_before_it_is_parsed(
    value: Any, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json, "loads", None)
    with pytest.raises(ApiError, match=f"the body must have at most {limit}"):
        bodies.parsed(json.dumps(value).encode())


@pytest.mark.parametrize(
    "value",
    [
        {"prompt": '{"[,' * 200_000},
        {"prompt": "\\\\" * 300_000 + '"'},
        {"prompt": [7] * 2**20},
        {"messages": [MESSAGE] * 4096},
        {"a": [[[]]] * 100, "b": "[" * 1000},
    ],
)
def test_what_is_in_a_text_does_not_count(value: Any) -> None:
    assert bodies.parsed(json.dumps(value).encode()) == value


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_nesting_has_a_bound(opening: str, closing: str) -> None:
    with pytest.raises(ApiError, match="at most 128 levels of nesting"):
        bodies.parsed((opening * 129 + "1" + closing * 129).encode())
    bodies.parsed((opening * 127 + "1" + closing * 127).encode())


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"messages": [MESSAGE] * 4097}, "messages"),
        (CHAT, {"messages": MESSAGES, "tools": [TOOL] * 4097}, "tools"),
        (RESPONSES, {"input": [MESSAGE] * 4097}, "input"),
        (TEXT, {"prompt": ["x"] * 1025}, "prompt"),
        (TEXT, {"prompt": [[7]] * 1025}, "prompt"),
    ],
)
def test_lists_have_a_bound(path: str, fields: dict[str, Any], param: str) -> None:
    reply = ask(Backend(*CHUNKS), "POST", path, json={"model": "m", **fields})
    told = reply.json()["error"]
    assert (reply.status_code, told["param"], told["code"]) == (
        400,
        param,
        "array_above_max_length",
    )
    turns = [MESSAGE] * 4097
    reply = ask(Backend(), "POST", ANTHROPIC, json={"max_tokens": 1, "messages": turns})
    assert "messages must have at most 4096 items" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": MESSAGES, "tools": [TOOL] * 4000}),
        (TEXT, {"prompt": [7] * 40_000}),
        (RESPONSES, {"input": [MESSAGE] * 4000}),
        (ANTHROPIC, {"max_tokens": 1, "messages": [MESSAGE] * 4000}),
        ("/v1/messages/count_tokens", {"messages": [MESSAGE] * 4000}),
    ],
)
def test_a_large_body_is_validated_while_other_streams_go_on(
    path: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is held until a stream that began after it has ended: on the loop, neither would end."""
    began, streamed = asyncio.Event(), threading.Event()
    loops: list[asyncio.AbstractEventLoop] = []
    validated = bodies.validated

    def held(raw: bytes, *args: Any) -> Any:
        if len(raw) > bodies.LARGE_BODY:
            loops[0].call_soon_threadsafe(began.set)
            assert streamed.wait(60), "the loop waits for the validation"
        return validated(raw, *args)

    monkeypatch.setattr(bodies, "validated", held)

    async def run() -> tuple[httpx.Response, httpx.Response]:
        loops.append(asyncio.get_running_loop())
        backend = Backend(*CHUNKS, template="tools <tool_call>")
        transport = httpx.ASGITransport(create_app(served(backend)))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            large = asyncio.create_task(client.post(path, json={"model": "m", **fields}))
            await began.wait()
            small = {"model": "m", "messages": MESSAGES, "stream": True}
            other = await client.post(CHAT, json=small)
            streamed.set()
            return other, await large

    other, large = asyncio.run(run())
    assert other.text.endswith("data: [DONE]\n\n")
    assert large.status_code == 200, large.text


@pytest.mark.parametrize(
    ("path", "fields", "param", "code"),
    [
        (CHAT, {"temperature": 2.5}, "temperature", "decimal_above_max_value"),
        (CHAT, {"presence_penalty": -3}, "presence_penalty", "integer_below_min_value"),
        (CHAT, {"frequency_penalty": 2.1}, "frequency_penalty", "decimal_above_max_value"),
        (CHAT, {"n": 129}, "n", "integer_above_max_value"),
        (CHAT, {"n": 0}, "n", "integer_below_min_value"),
        (CHAT, {"n": "2"}, "n", "invalid_type"),
        (CHAT, {"messages": []}, "messages", "empty_array"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role", MISSING),
        (CHAT, {"messages": [{"role": "", "content": "x"}]}, "messages[0].role", "empty_string"),
        (CHAT, {"stream_options": {"include_usage": True}}, "stream_options", None),
        (CHAT, {"top_logprobs": 2}, "top_logprobs", None),
        (CHAT, {"top_logprobs": 21, "logprobs": True}, "top_logprobs", "integer_above_max_value"),
        (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens", "integer_below_min_value"),
        (CHAT, {"tool_choice": "any"}, "tool_choice", "invalid_value"),
        (CHAT, {"tool_choice": {"type": "any"}}, "tool_choice", "invalid_value"),
        (CHAT, {"tool_choice": {"type": "function"}}, "tool_choice.function", MISSING),
        (CHAT, {"stop": ["a", 5]}, "stop[1]", "invalid_type"),
        (CHAT, {"messages": [{"role": "alien"}]}, "messages[0].role", "invalid_value"),
        (CHAT, {"messages": [{"role": "tool"}]}, "messages[0].tool_call_id", MISSING),
        (CHAT, {"tools": [TWO_WORDS]}, "tools[0].function.name", "invalid_value"),
        (CHAT, {"guided_json": "["}, "guided_json", "E1103"),
        (CHAT, {"structured_outputs": {"choice": [""]}}, "structured_outputs", "E1103"),
        (CHAT, {"logit_bias": {"5": "x"}}, "logit_bias.5", "invalid_type"),
        (TEXT, {"prompt": ""}, "prompt", "E1001"),
        (TEXT, {"prompt": [1, "a"]}, "prompt[0]", "invalid_type"),
        (TEXT, {"prompt": "x", "temperature": 3}, "temperature", "integer_above_max_value"),
        (RESPONSES, {"input": "x", "temperature": 3}, "temperature", "integer_above_max_value"),
        (RESPONSES, {"input": "x", "top_logprobs": 21}, "top_logprobs", "integer_above_max_value"),
        (RESPONSES, {"input": LONG}, "input", TOO_LONG),
        (CHAT, {"messages": [{"role": "user", "content": LONG}]}, "messages", TOO_LONG),
    ],
)
def test_a_mistake_has_its_field_and_openais_code(
    path: str, fields: dict[str, Any], param: str, code: str | None
) -> None:
    messages = {"messages": MESSAGES} if path == CHAT else {}
    reply = ask(Backend(*CHUNKS), "POST", path, json={"model": "m", **messages, **fields})
    told = reply.json()["error"]
    assert reply.status_code == 400
    assert (told["param"], told["code"]) == (param, code)
    assert told["type"] == "invalid_request_error"
    assert "['" not in told["message"]


@pytest.mark.parametrize(
    ("error", "chat_param", "text_param"),
    [
        (PromptTooLong("the prompt has 99 tokens"), "messages", "prompt"),
        (InvalidParameter("max_tokens must be at least 1"), "max_completion_tokens", "max_tokens"),
        (InvalidParameter("guided_decoding_guide of type regex"), "guided_regex", "guided_regex"),
        (InvalidParameter("a JSON schema must be an object"), "guided_regex", "guided_regex"),
        (InvalidParameter("stop_sequences must be at most 64"), "stop", "stop"),
        (InvalidParameter("the C++ backend does not support min_p"), "min_p", "min_p"),
        (InvalidParameter("top_k must be at least -1, not -2"), "top_k", "top_k"),
        (InvalidParameter("the model is what it is"), None, None),
    ],
)
def test_what_the_engine_refuses_has_the_name_that_the_body_has(
    error: CogTritonError, chat_param: str | None, text_param: str | None
) -> None:
    more = {"guided_regex": "a", "max_tokens": 5}
    told = chat(Backend(error), **more, max_completion_tokens=5).json()["error"]
    assert told["param"] == chat_param
    body = {"model": "m", "prompt": "x", **more}
    assert ask(Backend(error), "POST", TEXT, json=body).json()["error"]["param"] == text_param


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": MESSAGES}),
        (TEXT, {"prompt": "x"}),
        (RESPONSES, {"input": "x"}),
        (ANTHROPIC, {"max_tokens": 5, "messages": MESSAGES}),
    ],
)
def test_the_model_may_be_left_out_where_there_is_one(
    path: str, fields: dict[str, Any], tmp_path: Any
) -> None:
    for body in (fields, {"model": None, **fields}):
        reply = ask(Backend(*CHUNKS), "POST", path, json=body)
        assert (reply.status_code, reply.json()["model"]) == (200, "m")
    (tmp_path / "french").mkdir()
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / "french" / file).touch()
    reply = ask(Backend(*CHUNKS, LORA_DIR=str(tmp_path)), "POST", path, json=fields)
    assert reply.status_code == 400
    assert "you must provide model: one of m, other, french" in reply.json()["error"]["message"]
