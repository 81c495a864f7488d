"""What a request has that cannot be stored, and limits that are no numbers: 400, and nothing is asked."""

import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from tests.unit.api.openai.support import CHUNKS, RESPONSES, Backend, application, served

pytestmark = pytest.mark.anyio
JSON = {"content-type": "application/json"}
BIG, HALF = "100000000000000000000", '"\\ud800"'


def client_of(backend: Backend) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(application(served(backend)), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test", headers=JSON)


@pytest.fixture
def backend(tmp_path: Path) -> Backend:
    return Backend(*CHUNKS, STORE=str(tmp_path / "journal.db"))


def item(extra: str) -> str:
    return f'"input": [{{"role": "user", "content": "hi", {extra}}}]'


BODIES = {
    "text in an item": item(f'"x": {HALF}'),
    "name in an item": item('"\\udc00": 1'),
    "text in a part": f'"input": [{{"role": "user", "content": '
    f'[{{"type": "input_text", "text": "hi", "x": {HALF}}}]}}]',
    "text in the input": f'"input": {HALF}',
    "text in metadata": f'"input": "hi", "metadata": {{"a": {HALF}}}',
    "text in user": f'"input": "hi", "user": {HALF}',
    "text in instructions": f'"input": "hi", "instructions": {HALF}',
    "text in previous_response_id": f'"input": "hi", "previous_response_id": {HALF}',
    "nested too deeply": item(f'"x": {"[" * 300}{"]" * 300}'),
}


@pytest.mark.parametrize("more", ["", ', "stream": true', ', "background": true'])
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
async def test_a_response_that_cannot_be_stored_is_refused_before_it_is_made(
    backend: Backend, body: str, more: str
) -> None:
    async with client_of(backend) as client:
        reply = await client.post(RESPONSES, content=f"{{{body}{more}}}")
        assert reply.status_code == 400, reply.text
        assert reply.json()["error"]["type"] == "invalid_request_error"
        assert not backend.asked
        assert (await client.post(RESPONSES, json={"input": "hi"})).status_code == 200


NUMBERS = {
    "in an item": item(f'"x": {BIG}'),
    "negative": item(f'"x": -{BIG}'),
    "of 4,000 digits": item(f'"x": {"9" * 4000}'),
    "deep in an item": item(f'"x": {{"y": [{BIG}]}}'),
    "in a tool": '"input": "hi", "tools": [{"type": "function", "name": "f", '
    f'"parameters": {{"x": {BIG}}}}}]',
}


@pytest.mark.parametrize("more", ["", ', "store": false', ', "background": true'])
@pytest.mark.parametrize("body", NUMBERS.values(), ids=NUMBERS)
async def test_a_number_of_more_than_64_bits_is_stored_or_refused(
    backend: Backend, body: str, more: str
) -> None:
    async with client_of(backend) as client:
        reply = await client.post(RESPONSES, content=f"{{{body}{more}}}")
        assert reply.status_code in (200, 400), reply.text
        if reply.status_code == 400:
            assert not backend.asked
        elif reply.json()["store"]:
            for path in ("", "/input_items"):
                again = await client.get(f"{RESPONSES}/{reply.json()['id']}{path}")
                assert again.status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        f'"metadata": {{"a": {HALF}}}',
        f'"metadata": {{{HALF}: "a"}}',
        f'"input_file_id": {HALF}',
        f'"endpoint": {HALF}',
        f'"output_expires_after": {{"anchor": "created_at", "seconds": 3600, "x": {HALF}}}',
    ],
)
async def test_a_batch_that_cannot_be_stored_is_refused(backend: Backend, fields: str) -> None:
    async with client_of(backend) as client:
        file = await uploaded(client, "in.jsonl", "multipart/form-data; boundary=x")
        name = file.json()["id"]
        good = f'"input_file_id": "{name}", "endpoint": "/v1/completions"'
        body = f'{{{good}, "completion_window": "24h", {fields}}}'
        reply = await client.post("/v1/batches", content=body)
        assert reply.status_code == 400, reply.text
        assert (await client.get("/v1/batches")).json()["data"] == []


async def uploaded(client: httpx.AsyncClient, name: str, kind: str) -> httpx.Response:
    form = (
        '--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        f'--x\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'
        "{}\n\r\n--x--\r\n"
    )
    return await client.post("/v1/files", content=form.encode(), headers={"content-type": kind})


