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
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import anyio
from orjson import dumps

from cog_triton.errors import JournalUnavailable, file_problem
from cog_triton.processes import locked

logger = logging.getLogger(__name__)
Schema = Mapping[str, Any]  # statements of one module, by their names
Action = Callable[[sqlite3.Connection], Any]
VERSION = 1  # of the tables of all modules
LOCK_SECONDS = 5.0  # that a transaction waits for one of another process
GROUP_SECONDS = 0.02  # from one transaction to the next, at least
LOOK_SECONDS = 0.5  # between two looks for what other processes have left
KEEP_SECONDS = 5.0  # between two rounds of the housekeeping
MOST_DELETED = 100  # rows at once, because writes wait meanwhile
KEPT_PART = 0.9  # of the most bytes; beyond, the oldest rows go
PAGE_BYTES = 4096
PRAGMAS = ("auto_vacuum=2", "journal_mode=WAL", "synchronous=1", "secure_delete=1")
_USED = "SELECT page_count - freelist_count FROM pragma_page_count, pragma_freelist_count"
LOG = "CREATE TABLE IF NOT EXISTS log (id INTEGER PRIMARY KEY, records BLOB)"
# By parts of SQLite's texts.
_REASONS = {
    "full": "the disk is full, or STORE_MAX_BYTES reached",
    "locked": f"another process has held its lock for {LOCK_SECONDS:g} s",
    "malformed": "the file is damaged; move it away, and another is made",
    "not a database": "the file is not a journal; move it away, and one is made",
}

_row_type = cache(partial(namedtuple, "Row", rename=True))


