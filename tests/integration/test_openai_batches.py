"""Batches on real servers: OpenAI's SDK, the command, and what is killed while they run."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import sqlite3
import struct
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.integration.conftest import attached
from tests.openai_server import MESSAGES, OpenAIServer
from tests.support import START_TIMEOUT, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    import openai

    from tests.integration.conftest import Triton

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MEGABYTE = 1 << 20


@pytest.fixture(scope="module")
def batching(
    paced_triton: Triton, demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OpenAIServer]:
    directory = tmp_path_factory.mktemp("batching")
    environment = {
        "STORE": str(directory / "journal.db"),
        "MAX_REQUEST_BYTES": str(MEGABYTE),
        "MAX_FILE_BYTES": str(8 * MEGABYTE),
    }
    with attached(paced_triton, demo_model, directory / "log", **environment) as server:
        yield server
    assert "Traceback" not in server.log.read_text()


@pytest.fixture
def server(batching: OpenAIServer) -> OpenAIServer:
    return batching


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
    def upload(size: int) -> httpx.Response:
        return server.post("/v1/files", data={"purpose": "batch"}, files={"file": b"x" * size})

    file = upload(3 * MEGABYTE).json()
    assert server.get(f"/v1/files/{file['id']}/content").content == b"x" * (3 * MEGABYTE)
    assert upload(9 * MEGABYTE).status_code == 413
    assert server.complete(prompt="x" * 2 * MEGABYTE).status_code == 413


def test_the_command_answers_a_file_of_vllms_run_batch(
    server: OpenAIServer, tmp_path: Path
) -> None:
    lines = [line_of(f"request-{n}", (CHAT, TEXT)[n % 2]) for n in range(10)]
    lines[4]["body"]["model"] = "none"
    (tmp_path / "in.jsonl").write_bytes(text_of(*lines))
    program = "import sys; from cog_triton.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "batch", "-i", "in.jsonl", "-o", "out"]
    options: Any = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": START_TIMEOUT}
    done = subprocess.run([*command, "--url", server.url], **options)
    assert done.returncode == 0, done.stderr
    answers = list(map(json.loads, (tmp_path / "out").read_text().splitlines()))
    assert [answer["custom_id"] for answer in answers] == [line["custom_id"] for line in lines]
    codes = [answer["response"]["status_code"] for answer in answers]
    assert codes == [200] * 4 + [404] + [200] * 5
    (tmp_path / "in.jsonl").write_bytes(text_of(lines[0], lines[0]))
    done = subprocess.run([*command, "--url", server.url], **options)
    assert (done.returncode, "is already used by an earlier line" in done.stderr) == (1, True)


def runner_of(store: str) -> int:
    """The process that runs the only active batch, by its lock; 0 if there is none."""
    with contextlib.closing(sqlite3.connect(store)) as journal:
        row = journal.execute("SELECT runner FROM batches WHERE active").fetchone()
    if row is None or not row[0]:
        return 0
    with open(f"{store}-workers", "rb") as file:
        lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, row[0], 1, 0)
        return int(struct.unpack("hhqqi4x", fcntl.fcntl(file, fcntl.F_GETLK, lock))[4])


def test_a_batch_outlives_whatever_is_killed(
    paced_triton: Triton, demo_model: Path, tmp_path: Path
) -> None:
    store, count = str(tmp_path / "journal.db"), 80
    lines = [line_of(str(n), TEXT, max_tokens=20) for n in range(count)]

    def command(**more: str) -> OpenAIServer:
        environment = {"STORE": store, "MAX_RUNNING": "8", **more}
        return attached(paced_triton, demo_model, tmp_path / "log", **environment)

    def answered(server: OpenAIServer) -> int:
        return int(server.get(f"/v1/batches/{name}").json()["request_counts"]["completed"])

    with command(OPENAI_WORKERS="2") as server:
        form: Any = {"data": {"purpose": "batch"}, "files": {"file": text_of(*lines)}}
        file = server.post("/v1/files", **form).json()["id"]
        asked = {"input_file_id": file, "endpoint": TEXT, "completion_window": "24h"}
        name = server.post("/v1/batches", asked).json()["id"]
        wait_until(lambda: answered(server) > 5, 60, "answers")
        first = runner_of(store)
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: runner_of(store) not in (0, first), 60, "another runner")
        before = answered(server)
        wait_until(lambda: answered(server) > before + 10, 60, "further answers")
        server.kill_all()
    with command() as server:
        before = answered(server)
        assert before < count
        wait_until(lambda: answered(server) > before + 10, 60, "further answers")
        assert server.stop() == 0  # without waiting for the batch
    with command() as server:
        over = lambda: server.get(f"/v1/batches/{name}").json()["status"] == "completed"  # noqa: E731
        wait_until(over, 120, "the batch")
        batch = server.get(f"/v1/batches/{name}").json()
        text = server.get(f"/v1/files/{batch['output_file_id']}/content").text
    answers = [json.loads(line)["custom_id"] for line in text.splitlines()]
    assert sorted(answers, key=int) == [line["custom_id"] for line in lines]
    assert batch["request_counts"] == {"total": count, "completed": count, "failed": 0}
