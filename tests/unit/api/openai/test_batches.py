"""Files and batches on a backend that answers with what it is told to, and a real journal."""

import asyncio
import io
import json
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from cog_triton.api.openai import batch_input, batch_runner, jobs, pacing
from cog_triton.api.openai.background import BackgroundResponses
from cog_triton.api.openai.batch_input import Checks, InputLine, split_lines
from cog_triton.api.openai.batch_runner import Runner, body_of
from cog_triton.api.openai.keys import Key
from cog_triton.api.openai.quotas import Quotas
from cog_triton.api.openai.routes import files as file_routes
from cog_triton.api.openai.schemas.files_and_batches import LineBody
from cog_triton.api.openai.storage.batches import RunningBatch
from cog_triton.api.openai.storage.files import LineRow
from cog_triton.api.openai.storage.responses import ActiveResponse
from cog_triton.errors import JournalUnavailable, TritonUnavailable
from tests.unit.api.openai.support import (
    CHAT,
    CHUNKS,
    MESSAGES,
    TEXT,
    Backend,
    application,
    ask,
    served,
)

pytestmark = pytest.mark.anyio


def line_of(name: str, url: str = TEXT, **fields: Any) -> dict[str, Any]:
    body = {"model": "m", **({"messages": MESSAGES} if url == CHAT else {"prompt": "xy"}), **fields}
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def text_of(*lines: Any) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


class Client(httpx.AsyncClient):
    """One of an application whose batches run, while ``running`` does."""

    def __init__(self, backend: Backend, key: str = "") -> None:
        self.served = served(backend)
        app = application(self.served)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        super().__init__(transport=transport, base_url="http://test", headers=headers)
        self.app = app
        if self.served.storage is not None:
            self.storage = self.served.storage
            self.runner = Runner(app, self.served, self.storage)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.runner.work())
        try:
            yield
        finally:
            await self.runner.stop()
            task.cancel()

    async def upload(self, content: bytes, **fields: str) -> httpx.Response:
        form = {"purpose": "batch", **fields}
        return await self.post("/v1/files", data=form, files={"file": ("in.jsonl", content)})

    async def create(self, content: bytes, endpoint: str = TEXT, **fields: Any) -> dict[str, Any]:
        file = (await self.upload(content)).json()["id"]
        asked = {"input_file_id": file, "endpoint": endpoint, "completion_window": "24h"}
        reply = await self.post("/v1/batches", json={**asked, **fields})
        assert reply.status_code == 200, reply.text
        made: dict[str, Any] = reply.json()
        return made

    async def batch(self, name: str) -> dict[str, Any]:
        return dict((await self.get(f"/v1/batches/{name}")).json())

    async def until(self, name: str, *states: str) -> dict[str, Any]:
        async def state() -> dict[str, Any] | None:
            batch = await self.batch(name)
            return batch if batch["status"] in states else None

        return dict(await until(state))

    async def lines(self, batch: dict[str, Any], part: str) -> dict[str, Any]:
        """A file's lines by their custom ids, which have to be different."""
        if (file := batch[f"{part}_file_id"]) is None:
            return {}
        text = (await self.get(f"/v1/files/{file}/content")).text
        values = [json.loads(line) for line in text.splitlines()]
        named = {value["custom_id"]: value for value in values}
        assert len(named) == len(values) == batch["request_counts"][COUNTS[part]]
        return named


COUNTS = {"output": "completed", "error": "failed"}


async def until(condition: Callable[[], Awaitable[Any]]) -> Any:
    deadline = time.monotonic() + 60
    while not (value := await condition()):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    return value


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for module in (batch_runner, jobs):
        monkeypatch.setattr(module, "LOOK_SECONDS", 0.02)
    return str(tmp_path / "journal.db")


class Held(Backend):
    """One whose answers come when they are let go."""

    def __init__(self, *chunks: Any, **environment: str) -> None:
        super().__init__(*chunks, **environment)
        self.gate = asyncio.Semaphore(0)

    async def generate(self, *given: Any) -> AsyncIterator[Any]:  # type: ignore[override]
        await self.gate.acquire()
        async for chunk in super().generate(*given):
            yield chunk


