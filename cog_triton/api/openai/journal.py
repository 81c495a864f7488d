"""A journal in one SQLite file that processes share: grouped writes, and reads beside them.

No write waits for the disk: it survives the end of every process, and after the next checkpoint, which
runs between reads, that of the machine.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import secrets
import sqlite3
import time
from abc import ABC, abstractmethod
from collections import Counter, namedtuple
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import anyio
from orjson import dumps

from cog_triton.errors import InvalidParameter, JournalUnavailable, file_problem, is_unicode
from cog_triton.processes import locked

logger = logging.getLogger(__name__)
Schema = Mapping[str, Any]  # statements of one module, by their names
Action = Callable[[sqlite3.Connection], Any]
VERSION = 1  # of the tables of all modules
LOCK_SECONDS = 5.0  # that a transaction waits for one of another process
GROUP_SECONDS = 0.02  # from one transaction to the next, at least
LOOK_SECONDS = 0.5  # between two looks for what other processes have left
KEEP_SECONDS = 5.0  # between two rounds of the housekeeping
STUCK_SECONDS = 15.0  # without a commit while writes wait; then the server is not ready
REPORT_SECONDS = 60.0  # between two lines in the log about the same problem of the file
MOST_DELETED = 100  # rows at once, because writes wait meanwhile
KEPT_PART = 0.9  # of the most bytes; beyond, the oldest rows go
PAGE_BYTES = 4096
MOST_WAL_BYTES = 64 << 20  # of the write-ahead log, before it goes into the file and is cut
WAL_PART = 1 / 8  # of the most bytes, where that is less
SHRINK_SECONDS = 1.0  # between two attempts to cut it while somebody reads
PRAGMAS = ("auto_vacuum=2", "journal_mode=WAL", "synchronous=1", "secure_delete=1")
FASTEST_CLOCK = 2.0  # seconds by which the journal's time may advance in one second
FAILURES = 5  # of one job's task; then the job ends as failed
FIRST_PAUSE = 1.0  # seconds before a failed job is tried again; each further pause is twice as long
LONGEST_PAUSE = 60.0
_USED = "SELECT page_count - freelist_count FROM pragma_page_count, pragma_freelist_count"
_TABLES = (
    "CREATE TABLE IF NOT EXISTS log (id INTEGER PRIMARY KEY, records BLOB)",
    # When the housekeeping last ran, by the clock of ``SteadyClock``.
    "CREATE TABLE IF NOT EXISTS clock (id INTEGER PRIMARY KEY CHECK (id = 1), seconds REAL)",
)
_LOCKED = "locked"
# By parts of SQLite's texts.
_REASONS = {
    "full": "the disk is full, or STORE_MAX_BYTES is reached",
    _LOCKED: f"another process has held its lock for {LOCK_SECONDS:g} s",
    "malformed": "the file is damaged; move it away, and a new one is created",
    "not a database": "the file is not a journal; move it away, and one is created",
}
# What each key has, kept by triggers.
_USAGE = """
    CREATE TABLE usage (owner TEXT PRIMARY KEY, bytes INTEGER, row_count INTEGER) WITHOUT ROWID
"""
_OWNERS = "SELECT owner, bytes, row_count FROM usage WHERE row_count > 0 ORDER BY bytes DESC"
# Errors of one write, which say nothing about the file.
_FAULTS_OF_A_WRITE = (
    sqlite3.DataError,
    sqlite3.IntegrityError,
    sqlite3.NotSupportedError,
    sqlite3.ProgrammingError,
)

_row_type = cache(partial(namedtuple, "Row", rename=True))


@dataclass(eq=False)
class Write:
    """A statement with its values, or a function of a connection, that waits for its commit."""

    action: str | Action
    values: Sequence[Any] | Mapping[str, Any]
    future: asyncio.Future[Any]
    record: Any = None  # for the log


@dataclass(frozen=True)
class Outcome:
    """What a write gave: the rows changed or a function's result, or the error that it failed with."""

    result: Any = None
    error: Exception | None = None


