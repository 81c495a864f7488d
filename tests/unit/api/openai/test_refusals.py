"""Requests that are refused: the form of the error, whichever part refuses, and the line of the log."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from cog_triton.api.openai.app import OPENAI_ROUTERS
from cog_triton.api.openai.errors import ApiError, Asked, api_error, invalid
from cog_triton.api.openai.routes import messages
from cog_triton.errors import InvalidParameter, JournalUnavailable, PromptTooLong
from cog_triton.web.bodies import BadBody
from tests.unit.api.openai.support import (
    ANTHROPIC,
    CHAT,
    CHUNKS,
    RESPONSES,
    TEXT,
    Backend,
    ask,
    ask_in_turn,
    described_paths,
    post,
)

SECRET = "the-secret-word"
OPENAI_NAMES = {"message", "type", "param", "code"}
BODY_PATHS = [CHAT, TEXT, RESPONSES, ANTHROPIC, f"{ANTHROPIC}/count_tokens", "/tokenize"]
BODY_PATHS += ["/detokenize", "/v1/batches"]
LISTS = ["/v1/files", "/v1/batches"]


def check_form(reply: httpx.Response, path: str) -> dict[str, Any]:
    """Return the error of a reply, which has the form of its path's API."""
    body = reply.json()
    if path.startswith(ANTHROPIC):
        assert body.keys() == {"type", "error", "request_id"}
        assert body["error"].keys() == {"type", "message"}
    else:
        assert body.keys() == {"error"}
        assert body["error"].keys() == OPENAI_NAMES
    error: dict[str, Any] = body["error"]
    return error


def storing(tmp_path: Path) -> Backend:
    return Backend(*CHUNKS, STORE=str(tmp_path / "journal"))


@pytest.mark.parametrize("path", BODY_PATHS)
@pytest.mark.parametrize(
    "kind",
    [
        "application/json-seq",
        "application/jsonl",
        "application/x-www-form-urlencoded",
        "text/plain",
        "json",
        "\x01",
    ],
)
def test_a_body_of_another_type_is_refused_in_the_form_of_the_api(
    path: str, kind: str, tmp_path: Path
) -> None:
    headers = {"content-type": kind}
    reply = ask(storing(tmp_path), "POST", path, content=b"{}", headers=headers)
    assert reply.status_code == 415
    assert "application/json" in check_form(reply, path)["message"]


@pytest.mark.parametrize("path", LISTS)
@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=abc", "limit"),
        ("limit=-1", "limit"),
        ("limit=1e9", "limit"),
        ("limit=0", "limit"),
        ("limit=", "limit"),
        ("limit=%D9%A3", "limit"),  # a digit, but not an ASCII one
        ("limit=" + "9" * 5000, "limit"),
        ("after=file-unknown", "after"),
        ("order=upwards", "order"),
    ],
)
def test_a_list_with_an_odd_query_is_refused(
    path: str, query: str, param: str, tmp_path: Path
) -> None:
    reply = ask(storing(tmp_path), "GET", f"{path}?{query}")
    error = check_form(reply, path)
    found = reply.status_code, error["param"], error["code"]
    assert found == (400, param, "invalid_value")


@pytest.mark.parametrize(
    ("query", "param"),
    [("limit=abc", "limit"), ("after=msg_unknown", "after"), ("order=upwards", "order")],
)
def test_items_of_a_response_with_an_odd_query_are_refused(
    query: str, param: str, tmp_path: Path
) -> None:
    backend = storing(tmp_path)
    made = post(backend, RESPONSES).json()["id"]
    reply = ask(backend, "GET", f"{RESPONSES}/{made}/input_items?{query}")
    error = check_form(reply, RESPONSES)
    assert (reply.status_code, error["param"], error["code"]) == (400, param, "invalid_value")


MODELS = "/v1/models"


@pytest.mark.parametrize(
    "path", [f"{MODELS}?limit=abc", f"{MODELS}?after_id=x", f"{MODELS}?before_id=x", f"{MODELS}/x"]
)
def test_the_list_of_models_refuses_in_the_form_of_the_client(path: str) -> None:
    reply = ask(Backend(), "GET", path, headers={"anthropic-version": "2023-06-01"})
    assert reply.status_code in (400, 404)
    check_form(reply, ANTHROPIC)
    theirs = ask(Backend(), "GET", path)
    if theirs.status_code != 200:  # OpenAI's list has no parameters
        check_form(theirs, MODELS)