async def test_each_line_is_answered_and_errors_have_a_file_of_their_own(store: str) -> None:
    backend = Backend(*CHUNKS, STORE=store)
    lines = [
        line_of("a"),
        line_of("b", temperature=9),
        line_of("c", seed=7),
        line_of("s", stream=True),
    ]
    async with Client(backend) as client, client.running():
        batch = await client.create(text_of(*lines), metadata={"by": "me"})
        assert (batch["status"], batch["metadata"]) == ("validating", {"by": "me"})
        batch = await client.until(batch["id"], "completed")
        assert batch["request_counts"] == {"total": 4, "completed": 2, "failed": 2}
        assert batch["usage"]["total_tokens"] == 2 * (3 + 2)
        assert batch["created_at"] <= batch["in_progress_at"] <= batch["completed_at"]
        output, errors = await client.lines(batch, "output"), await client.lines(batch, "error")
        assert list(errors) == ["b", "s"]
        assert errors["b"]["response"]["status_code"] == 400
        assert errors["b"]["response"]["body"]["error"]["param"] == "temperature"
        assert output["a"]["response"]["body"]["choices"][0]["text"] == "ab"
        assert output["a"]["error"] is None
    assert 7 in {request.seed for request, _ in backend.asked}
    assert all(tenant.batch for tenant in backend.tenants)


@dataclass(frozen=True)
class LineError:
    """An error of a batch's input."""

    line: int | None
    code: str
    param: str | None


@dataclass(frozen=True)
class InvalidInput:
    """An input file, and its errors."""

    content: str
    errors: list[LineError]


INVALID_INPUTS = [
    InvalidInput("\n \n", [LineError(None, "empty_file", None)]),
    InvalidInput("no\n", [LineError(1, "invalid_json_line", None)]),
    InvalidInput("[1]\n", [LineError(1, "invalid_json_line", None)]),
    InvalidInput(
        '{"custom_id": "a", "method": "GET", "url": "/v1/completions", "body": {}}',
        [LineError(1, "invalid_value", "method")],
    ),
    InvalidInput(
        '{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {}}',
        [LineError(1, "url_mismatch", "url")],
    ),
    InvalidInput(
        '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": 1}',
        [LineError(1, "invalid_type", "body")],
    ),
    InvalidInput(
        '{"custom_id": 1, "method": "POST", "url": "/v1/completions", "body": {}}',
        [LineError(1, "invalid_type", "custom_id")],
    ),
    InvalidInput(
        r'{"custom_id": "\ud800", "method": "POST", "url": "/v1/completions", "body": {}}',
        [LineError(1, "invalid_json_line", None)],
    ),
    InvalidInput(
        '{"method": "POST", "url": "/v1/completions", "body": {}}',
        [LineError(1, "missing_required_parameter", "custom_id")],
    ),
    InvalidInput(
        (
            '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}\n'
            "\n"
            '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}\n'
            '{"custom_id": "b", "method": "POST", "url": "/v1/completions"\n'
        ),
        [LineError(3, "duplicate_custom_id", "custom_id"), LineError(4, "invalid_json_line", None)],
    ),
]


async def test_the_input_is_checked_before_anything_runs(store: str) -> None:
    backend = Backend(*CHUNKS, STORE=store)
    async with Client(backend) as client, client.running():
        for case in INVALID_INPUTS:
            batch = await client.create(case.content.encode())
            batch = await client.until(batch["id"], "failed")
            found = [LineError(e["line"], e["code"], e["param"]) for e in batch["errors"]["data"]]
            assert found == case.errors, case.content
            assert batch["request_counts"]["total"] == 0
    assert not backend.asked


def test_a_batch_has_so_many_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert batch_input.MAX_LINES == 50_000  # as at OpenAI
    monkeypatch.setattr(batch_input, "MAX_LINES", 500)
    monkeypatch.setattr(pacing, "RESTS_PER_WORK", 0.0)
    checks = Checks(TEXT, served(Backend(STORE="0")))
    rows = [InputLine(n, json.dumps(line_of(str(n))).encode()) for n in range(1, 502)]
    assert checks.read(rows[:-1])
    assert not checks.errors
    assert not checks.read(rows[-1:])
    assert [error.code for error in checks.errors] == ["too_many_tasks"]