class TransactionLost(Exception):
    """SQLite has rolled back a whole transaction because one write of it failed."""


class NoRoom(Exception):
    """A write that would give a key more than its share of the file; the caller says so to the client."""


@dataclass(frozen=True)
class Share:
    """What one of several API keys may have in the file."""

    bytes: int
    rows: int


@dataclass(frozen=True)
class Usage:
    """What one API key has in the file."""

    owner: str
    bytes: int
    row_count: int


@dataclass(frozen=True)
class Counted:
    """A table whose rows count for their owners.

    ``size`` is an SQL expression of a row's bytes, its overhead among them, with ``{row}`` for the row;
    ``columns`` are those whose change changes it.
    """

    table: str
    size: str
    columns: str

    def triggers(self) -> list[str]:
        """Return the statements that keep the table ``usage``."""
        new, old = self.size.format(row="NEW"), self.size.format(row="OLD")
        return [
            f"""
            CREATE TRIGGER usage_insert_{self.table} AFTER INSERT ON {self.table} BEGIN
            INSERT OR IGNORE INTO usage (owner, bytes, row_count) VALUES (NEW.owner, 0, 0);
            UPDATE usage SET bytes = bytes + {new}, row_count = row_count + 1
            WHERE owner = NEW.owner; END
            """,
            f"""
            CREATE TRIGGER usage_update_{self.table} AFTER UPDATE OF {self.columns} ON {self.table}
            BEGIN UPDATE usage SET bytes = bytes - {old} + {new} WHERE owner = NEW.owner; END
            """,
            f"""
            CREATE TRIGGER usage_delete_{self.table} AFTER DELETE ON {self.table} BEGIN
            UPDATE usage SET bytes = bytes - {old}, row_count = row_count - 1
            WHERE owner = OLD.owner; END
            """,
        ]

    def count(self) -> str:
        """Return the statement that counts the rows of a file from before there was ``usage``."""
        size = self.size.format(row=self.table)
        return f"""
            INSERT INTO usage (owner, bytes, row_count)
            SELECT owner, sum({size}), count(*) FROM {self.table} WHERE true GROUP BY owner
            ON CONFLICT (owner) DO UPDATE SET
            bytes = bytes + excluded.bytes, row_count = row_count + excluded.row_count
            """


class SteadyClock:
    """The time in seconds since 1970 by which rows expire, which does not follow a jump of the machine's.

    It is never ahead of the machine's clock, and advances by at most two seconds in one second. What is to
    be kept for 30 days is kept for at least 15, whatever a clock does. After a pause of the server
    it catches up within as much time as that took.
    """

    def __init__(self, seconds: float) -> None:
        """Begin with the time at which the housekeeping of the file last ran."""
        self._seconds = seconds
        self._at = time.monotonic()

    def now(self) -> float:
        at = time.monotonic()
        fastest = self._seconds + FASTEST_CLOCK * (at - self._at)
        self._seconds = min(time.time(), fastest)
        self._at = at
        return self._seconds


