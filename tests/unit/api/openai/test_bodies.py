"""Bodies: counted before they are parsed, validated off the event loop, their mistakes named."""

import json
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cog_triton.api.openai import body_route, validation
from cog_triton.api.openai.errors import ApiError
from cog_triton.errors import InvalidParameter, PromptTooLong, UserError
from cog_triton.web import bodies
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

MESSAGE = {"role": "user", "content": "x"}
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("value", "limit"),
    [
        ({"messages": [MESSAGE] * 40_000}, "131072 strings"),
        ({"prompt": [[7]] * 70_000}, "65536 objects and lists"),
        ({"prompt": [7] * (2**20 + 2)}, "1048576 values"),
        ({"logit_bias": {f'"\\{n}': 1 for n in range(140_000)}}, "131072 strings"),
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


HALF = "\ud800"  # of a surrogate pair: valid as JSON, and no text


def json_of(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


@pytest.mark.parametrize(
    ("path", "content"),
    [
        pytest.param(TEXT, b'{"model": "\xff"}', id="no UTF-8"),
        pytest.param(TEXT, b"{", id="cut off"),
        pytest.param(TEXT, b"5", id="number"),
        pytest.param(TEXT, b"", id="nothing"),
        pytest.param(
            CHAT, json_of({"model": HALF, "messages": [{"role": "user"}]}), id="half in the model"
        ),
        pytest.param(CHAT, json_of({"messages": [HALF]}), id="half for a message"),
        pytest.param(TEXT, json_of({"prompt": HALF}), id="half in the prompt"),
        pytest.param(TEXT, json_of({"prompt": "x", "stop": HALF}), id="half in a stop sequence"),
        pytest.param(TEXT, json_of({"prompt": "x", HALF: 1}), id="half in a field's name"),
        pytest.param(
            TEXT, json_of({"prompt": "x", "logit_bias": {HALF: 1}}), id="half in the name of a bias"
        ),
        pytest.param(
            ANTHROPIC,
            json_of({"model": HALF, "max_tokens": 1, "messages": []}),
            id="half in the model of Anthropic's API",
        ),
        pytest.param(
            RESPONSES,
            json_of(
                {
                    "input": "x",
                    "tool_choice": "none",
                    "tools": [{"type": "function", "name": "f", "parameters": {"a": HALF}}],
                }
            ),
            id="half in parameters of a tool",
        ),
        pytest.param("/tokenize", json_of({"prompt": HALF}), id="half in a text for its tokens"),
    ],
)
def test_what_cannot_be_read_is_a_users_mistake(path: str, content: bytes) -> None:
    headers = {"content-type": "application/json"}
    reply = ask(Backend(), "POST", path, content=content, headers=headers)
    assert reply.status_code == 400, reply.text
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


@dataclass(frozen=True)
class Mistake:
    """Fields that are wrong, and what the error says of it: its param, its code, a part of its text."""

    name: str
    path: str
    fields: dict[str, Any]
    param: str
    code: str | None
    text: str = ""


TOO_MANY = "array_above_max_length"
TOO_LONG = "context_length_exceeded"
TWO_MEGABYTES = "x" * 2**21
MISTAKES = [
    Mistake(
        "chat: temperature above 2",
        CHAT,
        {"temperature": 2.5},
        "temperature",
        "decimal_above_max_value",
    ),
    Mistake("chat: too many answers", CHAT, {"n": 129}, "n", "integer_above_max_value"),
    Mistake("chat: number in a text", CHAT, {"n": "2"}, "n", "invalid_type"),
    Mistake("chat: no messages", CHAT, {"messages": []}, "messages", "empty_array"),
    Mistake(
        "chat: message without a role",
        CHAT,
        {"messages": [{"content": "x"}]},
        "messages[0].role",
        "missing_required_parameter",
    ),
    Mistake(
        "chat: empty role",
        CHAT,
        {"messages": [{"role": "", "content": "x"}]},
        "messages[0].role",
        "empty_string",
    ),
    Mistake(
        "chat: unknown role",
        CHAT,
        {"messages": [{"role": "alien"}]},
        "messages[0].role",
        "invalid_value",
    ),
    Mistake(
        "chat: tool's message without its call",
        CHAT,
        {"messages": [{"role": "tool"}]},
        "messages[0].tool_call_id",
        "missing_required_parameter",
    ),
    Mistake(
        "chat: negative truncation",
        CHAT,
        {"truncate_prompt_tokens": -2},
        "truncate_prompt_tokens",
        "integer_below_min_value",
    ),
    Mistake(
        "chat: options of a stream without a stream",
        CHAT,
        {"stream_options": {"include_usage": True}},
        "stream_options",
        None,
    ),
    Mistake(
        "chat: top log probabilities without log probabilities",
        CHAT,
        {"top_logprobs": 2},
        "top_logprobs",
        None,
    ),
    Mistake(
        "chat: too many top log probabilities",
        CHAT,
        {"top_logprobs": 21, "logprobs": True},
        "top_logprobs",
        "integer_above_max_value",
    ),
    Mistake(
        "chat: no tokens",
        CHAT,
        {"max_completion_tokens": 0},
        "max_completion_tokens",
        "integer_below_min_value",
    ),
    Mistake(
        "chat: message that goes on and begins",
        CHAT,
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
        None,
        text="cannot both be true",
    ),
    Mistake(
        "chat: tools for a template without them",
        CHAT,
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        "tools",
        None,
        text="does not support them",
    ),
    Mistake(
        "chat: name of a tool with a space",
        CHAT,
        {"tools": [{"type": "function", "function": {"name": "two words"}}]},
        "tools[0].function.name",
        "invalid_value",
    ),
    Mistake(
        "chat: choice of Anthropic's API",
        CHAT,
        {"tool_choice": {"type": "any"}},
        "tool_choice",
        "invalid_value",
    ),
    Mistake(
        "chat: allowed tool that is not offered",
        CHAT,
        {
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "auto",
                    "tools": [{"type": "function", "function": {"name": "none"}}],
                },
            },
        },
        "tool_choice",
        None,
        text="names an unknown tool: none",
    ),
    Mistake(
        "chat: stop sequence that is a number", CHAT, {"stop": ["a", 5]}, "stop[1]", "invalid_type"
    ),
    Mistake(
        "chat: bias that is a text",
        CHAT,
        {"logit_bias": {"5": "x"}},
        "logit_bias.5",
        "invalid_type",
    ),
    Mistake("chat: schema that is no JSON", CHAT, {"guided_json": "["}, "guided_json", "E1103"),
    Mistake(
        "chat: empty choice",
        CHAT,
        {"structured_outputs": {"choice": [""]}},
        "structured_outputs",
        "E1103",
    ),
    Mistake(
        "chat: empty structured_outputs",
        CHAT,
        {"structured_outputs": {}},
        "structured_outputs",
        None,
        text="must have one of",
    ),
    Mistake(
        "chat: structured_outputs without an object",
        CHAT,
        {"structured_outputs": {"json_object": False}},
        "structured_outputs",
        None,
        text="must have one of",
    ),
    Mistake(
        "chat: two structured_outputs",
        CHAT,
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        "structured_outputs.regex",
        None,
        text="cannot be combined",
    ),
    Mistake(
        "chat: white space in structured_outputs",
        CHAT,
        {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
        "structured_outputs",
        "unsupported_parameter",
    ),
    Mistake(
        "chat: json_schema without a schema",
        CHAT,
        {"response_format": {"type": "json_schema"}},
        "response_format",
        None,
        text="must have json_schema.schema",
    ),
    Mistake(
        "chat: json without a schema",
        CHAT,
        {"response_format": {"type": "json"}},
        "response_format",
        None,
        text="must have schema",
    ),
    Mistake(
        "chat: regex without a pattern",
        CHAT,
        {"response_format": {"type": "regex"}},
        "response_format",
        None,
        text="must have regex",
    ),
    Mistake(
        "chat: ebnf without a grammar",
        CHAT,
        {"response_format": {"type": "ebnf"}},
        "response_format",
        None,
        text="must have ebnf",
    ),
    Mistake("completion: no tokens", TEXT, {"max_tokens": 0}, "max_tokens", "E1103"),
    Mistake(
        "completion: no allowed token",
        TEXT,
        {"allowed_token_ids": []},
        "allowed_token_ids",
        "empty_array",
    ),
    Mistake(
        "completion: negative allowed token",
        TEXT,
        {"allowed_token_ids": [-1]},
        "allowed_token_ids",
        "E1103",
    ),
    Mistake(
        "completion: bias for no token id",
        TEXT,
        {"logit_bias": {"a": 1}},
        "logit_bias.a",
        "invalid_value",
    ),
    Mistake(
        "completion: bias above 100",
        TEXT,
        {"logit_bias": {"1": 200}},
        "logit_bias.1",
        "integer_above_max_value",
    ),
    Mistake(
        "completion: two guides",
        TEXT,
        {"guided_regex": "a", "guided_choice": ["a"]},
        "guided_regex",
        None,
        text="cannot be combined",
    ),
    Mistake(
        "completion: log probabilities of a prompt in a stream",
        TEXT,
        {"prompt_logprobs": 1, "stream": True},
        "prompt_logprobs",
        None,
    ),
    Mistake("completion: no prompts", TEXT, {"prompt": []}, "prompt", None),
    Mistake("completion: empty prompt", TEXT, {"prompt": ""}, "prompt", "E1001"),
    Mistake(
        "completion: text among token ids", TEXT, {"prompt": [1, "a"]}, "prompt[0]", "invalid_type"
    ),
    Mistake(
        "response: temperature above 2",
        RESPONSES,
        {"temperature": 3},
        "temperature",
        "integer_above_max_value",
    ),
    Mistake(
        "response: unknown response",
        RESPONSES,
        {"previous_response_id": "resp_1"},
        "previous_response_id",
        "previous_response_not_found",
        text="'resp_1' not found",
    ),
    Mistake(
        "response: unknown effort",
        RESPONSES,
        {"reasoning": {"effort": "hihg"}},
        "reasoning.effort",
        "invalid_value",
    ),
    Mistake(
        "response: no tokens",
        RESPONSES,
        {"max_output_tokens": 0},
        "max_output_tokens",
        "integer_below_min_value",
    ),
    Mistake(
        "response: no items", RESPONSES, {"input": []}, "input", None, text="must not be empty"
    ),
    Mistake(
        "response: instructions that are items",
        RESPONSES,
        {"instructions": [{"role": "system", "content": "Be brief."}]},
        "instructions",
        "invalid_type",
    ),
    Mistake(
        "response: file",
        RESPONSES,
        {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
        "input",
        None,
        text="type input_file is not supported",
    ),
    Mistake(
        "response: item of another response",
        RESPONSES,
        {"input": [{"type": "item_reference", "id": "msg_1"}]},
        "input",
        None,
        text="must not be empty",
    ),
    Mistake(
        "response: unknown item",
        RESPONSES,
        {"input": [{"type": "mesage", "content": "x"}]},
        "input",
        None,
        text="mesage is not supported",
    ),
    Mistake(
        "response: call without arguments",
        RESPONSES,
        {"input": [{"type": "function_call", "name": "f"}]},
        "input",
        None,
        text="lacks a field",
    ),
    Mistake(
        "response: message of a tool",
        RESPONSES,
        {"input": [{"role": "tool", "content": "x"}]},
        "input[0].role",
        "invalid_value",
    ),
    Mistake(
        "response: allowed tool that is not offered",
        RESPONSES,
        {
            "tools": [{"type": "function", "name": "f"}],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "none"}],
            },
        },
        "tool_choice",
        None,
        text="names an unknown tool: none",
    ),
    Mistake(
        "response: format without a schema",
        RESPONSES,
        {"text": {"format": {"type": "json_schema", "name": "x"}}},
        "text",
        None,
        text="must have a schema",
    ),
    Mistake("chat: too many messages", CHAT, {"messages": [MESSAGE] * 4097}, "messages", TOO_MANY),
    Mistake(
        "chat: too long a message",
        CHAT,
        {"messages": [{"role": "user", "content": TWO_MEGABYTES}]},
        "messages",
        TOO_LONG,
    ),
    Mistake("chat: too many tools", CHAT, {"tools": [TOOL] * 4097}, "tools", TOO_MANY),
    Mistake("completion: too many prompts", TEXT, {"prompt": ["x"] * 1025}, "prompt", TOO_MANY),
    Mistake("completion: too long a stop sequence", TEXT, {"stop": ["x" * 300]}, "stop", "E1103"),
    Mistake(
        "completion: too many biases",
        TEXT,
        {"logit_bias": {str(n): 0 for n in range(4097)}},
        "logit_bias",
        TOO_MANY,
    ),
    Mistake("response: too long an input", RESPONSES, {"input": TWO_MEGABYTES}, "input", TOO_LONG),
    Mistake("response: too many items", RESPONSES, {"input": [MESSAGE] * 4097}, "input", TOO_MANY),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_has_its_field_and_openais_code(mistake: Mistake) -> None:
    reply = post(Backend(*CHUNKS), mistake.path, **mistake.fields)
    told = reply.json()["error"]
    assert (reply.status_code, told["type"]) == (400, "invalid_request_error")
    assert (told["param"], told["code"]) == (mistake.param, mistake.code)
    assert mistake.text in told["message"]
    assert "['" not in told["message"]


