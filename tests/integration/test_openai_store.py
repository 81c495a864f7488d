"""Responses and batches that are kept, with OpenAI's client and the command."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.conftest import Triton, attached
from tests.late import openai
from tests.openai_server import ANSWER, MESSAGES, QUESTION, OpenAIServer
from tests.support import command, limit, wait_until

KEYS = ("sk-first", "sk-second")
BODY: dict[str, Any] = {"model": "demo", "input": QUESTION, "temperature": 0}
BACKGROUND: dict[str, Any] = {**BODY, "background": True}
CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MEGABYTE = 1 << 20


@pytest.fixture(scope="module")
def server(
    triton: Triton, demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OpenAIServer]:
    """With a journal and two keys, on the Triton that tests share."""
    directory = tmp_path_factory.mktemp("store")
    environment = {
        "STORE": str(directory / "journal.db"),
        "OPENAI_API_KEYS": ",".join(KEYS),
        "MAX_REQUEST_BYTES": str(MEGABYTE),
        "MAX_FILE_BYTES": str(8 * MEGABYTE),
    }
    with attached(triton, demo_model, directory / "log", **environment) as server:
        yield server
    assert "Traceback" not in server.log.read_text()


@pytest.fixture
def clients(server: OpenAIServer) -> Iterator[list[Any]]:
    """One of each key."""
    made = [
        openai.OpenAI(
            base_url=f"{server.url}/v1",
            api_key=key,
            max_retries=0,
            http_client=openai.DefaultHttpxClient(trust_env=False, timeout=limit(60)),
        )
        for key in KEYS
    ]
    yield made
    for client in made:
        client.close()


@pytest.fixture
def client(clients: list[Any]) -> Any:
    return clients[0]


def test_a_response_is_kept_and_continued_until_it_is_deleted(clients: list[Any]) -> None:
    client, stranger = clients
    first = client.responses.create(**BODY, metadata={"a": "b"})
    assert first.output_text.startswith(ANSWER)
    assert client.responses.retrieve(first.id).to_dict() == first.to_dict()
    second = client.responses.create(
        model="demo", input="And again?", previous_response_id=first.id
    )
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
    items = [item.to_dict() for item in client.responses.input_items.list(second.id, order="asc")]
    assert [item["role"] for item in items] == ["user", "assistant", "user"]
    assert items[1] == first.output[0].to_dict()
    pages = client.responses.input_items.list(second.id, limit=1)
    assert [item.id for item in pages] == [item["id"] for item in reversed(items)]
    asking = stranger.responses
    for ask in (asking.retrieve, asking.delete, asking.input_items.list, asking.cancel):
        with pytest.raises(openai.NotFoundError):
            ask(first.id)
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    for own, id in ((client, first.id), (stranger, second.id)):
        with pytest.raises(openai.BadRequestError) as raised:
            own.responses.create(**BODY, previous_response_id=id)
        assert raised.value.code == "previous_response_not_found"


def test_one_that_need_not_be_kept_is_not(client: Any) -> None:
    unkept = client.responses.create(**BODY, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.create(**BACKGROUND, store=False)
    with client.responses.stream(**BODY) as stream:
        final = stream.get_final_response()
    assert client.responses.retrieve(final.id).output_text == final.output_text
    with pytest.raises(openai.BadRequestError, match="synchronous"):
        client.responses.cancel(final.id)
    with pytest.raises(openai.BadRequestError, match="conversation is not supported"):
        client.responses.create(**BODY, conversation="conv_1")


def test_a_stream_is_picked_up_again_from_any_event(server: OpenAIServer, client: Any) -> None:
    with client.responses.create(**BACKGROUND, stream=True) as stream:
        head = [next(stream) for _ in range(6)]
    response = head[0].response
    assert [event.type for event in head[:3]] == [
        *("response.created", "response.queued", "response.in_progress")
    ]
    tail = list(client.responses.retrieve(response.id, stream=True, starting_after=5))
    numbers = [event.sequence_number for event in (*head, *tail)]
    assert numbers == list(range(len(numbers)))
    final = tail[-1].response
    assert final.output_text == client.responses.create(**BODY).output_text
    assert client.responses.retrieve(response.id).to_dict() == final.to_dict()
    again = list(client.responses.retrieve(response.id, stream=True))
    assert [event.to_dict() for event in again] == [event.to_dict() for event in (*head, *tail)]
    headers = {"Authorization": f"Bearer {KEYS[0]}", "Last-Event-ID": str(numbers[-2])}
    (last,) = server.get(f"/v1/responses/{response.id}", headers=headers).text.split("\n\n")[:-1]
    assert last.startswith(f"id: {numbers[-1]}\nevent: response.completed\n")


# Batches


def line_of(name: str, url: str, **fields: Any) -> dict[str, Any]:
    asked: dict[str, dict[str, Any]] = {
        CHAT: {"messages": MESSAGES, "max_tokens": 8},
        TEXT: {"prompt": f"Hello {name}", "max_tokens": 8},
        RESPONSES: {"input": "Hello", "max_output_tokens": 8},
    }
    body = {"model": "demo", **asked[url], **fields}
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def text_of(*lines: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


@pytest.mark.parametrize("endpoint", [CHAT, TEXT, RESPONSES])
def test_openais_sdk_creates_polls_and_reads_one(client: openai.OpenAI, endpoint: Any) -> None:
    lines = [line_of(str(n), endpoint) for n in range(20)]
    lines[3]["body"]["temperature"] = 9
    after: Any = {"anchor": "created_at", "seconds": 3600}
    content = text_of(*lines)
    file = client.files.create(file=("in.jsonl", content), purpose="batch", expires_after=after)
    made = client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"a": "b"}
    )
    assert (made.status, made.metadata) == ("validating", {"a": "b"})

    def over() -> Any:
        batch = client.batches.retrieve(made.id)
        return batch if batch.status == "completed" else None

    batch = wait_until(over, 60, "the batch")
    assert (batch.request_counts.completed, batch.request_counts.failed) == (19, 1)
    answers = map(json.loads, client.files.content(batch.output_file_id).text.splitlines())
    texts = {answer["custom_id"]: answer["response"]["body"] for answer in answers}
    assert sorted(texts) == sorted({str(n) for n in range(20)} - {"3"})
    key = {RESPONSES: "output"}.get(endpoint, "choices")
    assert all(body[key] for body in texts.values())
    (error,) = map(json.loads, client.files.content(batch.error_file_id).text.splitlines())
    assert (error["custom_id"], error["response"]["status_code"]) == ("3", 400)
    assert client.files.content(file.id).content == content
    assert client.batches.list(limit=1).data[0].id == made.id
    assert made.id in [one.id for one in client.batches.list(limit=1)]
    assert client.files.delete(file.id).deleted


def test_a_file_may_have_more_bytes_than_a_request(server: OpenAIServer) -> None:
    headers = {"Authorization": f"Bearer {KEYS[0]}"}

    def upload(size: int) -> httpx.Response:
        form: Any = {"data": {"purpose": "batch"}, "files": {"file": b"x" * size}}
        return server.post("/v1/files", headers=headers, **form)

    file = upload(3 * MEGABYTE).json()
    content = server.get(f"/v1/files/{file['id']}/content", headers=headers).content
    assert content == b"x" * (3 * MEGABYTE)
    assert upload(9 * MEGABYTE).status_code == 413
    large = {"model": "demo", "prompt": "x" * 2 * MEGABYTE}
    assert server.post(TEXT, large, headers=headers).status_code == 413


def test_the_command_answers_a_file_of_vllms_run_batch(
    server: OpenAIServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [line_of(f"request-{n}", (CHAT, TEXT)[n % 2]) for n in range(10)]
    lines[4]["body"]["model"] = "none"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_PROXY", "*")
    options = ("-i", "in.jsonl", "-o", "out", "--url", server.url, "--api-key", KEYS[0])

    Path("in.jsonl").write_bytes(text_of(*lines))
    done = command("batch", *options)
    assert done.returncode == 0, done.stderr
    answers = list(map(json.loads, Path("out").read_text().splitlines()))
    assert [answer["custom_id"] for answer in answers] == [line["custom_id"] for line in lines]
    codes = [answer["response"]["status_code"] for answer in answers]
    assert codes == [200] * 4 + [404] + [200] * 5

    Path("in.jsonl").write_bytes(text_of(lines[0], lines[0]))
    done = command("batch", *options)
    assert done.returncode == 1
    assert "is already used by an earlier line" in done.stderr