@pytest.mark.parametrize(
    ("query", "ids", "has_more"),
    [
        ("limit=1", ["m"], True),
        ("after_id=m", ["other"], False),
        ("after_id=other", [], False),
        ("before_id=other", ["m"], False),
        ("limit=1000", ["m", "other"], False),
    ],
)
def test_pages_of_models_in_anthropics_form(query: str, ids: list[str], has_more: bool) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    page = ask(Backend(), "GET", f"{MODELS}?{query}", headers=headers).json()
    assert [model["id"] for model in page["data"]] == ids
    assert page["has_more"] is has_more
    assert page["first_id"] == (ids[0] if ids else None)


# The log


def logged(caplog: pytest.LogCaptureFixture, path: str, **fields: Any) -> str:
    caplog.set_level(logging.INFO, "cog_triton.api.openai.operation")
    assert post(Backend(*CHUNKS), path, **fields).status_code == 400
    (line,) = caplog.messages
    return line


@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [
        pytest.param(
            CHAT,
            {"temperature": 2.5},
            "POST code=decimal_above_max_value param=temperature: temperature: Input should be",
            id="a number",
        ),
        pytest.param(
            ANTHROPIC,
            {"max_tokens": None},
            "POST code=invalid_type param=max_tokens: max_tokens: Input should be",
            id="Anthropic's API, whose errors have no field",
        ),
        pytest.param(
            RESPONSES,
            {"previous_response_id": "resp_1"},
            "code=previous_response_not_found param=previous_response_id",
            id="a name",
        ),
    ],
)
def test_a_refusal_is_logged_with_its_reason(
    path: str, fields: dict[str, Any], expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    line = logged(caplog, path, **fields)
    assert f" {path} 400 " in line
    assert expected in line


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        pytest.param(CHAT, {"messages": SECRET}, id="messages"),
        pytest.param(CHAT, {"messages": [SECRET]}, id="a message"),
        pytest.param(CHAT, {"messages": [{"role": "user", "content": SECRET}], "n": "x"}, id="n"),
        pytest.param(CHAT, {"stop": [5, SECRET]}, id="stop"),
        pytest.param(CHAT, {"temperature": SECRET}, id="temperature"),
        pytest.param(RESPONSES, {"input": [SECRET]}, id="input"),
        pytest.param(RESPONSES, {"input": 5, "instructions": SECRET}, id="instructions"),
        pytest.param(ANTHROPIC, {"messages": SECRET}, id="Anthropic's messages"),
        pytest.param(ANTHROPIC, {"system": [SECRET]}, id="Anthropic's system"),
        pytest.param(TEXT, {"prompt": {"a": SECRET}}, id="prompt"),
    ],
)
def test_a_refusal_is_logged_without_the_prompt(
    path: str, fields: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert SECRET not in logged(caplog, path, **fields)


def test_a_body_that_is_no_json_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cog_triton.api.openai.operation")
    body = f'{{"prompt": "{SECRET}", }}'.encode()
    headers = {"content-type": "application/json"}
    assert ask(Backend(), "POST", TEXT, content=body, headers=headers).status_code == 400
    assert "must be JSON" in caplog.text
    assert SECRET not in caplog.text


@pytest.mark.parametrize("field", ["x" * 10**6, "a\nINFO forged", "\x1b[31m", "é\u2028"])
def test_a_line_of_the_log_is_one_short_line(field: str, caplog: pytest.LogCaptureFixture) -> None:
    line = logged(caplog, CHAT, logit_bias={field: 1})
    assert len(line) < 600
    assert line.isprintable()


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ("there is no model `gpt-4o`", "there is no model `gpt-4o`"),
        ("not 'two words'", "not '…'"),
        ('not "a: b"', 'not "…"'),
        ("must be 'a' or 'b'", "must be 'a' or 'b'"),
    ],
)
def test_what_a_message_quotes_is_logged_if_it_may_be_a_name(message: str, text: str) -> None:
    assert invalid(message, "p", "c").log_text() == f"code=c param=p: {text}"
    assert ApiError(400, message).log_text() == f"code=- param=-: {text}"


