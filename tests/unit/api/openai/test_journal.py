"""The journal: grouped writes, reads beside them, limits, and each way in which the file can fail."""

import asyncio
import contextlib
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cog_triton.api.openai.storage import database
from cog_triton.api.openai.storage import journal as module
from cog_triton.api.openai.storage.clock import SteadyClock
from cog_triton.api.openai.storage.database import Action
from cog_triton.api.openai.storage.housekeeping import MAX_DELETED, Expiry, Housekeeping
from cog_triton.api.openai.storage.journal import Journal
from cog_triton.api.openai.storage.limits import (
    CountedTable,
    Share,
    StorageLimits,
    Usage,
    all_usages,
    has_room,
    usage_of,
)
from cog_triton.errors import InvalidParameter, JournalUnavailable
from tests.support import ROOT, run_until_killed

pytestmark = pytest.mark.anyio

NOTES = "CREATE TABLE IF NOT EXISTS notes (owner TEXT, created REAL, text TEXT)"
COUNTED_NOTES = CountedTable("notes", "(100 + length({row}.text))", ("text",))
INSERT = "INSERT INTO notes VALUES ('', ?, ?)"


async def test_the_write_ahead_log_of_an_idle_file_is_cut_further(file: Path) -> None:
    wal = Path(f"{file}-wal")
    async with opened(file, max_bytes=1 << 22) as journal:
        most = journal.limits.max_wal_bytes // 4
        while not wal.exists() or wal.stat().st_size <= most:
            await journal.write(insert("x" * (1 << 12), time.time()))
        await journal.shrink_wal()
        assert wal.stat().st_size <= most


OF_KEY = "INSERT INTO notes VALUES (?, ?, ?)"
TEXTS = "SELECT text FROM notes ORDER BY rowid"
PROGRAM = """
import asyncio, os, signal, time
from pathlib import Path
from cog_triton.api.openai.storage.journal import Journal
from cog_triton.api.openai.storage.limits import StorageLimits
async def main():
    journal = Journal(Path(os.environ["FILE"]), StorageLimits(1 << 20, 30))
    await journal.write(lambda own: own.execute("{notes}").rowcount)
    await journal.write(lambda own: own.execute("INSERT INTO notes VALUES ('', 0, 'kept')").rowcount)
    print(journal.lease.worker, flush=True)
    {then}
asyncio.run(main())
"""


def execute(sql: str, *values: object) -> Action[int]:
    """A statement as a write, whose result is the number of rows that it has changed."""

    def action(connection: sqlite3.Connection) -> int:
        return connection.execute(sql, values).rowcount

    return action


def query(sql: str, *values: object) -> Action[list[Any]]:
    return lambda connection: connection.execute(sql, values).fetchall()


def insert(text: object, created: object = 0.0) -> Action[int]:
    return execute(INSERT, created, text)


class Notes:
    """A store of notes, which are counted and expire as all rows do."""

    def create(self, connection: sqlite3.Connection) -> None:
        exists = "SELECT 1 FROM sqlite_master WHERE name = 'notes'"
        if connection.execute(exists).fetchone() is None:
            connection.execute(NOTES)
            for trigger in COUNTED_NOTES.triggers():
                connection.execute(trigger)

    def delete_oldest(self, connection: sqlite3.Connection, expiry: Expiry) -> int:
        sql = """
            DELETE FROM notes WHERE rowid IN (SELECT rowid FROM notes WHERE created < ?
            AND (? IS NULL OR owner = ?) ORDER BY created LIMIT ?)
        """
        values = (expiry.before, expiry.owner, expiry.owner, MAX_DELETED)
        return connection.execute(sql, values).rowcount


def journal_of(
    file: Path, *, max_bytes: int = 1 << 20, days: float = 1, share: Share | None = None
) -> Journal:
    return Journal(file, StorageLimits(max_bytes, days, share))


