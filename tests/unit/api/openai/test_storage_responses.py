"""The store of responses: what is read while one runs, and how it ends."""

import sqlite3
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from cog_triton.api.openai.storage import database
from cog_triton.api.openai.storage.limits import NoRoom, Share, StorageLimits, all_usages
from cog_triton.api.openai.storage.records import CancelledRecord, ChunkRecord, FailedRecord, Record
from cog_triton.api.openai.storage.responses import Conclusion, NewResponse
from cog_triton.api.openai.storage.storage import Storage

pytestmark = pytest.mark.anyio


def piece(text: str) -> ChunkRecord:
    return ChunkRecord(text, 1, 3, None, (7,), ())


def row(id: str, owner: str = "a", size: int = 2) -> NewResponse:
    return NewResponse(id, owner, "m", 1.0, b"[]", b"x" * size)


@pytest.fixture
async def storage(tmp_path: Path) -> AsyncIterator[Storage]:
    share = Share(bytes=100_000, rows=1000)
    storage = Storage.at(tmp_path / "journal.db", StorageLimits(1 << 24, 30, share))
    yield storage
    await storage.journal.close()


async def begin(storage: Storage, id: str) -> None:
    """Make a background response that this process runs."""
    await storage.responses.insert_background(row(id), body=b"{}", request=b"{}", limit=9)
    assert await storage.responses.take(id, 0)


def ending(*last: Record) -> Any:
    def conclude(records: Sequence[Record]) -> Conclusion:
        return Conclusion(b"ended", [*records, *last])

    return conclude


async def test_a_reader_gets_only_what_is_new(storage: Storage) -> None:
    responses = storage.responses
    await begin(storage, "r")
    records: list[Record] = [piece(text) for text in "abcd"]
    assert await responses.append("r", "a", 0, records[:1])
    assert await responses.append("r", "a", 1, records[1:3])
    progress = await responses.progress("r", 1)
    assert progress is not None
    assert (progress.records, progress.has_ended) == (records[1:3], False)
    progress = await responses.progress("r", 3)
    assert progress is not None
    assert progress.records == []
    assert await responses.append("r", "a", 3, records[3:])
    assert await responses.end("r", lambda: 0, ending(CancelledRecord()))
    progress = await responses.progress("r", 3)
    assert progress is not None
    assert (progress.records, progress.has_ended) == ([records[3], CancelledRecord()], True)
    assert await responses.progress("none", 0) is None


async def test_following_a_response_never_reads_its_input(storage: Storage) -> None:
    await begin(storage, "r")
    assert await storage.responses.append("r", "a", 0, [piece("a")])
    seen: list[str] = []

    def trace(connection: sqlite3.Connection) -> None:
        connection.set_trace_callback(seen.append)

    await storage.journal.read(trace)
    await storage.responses.progress("r", 0)
    assert seen
    for statement in seen:
        assert "*" not in statement
        for column in ("input", "body", "request", "response,"):
            assert column not in statement


async def test_an_end_leaves_nothing_in_the_log(storage: Storage) -> None:
    for id in ("ended", "deleted"):
        await begin(storage, id)
        assert await storage.responses.append(id, "a", 0, [piece("a")])
    await storage.responses.end("ended", lambda: 1, ending())
    await storage.responses.delete("deleted")
    count = "SELECT count(*) FROM log"
    assert await storage.journal.read(lambda own: own.execute(count).fetchone()) == (0,)


async def test_only_the_runner_may_write_records(storage: Storage) -> None:
    await begin(storage, "r")
    other = Storage.at(storage.journal.path, storage.journal.limits)
    try:
        assert not await other.responses.append("r", "a", 0, [piece("a")])
        assert await other.responses.end("r", lambda: 0, ending(CancelledRecord()))
        assert not await storage.responses.append("r", "a", 0, [piece("a")])
        assert not await storage.responses.end("r", lambda: 0, ending())
    finally:
        await other.journal.close()
    progress = await storage.responses.progress("r", 0)
    assert progress is not None
    assert progress.records == [CancelledRecord()]


async def test_the_log_of_a_response_counts_for_its_key(storage: Storage) -> None:
    await begin(storage, "r")
    (before,) = await storage.journal.read(all_usages)
    assert await storage.responses.append("r", "a", 0, [piece("x" * 10_000)])
    (usage,) = await storage.journal.read(all_usages)
    assert usage.bytes > before.bytes + 10_000
    with pytest.raises(NoRoom):
        await storage.responses.append("r", "a", 1, [piece("x" * 90_000)])


async def test_a_given_up_response_has_its_records_and_the_error(storage: Storage) -> None:
    await begin(storage, "r")
    assert await storage.responses.append("r", "a", 0, [piece("a")])
    failed = FailedRecord(500, "server_error", "it failed")
    await storage.responses.end("r", lambda: 0, ending(failed))
    progress = await storage.responses.progress("r", 1)
    assert progress is not None
    assert progress.records == [failed]


@pytest.mark.parametrize("harm", [KeyError, sqlite3.OperationalError, KeyboardInterrupt])
def test_no_transaction_stays_open(tmp_path: Path, harm: type[BaseException]) -> None:
    connection = sqlite3.connect(tmp_path / "db", isolation_level=None)
    connection.execute("CREATE TABLE t (x)")

    def write_and_fail() -> None:
        with database.transaction(connection):
            connection.execute("INSERT INTO t VALUES (1)")
            raise harm

    with pytest.raises(harm):
        write_and_fail()
    assert not connection.in_transaction
    assert connection.execute("SELECT count(*) FROM t").fetchone() == (0,)
    connection.close()


def test_a_commit_that_fails_is_rolled_back(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "db", isolation_level=None)
    connection.execute("PRAGMA foreign_keys=1")
    connection.execute("CREATE TABLE a (x PRIMARY KEY)")
    deferred = "CREATE TABLE b (x REFERENCES a (x) DEFERRABLE INITIALLY DEFERRED)"
    connection.execute(deferred)
    with pytest.raises(database.TransactionLost), database.transaction(connection):
        connection.execute("INSERT INTO b VALUES (1)")
    assert not connection.in_transaction
    connection.close()