class Journal:
    """Rows of several modules, used on one event loop; JournalUnavailable says what is wrong with it.

    A schema's ``tables`` are created, each with a column ``owner``: the name of the API key, or empty. Its
    ``expiry`` deletes at most :most rows that are older than :before, in seconds since 1970, of one :owner
    or, where that is null, of all; :now is the journal's time. Its ``counted`` tables are those whose rows
    count for their owners.
    """

    def __init__(
        self,
        path: Path,
        schemas: Sequence[Schema],
        max_bytes: int,
        days: float,
        share: Share | None = None,
    ) -> None:
        """Open nothing yet: the first use does, and the next one after an error.

        ``share`` is what each of several keys may have; None where there is one key or none.
        """
        self.path = path
        self.worker = secrets.randbits(62)  # this process, to others; see ``alive``
        self._schemas = schemas
        self._seconds = days * 86400
        self.share = share
        self._max_wal_bytes = min(MOST_WAL_BYTES, int(max_bytes * WAL_PART))
        self._max_pages = (max_bytes - self._max_wal_bytes) // PAGE_BYTES
        # Beyond these the oldest rows go.
        self._kept_pages = KEPT_PART * self._max_pages
        self._pending: list[Write] = []
        self._draining: asyncio.Task[None] | None = None
        self._waiting_since: float | None = None  # of writes that no commit has answered
        self._shrunk_at = 0.0
        self._reported = ""  # the last problem of the file that was logged
        self._reported_at = 0.0
        self._clock: SteadyClock | None = None  # once the file is open
        self._threads = {name: ThreadPoolExecutor(1, f"journal-{name}") for name in "rw"}
        self._connections: dict[str, sqlite3.Connection] = {}  # one for reads, one for writes
        self._locks: int | None = None

    def write(self, do: str | Action, *values: Any, **named: Any) -> Any:
        """Return a future of the commit: the rows changed, or the result of a function that it calls.

        A write that fails takes no other with it. Values that SQLite cannot have are InvalidParameter.
        """
        return self._enqueue(do, named or values)

    def log(self, record: Any, do: str, *values: Any) -> Any:
        """``write`` with a JSON value; a transaction's are one row of the table ``log``, a list."""
        return self._enqueue(do, values, record)

    def _enqueue(self, action: str | Action, values: Any, record: Any = None) -> Any:
        check_values(values.values() if isinstance(values, Mapping) else values)
        future = asyncio.get_running_loop().create_future()
        self._pending.append(Write(action, values, future, record))
        if self._waiting_since is None:
            self._waiting_since = time.monotonic()
        if self._draining is None or self._draining.done():
            self._draining = asyncio.create_task(self._drain())
        return future

    async def read(self, sql: str, *values: Any) -> Any:
        """Return all rows, as named tuples."""
        check_values(values)
        return await self._in_thread("r", lambda own: own.execute(sql, values).fetchall())

    def now(self) -> float:
        """Return the time by which rows expire; see ``SteadyClock``."""
        return self._clock.now() if self._clock is not None else time.time()

    def problem(self) -> str | None:
        """Return why the server is not ready: writes have waited for a commit for too long."""
        if self._waiting_since is None:
            return None
        seconds = time.monotonic() - self._waiting_since
        if seconds < STUCK_SECONDS:
            return None
        return f"the journal {self.path} has committed nothing for {seconds:.0f} s while writes are waiting"

    async def keep(self) -> None:
        """Do the housekeeping until cancelled: what is old or too much goes, the disk gets the rest."""
        while True:
            try:
                await self.expire()
                await self.read("PRAGMA wal_checkpoint(PASSIVE)")
                await self._in_thread("w", self._shrink_when_idle)
            except JournalUnavailable:
                pass  # which the writer has logged
            except Exception:
                logger.exception("the housekeeping of the journal %s failed", self.path)
            await asyncio.sleep(KEEP_SECONDS)

    async def expire(self) -> None:
        """Delete what is too old, and the oldest of what is too much."""
        await self.write("DELETE FROM log WHERE 0")  # opens the file, which has the time
        now = self.now()
        while await self.write(partial(self._delete, now - self._seconds, now, None)):
            pass
        for usage in await self._usages():
            while self._is_over(usage):
                if not await self.write(partial(self._delete, now, now, usage.owner)):
                    break  # all that is there is in use
                left = [own for own in await self._usages() if own.owner == usage.owner]
                usage = left[0] if left else Usage(usage.owner, 0, 0)
        while (await self.read(_USED))[0][0] > self._kept_pages:
            if not await self._delete_of_the_largest(now):
                break
        await self.write("UPDATE clock SET seconds = ?", now)
        await self.write(lambda own: own.execute("PRAGMA incremental_vacuum(1000)").fetchall())

    async def _usages(self) -> list[Usage]:
        """Return what each key has, the largest first."""
        return [Usage(*row) for row in await self.read(_OWNERS)]

    def _is_over(self, usage: Usage) -> bool:
        share = self.share
        return share is not None and (usage.bytes > share.bytes or usage.row_count > share.rows)

    async def _delete_of_the_largest(self, now: float) -> int:
        """Delete some of the oldest rows of the key that has most, never of one below its even part."""
        usages = await self._usages()
        even_part = self._kept_pages * PAGE_BYTES / max(1, len(usages))
        for place, usage in enumerate(usages):
            if place > 0 and usage.bytes < even_part:
                break
            deleted = await self.write(partial(self._delete, now, now, usage.owner))
            if deleted:
                return int(deleted)
        return 0

    def most_bytes(self) -> int:
        """Return how many bytes one key may have."""
        most = int(self._kept_pages * PAGE_BYTES)
        return most if self.share is None else min(most, self.share.bytes)

    def has_room(
        self, connection: sqlite3.Connection, owner: str, more_bytes: int, more_rows: int = 1
    ) -> bool:
        """Return whether a key may have so much more; to be called in a write."""
        if more_bytes > self.most_bytes():
            return False
        if self.share is None:
            return True
        sql = "SELECT owner, bytes, row_count FROM usage WHERE owner = ?"
        row = connection.execute(sql, (owner,)).fetchone()
        usage = Usage(*row) if row is not None else Usage(owner, 0, 0)
        return (
            usage.bytes + more_bytes <= self.share.bytes
            and usage.row_count + more_rows <= self.share.rows
        )

    def alive(self, worker: int) -> bool:
        """Return False for a process on this file that has ended; to be called after a write."""
        if worker == self.worker or self._locks is None:
            return True
        try:
            fcntl.lockf(self._locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, worker)
        except OSError:
            return True
        fcntl.lockf(self._locks, fcntl.LOCK_UN, 1, worker)
        return False

    async def close(self) -> None:
        """Write what has been given, and close the file."""
        if self._draining is not None:
            await asyncio.wait([self._draining])
        for thread in self._threads.values():
            thread.shutdown()
        for connection in self._connections.values():
            connection.close()
        if self._locks is not None:
            os.close(self._locks)

    async def _drain(self) -> None:
        """Commit what is there, again and again, until nothing more comes."""
        while self._pending:
            began = time.monotonic()
            group, self._pending = self._pending, []
            try:
                outcomes = await self._in_thread("w", partial(self._commit, group))
            except Exception as error:  # nothing of the group is written
                outcomes = [Outcome(error=error)] * len(group)
            self._report(outcomes)
            for write, outcome in zip(group, outcomes, strict=True):
                if write.future.done():
                    continue
                if outcome.error is None:
                    write.future.set_result(outcome.result)
                else:
                    write.future.set_exception(outcome.error)
                    write.future.exception()  # nobody needs to wait for it
            await asyncio.sleep(max(0.0, began + GROUP_SECONDS - time.monotonic()))
        self._draining = None

    def _report(self, outcomes: Iterable[Outcome]) -> None:
        """Log what failed, and note whether writes come through."""
        errors = {str(outcome.error): outcome.error for outcome in outcomes if outcome.error}
        for text, error in errors.items():
            if isinstance(error, NoRoom):
                continue
            if not isinstance(error, JournalUnavailable):
                text = f"{type(error).__name__}: {text}"
                logger.error("one write to the journal failed: %s", text, exc_info=error)
            elif text != self._reported or time.monotonic() - self._reported_at > REPORT_SECONDS:
                self._reported, self._reported_at = text, time.monotonic()
                logger.warning("writes fail: %s", error.message)
        if not errors:
            self._reported = ""
        if not any(_REASONS[_LOCKED] in text for text in errors):
            self._waiting_since = time.monotonic() if self._pending else None

    async def _in_thread(self, name: str, do: Action) -> Any:
        """Call a function with the connection for reads or for writes, which is made if need be."""

        def run() -> Any:
            try:
                if name not in self._connections:
                    self.path.parent.mkdir(0o700, parents=True, exist_ok=True)
                    with locked(self.path.parent, lambda: None):  # one at a time makes it
                        self._connections[name] = self._connected(name)
                return do(self._connections[name])
            except Exception as error:
                self._disconnect(name)
                raise self._translated(error) from None

        return await asyncio.get_running_loop().run_in_executor(self._threads[name], run)

    def _disconnect(self, name: str) -> None:
        """Close a connection, which rolls back; its next use opens the file again."""
        with contextlib.suppress(sqlite3.Error, KeyError):
            self._connections.pop(name).close()

    def _translated(self, error: Exception) -> Exception:
        """Return JournalUnavailable for an error of the file; any other as it is."""
        if isinstance(error, _FAULTS_OF_A_WRITE) or not isinstance(error, sqlite3.Error | OSError):
            return error
        text = file_problem(error) if isinstance(error, OSError) else str(error)
        text = next((reason for part, reason in _REASONS.items() if part in text), text)
        return JournalUnavailable(f"the journal {self.path}: {text}")

    def _commit(self, group: Sequence[Write], connection: sqlite3.Connection) -> list[Outcome]:
        """Commit writes together; one that fails is rolled back alone."""
        try:
            outcomes = self._committed(group, connection)
        except TransactionLost:
            outcomes = []
            for write in group:
                outcomes += self._committed_alone(write, connection)
        if any(isinstance(outcome.error, JournalUnavailable) for outcome in outcomes):
            self._disconnect("w")  # another file may be there by the next write
        else:
            self._shrink(connection, self._max_wal_bytes)
        return outcomes

    def _committed(self, group: Sequence[Write], connection: sqlite3.Connection) -> list[Outcome]:
        """Write a group in one transaction, or raise: TransactionLost if some of it may be good."""
        connection.execute("BEGIN IMMEDIATE")
        records: list[bytes] = []
        unlogged: dict[Write, Exception] = {}
        for write in group:
            if write.record is None:
                continue
            try:
                records.append(dumps(write.record))
            except Exception as error:
                unlogged[write] = error
        try:
            # Before the writes, because some of them read the log.
            if records:
                row = b"[" + b",".join(records) + b"]"
                connection.execute("INSERT INTO log (records) VALUES (?)", (row,))
            outcomes = [
                Outcome(error=unlogged[write])
                if write in unlogged
                else self._attempt(write, connection)
                for write in group
            ]
            connection.execute("COMMIT")
        except Exception as error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            if len(group) == 1:
                raise
            raise TransactionLost from error
        return outcomes

    def _committed_alone(self, write: Write, connection: sqlite3.Connection) -> list[Outcome]:
        try:
            return self._committed([write], connection)
        except Exception as error:
            return [Outcome(error=self._translated(error))]

    def _attempt(self, write: Write, connection: sqlite3.Connection) -> Outcome:
        """Do one write of a transaction, or roll back what it has done."""
        connection.execute("SAVEPOINT one")
        try:
            if isinstance(write.action, str):
                result: Any = connection.execute(write.action, write.values).rowcount
            else:
                result = write.action(connection)
            connection.execute("RELEASE one")
            return Outcome(result)
        except Exception as error:
            if not connection.in_transaction:  # SQLite has rolled back all: the disk is full
                raise
            connection.execute("ROLLBACK TO one")
            connection.execute("RELEASE one")
            return Outcome(error=self._translated(error))

    def _shrink_when_idle(self, connection: sqlite3.Connection) -> None:
        self._shrink(connection, self._max_wal_bytes // 4)

    def _shrink(self, connection: sqlite3.Connection, most: int) -> None:
        """Move a write-ahead log of more bytes into the file and cut it, unless somebody reads."""
        now = time.monotonic()
        if now - self._shrunk_at < SHRINK_SECONDS or self._wal_bytes() <= most:
            return
        self._shrunk_at = now
        connection.execute("PRAGMA busy_timeout=50")
        try:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except sqlite3.Error as error:  # what is committed stays so
            logger.warning("the write-ahead log of %s could not be truncated: %s", self.path, error)
        finally:
            connection.execute(f"PRAGMA busy_timeout={LOCK_SECONDS * 1000:.0f}")

    def _wal_bytes(self) -> int:
        try:
            return os.stat(f"{self.path}-wal").st_size
        except OSError:
            return 0

    def _connected(self, name: str) -> sqlite3.Connection:
        with contextlib.suppress(FileExistsError):  # to close it would end SQLite's own locks on it
            os.close(os.open(self.path, os.O_CREAT | os.O_EXCL, 0o600))  # its others are alike
        if name == "w" and self._locks is None:
            self._locks = os.open(f"{self.path}-workers", os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.lockf(self._locks, fcntl.LOCK_EX, 1, self.worker)  # until this process ends
        connection = sqlite3.connect(
            self.path, LOCK_SECONDS, isolation_level=None, check_same_thread=False
        )
        connection.execute("PRAGMA wal_autocheckpoint=0")  # which ``keep`` and ``_shrink`` do
        connection.execute(f"PRAGMA journal_size_limit={self._max_wal_bytes}")
        connection.row_factory = lambda c, row: _row_type(tuple(d[0] for d in c.description))(*row)
        for pragma in (*PRAGMAS, f"max_page_count={self._max_pages}"):
            connection.execute(f"PRAGMA {pragma}")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version > VERSION:
            raise sqlite3.OperationalError(
                f"it was created by a newer version of cog-triton ({version})"
            )
        for table in (*_TABLES, *(table for schema in self._schemas for table in schema["tables"])):
            connection.execute(table)
        if version < VERSION:
            connection.execute(f"PRAGMA user_version={VERSION}")
        self._count_usage(connection)
        if self._clock is None:
            insert = "INSERT OR IGNORE INTO clock (id, seconds) VALUES (1, ?)"
            connection.execute(insert, (time.time(),))
            (seconds,) = connection.execute("SELECT seconds FROM clock").fetchone()
            self._clock = SteadyClock(seconds)
        return connection

    def _count_usage(self, connection: sqlite3.Connection) -> None:
        """Make the table ``usage``, and count what a file from before it has."""
        connection.execute("BEGIN IMMEDIATE")
        try:
            sql = "SELECT count(*) FROM sqlite_master WHERE name = 'usage'"
            (there,) = connection.execute(sql).fetchone()
            if not there:
                connection.execute(_USAGE)
                for counted in (own for schema in self._schemas for own in schema["counted"]):
                    connection.execute(counted.count())
                    for trigger in counted.triggers():
                        connection.execute(trigger)
            connection.execute("COMMIT")
        except sqlite3.Error:
            connection.execute("ROLLBACK")
            raise

    def _delete(
        self, before: float, now: float, owner: str | None, connection: sqlite3.Connection
    ) -> int:
        values = {"before": before, "now": now, "owner": owner, "most": MOST_DELETED}
        expiry = (sql for schema in self._schemas for sql in schema["expiry"])
        return sum(connection.execute(sql, values).rowcount for sql in expiry)


def check_values(values: Iterable[Any]) -> None:
    """Raise InvalidParameter for a value of a request that SQLite cannot have."""
    for value in values:
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise InvalidParameter("a number in the request has more than 64 bits")
        if isinstance(value, str) and not is_unicode(value):
            raise InvalidParameter("a string in the request contains a lone surrogate")


@dataclass
class Failures:
    """Those of one job's task, in this process."""

    count: int = 0
    again_at: float = 0.0  # on the monotonic clock
    error: BaseException | None = None

    def add(self, error: BaseException) -> None:
        pause = min(FIRST_PAUSE * 2.0**self.count, LONGEST_PAUSE)
        self.count += 1
        self.again_at = time.monotonic() + pause
        self.error = error

    @property
    def final(self) -> bool:
        """Whether the job is not tried again; a journal that cannot be had is waited for."""
        return self.count >= FAILURES and not isinstance(self.error, JournalUnavailable)


def in_turn(rows: Sequence[Any]) -> list[Any]:
    """Return the first row of each owner, then the second of each, and so on."""
    places: Counter[str] = Counter()
    numbered = []
    for row in rows:
        numbered.append((places[row.owner], row))
        places[row.owner] += 1
    numbered.sort(key=lambda pair: pair[0])
    return [row for _, row in numbered]


class Jobs(ABC):
    """The rows of one table that this process runs, each in a task.

    The schema's statement ``active`` returns the ids, owners and runners of a model's rows that have not
    ended, oldest first, and ``take`` gives one another runner. Keys take turns.
    """

    def __init__(
        self,
        journal: Journal | None,
        sql: Schema,
        model: str,
        most: int,
        most_of_key: int | None = None,
    ) -> None:
        """Run so many at once; of one of several keys only so many."""
        self.journal: Any = journal
        self.tasks, self.wake = dict[str, asyncio.Task[None]](), asyncio.Event()
        self.closed = journal is None  # nothing more is begun
        self._sql, self._model, self._most = sql, model, most
        self._failures: dict[str, Failures] = {}
        self._owners: dict[str, str] = {}  # of the tasks
        self._most_of_key = most_of_key

    @abstractmethod
    async def run(self, id: str) -> None: ...

    @abstractmethod
    async def give_up(self, id: str, reason: str) -> None:
        """End a row as failed, after its task has failed too often."""

    @abstractmethod
    def look(self, rows: Sequence[Any]) -> None:
        """Look at the active rows, before more are run."""

    async def work(self) -> None:
        """Run what no living process runs, until closed."""
        while not self.closed:
            try:
                await self._take_up()
            except JournalUnavailable:
                pass  # which the writer has logged
            except Exception:
                logger.exception("looking for work to run failed")
                await asyncio.sleep(FIRST_PAUSE)
            with anyio.move_on_after(LOOK_SECONDS):
                await self.wake.wait()
            self.wake.clear()

    def stop(self) -> asyncio.Future[Any]:
        """Close, and end what runs; the next process continues with it."""
        self.closed = True
        for task in self.tasks.values():
            task.cancel()
        return asyncio.gather(*self.tasks.values(), return_exceptions=True)

    async def _take_up(self) -> None:
        rows = await self.journal.read(self._sql["active"], self._model)
        self.look(rows)
        if rows:
            await self.journal.write("DELETE FROM log WHERE 0")  # opens the file, for ``alive``
        for id in self._failures.keys() - {row.id for row in rows}:
            del self._failures[id]
        for row in in_turn(rows):
            if row.id in self.tasks or self._runs_elsewhere(row):
                continue
            if failures := self._failures.get(row.id):
                if failures.final:
                    await self._end_as_failed(row.id, failures)
                    continue
                if time.monotonic() < failures.again_at:
                    continue
            if len(self.tasks) >= self._most:
                break
            if self._has_its_places(row.owner):
                continue
            taken = await self.journal.write(
                self._sql["take"], self.journal.worker, row.id, row.runner
            )
            if taken and not self.closed:
                self._owners[row.id] = row.owner
                task = self.tasks[row.id] = asyncio.create_task(self.run(row.id))
                task.add_done_callback(partial(self._ended, row.id))

    def _runs_elsewhere(self, row: Any) -> bool:
        return bool(row.runner != self.journal.worker and self.journal.alive(row.runner))

    def _has_its_places(self, owner: str) -> bool:
        if self._most_of_key is None or self.journal.share is None:
            return False
        return list(self._owners.values()).count(owner) >= self._most_of_key

    async def _end_as_failed(self, id: str, failures: Failures) -> None:
        error = failures.error
        reason = f"it failed {failures.count} times, at last with {type(error).__name__}"
        logger.error("giving up on %s: %s: %s", id, reason, error)
        await self.give_up(id, f"{reason}; see the server's log")

    def _ended(self, id: str, task: asyncio.Task[None]) -> None:
        del self.tasks[id], self._owners[id]
        error = None if task.cancelled() else task.exception()
        if error is None:
            self._failures.pop(id, None)
            self.wake.set()
        elif self.closed:
            logger.info("%s is left for later", id)
        else:
            failures = self._failures.setdefault(id, Failures())
            failures.add(error)
            pause = failures.again_at - time.monotonic()
            text = "is not retried" if failures.final else f"is retried in {pause:.0f} s"
            logger.warning("%s failed and %s", id, text, exc_info=error)