class Journal:
    """Rows of several modules, used on one event loop; JournalUnavailable says what is wrong with it.

    A schema's ``tables`` are created, each with a column ``owner``: the name of the API key, or empty. Its
    ``expiry`` deletes at most :most rows that are older than :before, in seconds since 1970.
    """

    def __init__(self, path: Path, schemas: Sequence[Schema], max_bytes: int, days: float) -> None:
        """Open nothing yet: the first use does, and the next one after an error."""
        self.path = path
        self.worker = secrets.randbits(62)  # this process, to others; see ``alive``
        self._schemas, self._max_bytes, self._seconds = schemas, max_bytes, days * 86400
        self._pending: list[tuple[Any, Any, asyncio.Future[Any]]] = []
        self._records: list[Any] = []  # for the log
        self._draining: asyncio.Task[None] | None = None
        self._threads = {name: ThreadPoolExecutor(1, f"journal-{name}") for name in "rw"}
        self._connections: dict[str, sqlite3.Connection] = {}  # one for reads, one for writes
        self._locks: int | None = None

    def write(self, do: str | Action, *values: Any, **named: Any) -> Any:
        """Return a future of the commit: the rows changed, or the result of a function that it calls."""
        future = asyncio.get_running_loop().create_future()
        self._pending.append((do, named or values, future))
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain())
        return future

    def log(self, record: Any, do: str, *values: Any) -> Any:
        """``write`` with a JSON value; a transaction's are one row of the table ``log``, a list."""
        self._records.append(record)
        return self.write(do, *values)

    async def read(self, sql: str, *values: Any) -> Any:
        """Return all rows, as named tuples."""
        return await self._in_thread("r", lambda own: own.execute(sql, values).fetchall())

    async def keep(self) -> None:
        """Do the housekeeping until cancelled: what is old or too much goes, the disk gets the rest."""
        while True:
            with contextlib.suppress(JournalUnavailable):
                await self.expire()
                await self.read("PRAGMA wal_checkpoint(PASSIVE)")
            await asyncio.sleep(KEEP_SECONDS)

    async def expire(self) -> None:
        while await self.write(partial(self._delete, time.time() - self._seconds)):
            pass
        while PAGE_BYTES * (await self.read(_USED))[0][0] > KEPT_PART * self._max_bytes:
            if not await self.write(partial(self._delete, time.time())):
                break  # all that is there is in use
        await self.write(lambda own: own.execute("PRAGMA incremental_vacuum(1000)").fetchall())

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
            group, records, began = self._pending, self._records, time.monotonic()
            self._pending, self._records, problem = [], [], None
            try:
                results = await self._in_thread("w", partial(self._commit, group, records))
            except JournalUnavailable as error:
                problem = error
            for future in (future for _, _, future in group if not future.done()):
                if problem is None:
                    future.set_result(results[future])
                else:
                    future.set_exception(problem)
                    future.exception()  # nobody needs to wait for it
            await asyncio.sleep(max(0.0, began + GROUP_SECONDS - time.monotonic()))
        self._draining = None

    async def _in_thread(self, name: str, do: Action) -> Any:
        """Call a function with the connection for reads or for writes, which is made if need be."""

        def run() -> Any:
            try:
                if name not in self._connections:
                    self.path.parent.mkdir(0o700, parents=True, exist_ok=True)
                    with locked(self.path.parent, lambda: None):  # one at a time makes it
                        self._connections[name] = self._connected(name)
                return do(self._connections[name])
            except (sqlite3.Error, OSError) as error:
                with contextlib.suppress(sqlite3.Error, KeyError):
                    self._connections.pop(name).close()  # which rolls back
                text = file_problem(error) if isinstance(error, OSError) else str(error)
                text = next((reason for part, reason in _REASONS.items() if part in text), text)
                raise JournalUnavailable(f"the journal {self.path}: {text}") from None

        return await asyncio.get_running_loop().run_in_executor(self._threads[name], run)

    def _commit(
        self, group: Sequence[Any], records: Sequence[Any], connection: sqlite3.Connection
    ) -> dict[Any, Any]:
        results = {}
        connection.execute("BEGIN IMMEDIATE")
        if records:
            connection.execute("INSERT INTO log (records) VALUES (?)", (dumps(records),))
        for do, values, future in group:
            # A function must not raise: others' writes are in the transaction, too.
            sql = isinstance(do, str)
            results[future] = connection.execute(do, values).rowcount if sql else do(connection)
        connection.execute("COMMIT")
        return results

    def _connected(self, name: str) -> sqlite3.Connection:
        with contextlib.suppress(FileExistsError):  # to close it would end SQLite's own locks on it
            os.close(os.open(self.path, os.O_CREAT | os.O_EXCL, 0o600))  # its others are alike
        if name == "w" and self._locks is None:
            self._locks = os.open(f"{self.path}-workers", os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.lockf(self._locks, fcntl.LOCK_EX, 1, self.worker)  # until this process ends
        connection = sqlite3.connect(
            self.path, LOCK_SECONDS, isolation_level=None, check_same_thread=False
        )
        connection.execute("PRAGMA wal_autocheckpoint=0")  # which ``keep`` does
        connection.row_factory = lambda c, row: _row_type(tuple(d[0] for d in c.description))(*row)
        for pragma in (*PRAGMAS, f"max_page_count={self._max_bytes // PAGE_BYTES}"):
            connection.execute(f"PRAGMA {pragma}")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version > VERSION:
            raise sqlite3.Error(f"a newer version of cog-triton has made it ({version})")
        for table in (LOG, *(table for schema in self._schemas for table in schema["tables"])):
            connection.execute(table)
        if version < VERSION:
            connection.execute(f"PRAGMA user_version={VERSION}")
        return connection

    def _delete(self, before: float, connection: sqlite3.Connection) -> int:
        values = {"before": before, "most": MOST_DELETED}
        expiry = (sql for schema in self._schemas for sql in schema["expiry"])
        return sum(connection.execute(sql, values).rowcount for sql in expiry)


class Jobs(ABC):
    """The rows of one table that this process runs, each in a task.

    The schema's statement ``active`` returns the ids and runners of a model's rows that have not ended,
    oldest first, and ``take`` gives one another runner.
    """

    def __init__(self, journal: Journal | None, sql: Schema, model: str, most: int) -> None:
        self.journal: Any = journal
        self.tasks, self.wake = dict[str, asyncio.Task[None]](), asyncio.Event()
        self.closed = journal is None  # nothing more is begun
        self._sql, self._model, self._most = sql, model, most

    @abstractmethod
    async def run(self, id: str) -> None: ...

    @abstractmethod
    def look(self, rows: Sequence[Any]) -> None:
        """Look at the active rows, before more are run."""

    async def work(self) -> None:
        """Run what no living process runs, until closed."""
        while not self.closed:
            with contextlib.suppress(JournalUnavailable):
                await self._take_up()
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
        own, rows = self.journal.worker, await self.journal.read(self._sql["active"], self._model)
        self.look(rows)
        if rows:
            await self.journal.write("DELETE FROM log WHERE 0")  # opens the file, for ``alive``
        for row in rows:
            if row.id in self.tasks or (row.runner != own and self.journal.alive(row.runner)):
                continue
            if len(self.tasks) >= self._most:
                break
            taken = await self.journal.write(self._sql["take"], own, row.id, row.runner)
            if taken and not self.closed:
                task = self.tasks[row.id] = asyncio.create_task(self.run(row.id))
                task.add_done_callback(partial(self._ended, row.id))

    def _ended(self, id: str, task: asyncio.Task[None]) -> None:
        del self.tasks[id]
        if task.cancelled() or (error := task.exception()) is None:
            self.wake.set()
        else:
            logger.warning("%s is left for later", id, exc_info=not self.closed and error)
