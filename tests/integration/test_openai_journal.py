"""Two processes that answer, with one journal, and what becomes of their work when they are killed."""

import contextlib
import fcntl
import json
import os
import signal
import sqlite3
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.conftest import Triton, attached
from tests.integration.test_openai_store import TEXT, line_of, text_of
from tests.openai_server import OpenAIServer
from tests.support import limit, server_sent_events, started_by, wait_until

RESPONSES, BATCHES = "/v1/responses", "/v1/batches"
QUESTIONS = [f"Question {number}" for number in range(8)]
TOKENS = 40
PAST_ANY_TEST = 5000  # tokens: 100 seconds at 20 ms a token
ROUNDS_OF_CANCELS = 8  # each request has a connection of its own, so that any process gets it
LINES = 100  # of the batch: at 20 ms a token, it takes longer than the kills


@pytest.fixture(scope="module")
def two_processes(
    paced_triton: Triton, demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OpenAIServer]:
    directory = tmp_path_factory.mktemp("journal")
    environment = {
        "STORE": str(directory / "journal.db"),
        "OPENAI_WORKERS": "2",
        "MAX_RUNNING": "16",  # of which each process has four for the background
    }
    with attached(paced_triton, demo_model, directory / "log", **environment) as server:
        yield server


@pytest.fixture
def server(two_processes: OpenAIServer) -> OpenAIServer:
    if two_processes.process.poll() is not None:  # a test before this one has ended it
        two_processes.__enter__()
    return two_processes


def create(server: OpenAIServer, question: str, **fields: Any) -> dict[str, Any]:
    """Return the response that was begun, or, if it is not in the background, has ended."""
    body = {"model": "demo", "input": question, "max_output_tokens": TOKENS, **fields}
    reply = server.post(RESPONSES, body)
    assert reply.status_code == 200, reply.text
    response: dict[str, Any] = reply.json()
    return response


def text(response: dict[str, Any]) -> str:
    (message,) = response["output"]
    return str(message["content"][0]["text"])


@contextlib.contextmanager
def watched(server: OpenAIServer, id: str) -> Iterator[Iterator[tuple[str, bytes]]]:
    """The events of a response from its beginning on, with their names."""
    url = f"{server.url}{RESPONSES}/{id}?stream=true"
    with httpx.stream("GET", url, trust_env=False, timeout=limit(60)) as reply:
        assert reply.status_code == 200, reply.read()
        yield server_sent_events(reply)


def test_a_response_that_any_process_cancels_stays_cancelled(server: OpenAIServer) -> None:
    for question in QUESTIONS[:ROUNDS_OF_CANCELS]:
        long = {"max_output_tokens": PAST_ANY_TEST, "min_tokens": PAST_ANY_TEST}
        id = create(server, question, background=True, **long)["id"]
        path = f"{RESPONSES}/{id}"
        with watched(server, id) as events:
            seen = [next(events) for _ in range(4)]
            cancelled = server.post(f"{path}/cancel").json()
            seen += events
        assert cancelled["status"] == "cancelled"
        assert seen[-1][0] == "response.incomplete"
        with watched(server, id) as events:
            assert [*events] == seen
        assert server.post(f"{path}/cancel").json() == cancelled
        assert server.get(path).json() == cancelled


def test_a_response_that_is_deleted_while_it_runs_is_gone(server: OpenAIServer) -> None:
    id = create(server, QUESTIONS[0], background=True)["id"]
    deleted = httpx.delete(f"{server.url}{RESPONSES}/{id}", trust_env=False, timeout=limit(60))
    assert deleted.status_code == 200
    assert server.get(f"{RESPONSES}/{id}").status_code == 404


