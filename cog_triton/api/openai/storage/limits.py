"""What one API key may store, so that no key's data pushes out another's.

The file counts the bytes and rows of each key in the table ``usage``. Triggers keep it, so that no
statement can forget to. A key's rows are those whose column ``owner`` has its name.
"""

import sqlite3
from dataclasses import dataclass

from cog_triton.api.openai.storage.database import select

PAGE_BYTES = 4096
KEPT_PART = 0.9  # the part of the file's pages above which the oldest rows are deleted
MAX_WAL_BYTES = 64 << 20  # the size at which the write-ahead log is moved into the file and cut
WAL_PART = 1 / 8  # the log's part of the maximum size, for small files
USAGE_TABLE = """
    CREATE TABLE usage (owner TEXT PRIMARY KEY, bytes INTEGER, row_count INTEGER) WITHOUT ROWID
"""
USED_PAGES = "SELECT page_count - freelist_count FROM pragma_page_count, pragma_freelist_count"


class NoRoom(Exception):
    """A write would give a key more than it may store; the caller tells the client."""


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
class StorageLimits:
    """The size of the file, and the part of each key.

    Attributes:
        max_bytes: of the file and its write-ahead log together.
        days: for which a response is kept.
        share: what each of several keys may store; None if there is at most one key.
    """

    max_bytes: int
    days: float
    share: Share | None = None

    @property
    def max_wal_bytes(self) -> int:
        return min(MAX_WAL_BYTES, int(self.max_bytes * WAL_PART))

    @property
    def max_pages(self) -> int:
        return (self.max_bytes - self.max_wal_bytes) // PAGE_BYTES

    @property
    def kept_pages(self) -> float:
        """The number of pages above which the oldest rows are deleted."""
        return KEPT_PART * self.max_pages

    @property
    def kept_bytes(self) -> int:
        return int(self.kept_pages * PAGE_BYTES)

    @property
    def key_bytes(self) -> int:
        """The number of bytes that one key may store."""
        if self.share is None:
            return self.kept_bytes
        return min(self.kept_bytes, self.share.bytes)

    def even_part(self, owners: int) -> float:
        """Return the bytes of each key if all of them share the file evenly."""
        return self.kept_bytes / max(1, owners)


@dataclass(frozen=True)
class CountedTable:
    """A table whose rows count for their owners.

    Attributes:
        size: SQL expression of a row's bytes with its overhead; ``{row}`` stands for the row.
        columns: the columns on which the size depends.
    """

    name: str
    size: str
    columns: tuple[str, ...]

    def triggers(self) -> list[str]:
        """Return the statements that create the triggers of the table ``usage``."""
        new = self.size.format(row="NEW")
        old = self.size.format(row="OLD")
        return [
            f"""
            CREATE TRIGGER usage_insert_{self.name} AFTER INSERT ON {self.name} BEGIN
            INSERT OR IGNORE INTO usage (owner, bytes, row_count) VALUES (NEW.owner, 0, 0);
            UPDATE usage SET bytes = bytes + {new}, row_count = row_count + 1
            WHERE owner = NEW.owner; END
            """,
            f"""
            CREATE TRIGGER usage_update_{self.name} AFTER UPDATE OF {", ".join(self.columns)}
            ON {self.name} BEGIN
            UPDATE usage SET bytes = bytes - {old} + {new} WHERE owner = NEW.owner; END
            """,
            f"""
            CREATE TRIGGER usage_delete_{self.name} AFTER DELETE ON {self.name} BEGIN
            UPDATE usage SET bytes = bytes - {old}, row_count = row_count - 1
            WHERE owner = OLD.owner; END
            """,
        ]

    def count(self) -> str:
        """Return the statement that adds the rows that are there to the table ``usage``."""
        size = self.size.format(row=self.name)
        # "WHERE true": without it, SQLite takes ON CONFLICT for the condition of a join.
        return f"""
            INSERT INTO usage (owner, bytes, row_count)
            SELECT owner, sum({size}), count(*) FROM {self.name} WHERE true GROUP BY owner
            ON CONFLICT (owner) DO UPDATE SET
            bytes = bytes + excluded.bytes, row_count = row_count + excluded.row_count
            """


def usage_of(connection: sqlite3.Connection, owner: str) -> Usage:
    """Return what a key has in the file."""
    sql = "SELECT owner, bytes, row_count FROM usage WHERE owner = ?"
    found = select(connection, Usage, sql, (owner,))
    return found[0] if found else Usage(owner, 0, 0)


def all_usages(connection: sqlite3.Connection) -> list[Usage]:
    """Return what each key has, the largest first."""
    sql = "SELECT owner, bytes, row_count FROM usage WHERE row_count > 0 ORDER BY bytes DESC"
    return select(connection, Usage, sql)


def used_pages(connection: sqlite3.Connection) -> int:
    row: tuple[int] = connection.execute(USED_PAGES).fetchone()
    return row[0]


def has_room(
    connection: sqlite3.Connection,
    limits: StorageLimits,
    owner: str,
    *,
    more_bytes: int,
    more_rows: int = 1,
) -> bool:
    """Return whether a key may store so much more. Call it in the transaction of the write.

    - One key may store what the file keeps.
    - Each of several keys may store its share.
    - The last tenth of the file, beyond what it keeps, is for keys with less than their even part of the
      file. A write there must not make its key exceed that part.
    """
    if more_bytes > limits.key_bytes:
        return False
    if limits.share is None:
        return True
    usage = usage_of(connection, owner)
    bytes_then = usage.bytes + more_bytes
    if bytes_then > limits.share.bytes or usage.row_count + more_rows > limits.share.rows:
        return False
    if used_pages(connection) * PAGE_BYTES + more_bytes <= limits.kept_bytes:
        return True
    owners = {other.owner for other in all_usages(connection)} | {owner}
    return bytes_then <= limits.even_part(len(owners))