INVALID_FORMS: list[tuple[dict[str, Any], str]] = [
    # Fields of a file's form, and the one at fault.
    ({"purpose": "assistants"}, "purpose"),
    ({"content": ""}, "file"),
    ({"expires_after[anchor]": "created_at"}, "expires_after.seconds"),
    (
        {"expires_after[anchor]": "created_at", "expires_after[seconds]": "1"},
        "expires_after.seconds",
    ),
    ({"expires_after[anchor]": "now", "expires_after[seconds]": "3600"}, "expires_after.anchor"),
]


@dataclass(frozen=True)
class Listing:
    """A query of the list of three files, and the numbers of those that come."""

    query: dict[str, str | int]
    numbers: list[int]
    has_more: bool
    after: int | None = None  # the number of the file behind which the list begins


LISTINGS = [
    Listing({}, [2, 1, 0], has_more=False),
    Listing({"limit": 2}, [2, 1], has_more=True),
    Listing({"limit": 2}, [0], after=1, has_more=False),
    Listing({"order": "asc", "limit": 1}, [0], has_more=True),
    Listing({"order": "asc"}, [2], after=1, has_more=False),
    Listing({"purpose": "batch", "limit": 1}, [2], has_more=True),
    Listing({"purpose": "batch_output"}, [], has_more=False),
]


async def test_files(store: str) -> None:
    async with Client(Backend(STORE=store)) as client:
        for form, param in INVALID_FORMS:
            reply = await client.upload(**{"content": b"x", **form})
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), form
        given = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
        content = b'{"a": "\xff"}\n\r\nno end'
        names = [(await client.upload(content, **given)).json()["id"] for _ in range(3)]
        file = (await client.get(f"/v1/files/{names[0]}")).json()
        assert (file["bytes"], file["filename"], file["purpose"]) == (
            len(content),
            "in.jsonl",
            "batch",
        )
        assert file["expires_at"] - file["created_at"] == 3600
        assert (await client.get(f"/v1/files/{names[0]}/content")).content == content
        for listing in LISTINGS:
            query = dict(listing.query)
            if listing.after is not None:
                query["after"] = names[listing.after]
            listed = (await client.get("/v1/files", params=query)).json()
            assert [names.index(file["id"]) for file in listed["data"]] == listing.numbers, listing
            assert listed["has_more"] is listing.has_more, listing
        for limit in ("0", "x", "10001"):
            assert (await client.get(f"/v1/files?limit={limit}")).status_code == 400
        assert (await client.delete(f"/v1/files/{names[0]}")).json()["deleted"]
        for path in (names[0], f"{names[0]}/content", "none"):
            assert (await client.get(f"/v1/files/{path}")).status_code == 404
        with sqlite3.connect(store) as journal:
            journal.execute("UPDATE files SET expires = 1 WHERE id = ?", (names[1],))
        assert [file["id"] for file in (await client.get("/v1/files")).json()["data"]] == names[2:]
        await client.storage.housekeeping.expire()
        with sqlite3.connect(store) as journal:
            assert journal.execute("SELECT DISTINCT source FROM lines").fetchall() == [(names[2],)]


INVALID_BATCHES: list[tuple[dict[str, Any], int, str]] = [
    # Fields of a batch, the status of the answer, and the parameter at fault.
    ({"input_file_id": "none"}, 404, "id"),
    ({"endpoint": "/v1/moderations"}, 400, "endpoint"),
    ({"completion_window": "1h"}, 400, "completion_window"),
    ({"metadata": {"a": 1}}, 400, "metadata.a"),
    (
        {"output_expires_after": {"anchor": "created_at", "seconds": 1}},
        400,
        "output_expires_after.seconds",
    ),
]


async def test_what_cannot_be_a_batch_is_refused(store: str) -> None:
    async with Client(Backend(STORE=store)) as client:
        file = (await client.upload(b"x")).json()["id"]
        asked = {"input_file_id": file, "endpoint": TEXT, "completion_window": "24h"}
        for fields, status, param in INVALID_BATCHES:
            reply = await client.post("/v1/batches", json={**asked, **fields})
            assert (reply.status_code, reply.json()["error"]["param"]) == (status, param), fields
        own = (await client.post("/v1/embeddings", json={})).json()
        reply = await client.post("/v1/batches", json={**asked, "endpoint": "/v1/embeddings"})
        assert reply.json() == own


def test_without_a_journal_there_are_no_files() -> None:
    reply = ask(Backend(STORE="0"), "GET", "/v1/files")
    assert (reply.status_code, "STORE=0" in reply.text) == (404, True)