@pytest.mark.parametrize(
    ("error", "named"),
    [
        pytest.param(
            InvalidParameter("top_k must be at most 5"),
            "ms POST code=E1103 param=top_k",
            id="the same",
        ),
        pytest.param(PromptTooLong("long"), "ms E1002 POST code=context_length_exceeded", id="two"),
    ],
)
def test_a_line_names_a_code_of_the_engines_refusal_once(
    error: Exception, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "cog_triton.api.openai.operation")
    assert post(Backend(error), CHAT).status_code == 400
    (line,) = caplog.messages
    assert named in line
    assert line.count("E11") + line.count("E10") == 1


def test_what_succeeds_has_no_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cog_triton.api.openai.operation")
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hi"}]})
    headers = {"content-type": "application/json"}
    ask_in_turn(Backend(*CHUNKS), ("POST", CHAT, {"content": body, "headers": headers}))
    (line,) = caplog.messages
    assert "code=" not in line


def test_a_long_prompt_is_refused_in_the_words_that_clients_look_for() -> None:
    refused = api_error(PromptTooLong("Prompt length (70) exceeds maximum input length (63)."))
    assert refused.code == "context_length_exceeded"
    assert refused.message == (
        "the prompt has 70 tokens, but this model's maximum context length is 63 tokens, excluding output"
    )


def test_the_table_of_errors_has_all_that_a_route_may_raise() -> None:
    """FastAPI's errors, those of bodies, and this package's; the nearest base has the form."""
    asked = Asked({"prompt": "messages", "temperature": "temperature"}, "GET /nowhere")
    parameter = RequestValidationError([{"loc": ("query", "limit"), "msg": "is wrong"}])
    expected: list[tuple[Exception, int, str | None, str | None]] = [
        (HTTPException(404), 404, "unknown_url", None),
        (HTTPException(405), 405, "method_not_supported", None),
        (parameter, 400, "invalid_value", "limit"),
        (BadBody("is too deep"), 400, None, None),
        (InvalidParameter("temperature is too high"), 400, "E1103", "temperature"),
        (PromptTooLong("too long"), 400, "context_length_exceeded", "messages"),
        (JournalUnavailable("full"), 503, "E2107", None),
        (KeyError("secret"), 500, None, None),
    ]
    for error, status, code, param in expected:
        refused = api_error(error, asked)
        assert (refused.status, refused.code, refused.param) == (status, code, param), error
        assert "secret" not in refused.message


ROUTES = [
    (method, route.path)
    for router in (*OPENAI_ROUTERS, messages.router)
    for route in router.routes
    if isinstance(route, APIRoute)
    for method in sorted(route.methods or ())
]
ODD_BODIES: dict[str, tuple[str, bytes]] = {
    "nothing": ("application/json", b""),
    "an empty object": ("application/json", b"{}"),
    "a list": ("application/json", b"[1]"),
    "not JSON": ("application/json", b"{"),
    "another type": ("text/plain", b"{}"),
    "a form": ("multipart/form-data; boundary=x", b"--x\r\n"),
    "wrong types": (
        "application/json",
        b'{"model": 1, "messages": {}, "prompt": {}, "input": {}, "tokens": {}, "endpoint": {}}',
    ),
}
ODD_QUERY = {"limit": "x", "after": "x", "after_id": "x", "order": "x", "stream": "x"}
ODD_NAMES = ("none", "%00", "%ff%fe", "a" * 4000, "..%2f..", "%ED%A0%80")


def test_the_routes_are_those_of_the_application() -> None:
    assert described_paths().keys() - {path.replace(":path", "") for _, path in ROUTES} == set()


@pytest.mark.parametrize(("method", "path"), ROUTES, ids=lambda value: value.strip("/"))
def test_whatever_is_wrong_with_a_request_the_error_has_the_form_of_the_api(
    method: str, path: str, tmp_path: Path
) -> None:
    """No route answers with FastAPI's own form, or has its mistake in place of the client's."""
    requests: list[tuple[str, str, dict[str, Any]]] = []
    for name in ODD_NAMES if "{" in path else ("",):
        place = re.sub(r"\{[^}]*\}", lambda _, name=name: name, path)  # type: ignore[misc]
        requests.append((method, place, {"params": ODD_QUERY}))
    for kind, content in ODD_BODIES.values():
        headers = {"content-type": kind}
        requests.append((method, place, {"content": content, "headers": headers}))
    for reply in ask_in_turn(storing(tmp_path), *requests):
        assert reply.status_code < 500, reply.text
        if reply.status_code >= 400 and method != "HEAD":
            check_form(reply, path)