@contextlib.asynccontextmanager
async def opened(
    file: Path, *, max_bytes: int = 1 << 20, days: float = 1, share: Share | None = None
) -> AsyncIterator[Journal]:
    """A journal with the table of notes."""
    journal = journal_of(file, max_bytes=max_bytes, days=days, share=share)
    try:
        await journal.write(Notes().create)
        yield journal
    finally:
        await journal.close()


@contextlib.asynccontextmanager
async def unopened(file: Path, *, max_bytes: int = 1 << 20) -> AsyncIterator[Journal]:
    journal = journal_of(file, max_bytes=max_bytes)
    try:
        yield journal
    finally:
        await journal.close()


async def expire(journal: Journal) -> None:
    await Housekeeping(journal, [Notes()]).expire()


async def texts_of(journal: Journal) -> list[str]:
    return [text for (text,) in await journal.read(query(TEXTS))]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "state" / "journal.db"


def program(then: str) -> str:
    return PROGRAM.replace("{then}", then).replace("{notes}", NOTES)


def statements(connection: sqlite3.Connection) -> list[str]:
    seen: list[str] = []
    connection.set_trace_callback(seen.append)
    return seen


async def test_writes_of_one_moment_are_one_transaction_in_their_order(file: Path) -> None:
    async with opened(file) as journal:
        await journal.write(insert("first", 0))
        seen = statements(await journal.write(lambda own: own))
        written = [journal.write(insert(str(n), 0)) for n in range(100)]
        count = journal.write(lambda own: own.execute("SELECT count(*) FROM notes").fetchone())
        written.append(journal.write(insert("last", 0)))
        await asyncio.gather(*written)
        assert await count == (101,)
        assert seen.count("BEGIN IMMEDIATE") == seen.count("COMMIT") == 1
        texts = await texts_of(journal)
        assert texts == ["first", *map(str, range(100)), "last"]


async def test_an_opening_that_fails_is_the_error_of_a_write(file: Path) -> None:
    async with opened(file) as journal:
        await journal.write(insert("kept"))
        journal.path.unlink()
        journal.path.mkdir()  # seen at the next opening
        await asyncio.gather(journal.write(execute("no SQL")), return_exceptions=True)
        with pytest.raises(JournalUnavailable):
            await journal.write(insert("lost"))


async def test_the_file_is_for_its_owner_only_and_closing_writes_all(file: Path) -> None:
    async with opened(file) as journal:
        journal.write(insert("unwaited", 0))
    async with opened(file) as journal:
        assert await texts_of(journal) == ["unwaited"]
        modes = {path.name: oct(path.stat().st_mode)[-3:] for path in file.parent.iterdir()}
        assert set(modes.values()) == {"600"}, modes
        assert len(modes) == 4  # SQLite's -wal and -shm among them


async def test_what_is_committed_survives_sigkill(file: Path) -> None:
    run_until_killed(program("os.kill(os.getpid(), signal.SIGKILL)"), FILE=str(file))
    async with opened(file) as journal:
        assert await texts_of(journal) == ["kept"]


async def test_a_worker_is_alive_until_its_process_ends(file: Path) -> None:
    command = [sys.executable, "-c", program("input()")]
    environment = {"FILE": str(file), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    ) as other:
        assert other.stdout is not None
        worker = int(other.stdout.readline())
        async with opened(file) as journal:
            await journal.write(insert("opens it", 0))
            assert journal.lease.is_held_by_another(worker)
            assert not journal.lease.is_held_by_another(journal.lease.worker)
            other.kill()
            other.wait()
            assert not journal.lease.is_held_by_another(worker)
            assert not journal.lease.is_held_by_another(journal.lease.worker)