TOOL_USE = {"type": "tool_use", "id": "a", "name": "f", "input": {}}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        pytest.param({"max_tokens": 0}, "max_tokens must be at least 1", id="no tokens"),
        pytest.param({"max_tokens": None}, "max_tokens", id="tokens that are null"),
        pytest.param({"temperature": -1}, "temperature", id="negative temperature"),
        pytest.param(
            {"tools": [{"name": "two words", "input_schema": {}}]},
            "tools[0].name",
            id="name of a tool with a space",
        ),
        pytest.param(
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "a tool_use_id",
            id="result without its call",
        ),
        pytest.param(
            {
                "messages": [
                    {"role": "user", "content": "Hi"},
                    {"role": "assistant", "content": " "},
                ]
            },
            "has no text",
            id="begun answer of white space",
        ),
        pytest.param(
            {
                "messages": [
                    {"role": "user", "content": "Hi"},
                    {"role": "assistant", "content": [TOOL_USE]},
                ]
            },
            "has no text",
            id="begun answer of a call",
        ),
        pytest.param(
            {
                "messages": [
                    {"role": "user", "content": "Hi"},
                    {"role": "assistant", "content": [{"type": "text", "text": "Well"}, TOOL_USE]},
                ]
            },
            "has no text",
            id="begun answer that ends with a call",
        ),
        pytest.param(
            {"messages": [MESSAGE] * 4097},
            "messages must have at most 4096 items",
            id="too many messages",
        ),
    ],
)
def test_a_mistake_in_anthropics_form(fields: dict[str, Any], text: str) -> None:
    reply = post(Backend(*CHUNKS), ANTHROPIC, **fields)
    told = reply.json()
    assert (reply.status_code, [*told]) == (400, ["type", "error", "request_id"])
    assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
    assert text in told["error"]["message"]


@pytest.mark.parametrize(
    ("error", "chat_param", "text_param"),
    [
        pytest.param(
            PromptTooLong("the prompt has 99 tokens"), "messages", "prompt", id="too long a prompt"
        ),
        pytest.param(
            InvalidParameter("max_tokens must be at least 1"),
            "max_completion_tokens",
            "max_tokens",
            id="max_tokens",
        ),
        pytest.param(
            InvalidParameter("guided_decoding_guide of type regex"),
            "guided_regex",
            "guided_regex",
            id="guide",
        ),
        pytest.param(
            InvalidParameter("a JSON schema must be an object"),
            "guided_regex",
            "guided_regex",
            id="schema",
        ),
        pytest.param(
            InvalidParameter("stop_sequences must be at most 64"),
            "stop",
            "stop",
            id="too many stop sequences",
        ),
        pytest.param(
            InvalidParameter("the C++ backend does not support min_p"),
            "min_p",
            "min_p",
            id="unsupported parameter",
        ),
        pytest.param(InvalidParameter("the model is what it is"), None, None, id="no parameter"),
    ],
)
def test_what_the_engine_refuses_has_the_name_that_the_body_has(
    error: UserError, chat_param: str | None, text_param: str | None
) -> None:
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
