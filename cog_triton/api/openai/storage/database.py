"""One connection to an SQLite file in a thread of its own, transactions, and typed rows."""

import asyncio
import contextlib
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import TypeVar

from cog_triton.errors import InvalidParameter, JournalUnavailable, file_problem

LOCK_SECONDS = 5.0  # how long a transaction waits for that of another process
LOCKED = "another process has held its lock for"
Parameters = Sequence[object] | Mapping[str, object]
T = TypeVar("T")
Action = Callable[[sqlite3.Connection], T]
# Errors of one write, which say nothing about the file.
FAULTS_OF_A_WRITE = (
    sqlite3.DataError,
    sqlite3.IntegrityError,
    sqlite3.NotSupportedError,
    sqlite3.ProgrammingError,
)


class TransactionLost(Exception):
    """Nothing of a transaction is written: its commit failed, or the disk is full."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Commit what is done within, or roll it back if that raises. No transaction is ever left open.

    Raise TransactionLost if the commit fails.
    """
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        _commit(connection)
    except BaseException:
        if connection.in_transaction:  # SQLite may have rolled it back already
            connection.execute("ROLLBACK")
        raise


def _commit(connection: sqlite3.Connection) -> None:
    try:
        connection.execute("COMMIT")
    except sqlite3.Error as error:
        raise TransactionLost(error) from error


@contextlib.contextmanager
def savepoint(connection: sqlite3.Connection) -> Iterator[None]:
    """Roll back what is done within if that raises, and keep what the transaction did before.

    Raise TransactionLost if SQLite has rolled back the whole transaction, as it does on a full disk.
    """
    connection.execute("SAVEPOINT write")
    try:
        yield
        connection.execute("RELEASE write")
    except Exception as error:
        if not connection.in_transaction:
            raise TransactionLost(error) from error
        connection.execute("ROLLBACK TO write")
        connection.execute("RELEASE write")
        raise


def columns(row_type: type[object]) -> str:
    """Return the columns of a dataclass of rows for a statement, in the order of its fields."""
    return ", ".join(field.name for field in fields(row_type))  # type: ignore[arg-type]


def select(
    connection: sqlite3.Connection,
    row_type: Callable[..., T],
    sql: str,
    parameters: Parameters = (),
) -> list[T]:
    """Return the rows of a query, each as an object of its values."""
    return [row_type(*row) for row in connection.execute(sql, parameters)]


def translated(error: Exception, path: Path) -> Exception:
    """Return JournalUnavailable for an error of the file, InvalidParameter for a value that SQLite cannot
    store, and any other error as it is.
    """
    if isinstance(error, OverflowError):
        return InvalidParameter("a number in the request has more than 64 bits")
    if isinstance(error, UnicodeEncodeError):
        return InvalidParameter("a string in the request contains a lone surrogate")
    if isinstance(error, FAULTS_OF_A_WRITE):
        return error
    if isinstance(error, OSError):
        return JournalUnavailable(f"the journal {path}: {file_problem(error)}")
    if isinstance(error, sqlite3.Error):
        return JournalUnavailable(f"the journal {path}: {_reason(str(error))}")
    return error


def _reason(text: str) -> str:
    """Return an error of SQLite in words that say what to do."""
    if "full" in text:
        return "the disk is full, or STORE_MAX_BYTES is reached"
    if "locked" in text:
        return f"{LOCKED} {LOCK_SECONDS:g} s"
    if "malformed" in text:
        return "the file is damaged; move it away, and a new one is created"
    if "not a database" in text:
        return "the file is not a journal; move it away, and one is created"
    return text


class ConnectionThread:
    """A thread that has a connection: it is opened at the first use, and again after an error."""

    def __init__(self, name: str, path: Path, connect: Callable[[], sqlite3.Connection]) -> None:
        """Open nothing yet; ``connect`` opens the file at ``path``."""
        self._path = path
        self._connect = connect
        self._executor = ThreadPoolExecutor(1, f"journal-{name}")
        self._connection: sqlite3.Connection | None = None

    async def call(self, action: Action[T]) -> T:
        """Call a function with the connection in the thread, or raise JournalUnavailable."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._call, action)

    def _call(self, action: Action[T]) -> T:
        try:
            if self._connection is None:
                self._connection = self._connect()
            return action(self._connection)
        except Exception as error:
            self.disconnect()
            raise translated(error, self._path) from None

    def disconnect(self) -> None:
        """Close the connection; to be called in the thread, or when it has ended."""
        connection = self._connection
        self._connection = None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.close()

    def close(self) -> None:
        """Wait for the calls that were made, and close the connection."""
        self._executor.shutdown()
        self.disconnect()