async def test_the_old_goes_and_so_does_what_is_too_much(file: Path) -> None:
    async with opened(file, max_bytes=1 << 20) as journal:
        now = time.time()
        for age in (90_000, 80_000):  # of a day, which is kept
            await journal.write(insert(str(age), now - age))
        await expire(journal)
        assert await texts_of(journal) == ["80000"]
        written = [journal.write(insert("x" * 4000, now - 300 + n)) for n in range(195)]
        await asyncio.gather(*written)
        await expire(journal)
        ((left, oldest),) = await journal.read(query("SELECT count(*), min(created) FROM notes"))
        assert 50 < left < 195
        assert oldest > now - 300
        await journal.read(query("PRAGMA wal_checkpoint(TRUNCATE)"))
        assert file.stat().st_size <= 1 << 20


def damage(file: Path) -> Any:
    file.write_bytes(b"SQLite format 3\0" + b"\1\2\3" * 3000)


def replace_by_text(file: Path) -> Any:
    file.write_text("no journal at all, but a long text\n" * 300)


def lock(file: Path) -> Any:
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    return other


def make_directory(file: Path) -> Any:
    file.mkdir()


def age_backwards(file: Path) -> Any:
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("PRAGMA user_version=99")
    other.close()


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (damage, "the file is (damaged|not a journal); move it away"),
        (replace_by_text, "the file is not a journal; move it away"),
        (lock, "another process has held its lock for"),
        (make_directory, "unable to open database file"),
        (age_backwards, r"it was created by a newer version of cog-triton \(99\)"),
    ],
)
async def test_a_bad_file_is_a_clear_error_until_it_is_good(
    file: Path, harm: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "LOCK_SECONDS", 0.05)
    file.parent.mkdir()
    async with unopened(file) as journal:
        held = harm(file)
        with pytest.raises(JournalUnavailable, match=rf"E2107.*{reason}"):
            await journal.write(insert("lost", 0))
        if held is not None:
            held.close()
        elif file.is_dir():
            file.rmdir()
        else:
            file.unlink()
        await journal.write(Notes().create)
        await journal.write(insert("kept", 0))
        assert await texts_of(journal) == ["kept"]


async def test_a_full_file_refuses_writes_takes_reads_and_recovers(file: Path) -> None:
    async with opened(file, max_bytes=1 << 18) as journal:
        await journal.write(insert("small", 0))
        with pytest.raises(JournalUnavailable, match="STORE_MAX_BYTES is reached"):
            await journal.write(insert("x" * (1 << 19), 0))
        assert await texts_of(journal) == ["small"]
        await journal.write(insert("small too", 0))
        assert len(await texts_of(journal)) == 2


def refuse(_: sqlite3.Connection) -> None:
    raise KeyError("a write of ours that is wrong")


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        pytest.param(refuse, KeyError, id="function"),
        pytest.param(execute("INSERT INTO notes VALUES (1, 2)"), JournalUnavailable, id="columns"),
        pytest.param(execute(INSERT, 0), sqlite3.Error, id="bindings"),
        pytest.param(insert(object()), sqlite3.Error, id="type"),
        pytest.param(
            execute("INSERT INTO clock VALUES (2, 0)"), sqlite3.IntegrityError, id="constraint"
        ),
    ],
)
async def test_a_write_that_fails_takes_no_other_with_it(
    file: Path, wrong: Any, error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(file) as journal:
        before = journal.write(insert("before", 0))
        failing = journal.write(wrong)
        after = journal.write(insert("after"))
        with pytest.raises(error):
            await failing
        assert (await before, await after) == (1, 1)
        assert await texts_of(journal) == ["before", "after"]
        assert (
            "writes to the journal fail" in caplog.text
            or "a write to the journal failed" in caplog.text
        )
        await journal.write(insert("later", 0))
        with sqlite3.connect(file, timeout=0, isolation_level=None) as other:
            other.execute("BEGIN IMMEDIATE")  # no transaction was left open


async def test_what_a_failed_write_has_changed_is_rolled_back(file: Path) -> None:
    def change_and_fail(connection: sqlite3.Connection) -> None:
        connection.execute(INSERT, (0, "half"))
        raise KeyError

    async with opened(file) as journal:
        first = journal.write(insert("first"))
        failing = journal.write(change_and_fail)
        await asyncio.gather(first, failing, return_exceptions=True)
        assert await texts_of(journal) == ["first"]


async def test_a_write_that_fills_the_file_fails_alone(file: Path) -> None:
    async with opened(file, max_bytes=1 << 17) as journal:
        writes = [journal.write(insert("small", 0)) for _ in range(3)]
        writes.insert(1, journal.write(insert("x" * (1 << 18), 0)))
        outcomes = await asyncio.gather(*writes, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [int, JournalUnavailable, int, int]
        assert await texts_of(journal) == ["small"] * 3


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 10**400, "a \ud800", "\udfff"])
async def test_a_value_that_sqlite_cannot_store_is_the_requests_fault(
    file: Path, value: object
) -> None:
    async with opened(file) as journal:
        good = journal.write(insert("good"))
        bad = journal.write(insert(value))
        with pytest.raises(InvalidParameter):
            await bad
        assert await good == 1
        with pytest.raises(InvalidParameter):
            await journal.read(query("SELECT 1 WHERE ? = 1", value))
        assert await texts_of(journal) == ["good"]


