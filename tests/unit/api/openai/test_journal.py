"""The journal: grouped writes, reads beside them, limits, and each way in which the file can fail."""

import asyncio
import contextlib
import json
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cog_triton.api.openai import journal as module
from cog_triton.api.openai.journal import Counted, Journal, Share, SteadyClock
from cog_triton.errors import InvalidParameter, JournalUnavailable
from tests.support import ROOT, run_until_killed

pytestmark = pytest.mark.anyio

NOTES = {
    "tables": ["CREATE TABLE IF NOT EXISTS notes (owner TEXT, created REAL, text TEXT)"],
    "expiry": [
        "DELETE FROM notes WHERE rowid IN (SELECT rowid FROM notes WHERE created < :before"
        " AND (:owner IS NULL OR owner = :owner) ORDER BY created LIMIT :most)"
    ],
    "counted": [Counted("notes", "(100 + length({row}.text))", "text")],
}
INSERT, TEXTS = "INSERT INTO notes VALUES ('', ?, ?)", "SELECT text FROM notes ORDER BY rowid"
PROGRAM = """
import asyncio, os, signal, time
from pathlib import Path
from cog_triton.api.openai.journal import Journal
async def main():
    tables = ["CREATE TABLE IF NOT EXISTS notes (owner TEXT, created REAL, text TEXT)"]
    schema = {"tables": tables, "expiry": [], "counted": []}
    journal = Journal(Path(os.environ["FILE"]), [schema], 1 << 20, 30)
    await journal.write("INSERT INTO notes VALUES ('', 0, 'kept')")
    print(journal.worker, flush=True)
    {then}
asyncio.run(main())
"""


@contextlib.asynccontextmanager
async def opened(
    file: Path, *, max_bytes: int = 1 << 20, days: float = 1, share: Share | None = None
) -> AsyncIterator[Journal]:
    journal = Journal(file, [NOTES], max_bytes, days, share)
    try:
        yield journal
    finally:
        await journal.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "state" / "journal.db"


def program(then: str) -> str:
    return PROGRAM.replace("{then}", then)


def statements(connection: sqlite3.Connection) -> list[str]:
    seen: list[str] = []
    connection.set_trace_callback(seen.append)
    return seen


async def test_writes_of_one_moment_are_one_transaction_in_their_order(file: Path) -> None:
    async with opened(file) as journal:
        await journal.write(INSERT, 0, "first")
        seen = statements(journal._connections["w"])
        written = [journal.write(INSERT, 0, str(n)) for n in range(100)]
        count = journal.write(lambda own: own.execute("SELECT count(*) FROM notes").fetchone())
        written.append(journal.write(INSERT, 0, "last"))
        await asyncio.gather(*written)
        assert await count == (101,)
        assert seen.count("BEGIN IMMEDIATE") == seen.count("COMMIT") == 1
        texts = [text for (text,) in await journal.read(TEXTS)]
        assert texts == ["first", *map(str, range(100)), "last"]


async def test_records_of_one_moment_are_one_row_of_the_log(file: Path) -> None:
    async with opened(file) as journal:
        written = [journal.log([n, "ä"], INSERT, 0, str(n)) for n in range(100)]
        assert await asyncio.gather(*written) == [1] * 100
        ((records,),) = await journal.read("SELECT records FROM log")
        assert json.loads(records) == [[n, "ä"] for n in range(100)]
        journal.path.unlink()
        journal.path.mkdir()  # seen at the next opening
        await asyncio.gather(journal.write("no SQL"), return_exceptions=True)
        with pytest.raises(JournalUnavailable):
            await journal.log([0], INSERT, 0, "lost")


async def test_the_file_is_for_its_owner_only_and_closing_writes_all(file: Path) -> None:
    async with opened(file) as journal:
        journal.write(INSERT, 0, "unwaited")
    async with opened(file) as journal:
        assert await journal.read(TEXTS) == [("unwaited",)]
        modes = {path.name: oct(path.stat().st_mode)[-3:] for path in file.parent.iterdir()}
        assert set(modes.values()) == {"600"}, modes
        assert len(modes) == 4  # SQLite's -wal and -shm among them


async def test_what_is_committed_survives_sigkill(file: Path) -> None:
    run_until_killed(program("os.kill(os.getpid(), signal.SIGKILL)"), FILE=str(file))
    async with opened(file) as journal:
        assert await journal.read(TEXTS) == [("kept",)]


async def test_a_worker_is_alive_until_its_process_ends(file: Path) -> None:
    command = [sys.executable, "-c", program("input()")]
    environment = {"FILE": str(file), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    ) as other:
        assert other.stdout is not None
        worker = int(other.stdout.readline())
        async with opened(file) as journal:
            await journal.write(INSERT, 0, "opens it")
            assert journal.alive(worker)
            assert journal.alive(journal.worker)
            other.kill()
            other.wait()
            assert not journal.alive(worker)
            assert journal.alive(journal.worker)


