"""Uploads, and the files that batches write.

A file's lines are rows of the table ``lines`` under the file's source and part; see ``schema.py``.
"""

import sqlite3
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from cog_triton.api.openai.storage.database import columns
from cog_triton.api.openai.storage.housekeeping import MAX_DELETED, Expiry
from cog_triton.api.openai.storage.journal import Journal
from cog_triton.api.openai.storage.limits import NoRoom, has_room
from cog_triton.api.openai.storage.schema import ROW_BYTES

CHUNK_BYTES = 1 << 16  # how much of an upload is in one row, with the rest of the last line
READ_ROWS = 32  # rows that are read at once
UPLOAD_SECONDS = 3600  # after which an upload that did not end is deleted
INPUT = "input"  # the part of an upload
_DELETE_LINES = """
    DELETE FROM lines WHERE rowid IN (SELECT lines.rowid FROM files JOIN lines USING (source, part)
    WHERE state = 'gone' LIMIT ?)
"""
_DELETE_FILES = """
    DELETE FROM files WHERE state = 'gone' AND NOT EXISTS (SELECT 1 FROM lines
    WHERE lines.source = files.source AND lines.part = files.part)
"""


@dataclass(frozen=True)
class FileRow:
    """A file that is there."""

    id: str
    created: int
    expires: int
    bytes: int
    name: str
    purpose: str
    source: str
    part: str


@dataclass(frozen=True)
class NewFile:
    """A file whose lines are there already, or are going to be.

    Attributes:
        state: ``coming``, or ``there``.
        source: see ``schema.py``, as for ``part``.
    """

    id: str
    owner: str
    state: str
    source: str
    part: str
    created: int
    expires: int
    bytes: int
    name: str
    purpose: str


@dataclass(frozen=True)
class UploadChunk:
    """Some whole lines of an upload, which are one row."""

    first_line: int
    data: bytes

    @property
    def next_line(self) -> int:
        return self.first_line + self.data.count(b"\n")


@dataclass(frozen=True)
class LineRow:
    """A row of a file: an upload's has some lines and the number of the first."""

    line: int
    data: bytes


def insert_file(connection: sqlite3.Connection, file: NewFile) -> None:
    sql = f"INSERT INTO files ({columns(NewFile)}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
    values = (
        *(file.id, file.owner, file.state, file.source, file.part),
        *(file.created, file.expires, file.bytes, file.name, file.purpose),
    )
    connection.execute(sql, values)


class FileStore:
    """The tables ``files`` and ``lines``."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    async def find(self, owner: str, id: str) -> FileRow | None:
        """Return a key's file."""
        sql = f"""
            SELECT {columns(FileRow)} FROM files
            WHERE owner = ? AND id = ? AND state = 'there' AND expires > ?
        """
        values = (owner, id, self._journal.now())
        rows = await self._journal.select(FileRow, sql, values)
        return rows[0] if rows else None

    async def page(
        self,
        owner: str,
        *,
        limit: int,
        after: str | None = None,
        purpose: str | None = None,
        oldest_first: bool = False,
    ) -> list[FileRow]:
        """Return a key's files, from the one behind ``after`` on."""
        order, compare = ("ASC", ">") if oldest_first else ("DESC", "<")
        sql = f"""
            SELECT {columns(FileRow)} FROM files
            WHERE owner = :owner AND state = 'there' AND expires > :now
            AND (:purpose IS NULL OR purpose = :purpose)
            AND (:after IS NULL OR number {compare}
                (SELECT number FROM files WHERE id = :after AND owner = :owner))
            ORDER BY number {order} LIMIT :limit
        """
        values = {
            "owner": owner,
            "now": self._journal.now(),
            "purpose": purpose,
            "after": after,
            "limit": limit,
        }
        return await self._journal.select(FileRow, sql, values)

    async def begin_upload(self, file: NewFile) -> None:
        """Count the whole of an upload for its key, or raise NoRoom."""

        def begin(connection: sqlite3.Connection) -> None:
            size = file.bytes + 2 * ROW_BYTES
            rows = file.bytes // CHUNK_BYTES + 2
            limits = self._journal.limits
            if not has_room(connection, limits, file.owner, more_bytes=size, more_rows=rows):
                raise NoRoom
            insert_file(connection, file)

        await self._journal.write(begin)

    async def append_chunks(self, file: NewFile, chunks: Sequence[UploadChunk]) -> None:
        """Write the next lines of an upload."""
        sql = "INSERT INTO lines (owner, source, line, part, data) VALUES (?, ?, ?, ?, ?)"
        rows = [
            (file.owner, file.source, chunk.first_line, file.part, chunk.data) for chunk in chunks
        ]
        await self._journal.write(lambda connection: connection.executemany(sql, rows).rowcount)

    async def finish_upload(self, id: str, expires: int) -> bool:
        """Note that an upload is complete; return False if it took too long and was deleted."""
        sql = "UPDATE files SET state = 'there', expires = ? WHERE id = ? AND state = 'coming'"
        return await self._journal.execute(sql, (expires, id)) == 1

    def abandon_upload(self, id: str) -> None:
        """Let the housekeeping delete an upload; there is nothing to wait for."""
        sql = "UPDATE files SET state = 'gone' WHERE id = ?"
        self._journal.execute(sql, (id,))

    async def rows(self, source: str, part: str) -> AsyncIterator[list[LineRow]]:
        """Yield the rows of a file, some at a time."""
        sql = """
            SELECT line, data FROM lines WHERE source = ? AND line > ? AND part = ?
            ORDER BY line LIMIT ?
        """
        last = 0
        while True:
            values = (source, last, part, READ_ROWS)
            rows = await self._journal.select(LineRow, sql, values)
            if not rows:
                return
            yield rows
            last = rows[-1].line

    async def delete(self, id: str) -> bool:
        """Delete a file; return False if a batch is to read it. Its space is free when this returns."""
        sql = """
            UPDATE files SET state = 'gone' WHERE id = :id
            AND NOT EXISTS (SELECT 1 FROM batches WHERE input = :id AND active)
        """
        if await self._journal.execute(sql, {"id": id}) == 0:
            return False
        while await self._journal.write(_delete_lines):
            pass
        await self._journal.write(_delete_files)
        return True

    def delete_oldest(self, connection: sqlite3.Connection, expiry: Expiry) -> int:
        """Delete one file after the other, so that none is there in part.

        Files that a batch is to read stay; those that are still coming do until their time is over.
        """
        oldest = """
            UPDATE files SET state = 'gone' WHERE id IN (SELECT id FROM files
            WHERE ((state = 'there' AND created < :before) OR (state != 'gone' AND expires <= :now))
            AND (:owner IS NULL OR owner = :owner)
            AND NOT EXISTS (SELECT 1 FROM batches WHERE input = files.id AND active)
            ORDER BY created LIMIT 1)
            AND NOT EXISTS (SELECT 1 FROM files WHERE state = 'gone')
        """
        values = {"before": expiry.before, "now": expiry.now, "owner": expiry.owner}
        marked = connection.execute(oldest, values).rowcount
        return marked + _delete_lines(connection) + _delete_files(connection)


def _delete_lines(connection: sqlite3.Connection) -> int:
    """Delete some lines of files that are gone; return how many."""
    return connection.execute(_DELETE_LINES, (MAX_DELETED,)).rowcount


def _delete_files(connection: sqlite3.Connection) -> int:
    """Delete the files that are gone with all of their lines; return how many."""
    return connection.execute(_DELETE_FILES).rowcount
