"""Any request to the applications of both ports: no answer is a 500, and errors have the API's form."""

import asyncio
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cog_triton.api.cog.passage import Passage
from cog_triton.api.cog.replicate.creation import Creation
from cog_triton.api.cog.replicate.prediction import Prediction
from tests.unit.api.openai.support import MESSAGES
from tests.unit.api.ports import CogPort, OpenAIPort

BIG, HALF = 10**25, "\ud800"
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([BIG, -BIG, 2**63, 2**64, 0, -1, 1e308])
    | st.floats()
    | st.text()
    | st.sampled_from(
        [HALF, "\0", "", "m", "user", "function", "auto", "custom", "text", "9" * 400]
    )
)
NAMES = (
    st.sampled_from(["type", "role", "content", "text", "name", "function", "parameters"])
    | st.sampled_from(["schema", "id", "url", "webhook", "input", "messages"])
    | st.text(max_size=4)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=8,
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FLAT_TOOL = {"type": "function", "name": "f", "parameters": {}}
ITEM = {"role": "user", "content": [{"type": "input_text", "text": "hi"}]}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
# Bodies that are right, of which a test changes some values.
OPENAIS: dict[str, Any] = {
    "/v1/chat/completions": {
        "messages": [*MESSAGES, {"role": "assistant", "tool_calls": [], "content": None}],
        "tools": [TOOL],
        "tool_choice": "auto",
        "stream_options": {"include_usage": True},
        "logit_bias": {"1": 2},
        "response_format": FORM,
        "metadata": {"a": "b"},
        "stop": ["x"],
    },
    "/v1/completions": {"prompt": "x", "echo": True, "logprobs": 1, "stop_token_ids": [1]},
    "/v1/responses": {
        "input": [ITEM],
        "tools": [FLAT_TOOL],
        "metadata": {"a": "b"},
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "low"},
        "previous_response_id": None,
        "background": False,
    },
    "/v1/messages": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "max_tokens": 3,
        "system": "x",
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"},
        "metadata": {"user_id": "x"},
        "output_config": {"format": {"type": "json_schema", "schema": {}}},
    },
    "/v1/messages/count_tokens": {"messages": MESSAGES, "tools": []},
    "/tokenize": {"prompt": "x", "return_token_strs": False},
    "/detokenize": {"tokens": [65]},
    "/v1/batches": {
        "input_file_id": "file-1",
        "endpoint": "/v1/completions",
        "completion_window": "24h",
        "metadata": {"a": "b"},
    },
    "/v1/files": {},
    "/v1/embeddings": {},
    "/v1/responses/x/cancel": {},
    "/v1/batches/x/cancel": {},
}
COGS: dict[str, Any] = {
    "/predictions": {"input": {"prompt": "x"}, "webhook": None, "webhook_events_filter": []},
    "/v1/predictions": {
        "version": "a/b:c",
        "input": {"prompt": "x"},
        "webhook": "http://127.0.0.1:1/",
        "webhook_events_filter": ["start"],
    },
    "/v1/models/a/b/predictions": {"input": {"prompt": "x"}, "webhook_completed": "http://x"},
    "/v1/deployments/a/b/predictions": {"input": {}},
    "/v1/files": {},
    "/v1/predictions/x/cancel": {},
    "/predictions/x/cancel": {},
    "/trainings": {},
    "/elsewhere": {},
    "/v1/elsewhere": {},
}
PATHS = [*OPENAIS, *COGS, "/v1/models", "/v1/models/m", "/health/ready", "/metrics", "/v1/loads"]
PATHS += ["/v1/responses/x/input_items", "/v1/responses/x", "/v1/files/x", "/v1/files/x/content"]
PATHS += ["/v1/batches/x", "/v1/predictions/x", "/v1/predictions/x/stream", "/", "/version"]
PATHS += ["/v1/models/a/b/versions", "/v1/models/a/b/versions/c"]
METHODS = ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"]
QUERIES = ["limit", "after", "order", "stream", "starting_after", "purpose", "api-version"]
HEADERS = ["Prefer", "X-Forwarded-Proto", "Last-Event-ID", "X-Request-Id", "traceparent", "Accept"]
HEADERS += ["Content-Type", "Authorization", "x-api-key", "anthropic-version", "Range"]
HEADER_VALUES = st.text(
    st.characters(codec="latin-1", exclude_characters="\r\n\0"), max_size=20
).map(str.strip) | st.sampled_from(
    ["wait=" + "9" * 400, "wait", "javascript:", "99999999999", "https"]
)
FORM_TYPES = [
    f"multipart/form-data; boundary=x{charset}"
    for charset in (
        "",
        "; charset=utf-7",
        "; charset=punycode",
        "; charset=nothing",
        "; charset=\xff",
    )
]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values in one."""
    steps: list[Any] = []
    if isinstance(value, dict):
        steps = list(value)
    if isinstance(value, list):
        steps = list(range(len(value)))
    return [path] + [found for step in steps for found in places(value[step], (*path, step))]


@st.composite
def changed(draw: st.DrawFn, body: Any) -> Any:
    """A body with another value at a place, or one more field."""
    body = json.loads(json.dumps(body))
    *path, last = draw(st.sampled_from([place for place in places(body) if place] or [("x",)]))
    inner = body
    for step in path:
        inner = inner[step]
    if isinstance(inner, dict) and draw(st.booleans()):
        last = draw(NAMES)
    inner[last] = draw(VALUES)
    return body


def as_json(value: Any) -> bytes:
    """JSON, with halves of surrogate pairs and numbers of any size."""
    return json.dumps(value).encode()


def requests(bodies: dict[str, Any]) -> st.SearchStrategy[tuple[str, str, bytes]]:
    return st.sampled_from(list(bodies)).flatmap(
        lambda path: (changed(bodies[path]) | VALUES).map(
            lambda body: ("POST", path, as_json(body))
        )
    )


ODD = st.tuples(
    st.sampled_from(METHODS),
    st.sampled_from(PATHS)
    | st.text(max_size=10).map(lambda path: "/v1/" + quote(path, errors="replace")),
    st.binary(max_size=50) | SCALARS.map(as_json),
)
QUERY = st.dictionaries(
    st.sampled_from(QUERIES),
    st.sampled_from(
        ["9" * 5000, "abc", "-1", "1e9", "%D9%A3", "%ed%a0%80", "%00", "true", "asc", ""]
    )
    | st.text(max_size=5).map(lambda text: quote(text, errors="replace")),
    max_size=3,
).map(lambda query: "&".join(f"{name}={value}" for name, value in query.items()))
SOME_HEADERS = st.dictionaries(st.sampled_from(HEADERS), HEADER_VALUES, max_size=2)


def check(
    path: str, method: str, reply: httpx.Response, headers: Mapping[str, str] = MappingProxyType({})
) -> None:
    assert reply.status_code < 500 or reply.status_code == 503, reply.text
    if reply.status_code < 400 or method == "HEAD":
        return
    error = reply.json()
    is_anthropics_client = "anthropic-version" in {name.lower() for name in headers}
    if path.startswith("/v1/messages") or (path.startswith("/v1/models") and is_anthropics_client):
        assert error["type"] == "error"
        assert error["error"]["message"]
    else:
        assert {"message", "type", "param", "code"} == set(error["error"])


def check_cogs(path: str, method: str, reply: httpx.Response) -> None:
    assert reply.status_code < 500 or reply.status_code == 503, reply.text
    if reply.status_code < 400 or method == "HEAD":
        return
    error = reply.json()
    if path.startswith("/v1/"):
        assert {"title", "detail", "status"} == set(error)
        assert error["status"] == reply.status_code
    else:
        assert error["detail"]


ANY = settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
JSON_TYPE = {"Content-Type": "application/json"}


@ANY
@given(requests(OPENAIS), QUERY)
def test_any_json_at_the_openai_port(
    openai_port: OpenAIPort, request_: tuple[str, str, bytes], query: str
) -> None:
    method, path, body = request_
    check(path, method, openai_port.ask(method, f"{path}?{query}", body, JSON_TYPE))


@ANY
@given(requests(COGS), SOME_HEADERS)
def test_any_json_at_cogs_port(
    cog_port: CogPort, request_: tuple[str, str, bytes], headers: dict[str, str]
) -> None:
    method, path, body = request_
    check_cogs(path, method, cog_port.ask(method, path, body, {**JSON_TYPE, **headers}))


@ANY
@given(ODD, QUERY, SOME_HEADERS)
@example(("GET", "/v1/responses/x/input_items", b""), "limit=abc", {})
@example(("POST", "/v1/completions", b"{}"), "", {"Content-Type": "application/json-seq"})
@example(("POST", "/v1/messages", b"{}"), "", {"Content-Type": "application/json5"})
@example(("GET", "/v1/models/a/b", b""), "", {"anthropic-version": "2023-06-01"})
def test_any_request_at_the_openai_port(
    openai_port: OpenAIPort, request_: tuple[str, str, bytes], query: str, headers: dict[str, str]
) -> None:
    method, path, body = request_
    check(path, method, openai_port.ask(method, f"{path}?{query}", body, headers), headers)


@ANY
@given(ODD, QUERY, SOME_HEADERS)
@example(
    ("POST", "/v1/predictions", b'{"input":{"prompt":"x"}}'), "", {"Prefer": "wait=" + "9" * 400}
)
@example(("DELETE", "/v1/predictions", b""), "", {})
def test_any_request_at_cogs_port(
    cog_port: CogPort, request_: tuple[str, str, bytes], query: str, headers: dict[str, str]
) -> None:
    method, path, body = request_
    check_cogs(path, method, cog_port.ask(method, f"{path}?{query}", body, headers))


FORMS = st.lists(
    st.tuples(
        st.sampled_from(
            ["file", "purpose", "content", "metadata", "expires_after[seconds]", "\xff", ""]
        ),
        st.sampled_from([None, "a.jsonl", "+2AA-.jsonl", "\xff", ""]) | HEADER_VALUES,
        st.binary(max_size=30) | SCALARS.map(as_json),
    ),
    max_size=4,
)


@ANY
@given(FORMS, st.sampled_from(FORM_TYPES), st.booleans())
def test_any_form_at_both_ports(
    openai_port: OpenAIPort,
    cog_port: CogPort,
    parts: list[tuple[str, str | None, bytes]],
    kind: str,
    ends: bool,
) -> None:
    body = b""
    for name, filename, content in parts:
        disposition = f'form-data; name="{name}"'
        if filename is not None:
            disposition += f'; filename="{filename}"'
        head = f"--x\r\nContent-Disposition: {disposition}\r\n\r\n".encode("latin-1")
        body += head + content + b"\r\n"
    body += b"--x--\r\n" * ends
    headers = {"Content-Type": kind}
    check("/v1/files", "POST", openai_port.ask("POST", "/v1/files", body, headers))
    check_cogs("/v1/files", "POST", cog_port.ask("POST", "/v1/files", body, headers))


@pytest.mark.parametrize("scheme", ["https", "HTTPS", "http", "javascript:alert(1)//", "ftp", ""])
def test_addresses_begin_with_http_or_https(cog_port: CogPort, scheme: str) -> None:
    headers = {"X-Forwarded-Proto": scheme}
    url = cog_port.ask("GET", "/v1/models/a/b", b"", headers).json()["url"]
    expected = "https" if scheme.lower() == "https" else "http"
    assert url == f"{expected}://127.0.0.1:{cog_port.port}/v1/models/a/b"


@pytest.mark.parametrize("path", ["/v1/predictions", "/v1/files"])
def test_lists_are_for_those_who_have_the_token(cog_port: CogPort, path: str) -> None:
    headers = [{}, {"Authorization": "Bearer x"}, {"Authorization": "t"}]
    assert [cog_port.ask("GET", path, b"", own).status_code for own in headers] == [403] * 3
    page = cog_port.ask("GET", path, b"", {"Authorization": "Bearer t"})
    assert (page.status_code, list(page.json())) == (200, ["previous", "next", "results"])


async def events_of(chunks: list[str]) -> list[str]:
    creation = Creation("a/b", "c", {}, Passage("PUT", "/predictions/x"))
    prediction = Prediction("x", creation, 0)
    prediction.fields["output"] = chunks
    prediction.end("succeeded")
    return [event async for event in prediction.events()]


@given(st.lists(st.text(alphabet="\r\na")))
def test_a_line_ends_once_however_it_is_cut(chunks: list[str]) -> None:
    text = ""
    for event in asyncio.run(events_of(chunks)):
        lines = event.split("\n")
        if lines[0] == "event: output":
            text += "\n".join(line[6:] for line in lines if line.startswith("data: "))
    assert text == "".join(chunks).replace("\r\n", "\n").replace("\r", "\n")