async def test_the_old_goes_and_so_does_what_is_too_much(file: Path) -> None:
    async with opened(file, max_bytes=1 << 20) as journal:
        now = time.time()
        for age in (90_000, 80_000):  # of a day, which is kept
            await journal.write(INSERT, now - age, str(age))
        await journal.expire()
        assert await journal.read(TEXTS) == [("80000",)]
        written = [journal.write(INSERT, now - 300 + n, "x" * 4000) for n in range(210)]
        await asyncio.gather(*written)
        await journal.expire()
        ((left, oldest),) = await journal.read("SELECT count(*), min(created) FROM notes")
        assert 100 < left < 210
        assert oldest > now - 300
        await journal.read("PRAGMA wal_checkpoint(TRUNCATE)")
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
    monkeypatch.setattr(module, "LOCK_SECONDS", 0.05)
    file.parent.mkdir()
    async with opened(file) as journal:
        held = harm(file)
        with pytest.raises(JournalUnavailable, match=rf"E2107.*{reason}"):
            await journal.write(INSERT, 0, "lost")
        if held is not None:
            held.close()
        elif file.is_dir():
            file.rmdir()
        else:
            file.unlink()
        await journal.write(INSERT, 0, "kept")
        assert await journal.read(TEXTS) == [("kept",)]


async def test_a_full_file_refuses_writes_takes_reads_and_recovers(file: Path) -> None:
    async with opened(file, max_bytes=1 << 16) as journal:
        await journal.write(INSERT, 0, "small")
        with pytest.raises(JournalUnavailable, match="STORE_MAX_BYTES is reached"):
            await journal.write(INSERT, 0, "x" * (1 << 17))
        assert await journal.read(TEXTS) == [("small",)]
        await journal.write(INSERT, 0, "small too")
        assert len(await journal.read(TEXTS)) == 2


def refuse(_: sqlite3.Connection) -> None:
    raise KeyError("a write of ours that is wrong")


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        pytest.param((refuse,), KeyError, id="function"),
        pytest.param(("INSERT INTO notes VALUES (1, 2)",), JournalUnavailable, id="columns"),
        pytest.param(("INSERT INTO notes VALUES ('', ?, ?)", 0), sqlite3.Error, id="bindings"),
        pytest.param((INSERT, 0, object()), sqlite3.Error, id="type"),
        pytest.param(("INSERT INTO clock VALUES (2, 0)",), sqlite3.IntegrityError, id="constraint"),
    ],
)
async def test_a_write_that_fails_takes_no_other_with_it(
    file: Path, wrong: Any, error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(file) as journal:
        before = journal.write(INSERT, 0, "before")
        failing = journal.write(*wrong)
        after = journal.log(["a record"], INSERT, 0, "after")
        with pytest.raises(error):
            await failing
        assert (await before, await after) == (1, 1)
        assert await journal.read(TEXTS) == [("before",), ("after",)]
        assert "writes fail" in caplog.text or "one write to the journal failed" in caplog.text
        await journal.write(INSERT, 0, "later")
        with sqlite3.connect(file, timeout=0, isolation_level=None) as other:
            other.execute("BEGIN IMMEDIATE")  # no transaction was left open


async def test_what_a_failed_write_has_changed_is_rolled_back(file: Path) -> None:
    def change_and_fail(connection: sqlite3.Connection) -> None:
        connection.execute(INSERT, (0, "half"))
        raise OverflowError

    async with opened(file) as journal:
        written = [journal.write(INSERT, 0, "first"), journal.write(change_and_fail)]
        await asyncio.gather(*written, return_exceptions=True)
        assert await journal.read(TEXTS) == [("first",)]


async def test_a_record_that_is_no_json_fails_its_own_write_only(file: Path) -> None:
    async with opened(file) as journal:
        wrong = journal.log(["\ud800"], INSERT, 0, "unlogged")
        right = journal.log(["logged"], INSERT, 0, "logged")
        with pytest.raises(TypeError):
            await wrong
        assert await right == 1
        assert await journal.read(TEXTS) == [("logged",)]
        assert await journal.read("SELECT records FROM log") == [(b'[["logged"]]',)]


async def test_a_write_that_fills_the_file_fails_alone(file: Path) -> None:
    async with opened(file, max_bytes=1 << 17) as journal:
        writes = [journal.write(INSERT, 0, "small") for _ in range(3)]
        writes.insert(1, journal.write(INSERT, 0, "x" * (1 << 18)))
        outcomes = await asyncio.gather(*writes, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [int, JournalUnavailable, int, int]
        assert await journal.read(TEXTS) == [("small",)] * 3


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 10**400, "a \ud800", "\udfff"])
async def test_values_that_sqlite_cannot_have_never_reach_the_writer(
    file: Path, value: Any
) -> None:
    async with opened(file) as journal:
        for ask in (
            lambda: journal.write(INSERT, 0, value),
            lambda: journal.write("INSERT INTO notes VALUES ('', 0, :text)", text=value),
            lambda: journal.read("SELECT 1 WHERE ? = 1", value),
        ):
            with pytest.raises(InvalidParameter):
                await ask()
        assert not file.exists()