@pytest.mark.parametrize(
    ("name", "charset"),
    [
        ("+2AA-.jsonl", "utf-7"),
        ("a+3AA-", "utf-7"),
        ("x" * 2000, "utf-8"),
        ("\\ud800.jsonl", "unicode_escape"),
        ("in.jsonl", "punycode"),
        ("in.jsonl", "idna"),
        ("in.jsonl", "hex"),
        ("in.jsonl", "none-such"),
        ("in.jsonl", "utf-16"),
    ],
)
async def test_a_files_name_never_stops_the_journal(
    backend: Backend, name: str, charset: str
) -> None:
    async with client_of(backend) as client:
        kind = f"multipart/form-data; boundary=x; charset={charset}"
        reply = await uploaded(client, name, kind)
        assert reply.status_code < 500, reply.text
        if reply.status_code >= 400:
            assert reply.json()["error"]["type"] == "invalid_request_error"
        listed = await client.get("/v1/files")
        assert listed.status_code == 200
        assert len(listed.json()["data"]) == (reply.status_code == 200)
        assert (await client.post(RESPONSES, json={"input": "hi"})).status_code == 200


LIMITS = ["", "0", "-1", "+1", "1e3", "1.0", "abc", "٣", "²", "1_0", " 1", "9" * 5000]
LIMITS += ["00000000199999999", "000000001" + "9" * 30, "10001"]


@pytest.mark.parametrize("limit", LIMITS)
async def test_a_limit_is_a_number_in_its_bounds(backend: Backend, limit: str) -> None:
    async with client_of(backend) as client:
        stored: Any = (await client.post(RESPONSES, json={"input": "hi"})).json()["id"]
        for path in ("/v1/files", "/v1/batches", f"{RESPONSES}/{stored}/input_items"):
            reply = await client.get(f"{path}?limit={quote(limit)}")
            assert reply.status_code == 400, (path, reply.text)
            error = reply.json()["error"]
            assert (error["type"], error["param"]) == ("invalid_request_error", "limit")
            for good in ("1", "100", "00000000000000000000002"):
                assert (await client.get(f"{path}?limit={good}")).status_code == 200


async def test_a_stored_response_is_given_back_as_it_was(backend: Backend) -> None:
    async with client_of(backend) as client:
        made = (await client.post(RESPONSES, json={"input": "hé 🙂"})).json()
        again = await client.get(f"{RESPONSES}/{made['id']}")
        assert again.headers["content-type"] == "application/json"
        assert json.loads(again.content) == made


# A body with an object of each class that a response may have.
WHOLE: dict[str, Any] = {
    "model": "m",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "run", "input": "ls"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "a.txt"},
    ],
    "tools": [
        {"type": "function", "name": "weather", "parameters": {"type": "object"}},
        {"type": "custom", "name": "run", "format": {"type": "text"}},
    ],
    "tool_choice": {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "weather"}],
    },
    "text": {"format": {"type": "json_schema", "name": "s", "schema": {"type": "object"}}},
    "reasoning": {"effort": "low"},
    "metadata": {"a": "b"},
    "chat_template_kwargs": {"a": "b"},
}


def with_further_fields(value: Any, further: Any) -> Any:
    """A body in which each object has a field that no class has; metadata may only have texts."""
    if isinstance(value, list):
        return [with_further_fields(part, further) for part in value]
    if not isinstance(value, dict):
        return value
    parts = {
        name: part if name == "metadata" else with_further_fields(part, further)
        for name, part in value.items()
    }
    return {**parts, "further": further}


NESTED: Any = "deep"
for _ in range(110):
    NESTED = [NESTED]
FURTHER = {"a number of 67 bits": 10**20, "nesting": NESTED, "an object": {"y": [1, "two", None]}}


@pytest.mark.parametrize("is_background", [False, True], ids=["at once", "in the background"])
@pytest.mark.parametrize("further", FURTHER.values(), ids=FURTHER)
async def test_further_fields_of_all_objects_are_stored_as_they_can_be_read_again(
    tmp_path: Path, further: Any, is_background: bool
) -> None:
    """Objects below the body keep fields that no class has, and clients get them back."""
    backend = Backend(
        *CHUNKS, template="tools <tool_call> </think>", STORE=str(tmp_path / "journal.db")
    )
    app = application(served(backend))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        body = {**with_further_fields(WHOLE, further), "background": is_background}
        reply = await client.post(RESPONSES, json=body)
        assert reply.status_code == 200, reply.text
        assert (
            reply.headers["warning"] == '199 cog-triton "ignored fields: further"' or is_background
        )
        id = reply.json()["id"]
        stored = (await client.get(f"{RESPONSES}/{id}")).json()
        assert "further" not in stored  # the body's, which has no type at all
        assert {tool["further"] == further for tool in stored["tools"]} == {True}
        items = (await client.get(f"{RESPONSES}/{id}/input_items")).json()["data"]
        assert {item["further"] == further for item in items} == {True}
        if is_background:  # what another process makes of the rows
            row = await app.state.served.storage.responses.find_background(id)
            assert (await app.state.background.run_of(row)).id == id
        else:
            more = {"input": "And?", "previous_response_id": id}
            assert (await client.post(RESPONSES, json=more)).status_code == 200
