"""A journal in one SQLite file that processes share: grouped writes, and reads beside them.

No write waits for the disk. A write survives the end of every process, and after the next checkpoint,
which runs between reads, also that of the machine.
"""

import asyncio
import contextlib
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from cog_triton.api.openai.background_tasks import BackgroundTasks
from cog_triton.api.openai.storage import database
from cog_triton.api.openai.storage.clock import SteadyClock
from cog_triton.api.openai.storage.database import (
    LOCKED,
    Action,
    ConnectionThread,
    Parameters,
    TransactionLost,
    savepoint,
    transaction,
    translated,
)
from cog_triton.api.openai.storage.lease import Lease
from cog_triton.api.openai.storage.limits import NoRoom, StorageLimits
from cog_triton.api.openai.storage.schema import migrate
from cog_triton.errors import JournalUnavailable
from cog_triton.processes import locked

logger = logging.getLogger(__name__)
T = TypeVar("T")
GROUP_SECONDS = 0.02  # the least time from one transaction to the next
STUCK_SECONDS = 15.0  # after so long without a commit while writes wait, the server is not ready
REPORT_SECONDS = 60.0  # between two lines in the log about the same problem of the file
SHRINK_SECONDS = 1.0  # between two attempts to cut the write-ahead log while somebody reads
PRAGMAS = ("auto_vacuum=2", "journal_mode=WAL", "synchronous=1", "secure_delete=1")


@dataclass(eq=False)
class Write(Generic[T]):
    """A function of a connection that waits for its commit."""

    action: Action[T]
    future: "asyncio.Future[T]"


@dataclass(frozen=True)
class Outcome:
    """The result of a write, or the error that it failed with."""

    result: Any = None
    error: Exception | None = None


