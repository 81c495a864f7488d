"""Responses that are kept, with OpenAI's client: on two workers with one journal, which are killed."""

import os
import signal
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Triton, attached
from tests.late import openai
from tests.openai_server import ANSWER, QUESTION, OpenAIServer
from tests.support import limit, started_by, wait_until

KEYS = ("sk-first", "sk-second")
BODY: dict[str, Any] = {"model": "demo", "input": QUESTION, "temperature": 0}
BACKGROUND: dict[str, Any] = {**BODY, "background": True}
RUNNING = ("queued", "in_progress")


@pytest.fixture(scope="module")
def server(
    triton: Triton, demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OpenAIServer]:
    """Two workers with one journal, on the Triton that tests share."""
    directory = tmp_path_factory.mktemp("store")
    environment = {
        "STORE": str(directory / "journal.db"),
        "OPENAI_API_KEYS": ",".join(KEYS),
        "OPENAI_WORKERS": "2",
        "DRAIN_SECONDS": "0",
        "MAX_RUNNING": "16",  # of which each worker has four for the background
    }
    with attached(triton, demo_model, directory / "log", **environment) as server:
        yield server


@pytest.fixture
def clients(server: OpenAIServer) -> Iterator[list[Any]]:
    """One of each key. Each request has a connection of its own, so that any worker gets it."""
    made = [
        openai.OpenAI(
            base_url=f"{server.url}/v1",
            api_key=key,
            max_retries=0,
            http_client=openai.DefaultHttpxClient(
                trust_env=False, headers={"Connection": "close"}, timeout=limit(60)
            ),
        )
        for key in KEYS
    ]
    yield made
    for client in made:
        client.close()


@pytest.fixture
def client(clients: list[Any]) -> Any:
    return clients[0]


def ended(client: Any, id: str) -> Any:
    def end() -> Any:
        response = client.responses.retrieve(id)
        return response.status not in RUNNING and response

    return wait_until(end, 60, f"the end of {id}")


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


def test_one_that_is_cancelled_by_any_worker_stays_so(client: Any) -> None:
    for _ in range(12):
        id = client.responses.create(**BACKGROUND, extra_body={"min_tokens": 1900}).id
        watched = client.responses.retrieve(id, stream=True)
        seen = [next(watched) for _ in range(4)]
        cancelled = client.responses.cancel(id)
        seen += watched
        if cancelled.status == "cancelled":
            assert (seen[-1].type, seen[-1].response.status) == ("response.incomplete", "cancelled")
        assert [event.sequence_number for event in seen] == [*range(len(seen))]
        assert [*client.responses.retrieve(id, stream=True)] == seen
        for same in (client.responses.cancel(id), client.responses.retrieve(id)):
            assert same.to_dict() == cancelled.to_dict()
    id = client.responses.create(**BACKGROUND).id
    client.responses.delete(id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(id)


def unfinished(server: OpenAIServer) -> dict[str, int]:
    """The processes of the responses that have begun and not ended."""
    with sqlite3.connect(server.environment["STORE"]) as journal:
        sql = "SELECT id, runner FROM responses WHERE runner IS NOT NULL AND started IS NOT NULL"
        return dict(journal.execute(sql).fetchall())


def kill_worker(server: OpenAIServer) -> None:
    os.kill(started_by(server.process.pid, "openai.workers")[0], signal.SIGKILL)


def test_what_ran_when_all_was_killed_goes_on_to_the_same_text(
    server: OpenAIServer, client: Any
) -> None:
    """A worker first, then everything; and what ran at a stop."""
    asked = [{**BODY, "temperature": n % 2, "extra_body": {"seed": n}} for n in range(20)]
    create, ids = partial(client.responses.create, background=True), list[str]()
    with ThreadPoolExecutor(20) as threads:
        texts = [*threads.map(lambda body: client.responses.create(**body).output_text, asked)]
        for end in (kill_worker, OpenAIServer.kill_all, OpenAIServer.stop):
            ids += [response.id for response in threads.map(lambda body: create(**body), asked)]
            wait_until(lambda: len(unfinished(server)) > 2, 60, "some that run")
            end(server)
            if server.process.poll() is not None:
                assert unfinished(server)
                server.__enter__()
    assert [ended(client, id).output_text for id in ids] == texts * 3
    assert not unfinished(server)