async def test_a_writer_that_is_stuck_says_so(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(file) as journal:
        await journal.write(INSERT, 0, "fine")
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
    monkeypatch.setattr(module, "LOCK_SECONDS", 0.05)
    monkeypatch.setattr(module, "STUCK_SECONDS", 0.0)
    async with opened(file) as journal:
        await journal.write(INSERT, 0, "fine")
        other = sqlite3.connect(file, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(JournalUnavailable, match="held its lock"):
            await journal.write(INSERT, 0, "lost")
        assert journal.problem() is not None
        other.execute("ROLLBACK")
        other.close()
        await journal.write(INSERT, 0, "fine again")
        assert journal.problem() is None


@pytest.mark.parametrize("days", [31, 4000, -31], ids=["month", "decade", "back"])
async def test_a_clock_that_jumps_deletes_nothing(
    file: Path, days: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = time.time
    async with opened(file, days=30) as journal:
        await journal.write(INSERT, real(), "kept")
        await journal.expire()
        monkeypatch.setattr(time, "time", lambda: real() + days * 86400)
        for _ in range(3):
            await journal.expire()
        await journal.write(INSERT, journal.now(), "of the jump")
    async with opened(file, days=30) as journal:  # the next process
        await journal.expire()
        monkeypatch.setattr(time, "time", real)
        await journal.expire()
        assert await journal.read(TEXTS) == [("kept",), ("of the jump",)]


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
            await journal.write(INSERT, time.time(), "x" * (1 << 16))
            await journal.write("DELETE FROM notes")
            if number % 10 == 9:
                journal._shrunk_at = 0.0  # as a second later
        journal._shrunk_at = 0.0
        await journal.write(INSERT, time.time(), "last")
        assert wal.stat().st_size <= journal._max_wal_bytes
        assert file.stat().st_size + wal.stat().st_size <= 1 << 22


OF_KEY = "INSERT INTO notes VALUES (?, ?, ?)"


async def owners(journal: Journal) -> dict[str, int]:
    rows = await journal.read("SELECT owner, count(*) FROM notes GROUP BY owner")
    return dict(rows)


async def test_space_is_made_within_the_key_that_has_most(file: Path) -> None:
    async with opened(file) as journal:
        now = time.time()
        small = [journal.write(OF_KEY, "small", now - 3000 + n, "x" * 4000) for n in range(20)]
        large = [journal.write(OF_KEY, "large", now - n, "x" * 4000) for n in range(190)]
        await asyncio.gather(*small, *large)
        await journal.expire()
        left = await owners(journal)
        assert left["small"] == 20  # although they are the oldest
        assert 50 < left["large"] < 190


async def test_a_key_that_is_over_its_share_loses_its_own(file: Path) -> None:
    async with opened(file, share=Share(bytes=100_000, rows=50)) as journal:
        now = time.time()
        few_rows = [journal.write(OF_KEY, "bytes", now - n, "x" * 4000) for n in range(40)]
        many = [journal.write(OF_KEY, "rows", now - n, "x") for n in range(130)]
        other = [journal.write(OF_KEY, "other", now - 3000 - n, "x") for n in range(20)]
        await asyncio.gather(*few_rows, *many, *other)
        await journal.expire()
        left = await owners(journal)
        assert left.pop("other") == 20
        assert all(count <= 50 for count in left.values())
        usage = {own.owner: own.bytes for own in await journal._usages()}
        assert usage.get("bytes", 0) <= 100_000


async def test_what_keys_have_is_counted_through_all_changes(file: Path) -> None:
    async with opened(file, share=Share(bytes=1000, rows=3)) as journal:
        assert await journal.write(lambda own: journal.has_room(own, "a", 1000))
        assert not await journal.write(lambda own: journal.has_room(own, "a", 1001))
        for text in ("x" * 100, "", "x" * 50):
            await journal.write(OF_KEY, "a", 0, text)
        await journal.write("UPDATE notes SET text = 'xx' WHERE text = ''")
        (usage,) = await journal._usages()
        assert (usage.owner, usage.bytes, usage.row_count) == ("a", 3 * 100 + 152, 3)
        assert not await journal.write(lambda own: journal.has_room(own, "a", 1))  # a fourth row
        assert await journal.write(lambda own: journal.has_room(own, "b", 1))
        await journal.write("DELETE FROM notes WHERE text = 'xx'")
        (usage,) = await journal._usages()
        assert (usage.bytes, usage.row_count) == (350, 2)


async def test_a_file_from_before_shares_is_counted_once(file: Path) -> None:
    async with opened(file) as journal:
        await journal.write(OF_KEY, "a", time.time(), "x" * 50)
    with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as old:
        for (trigger,) in old.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'"):
            old.execute(f"DROP TRIGGER {trigger}")
        old.execute("DROP TABLE usage")
        old.execute(OF_KEY, ("a", time.time(), "x" * 25))
    for _ in range(2):
        async with opened(file) as journal:
            (usage,) = await journal._usages()
            assert (usage.bytes, usage.row_count) == (275, 2)