class Journal:
    """What a journal says of the work that its servers have."""

    def __init__(self, server: OpenAIServer) -> None:
        self._file = server.environment["STORE"]

    def running(self) -> int:
        """Return how many background responses have begun and not ended."""
        sql = "SELECT count(*) FROM responses WHERE runner IS NOT NULL AND started IS NOT NULL"
        ((count,),) = self._rows(sql)
        return int(count)

    def runner(self) -> int:
        """Return the process that runs the only active batch, by its lock; 0 if there is none."""
        rows = self._rows("SELECT runner FROM batches WHERE active")
        if not rows or not rows[0][0]:
            return 0
        with open(f"{self._file}-workers", "rb") as file:
            lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, rows[0][0], 1, 0)
            return int(struct.unpack("hhqqi4x", fcntl.fcntl(file, fcntl.F_GETLK, lock))[4])

    def _rows(self, sql: str) -> list[tuple[Any, ...]]:
        with contextlib.closing(sqlite3.connect(self._file)) as journal:
            return journal.execute(sql).fetchall()


def of_ended(server: OpenAIServer, id: str) -> dict[str, Any]:
    """Wait for the end of a background response, and return it."""

    def end() -> Any:
        response = server.get(f"{RESPONSES}/{id}").json()
        return response["status"] not in ("queued", "in_progress") and response

    ended: dict[str, Any] = wait_until(end, 60, f"the end of {id}")
    return ended


def create_batch(server: OpenAIServer) -> str:
    lines = text_of(*(line_of(str(number), TEXT, max_tokens=20) for number in range(LINES)))
    uploaded = server.post("/v1/files", data={"purpose": "batch"}, files={"file": lines}).json()
    asked = {"input_file_id": uploaded["id"], "endpoint": TEXT, "completion_window": "24h"}
    return str(server.post(BATCHES, asked).json()["id"])


def completed(server: OpenAIServer, batch: str) -> dict[str, Any] | None:
    """Return the batch, once each of its lines has an answer."""
    found: dict[str, Any] = server.get(f"{BATCHES}/{batch}").json()
    return found if found["status"] == "completed" else None


def answered(server: OpenAIServer, batch: str) -> int:
    return int(server.get(f"{BATCHES}/{batch}").json()["request_counts"]["completed"])


def test_what_runs_when_its_process_is_killed_goes_on_to_the_same_answers(
    server: OpenAIServer, paced_triton: Triton, demo_model: Path, tmp_path: Path
) -> None:
    """Background responses and a batch: one process is killed, then all are, then a server is stopped."""
    journal = Journal(server)
    ids: list[str] = []

    def another_server(log: str) -> OpenAIServer:
        options = {"STORE": server.environment["STORE"], "MAX_RUNNING": "16", "DRAIN_SECONDS": "0"}
        return attached(paced_triton, demo_model, tmp_path / log, **options)

    with ThreadPoolExecutor(len(QUESTIONS)) as threads:
        expected = [*threads.map(lambda question: text(create(server, question)), QUESTIONS)]

        def begin_work(server: OpenAIServer, batch: str) -> None:
            """Begin a response to each question, and wait until some run and the batch gets on."""
            before = answered(server, batch)

            def begin(question: str) -> str:
                return str(create(server, question, background=True)["id"])

            ids.extend(threads.map(begin, QUESTIONS))
            wait_until(lambda: journal.running() > 2, 60, "some responses that run")
            wait_until(lambda: answered(server, batch) > before, 60, "an answer of the batch")

        batch = create_batch(server)
        wait_until(journal.runner, 60, "a process that runs the batch")
        begin_work(server, batch)
        first = journal.runner()
        assert first in started_by(server.process.pid, "openai.workers")
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: journal.runner() not in (0, first), 60, "another process for the batch")
        begin_work(server, batch)
        server.kill_all()
        assert journal.running()
        with another_server("second") as second:
            begin_work(second, batch)
            assert second.stop() == 0  # without waiting for its work
        assert journal.running()
        with another_server("third") as third:
            made = wait_until(lambda: completed(third, batch), 120, "the batch")
            ended = [text(of_ended(third, id)) for id in ids]
            output = third.get(f"/v1/files/{made['output_file_id']}/content").text
    assert ended == expected * 3
    assert made["request_counts"] == {"total": LINES, "completed": LINES, "failed": 0}
    names = [json.loads(line)["custom_id"] for line in output.splitlines()]
    assert sorted(names, key=int) == [str(number) for number in range(LINES)]