class Journal:
    """The file, used on one event loop. JournalUnavailable says what is wrong with it."""

    def __init__(self, path: Path, limits: StorageLimits) -> None:
        """Open nothing yet: the first use does, and the next one after an error."""
        self.path = path
        self.limits = limits
        self.lease = Lease(Path(f"{path}-workers"))
        self._pending: list[Write[Any]] = []
        self._committing: asyncio.Task[None] | None = None
        self._tasks = BackgroundTasks()
        self._waiting_since: float | None = None  # since when writes wait for a commit
        self._shrunk_at = 0.0
        self._reported = ""  # the last problem of the file that was logged
        self._reported_at = 0.0
        self._clock: SteadyClock | None = None  # once the file is open
        self._reader = ConnectionThread("reader", path, self._connect)
        self._writer = ConnectionThread("writer", path, self._connect_writer)

    def write(self, action: Action[T]) -> "asyncio.Future[T]":
        """Call a function in a transaction; return the future of its result, after the commit.

        All writes of a moment share a transaction. One that fails is rolled back alone.
        """
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._pending.append(Write(action, future))
        if self._waiting_since is None:
            self._waiting_since = time.monotonic()
        if self._committing is None or self._committing.done():
            self._committing = self._tasks.start("commit writes", self._commit_pending())
        return future

    async def read(self, action: Action[T]) -> T:
        """Call a function that only reads, beside all writes."""
        return await self._reader.call(action)

    def execute(self, sql: str, parameters: Parameters = ()) -> "asyncio.Future[int]":
        """Run one statement; return the future of the number of rows that it changed. See ``write``."""
        return self.write(lambda connection: connection.execute(sql, parameters).rowcount)

    async def select(
        self, row_type: Callable[..., T], sql: str, parameters: Parameters = ()
    ) -> list[T]:
        """Return the rows of a query, each as an object of its values."""
        return await self.read(
            partial(database.select, row_type=row_type, sql=sql, parameters=parameters)
        )

    async def open(self) -> None:
        """Open the file if it is not open, or raise JournalUnavailable."""
        await self.write(lambda _: None)

    def now(self) -> float:
        """Return the time by which rows expire; see ``SteadyClock``."""
        return self._clock.now() if self._clock is not None else time.time()

    def problem(self) -> str | None:
        """Return why the server is not ready: writes have waited for a commit for too long."""
        if self._tasks.problem() is not None:
            return self._tasks.problem()
        if self._waiting_since is None:
            return None
        seconds = time.monotonic() - self._waiting_since
        if seconds < STUCK_SECONDS:
            return None
        return f"the journal {self.path} has committed nothing for {seconds:.0f} s while writes are waiting"

    async def shrink_wal(self) -> None:
        """Cut the write-ahead log of an idle file to a fraction of its maximum."""
        await self._writer.call(partial(self._shrink, max_bytes=self.limits.max_wal_bytes // 4))

    async def close(self) -> None:
        """Write what is waiting, and close the file."""
        if self._committing is not None:
            await asyncio.wait([self._committing])
        self._reader.close()
        self._writer.close()
        self.lease.release()

    async def _commit_pending(self) -> None:
        """Commit what is there, again and again, until nothing more comes."""
        while self._pending:
            began = time.monotonic()
            group = self._pending
            self._pending = []
            try:
                outcomes = await self._writer.call(partial(self._commit, group))
            except Exception as error:  # nothing of the group is written
                outcomes = [Outcome(error=error)] * len(group)
            self._report(outcomes)
            for write, outcome in zip(group, outcomes, strict=True):
                _resolve(write.future, outcome)
            await asyncio.sleep(max(0.0, began + GROUP_SECONDS - time.monotonic()))
        self._committing = None

    def _report(self, outcomes: Iterable[Outcome]) -> None:
        """Log what failed, and note whether writes come through."""
        errors = {str(outcome.error): outcome.error for outcome in outcomes if outcome.error}
        for text, error in errors.items():
            if isinstance(error, NoRoom):
                continue
            if not isinstance(error, JournalUnavailable):
                kind = type(error).__name__
                logger.error("a write to the journal failed: %s: %s", kind, text, exc_info=error)
            elif text != self._reported or time.monotonic() - self._reported_at > REPORT_SECONDS:
                self._reported = text
                self._reported_at = time.monotonic()
                logger.warning("writes to the journal fail: %s", error.message)
        if not errors:
            self._reported = ""
        if not any(LOCKED in text for text in errors):
            self._waiting_since = time.monotonic() if self._pending else None

    def _commit(self, group: Sequence[Write[Any]], connection: sqlite3.Connection) -> list[Outcome]:
        """Commit writes together; one that fails is rolled back alone."""
        try:
            outcomes = self._commit_together(group, connection)
        except TransactionLost:
            outcomes = [self._commit_alone(write, connection) for write in group]
        if any(isinstance(outcome.error, JournalUnavailable) for outcome in outcomes):
            self._writer.disconnect()  # another file may be there by the next write
        else:
            self._shrink(connection, max_bytes=self.limits.max_wal_bytes)
        return outcomes

    def _commit_together(
        self, group: Sequence[Write[Any]], connection: sqlite3.Connection
    ) -> list[Outcome]:
        """Commit a group in one transaction, or raise TransactionLost if some of it may be good."""
        with transaction(connection):
            return [self._attempt(write, connection) for write in group]

    def _commit_alone(self, write: Write[Any], connection: sqlite3.Connection) -> Outcome:
        try:
            with transaction(connection):
                return self._attempt(write, connection)
        except TransactionLost as lost:
            return Outcome(error=translated(lost.cause, self.path))
        except Exception as error:
            return Outcome(error=translated(error, self.path))

    def _attempt(self, write: Write[Any], connection: sqlite3.Connection) -> Outcome:
        """Do one write of a transaction, or roll back what it has done."""
        try:
            with savepoint(connection):
                return Outcome(write.action(connection))
        except TransactionLost:
            raise
        except Exception as error:
            return Outcome(error=translated(error, self.path))

    def _shrink(self, connection: sqlite3.Connection, max_bytes: int) -> None:
        """Move a write-ahead log of more bytes into the file and cut it, unless somebody reads."""
        now = time.monotonic()
        if now - self._shrunk_at < SHRINK_SECONDS or self._wal_bytes() <= max_bytes:
            return
        self._shrunk_at = now
        connection.execute("PRAGMA busy_timeout=50")
        try:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except sqlite3.Error as error:  # what is committed stays so
            logger.warning("the write-ahead log of %s could not be truncated: %s", self.path, error)
        finally:
            connection.execute(f"PRAGMA busy_timeout={database.LOCK_SECONDS * 1000:.0f}")

    def _wal_bytes(self) -> int:
        try:
            return os.stat(f"{self.path}-wal").st_size
        except OSError:
            return 0

    def _connect_writer(self) -> sqlite3.Connection:
        connection = self._connect()
        self.lease.acquire()
        return connection

    def _connect(self) -> sqlite3.Connection:
        """Open the file, which is made if need be; one process and thread after the other."""
        self.path.parent.mkdir(0o700, parents=True, exist_ok=True)
        with locked(self.path.parent, lambda: None):
            # A file that is there is not opened here: to close it again would end SQLite's locks on it.
            with contextlib.suppress(FileExistsError):
                os.close(os.open(self.path, os.O_CREAT | os.O_EXCL, 0o600))
            connection = sqlite3.connect(
                self.path, database.LOCK_SECONDS, isolation_level=None, check_same_thread=False
            )
            try:
                self._prepare(connection)
            except Exception:
                connection.close()
                raise
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        # The housekeeping and ``_shrink`` do the checkpoints.
        connection.execute("PRAGMA wal_autocheckpoint=0")
        connection.execute(f"PRAGMA journal_size_limit={self.limits.max_wal_bytes}")
        for pragma in (*PRAGMAS, f"max_page_count={self.limits.max_pages}"):
            connection.execute(f"PRAGMA {pragma}")
        migrate(connection)
        if self._clock is None:
            insert = "INSERT OR IGNORE INTO clock (id, seconds) VALUES (1, ?)"
            connection.execute(insert, (time.time(),))
            (seconds,) = connection.execute("SELECT seconds FROM clock").fetchone()
            self._clock = SteadyClock(seconds)


def _resolve(future: "asyncio.Future[Any]", outcome: Outcome) -> None:
    """Give a future the outcome of its write."""
    if future.done():  # cancelled
        return
    if outcome.error is None:
        future.set_result(outcome.result)
    else:
        future.set_exception(outcome.error)
        future.exception()  # nobody needs to wait for it: ``_report`` has logged the error