async def test_a_cancelled_batch_has_an_answer_or_an_error_for_each_line(store: str) -> None:
    backend = Held(*CHUNKS, STORE=store)
    async with Client(backend) as client, client.running():
        name = (await client.create(text_of(*(line_of(str(n)) for n in range(40)))))["id"]
        for _ in range(5):
            backend.gate.release()
        await until(lambda: counted(client, name, 5))
        assert (
            await client.delete(f"/v1/files/{(await client.batch(name))['input_file_id']}")
        ).status_code == 409
        assert (await client.post(f"/v1/batches/{name}/cancel")).json()["status"] == "cancelling"
        batch = await client.until(name, "cancelled")
        assert batch["request_counts"] == {"total": 40, "completed": 5, "failed": 35}
        output, errors = await client.lines(batch, "output"), await client.lines(batch, "error")
        assert {*output, *errors} == {str(n) for n in range(40)}
        assert {error["error"]["code"] for error in errors.values()} == {"batch_cancelled"}
        assert (await client.post(f"/v1/batches/{name}/cancel")).json()["status"] == "cancelled"
        assert (await client.delete(f"/v1/files/{batch['input_file_id']}")).status_code == 200
    assert backend.open == 0


async def counted(client: Client, name: str, completed: int) -> bool:
    return bool((await client.batch(name))["request_counts"]["completed"] == completed)


async def test_a_batch_that_has_ended_cannot_be_cancelled(store: str) -> None:
    async with Client(Backend(*CHUNKS, STORE=store)) as client, client.running():
        batch = await client.create(text_of(line_of("a")))
        await client.until(batch["id"], "completed")
        assert (await client.post(f"/v1/batches/{batch['id']}/cancel")).status_code == 409


async def test_at_its_end_of_time_a_batch_keeps_the_answers_that_it_has(store: str) -> None:
    backend = Held(*CHUNKS, STORE=store)
    async with Client(backend) as client, client.running():
        name = (await client.create(text_of(*(line_of(str(n)) for n in range(9)))))["id"]
        backend.gate.release()
        await until(lambda: counted(client, name, 1))
        with sqlite3.connect(store) as journal:
            journal.execute("UPDATE batches SET expires = 1")
        errors = await client.lines(await client.until(name, "expired"), "error")
        assert len(errors) == 8
        assert {error["error"]["code"] for error in errors.values()} == {"batch_expired"}


async def test_a_process_that_stops_leaves_its_batch_to_the_next(store: str) -> None:
    backend = Held(*CHUNKS, STORE=store)
    async with Client(backend) as first:
        async with first.running():
            name = (await first.create(text_of(*(line_of(str(n)) for n in range(9)))))["id"]
            for _ in range(4):
                backend.gate.release()
            await until(lambda: counted(first, name, 4))
        await first.storage.journal.close()
    other = Backend(*CHUNKS, STORE=store)
    async with Client(other) as second, second.running():
        assert len(await second.lines(await second.until(name, "completed"), "output")) == 9
    assert len(other.asked) == 5


async def test_an_error_that_says_to_ask_again_is_no_answer(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_runner, "LONGEST_PAUSE", 0.01)
    backend = Backend(TritonUnavailable("away"), STORE=store)
    async with Client(backend) as client, client.running():
        name = (await client.create(text_of(line_of("a"))))["id"]
        batch = await client.until(name, "completed")
        assert (await client.lines(batch, "error"))["a"]["response"]["status_code"] == 503
        assert len(backend.asked) == batch_runner.MAX_ATTEMPTS
        backend._chunks = CHUNKS
        batch = await client.create(text_of(line_of("a")))
        assert await client.lines(await client.until(batch["id"], "completed"), "output")