async def test_a_writer_that_is_stuck_says_so(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(file) as journal:
        await journal.write(insert("fine", 0))
        held, released = threading.Event(), threading.Event()

        def hang(_: sqlite3.Connection) -> None:
            held.set()
            released.wait(60)

        stuck = journal.write(hang)
        await asyncio.to_thread(held.wait)
        assert journal.problem() is None  # yet
        monkeypatch.setattr(module, "STUCK_SECONDS", 0.0)
        assert "has committed nothing" in (journal.problem() or "")
        released.set()
        await stuck
        assert journal.problem() is None


async def test_a_lock_that_another_process_keeps_makes_the_writer_stuck(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "LOCK_SECONDS", 0.05)
    monkeypatch.setattr(module, "STUCK_SECONDS", 0.0)
    async with opened(file) as journal:
        await journal.write(insert("fine", 0))
        other = sqlite3.connect(file, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(JournalUnavailable, match="held its lock"):
            await journal.write(insert("lost", 0))
        assert journal.problem() is not None
        other.execute("ROLLBACK")
        other.close()
        await journal.write(insert("fine again", 0))
        assert journal.problem() is None


@pytest.mark.parametrize("days", [31, 4000, -31], ids=["month", "decade", "back"])
async def test_a_clock_that_jumps_deletes_nothing(
    file: Path, days: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = time.time
    async with opened(file, days=30) as journal:
        await journal.write(insert("kept", real()))
        await expire(journal)
        monkeypatch.setattr(time, "time", lambda: real() + days * 86400)
        for _ in range(3):
            await expire(journal)
        await journal.write(insert("of the jump", journal.now()))
    async with opened(file, days=30) as journal:  # the next process
        await expire(journal)
        monkeypatch.setattr(time, "time", real)
        await expire(journal)
        assert await texts_of(journal) == ["kept", "of the jump"]


def test_the_journals_time_catches_up_twice_as_fast_as_time_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monotonic, wall = 0.0, 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: monotonic)
    monkeypatch.setattr(time, "time", lambda: wall)
    clock = SteadyClock(900.0)  # a pause of 100 s
    assert clock.now() == 900
    monotonic, wall = 50.0, 1050.0
    assert clock.now() == 1000
    monotonic, wall = 100.0, 1100.0
    assert clock.now() == 1100
    monotonic, wall = 101.0, 500.0  # back: at once, because nothing expires for that
    assert clock.now() == 500
    monotonic, wall = 102.0, 1102.0
    assert clock.now() == 502


async def test_the_write_ahead_log_is_cut(file: Path) -> None:
    wal = Path(f"{file}-wal")
    async with opened(file, max_bytes=1 << 22) as journal:
        for number in range(40):
            await journal.write(insert("x" * (1 << 16), time.time()))
            await journal.write(execute("DELETE FROM notes"))
            if number % 10 == 9:
                journal._shrunk_at = 0.0  # as a second later
        journal._shrunk_at = 0.0
        await journal.write(insert("last", time.time()))
        assert wal.stat().st_size <= journal.limits.max_wal_bytes
        assert file.stat().st_size + wal.stat().st_size <= 1 << 22


OF_KEY = "INSERT INTO notes VALUES (?, ?, ?)"


async def owners(journal: Journal) -> dict[str, int]:
    rows = await journal.read(query("SELECT owner, count(*) FROM notes GROUP BY owner"))
    return dict(rows)


async def test_space_is_made_within_the_key_that_has_most(file: Path) -> None:
    async with opened(file) as journal:
        now = time.time()
        small = [
            journal.write(execute(OF_KEY, "small", now - 3000 + n, "x" * 4000)) for n in range(20)
        ]
        large = [journal.write(execute(OF_KEY, "large", now - n, "x" * 4000)) for n in range(170)]
        await asyncio.gather(*small, *large)
        await expire(journal)
        left = await owners(journal)
        assert left["small"] == 20  # although they are the oldest
        assert 50 < left["large"] < 170


async def test_a_key_that_is_over_its_share_loses_its_own(file: Path) -> None:
    async with opened(file, share=Share(bytes=100_000, rows=50)) as journal:
        now = time.time()
        few_rows = [journal.write(execute(OF_KEY, "bytes", now - n, "x" * 4000)) for n in range(40)]
        many = [journal.write(execute(OF_KEY, "rows", now - n, "x")) for n in range(130)]
        other = [journal.write(execute(OF_KEY, "other", now - 3000 - n, "x")) for n in range(20)]
        await asyncio.gather(*few_rows, *many, *other)
        await expire(journal)
        left = await owners(journal)
        assert left.pop("other") == 20
        assert all(count <= 50 for count in left.values())
        usage = await journal.read(lambda own: usage_of(own, "bytes"))
        assert usage.bytes <= 100_000


async def room(journal: Journal, owner: str, more_bytes: int) -> bool:
    return await journal.write(
        lambda own: has_room(own, journal.limits, owner, more_bytes=more_bytes)
    )


async def test_what_keys_have_is_counted_through_all_changes(file: Path) -> None:
    async with opened(file, share=Share(bytes=1000, rows=3)) as journal:
        assert await room(journal, "a", 1000)
        assert not await room(journal, "a", 1001)
        for text in ("x" * 100, "", "x" * 50):
            await journal.write(execute(OF_KEY, "a", 0, text))
        await journal.write(execute("UPDATE notes SET text = 'xx' WHERE text = ''"))
        assert await journal.read(all_usages) == [Usage("a", 3 * 100 + 152, 3)]
        assert not await room(journal, "a", 1)  # a fourth row
        assert await room(journal, "b", 1)
        await journal.write(execute("DELETE FROM notes WHERE text = 'xx'"))
        assert await journal.read(all_usages) == [Usage("a", 350, 2)]


async def test_a_full_file_has_room_only_for_keys_below_their_even_part(file: Path) -> None:
    share = Share(bytes=600_000, rows=1000)
    async with opened(file, share=share) as journal:
        large = [journal.write(execute(OF_KEY, "large", 0, "x" * 4000)) for _ in range(100)]
        medium = [journal.write(execute(OF_KEY, "medium", 0, "x" * 4000)) for _ in range(100)]
        await asyncio.gather(*large, *medium)
        assert not await room(journal, "large", 4000)
        assert not await room(journal, "medium", 4000)
        assert await room(journal, "small", 4000)
        assert not await room(journal, "small", 400_000)
        await journal.write(execute("DELETE FROM notes WHERE owner = 'medium'"))
        assert await room(journal, "large", 4000)
