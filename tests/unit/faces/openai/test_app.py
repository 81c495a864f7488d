"""The application on a backend that answers with what it is told to: routes, bytes, errors, ends."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from cog_triton import errors
from cog_triton.faces.openai.app import create_app
from cog_triton.faces.openai.errors import api_error
from cog_triton.faces.openai.fields import FIELDS
from cog_triton.generation import Chunk
from cog_triton.wire import TokenLogProb
from tests.unit.faces.openai.support import (
    CHUNKS,
    LAST,
    MESSAGES,
    Backend,
    StrictTokenizer,
    Tokenizer,
    ask,
    chat,
    complete,
    events,
    served,
)

TOOLS = [{"type": "function", "function": {"name": "f"}}]


def test_the_usage_comes_last_and_is_null_before() -> None:
    reply = chat(Backend(*CHUNKS), stream=True, stream_options={"include_usage": True})
    *others, last = events(reply)
    assert [event["usage"] for event in others] == [None] * 4
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert "usage" not in events(chat(Backend(*CHUNKS), stream=True))[0]


def test_a_chunk_without_text_is_no_event() -> None:
    reply = chat(Backend(Chunk("", 1, 3), Chunk("b", 2, 3, "length")), stream=True)
    assert [event["choices"][0]["delta"] for event in events(reply)] == [
        {"role": "assistant", "content": "", "refusal": None},
        {"content": "b"},
        {},
    ]


STOPPED = (Chunk("a", 1, 3), Chunk("", 2, 3, "stop", stop_token=0))


@pytest.mark.parametrize("send", [chat, complete])
def test_the_token_that_ended_an_answer_is_told(send: Any) -> None:
    (choice,) = send(Backend(*STOPPED), stop_token_ids=[0]).json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 0)
    streamed = events(send(Backend(*STOPPED), stop_token_ids=[0], stream=True))
    reasons = [event["choices"][0].get("stop_reason") for event in streamed]
    assert reasons == [None] * (len(streamed) - 1) + [0]
    (choice,) = send(Backend(*CHUNKS), stop_token_ids=[0]).json()["choices"]
    assert "stop_reason" not in choice


def test_a_template_without_tools_takes_none() -> None:
    told = chat(Backend(*CHUNKS), tools=TOOLS).json()["error"]
    assert (told["param"], "chat template" in told["message"]) == ("tools", True)


def test_of_alternatives_with_one_text_the_likeliest_is_told() -> None:
    class Bytes(Tokenizer):
        def decode(self, ids: list[int], **_: Any) -> str:
            return "\ufffd" if ids[0] > 200 else super().decode(ids)

    token = TokenLogProb(201, -0.5, ((201, -0.5), (97, -1.0), (202, -3.0)))
    backend = Backend(Chunk("\ufffd", 1, 3, "stop", log_probs=(token,)))
    backend.tokenizer = Bytes()
    (choice,) = complete(backend, logprobs=3).json()["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"\ufffd": -0.5, "a": -1.0}]


def test_text_is_escaped_as_json_wants_it() -> None:
    text = 'a"\\\n\x00é\U0001f680\u2028'
    reply = chat(Backend(Chunk(text, 1, 3), LAST), stream=True)
    assert events(reply)[1]["choices"][0]["delta"] == {"content": text}
    reply = complete(Backend(Chunk(text, 1, 3), LAST), stream=True)
    assert events(reply)[0]["choices"][0]["text"] == text


def test_a_request_is_named_in_triton_by_its_id() -> None:
    backend = Backend(*CHUNKS)
    body = {"model": "m", "prompt": ["x", "y"], "n": 2}
    reply = ask(backend, "POST", "/v1/completions", json=body, headers={"x-request-id": "mine"})
    assert reply.headers["x-request-id"] == "mine"
    names = [str(name) for _, name in backend.asked]
    assert len(set(names)) == 4
    assert all(name.startswith("mine-") for name in names)


def test_what_is_asked_for_under_another_name_is_answered_under_it() -> None:
    assert chat(Backend(*CHUNKS), model="other").json()["model"] == "other"
    names = [card["id"] for card in ask(Backend(), "GET", "/v1/models").json()["data"]]
    assert names == ["m", "other"]
    assert ask(Backend(), "GET", "/v1/models/m").json()["max_model_len"] == 64


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_before_the_first_chunk_has_a_status(stream: bool) -> None:
    for error, status, kind, code in (
        (errors.InvalidParameter("x"), 400, "invalid_request_error", "E1103"),
        (errors.TritonOverloaded("x"), 429, "requests", "rate_limit_exceeded"),
        (errors.TritonUnavailable("x"), 503, "server_error", "E2105"),
        (errors.TritonTimeout("x"), 500, "server_error", "E2101"),
    ):
        reply = chat(Backend(error), stream=stream)
        assert reply.status_code == status
        assert reply.json() == {
            "error": {"message": "x", "type": kind, "param": None, "code": code}
        }
    assert (
        chat(Backend(errors.TritonOverloaded("x", retry_after=7.2))).headers["retry-after"] == "7"
    )


def test_an_error_that_nobody_foresaw_keeps_its_text(caplog: pytest.LogCaptureFixture) -> None:
    for backend in (Backend(ValueError("secret")), Backend(CHUNKS[0], ValueError("secret"))):
        reply = chat(backend, stream=True)
        assert "internal error" in reply.text
        assert "secret" not in reply.text
    assert "secret" in caplog.text


def test_an_error_behind_the_first_chunk_is_an_event() -> None:
    for answers in (1, 2):
        backend = Backend(CHUNKS[0], errors.TritonUnavailable("gone"))
        reply = chat(backend, stream=True, n=answers)
        assert reply.status_code == 200
        last = events(reply)[-1]
        assert last["error"]["code"] == "E2105"
        assert backend.open == 0
    assert chat(Backend(CHUNKS[0], errors.TritonUnavailable("gone"))).status_code == 503


def test_every_error_of_the_package_has_a_status() -> None:
    kinds = [errors.CogTritonError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    for kind in kinds:
        told = api_error(kind("x"), FIELDS)
        assert told.status == 400 or not issubclass(kind, errors.UserError)
        assert ("Retry-After" in told.headers) == kind.retryable


def test_requests_that_reach_no_route() -> None:
    reply = ask(Backend(), "GET", "/v1/completions")
    assert (reply.status_code, reply.headers["allow"]) == (405, "POST")
    assert reply.json()["error"]["code"] == "method_not_supported"
    assert ask(Backend(), "GET", "/v1/none").json()["error"]["code"] == "unknown_url"
    plain = {"content": "{}", "headers": {"content-type": "text/plain"}}
    for path in ("/v1/completions", "/v1/responses", "/v1/messages"):
        assert ask(Backend(), "POST", path, **plain).status_code == 415
    told = ask(Backend(), "POST", "/v1/completions", **plain).json()["error"]
    assert told["code"] == "unsupported_content_type"


HALF = r"\ud800"  # of a surrogate pair: valid as JSON, and no text
JSON_TYPE = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", {"model": HALF, "messages": MESSAGES}, 404),
        ("/v1/chat/completions", {"model": "m", "messages": [HALF]}, 400),
        (
            "/v1/chat/completions",
            {"model": "m", "messages": MESSAGES, "logit_bias": {HALF: 1}},
            400,
        ),
        ("/v1/completions", {"model": "m", "prompt": HALF}, 400),
        ("/v1/completions", {"model": "m", "prompt": "x", "stop": HALF}, 400),
        ("/v1/completions", {"model": "m", "prompt": "x", HALF: 1}, 400),
        ("/v1/responses", {"model": HALF, "input": "x"}, 404),
        ("/v1/messages", {"model": HALF, "max_tokens": 1, "messages": MESSAGES}, 404),
        ("/v1/messages/count_tokens", {"model": "m", "system": HALF, "messages": MESSAGES}, 400),
        ("/tokenize", {"prompt": HALF}, 400),
    ],
)
def test_what_is_no_text_is_a_users_mistake(path: str, body: dict[str, Any], status: int) -> None:
    content = json.dumps(body).replace(json.dumps(HALF), f'"{HALF}"')
    backend = Backend(*CHUNKS)
    backend.tokenizer = StrictTokenizer()
    reply = ask(backend, "POST", path, content=content, headers=JSON_TYPE)
    assert reply.status_code == status, reply.text
    assert reply.json()["error"]["message"]


def test_bodies_that_cannot_be_read() -> None:
    deep = b"[" * 10_000
    for content in (deep, deep + b"]" * 10_000, b'{"model": "\xff"}', b"{", b"5", b"\x00"):
        reply = ask(Backend(), "POST", "/v1/completions", content=content, headers=JSON_TYPE)
        assert reply.status_code == 400
        assert "body" in reply.json()["error"]["message"]


def test_a_path_with_a_slash_at_its_end_is_another_one() -> None:
    """A redirection would go by the address that a proxy has this server under."""
    for path in ("/v1/completions/", "/v1/completions//"):
        assert ask(Backend(), "POST", path, json={}).json()["error"]["code"] == "unknown_url"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
def test_a_fault_has_the_requests_id_too(path: str) -> None:
    body = {"model": "m", "prompt": "x", "messages": MESSAGES, "max_tokens": 1}
    reply = ask(
        Backend(RuntimeError("x")), "POST", path, json=body, headers={"x-request-id": "mine"}
    )
    assert (reply.status_code, reply.headers["x-request-id"]) == (500, "mine")
    assert reply.headers.get("request-id") == ("mine" if path == "/v1/messages" else None)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("tools [TOOL_CALLS]", '[TOOL_CALLS]f[ARGS]{"a": 1}'),
        ("tools [func_name1(params_name1=params_value1)]", "[f(a=1)]"),
    ],
)
def test_calls_are_read_as_the_template_has_them(template: str, text: str) -> None:
    backend = Backend(*(Chunk(char, 1, 3) for char in text), LAST, template=template)
    (choice,) = chat(backend, tools=TOOLS).json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"], choice["finish_reason"]) == (
        {"name": "f", "arguments": '{"a": 1}'},
        "tool_calls",
    )
    *_, last = events(chat(backend, tools=TOOLS, stream=True))
    assert last["choices"][0]["finish_reason"] == "tool_calls"


def test_answers_of_a_stream_keep_their_numbers() -> None:
    reply = chat(Backend(*CHUNKS), n=3, stream=True)
    choices = [event["choices"][0] for event in events(reply)]
    for number in range(3):
        own = [choice for choice in choices if choice["index"] == number]
        assert [choice["delta"].get("content") for choice in own] == ["", "a", "b", None]
        assert [choice["finish_reason"] for choice in own] == [None, None, None, "stop"]


async def _call(app: Any, body: dict[str, Any], gone: asyncio.Event) -> list[dict[str, Any]]:
    """The messages that the application sends to a client that goes away at an event."""
    sent: list[dict[str, Any]] = []
    first = [{"type": "http.request", "body": json.dumps(body).encode()}]

    async def receive() -> dict[str, Any]:
        if first:
            return first.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)
        if message["type"] == "http.response.body":
            gone.set()

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "asgi": {"version": "3.0"},
    }
    await app(scope, receive, send)
    return sent


@pytest.mark.parametrize("answers", [1, 3])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_closes_its_answers(stream: bool, answers: int) -> None:
    async def run() -> list[dict[str, Any]]:
        backend = Backend(*CHUNKS)
        backend.wait, gone = asyncio.Event(), asyncio.Event()
        body = {"model": "m", "messages": MESSAGES, "stream": stream, "n": answers}
        if not stream:
            asyncio.get_running_loop().call_later(0.01, gone.set)
        sent = await _call(create_app(served(backend)), body, gone)
        assert (len(backend.asked), backend.open) == (answers, 0)
        return sent

    sent = asyncio.run(run())
    assert sent[0]["status"] == (200 if stream else 499)


def test_draining_lets_answers_end_and_takes_no_more() -> None:
    async def run() -> None:
        backend = Backend(*CHUNKS, DRAIN_SECONDS="30")
        backend.wait = asyncio.Event()
        state = served(backend)
        app = create_app(state)
        body = {"model": "m", "messages": MESSAGES}
        running = asyncio.create_task(_call(app, body, asyncio.Event()))
        while not backend.open:
            await asyncio.sleep(0)
        draining = asyncio.create_task(state.drain())
        await asyncio.sleep(0)
        refused = await _call(app, body, asyncio.Event())
        assert refused[0]["status"] == 503
        assert not draining.done()
        backend.wait.set()
        await draining
        assert (await running)[0]["status"] == 200

    asyncio.run(run())


def test_health_says_whether_requests_may_come() -> None:
    backend = Backend()
    assert ask(backend, "GET", "/health/ready").json() == {"status": "ready"}
    backend.is_healthy = False
    assert ask(backend, "GET", "/health").status_code == 503
    assert ask(backend, "GET", "/health/live").status_code == 200


def test_log_probabilities_stand_beside_their_text() -> None:
    token = TokenLogProb(ord("a"), -0.5, ((ord("a"), -0.5), (ord("b"), -1.5)))
    chunks = (Chunk("", 1, 3, ids=(97,), log_probs=(token,)), LAST)
    entry = {"token": "a", "logprob": -0.5, "bytes": [97]}
    other = {"token": "b", "logprob": -1.5, "bytes": [98]}
    content = [{**entry, "top_logprobs": [entry, other]}]
    fields = {"logprobs": True, "top_logprobs": 2}
    whole = chat(Backend(*chunks), **fields).json()["choices"][0]
    assert whole["logprobs"] == {"content": content, "refusal": None}
    streamed = events(chat(Backend(*chunks), **fields, stream=True))[1]["choices"][0]
    assert streamed["logprobs"] == {"content": content, "refusal": None}
    reply = complete(Backend(*chunks), logprobs=2).json()
    assert reply["choices"][0]["logprobs"] == {
        "tokens": ["a"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"a": -0.5, "b": -1.5}],
        "text_offset": [0],
    }


THINKING = "{% if enable_thinking is defined and not enable_thinking %}"


@pytest.mark.parametrize(
    ("template", "effort", "switches"),
    [
        ("{{ reasoning_effort }}", "low", {"reasoning_effort": "low"}),
        (THINKING, "none", {"enable_thinking": False}),
        (THINKING, "high", {"enable_thinking": True}),
        ("{% if not thinking is defined %}", "none", {"thinking": False}),
        ("{{ messages }} thinking of it", "high", {}),
    ],
)
def test_an_effort_is_the_templates_switch(
    template: str, effort: str, switches: dict[str, Any]
) -> None:
    backend = Backend(*CHUNKS, template=template)

    def given() -> dict[str, Any]:
        names = ("reasoning_effort", "enable_thinking", "thinking")
        options = backend.tokenizer.options
        return {name: options[name] for name in names if name in options}

    body = {"model": "m", "input": "x", "reasoning": {"effort": effort, "summary": "auto"}}
    reply = ask(backend, "POST", "/v1/responses", json=body)
    assert reply.json()["reasoning"] == {"effort": effort, "summary": "auto"}
    assert ("warning" in reply.headers, given()) == (False, switches)
    assert chat(backend, reasoning_effort=effort).status_code == 200
    assert given() == switches
    chat(backend, reasoning_effort=effort, chat_template_kwargs={"enable_thinking": None})
    assert given() == {**switches, "enable_thinking": None}


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_only_allowed_tools_are_offered(path: str, mode: str) -> None:
    flat = path == "/v1/responses"

    def named(*names: str) -> list[dict[str, Any]]:
        return [
            {"type": "function", **({"name": name} if flat else {"function": {"name": name}})}
            for name in names
        ]

    def asked(*names: str) -> httpx.Response:
        allowed = {"mode": mode, "tools": named(*names)}
        choice = allowed if flat else {"allowed_tools": allowed}
        body: dict[str, Any] = {"model": "m", "input": "x", "messages": MESSAGES}
        body["tools"] = named("f", "g", "h")
        body["tool_choice"] = {"type": "allowed_tools", **choice}
        return ask(backend, "POST", path, json=body)

    backend = Backend(*CHUNKS, template="tools <tool_call>")
    reply = asked("f", "h")
    assert reply.status_code == 200, reply.text
    offered = [tool["function"]["name"] for tool in backend.tokenizer.options["tools"]]
    guide = backend.asked[-1][0].guide
    assert (offered, guide is None) == (["f", "h"], mode == "auto")
    if guide is not None:
        calls = json.loads(guide.text)["items"]["anyOf"]
        assert [call["properties"]["name"]["const"] for call in calls] == ["f", "h"]
    if flat:
        told = {"type": "allowed_tools", "mode": mode, "tools": named("f", "h")}
        assert reply.json()["tool_choice"] == told
    error = asked("none").json()["error"]
    assert (error["param"], "names no tool: none" in error["message"]) == ("tool_choice", True)


@pytest.mark.parametrize(
    "refused",
    [
        {"content": None, "refusal": "I must not."},
        {"content": [{"type": "refusal", "refusal": "I must not."}]},
    ],
)
def test_a_refusal_is_text_to_the_model(refused: dict[str, Any]) -> None:
    backend = Backend(*CHUNKS)
    turns = [*MESSAGES, {"role": "assistant", **refused}, *MESSAGES]
    assert chat(backend, messages=turns).status_code == 200
    assert "<assistant>I must not.<user>" in backend.asked[0][0].prompt


def test_a_role_of_the_templates_own() -> None:
    backend = Backend(*CHUNKS, template="{% if message.role == 'ipython' %}")
    assert chat(backend, messages=[{"role": "ipython", "content": "x"}]).status_code == 200


def test_what_probes_ask() -> None:
    for path in ("/", "/health", "/health/ready", "/ping", "/v1/models"):
        assert ask(Backend(), "HEAD", path).status_code == 200, path
        assert ask(Backend(), "GET", path).status_code == 200, path
    assert ask(Backend(), "HEAD", "/v1/completions").status_code == 405
    reply = ask(Backend(), "POST", "/v1/embeddings", json={"model": "m", "input": "x"})
    assert (reply.status_code, reply.headers.get("x-should-retry")) == (404, None)
    assert "embeddings are not served" in reply.json()["error"]["message"]