async def test_keys_see_their_own_and_pay_for_their_batches(store: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a sk-a tokens_per_minute=60\nb sk-b\n")
    backend = Backend(*CHUNKS, STORE=store, OPENAI_API_KEYS_FILE=str(keys))
    async with Client(backend, "sk-a") as client, client.running():
        name = (await client.create(text_of(*(line_of(str(n)) for n in range(4)))))["id"]
        batch = await client.until(name, "completed")
        other = {"headers": {"Authorization": "Bearer sk-b"}}
        paths = (
            f"/v1/batches/{name}",
            f"/v1/files/{batch['input_file_id']}",
            f"/v1/files/{batch['output_file_id']}/content",
        )
        assert [(await client.get(path, **other)).status_code for path in paths] == [404] * 3  # type: ignore[arg-type]
        assert (await client.post(f"/v1/batches/{name}/cancel", **other)).status_code == 404  # type: ignore[arg-type]
        for path in ("files", "batches"):
            assert (await client.get(f"/v1/{path}", **other)).json()["data"] == []  # type: ignore[arg-type]
        used = client.served.quotas.headers(client.served.keys.named("a"))  # type: ignore[union-attr, arg-type]
        assert int(dict(used)[b"x-ratelimit-remaining-tokens"]) <= 60 - 4 * 5 + 1


async def test_a_batch_whose_key_is_gone_ends(store: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a sk-a\n")
    backend = Backend(*CHUNKS, STORE=store, OPENAI_API_KEYS_FILE=str(keys))
    async with Client(backend, "sk-a") as client:
        name = (await client.create(text_of(line_of("x"))))["id"]
        keys.write_text("b sk-b\na-new sk-a\n")
        client.served.keys._checked_at = 0.0  # type: ignore[union-attr]
        async with client.running():

            async def failed() -> bool:
                return (await client.storage.batches.running(name)).status == "failed"

            await until(failed)
    assert not backend.asked


def test_a_key_that_has_taken_too_much_waits_for_its_tokens() -> None:
    now = 0.0
    quotas, key = Quotas(clock=lambda: now), Key("a", b"", tokens_per_minute=60)
    assert quotas.spend(key, 30) == 0
    assert quotas.spend(key, 40) == pytest.approx(11)
    now = 11.0
    assert quotas.spend(key, 0) == pytest.approx(0)
    assert quotas.spend(Key("b", b""), 1000) == 0


TWO_KEYS = "alice-key,bob-key"


def of(key: str) -> Any:
    return {"headers": {"Authorization": f"Bearer {key}"}}


@pytest.mark.parametrize(
    "content",
    [b"\n" * 200_000, b" \n" * 100_000, b"\r\n" * 100_000, b"{}\n" * 70_000, b"x\n\n" * 70_000],
    ids=["line feeds", "spaces", "CR LF", "objects", "alternating"],
)
async def test_short_lines_are_few_rows_and_come_back_as_they_were(
    store: str, content: bytes
) -> None:
    async with Client(Backend(STORE=store)) as client:
        file = (await client.upload(content)).json()["id"]
        with sqlite3.connect(store) as journal:
            (rows,) = journal.execute("SELECT count(*) FROM lines").fetchone()
        assert rows <= len(content) // 2**16 + 1
        assert (await client.get(f"/v1/files/{file}/content")).content == content


def test_lines_have_their_numbers_in_the_file() -> None:
    long = b"y" * 200_000
    content = b"\n\na\n \n" + b"b\n" * 40_000 + b"\n" + long + b"\n\nlast"
    file, first, rows = io.BytesIO(content), 1, []
    while chunks := file_routes.read_chunks(file, first):
        rows += [LineRow(chunk.first_line, chunk.data) for chunk in chunks]
        first = chunks[-1].next_line
    assert b"".join(row.data for row in rows) == content
    expected = [
        InputLine(n, line) for n, line in enumerate(content.split(b"\n"), 1) if line.strip()
    ]
    assert split_lines(rows) == expected
    assert len(rows) < 10


async def test_one_key_cannot_fill_the_file_for_another(store: str) -> None:
    settings = {"STORE_MAX_BYTES": str(4 << 20), "OPENAI_API_KEYS": TWO_KEYS}
    async with Client(Backend(*CHUNKS, STORE=store, **settings), "alice-key") as client:
        asked = {"json": {"input": "secret"}, **of("bob-key")}
        kept = [(await client.post("/v1/responses", **asked)).json()["id"] for _ in range(5)]
        too_large = await client.upload(b"x" * (3 << 20))
        error = too_large.json()["error"]
        assert (too_large.status_code, error["code"]) == (413, "storage_limit_exceeded")
        statuses = [(await client.upload(b"x\n" * (200 << 10))).status_code for _ in range(12)]
        assert statuses[0] == 200
        assert statuses[-1] == 429
        large = {"input": "y" * 200_000}
        for _ in range(12):  # her own make room, or are not kept
            assert (await client.post("/v1/responses", json=large)).status_code == 200
        stored: Any = await client.post("/v1/responses", json={**large, "store": True})
        assert stored.status_code == 429
        assert stored.json()["error"]["code"] == "storage_limit_exceeded"
        await client.storage.housekeeping.expire()
        for id in kept:
            assert (await client.get(f"/v1/responses/{id}", **of("bob-key"))).status_code == 200
        size = sum(path.stat().st_size for path in Path(store).parent.glob("journal.db*"))
        assert size < 5 << 20  # the shared memory of SQLite's among them
        (first, *_) = (await client.get("/v1/files?order=asc")).json()["data"]
        assert (await client.delete(f"/v1/files/{first['id']}")).status_code == 200
        assert (await client.upload(b"x\n" * (100 << 10))).status_code == 200


async def test_a_keys_oldest_responses_make_room_for_its_new_ones(store: str) -> None:
    settings = {"STORE_KEY_ROWS": "30", "OPENAI_API_KEYS": TWO_KEYS}
    async with Client(Backend(*CHUNKS, STORE=store, **settings), "alice-key") as client:
        asked: Any = {"json": {"input": "hi", "store": True}}
        bobs = (await client.post("/v1/responses", **asked, **of("bob-key"))).json()["id"]
        names = [(await client.post("/v1/responses", **asked)).json()["id"] for _ in range(45)]
        statuses = [(await client.get(f"/v1/responses/{name}")).status_code for name in names]
        assert statuses[0] == 404
        assert statuses[-20:] == [200] * 20
        assert (await client.get(f"/v1/responses/{bobs}", **of("bob-key"))).status_code == 200


async def test_one_key_leaves_background_places_to_another(store: str) -> None:
    settings = {"STORE_BACKGROUND": "4", "OPENAI_API_KEYS": TWO_KEYS}
    async with Client(Backend(*CHUNKS, STORE=store, **settings), "alice-key") as client:
        asked: Any = {"json": {"input": "hi", "background": True}}
        statuses = [(await client.post("/v1/responses", **asked)).status_code for _ in range(3)]
        assert statuses == [200, 200, 429]
        reply = await client.post("/v1/responses", **asked, **of("bob-key"))
        assert reply.status_code == 200


async def test_a_batch_whose_answers_find_no_room_fails_and_says_why(store: str) -> None:
    settings = {"STORE_KEY_ROWS": "10", "OPENAI_API_KEYS": TWO_KEYS}
    backend = Backend(*CHUNKS, STORE=store, **settings)
    async with Client(backend, "alice-key") as client, client.running():
        name = (await client.create(text_of(*(line_of(str(n)) for n in range(40)))))["id"]
        batch = await client.until(name, "failed")
        assert [e["code"] for e in batch["errors"]["data"]] == ["storage_limit_exceeded"]
        assert 0 < len(await client.lines(batch, "output")) < 10


async def test_an_upload_that_fails_leaves_nothing(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise OSError("the disk of the temporary file")

    async with Client(Backend(STORE=store)) as client:
        monkeypatch.setattr(file_routes, "read_chunks", fail)
        assert (await client.upload(b"x")).status_code == 500
        await client.storage.housekeeping.expire()
        with sqlite3.connect(store) as journal:
            assert journal.execute("SELECT id FROM files").fetchall() == []


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "FIRST_PAUSE", 0.01)


@pytest.mark.usefixtures("quick")
async def test_a_batch_whose_task_fails_is_given_up(
    store: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries = []

    async def fail(_: Runner, batch: Any) -> None:
        tries.append(batch.id)
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(Runner, "_work", fail)
    async with Client(Backend(*CHUNKS, STORE=store)) as client, client.running():
        name = (await client.create(text_of(line_of("a"))))["id"]
        batch = await client.until(name, "failed")
        assert len(tries) == jobs.MAX_ATTEMPTS
        (error,) = batch["errors"]["data"]
        assert error["code"] == "server_error"
        assert "a fault of ours" in caplog.text


@pytest.mark.usefixtures("quick")
async def test_a_background_response_whose_task_fails_is_given_up(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    async def fail(_: BackgroundResponses, run: Any) -> None:
        tries.append(run.id)
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(BackgroundResponses, "_generate", fail)
    async with Client(Backend(*CHUNKS, STORE=store)) as client:
        background = client.app.state.background
        task = asyncio.create_task(background.work())
        asked = {"input": "hi", "background": True}
        name = (await client.post("/v1/responses", json=asked)).json()["id"]

        async def failed() -> Any:
            response = (await client.get(f"/v1/responses/{name}")).json()
            return response if response["status"] == "failed" else None

        response = await until(failed)
        assert len(tries) == jobs.MAX_ATTEMPTS
        assert response["error"]["code"] == "server_error"
        events = (await client.get(f"/v1/responses/{name}?stream=true")).text
        assert events.rstrip().split("\n")[-2] == "event: response.failed"
        await background.stop()
        task.cancel()


def test_pauses_between_attempts_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    retry, pauses = jobs.RetryPolicy(), []
    for _ in range(8):
        retry.on_failure(JournalUnavailable("full"))
        pauses.append(retry.again_at)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    assert not retry.is_final  # the file is waited for
    retry.on_failure(RuntimeError())
    assert retry.is_final


async def test_one_key_leaves_places_for_the_batches_of_another(store: str) -> None:
    backend = Held(*CHUNKS, STORE=store, OPENAI_API_KEYS=TWO_KEYS)
    async with Client(backend, "alice-key") as client, client.running():
        for _ in range(batch_runner.MAX_BATCHES + 2):
            await client.create(text_of(line_of("a")))

        async def held() -> bool:
            return len(client.runner.tasks) == batch_runner.MAX_BATCHES_OF_KEY

        await until(held)
        alices = set(client.runner.tasks)
        client.headers["Authorization"] = "Bearer bob-key"
        name = (await client.create(text_of(line_of("b"))))["id"]

        async def bobs() -> bool:
            return name in client.runner.tasks

        await until(bobs)
        assert alices < set(client.runner.tasks)


async def test_the_inputs_of_batches_are_checked_one_after_the_other(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    most, running = [0], [0]
    read = Checks.read

    def counted_read(checks: Checks, rows: Any) -> bool:
        running[0] += 1
        most[0] = max(most[0], running[0])
        time.sleep(0.02)  # for another that would come in between
        running[0] -= 1
        return read(checks, rows)

    monkeypatch.setattr(Checks, "read", counted_read)
    async with Client(Backend(*CHUNKS, STORE=store)) as client:
        names = [(await client.create(text_of(line_of("a"))))["id"] for _ in range(4)]
        async with client.running():
            for name in names:
                await client.until(name, "completed")
    assert most == [1]


def test_keys_take_turns() -> None:
    rows = [
        ActiveResponse(name, owner=name[0], runner=0)
        for name in ("a1", "a2", "a3", "b1", "c1", "b2")
    ]
    assert [row.id for row in jobs.in_turn(rows)] == ["a1", "b1", "c1", "a2", "b2", "a3"]


async def test_batches_share_the_places_of_their_lines_and_give_them_back(store: str) -> None:
    backend = Held(*CHUNKS, STORE=store)
    async with Client(backend) as client, client.running():
        places = 2 * backend.admission.max_running
        content = text_of(*(line_of(str(n)) for n in range(places)))
        names = [(await client.create(content))["id"] for _ in range(2)]

        async def taken() -> bool:
            return client.runner._shared_places.locked()

        await until(taken)
        for name in names:
            await client.post(f"/v1/batches/{name}/cancel")
        for name in names:
            await client.until(name, "cancelled")
        assert client.runner._shared_places._value == places


async def test_lines_begin_one_at_a_time_when_the_event_loop_is_free(store: str) -> None:
    backend = Held(*CHUNKS, STORE=store)
    turns = asyncio.Semaphore(0)
    async with Client(backend) as client:
        client.runner._pace.wait_for_turn = turns.acquire  # type: ignore[method-assign, assignment]
        name = (await client.create(text_of(*(line_of(str(n)) for n in range(3)))))["id"]
        async with client.running():
            free = 2 * backend.admission.max_running - 1

            async def one_waits() -> bool:
                return client.runner._shared_places._value == free

            await until(one_waits)
            assert not backend.asked
            for _ in range(3):
                turns.release()
                backend.gate.release()
            await client.until(name, "completed")


@pytest.mark.parametrize("what_is_full", ["rows", "bytes"])
async def test_what_cannot_be_stored_is_refused_before_it_is_answered(
    store: str, what_is_full: str
) -> None:
    settings = {"OPENAI_API_KEYS": TWO_KEYS, "STORE": store}
    if what_is_full == "rows":
        settings |= {"STORE_KEY_ROWS": "2"}
    else:
        settings |= {"STORE_MAX_BYTES": str(4 << 20), "STORE_KEY_PART": "0.1"}
    backend = Backend(*CHUNKS, **settings)
    async with Client(backend, "alice-key") as client:
        if what_is_full == "rows":
            assert (await client.upload(b"x")).status_code == 200  # one row, and one of its lines
        asked: Any = {"input": "y" * 500_000, "store": True}
        reply = await client.post("/v1/responses", json=asked)
        assert reply.status_code == 429
        assert reply.json()["error"]["code"] == "storage_limit_exceeded"
        assert not backend.asked
        reply = await client.post("/v1/responses", json={**asked, "store": None})
        assert reply.status_code == 200


async def test_responses_that_make_room_let_another_be_asked_for(store: str) -> None:
    settings = {"OPENAI_API_KEYS": TWO_KEYS, "STORE_KEY_ROWS": "3"}
    async with Client(Backend(*CHUNKS, STORE=store, **settings), "alice-key") as client:
        for _ in range(5):
            reply = await client.post("/v1/responses", json={"input": "x", "store": True})
            assert reply.status_code == 200


def test_a_line_without_a_seed_gets_the_same_one_each_time() -> None:
    batch = RunningBatch("batch_1", "", "file_1", TEXT, "in_progress", expires=0, total=2)

    def seed_of(number: int, *, seeded: bool = True, **fields: Any) -> int | None:
        line = LineBody.model_validate(line_of(str(number), **fields))
        seed: int | None = json.loads(body_of(line, batch, number, seeded=seeded)).get("seed")
        return seed

    assert seed_of(1) == seed_of(1) == seed_of(1, seed=-1) is not None
    assert seed_of(2) != seed_of(1)
    assert seed_of(1, seed=7) == 7
    assert seed_of(1, seeded=False) is None, "vLLM is asked without one"


@asynccontextmanager
async def background_of(client: Client) -> AsyncIterator[BackgroundResponses]:
    """The background responses of an application, which run meanwhile."""
    background: BackgroundResponses = client.app.state.background
    task = asyncio.create_task(background.work())
    try:
        yield background
    finally:
        await background.stop()
        task.cancel()


IN_BACKGROUND = {"input": "hi", "background": True}


async def test_background_responses_take_half_of_the_slots(store: str) -> None:
    backend = Held(*CHUNKS, STORE=store)
    half = backend.admission.max_running // 2
    async with Client(backend) as client, background_of(client) as background:
        names = [
            (await client.post("/v1/responses", json=IN_BACKGROUND)).json()["id"]
            for _ in range(half + 1)
        ]

        async def half_run() -> bool:
            return len(background.tasks) == half

        await until(half_run)
        waiting = set(names) - background.tasks.keys()
        assert len(waiting) == 1
        backend.gate.release()

        async def the_last_runs() -> bool:
            return waiting <= background.tasks.keys()

        await until(the_last_runs)
        assert len(background.tasks) == half


async def test_a_background_response_counts_for_its_keys_tokens_alone(
    store: str, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a sk-a max_running=1 tokens_per_minute=60\n")
    backend = Backend(*CHUNKS, STORE=store, OPENAI_API_KEYS_FILE=str(keys))
    async with Client(backend, "sk-a") as client:
        replies = [await client.post("/v1/responses", json=IN_BACKGROUND) for _ in range(2)]
        assert [reply.status_code for reply in replies] == [200, 200]
        async with background_of(client):
            for reply in replies:
                path = f"/v1/responses/{reply.json()['id']}"

                async def is_over(path: str = path) -> bool:
                    return bool((await client.get(path)).json()["status"] == "completed")

                await until(is_over)
        used = client.served.quotas.headers(client.served.keys.named("a"))  # type: ignore[union-attr, arg-type]
        assert int(dict(used)[b"x-ratelimit-remaining-tokens"]) <= 60 - 2 * 5 + 1
