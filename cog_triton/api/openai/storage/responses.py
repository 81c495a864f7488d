"""Responses that are kept, and the log of those that run in the background."""

import asyncio
import math
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from cog_triton.api.openai.storage.database import columns
from cog_triton.api.openai.storage.housekeeping import MAX_DELETED, Expiry
from cog_triton.api.openai.storage.journal import Journal
from cog_triton.api.openai.storage.limits import NoRoom, has_room, usage_of
from cog_triton.api.openai.storage.records import Record, decode, encode
from cog_triton.api.openai.storage.schema import COUNTED_RESPONSES, RESPONSE_ROW_BYTES, ROW_BYTES

MADE_ROOM_ROWS = 10  # old rows that are deleted at once to make room
LARGE_BYTES = 1 << 16  # records of this size are decoded in a thread


class TooManyInBackground(Exception):
    """Too many background responses are waiting or running.

    Attributes:
        limit: how many there may be.
        of_key: whether the limit is that of one API key.
    """

    def __init__(self, limit: int, *, of_key: bool) -> None:
        super().__init__(limit)
        self.limit = limit
        self.of_key = of_key


@dataclass(frozen=True)
class NewResponse:
    """A response to keep.

    Attributes:
        input: JSON of its items, with those of the previous responses.
        response: JSON of the response as a client reads it.
    """

    id: str
    owner: str
    model: str
    created: float
    input: bytes
    response: bytes

    @property
    def bytes(self) -> int:
        return RESPONSE_ROW_BYTES + len(self.input) + len(self.response)


@dataclass(frozen=True)
class StoredResponse:
    """A response that is kept.

    Attributes:
        runner: of one that runs in the background, the process; 0 for none, None once it has ended.
        started: None until a process has begun to answer.
        request_bytes: None unless it is a background response.
    """

    id: str
    owner: str
    created: float
    runner: int | None
    started: float | None
    input: bytes
    response: bytes
    request_bytes: int | None

    @property
    def is_background(self) -> bool:
        return self.request_bytes is not None

    @property
    def has_ended(self) -> bool:
        return self.runner is None


@dataclass(frozen=True)
class BackgroundResponse:
    """What a background response is made of.

    Attributes:
        body: JSON of the request's body with all of its input.
        request: JSON of the ``Request``, with its seed.
        response: JSON of the response: as it was stored at first, or as it has ended.
    """

    id: str
    owner: str
    created: float
    body: bytes
    request: bytes
    response: bytes


@dataclass(frozen=True)
class ActiveResponse:
    """A background response that has not ended."""

    id: str
    owner: str
    runner: int


@dataclass(frozen=True)
class Progress:
    """What has been written of a background response behind the records that a reader has."""

    records: list[Record]
    has_ended: bool


@dataclass(frozen=True)
class Conclusion:
    """The end of a background response: its JSON as a client reads it, and all of its records."""

    response: bytes
    records: Sequence[Record]


@dataclass(frozen=True)
class StoredProgress:
    """What the file has of a background response.

    Attributes:
        parts: its encoded records: once it has ended all of them, before that those of the log.
    """

    has_ended: bool
    parts: Sequence[bytes]


class ResponseStore:
    """The table ``responses``, and the log of the responses that run."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    async def find(self, id: str) -> StoredResponse | None:
        sql = """
            SELECT id, owner, created, runner, started, input, response, length(request)
            FROM responses WHERE id = ?
        """
        rows = await self._journal.select(StoredResponse, sql, (id,))
        return rows[0] if rows else None

    async def find_background(self, id: str) -> BackgroundResponse | None:
        """Return what a background response is made of; None if it is not there or is another one."""
        names = columns(BackgroundResponse)
        sql = f"SELECT {names} FROM responses WHERE id = ? AND request IS NOT NULL"
        rows = await self._journal.select(BackgroundResponse, sql, (id,))
        return rows[0] if rows else None

    async def progress(self, id: str, position: int) -> Progress | None:
        """Return the records from a position on; None if the response is not there."""
        stored = await self._journal.read(partial(_read_progress, id=id, position=position))
        if stored is None:
            return None
        if sum(len(part) for part in stored.parts) >= LARGE_BYTES:
            records = await asyncio.to_thread(_decode_all, stored.parts)
        else:
            records = _decode_all(stored.parts)
        if stored.has_ended:  # its only part has all records
            records = records[position:]
        return Progress(records, stored.has_ended)

    async def insert(self, row: NewResponse) -> None:
        """Keep a response that has ended; the oldest of its key make room for it, or NoRoom is raised."""
        await self._journal.write(partial(self._insert, row=row))

    def _insert(self, connection: sqlite3.Connection, row: NewResponse) -> None:
        self._make_room(connection, row.owner, row.bytes)
        sql = """
            INSERT INTO responses (id, owner, model, created, input, response)
            VALUES (?, ?, ?, ?, ?, ?)
        """
        values = (row.id, row.owner, row.model, row.created, row.input, row.response)
        connection.execute(sql, values)

    async def insert_background(
        self, row: NewResponse, *, body: bytes, request: bytes, limit: int
    ) -> None:
        """Keep a response that is to run, or raise NoRoom or TooManyInBackground.

        Args:
            body: see ``BackgroundResponse``, as ``request``.
            limit: how many may wait or run; one of several keys may have half of them.
        """

        def insert(connection: sqlite3.Connection) -> None:
            self._check_background(connection, row.owner, limit)
            self._make_room(connection, row.owner, row.bytes + len(body) + len(request))
            sql = """
                INSERT INTO responses
                (id, owner, model, created, runner, body, request, input, response)
                VALUES (?, ?, ?, ?, 0, ?, ?, ?, ?)
            """
            values = (row.id, row.owner, row.model, row.created, body, request, row.input)
            connection.execute(sql, (*values, row.response))

        await self._journal.write(insert)

    def _check_background(self, connection: sqlite3.Connection, owner: str, limit: int) -> None:
        sql = """
            SELECT count(*), count(*) FILTER (WHERE owner = ?) FROM responses
            WHERE runner IS NOT NULL
        """
        of_all, of_key = connection.execute(sql, (owner,)).fetchone()
        if of_all >= limit:
            raise TooManyInBackground(limit, of_key=False)
        if self._journal.limits.share is None:
            return
        limit_of_key = math.ceil(limit / 2)
        if of_key >= limit_of_key:
            raise TooManyInBackground(limit_of_key, of_key=True)

    def _make_room(self, connection: sqlite3.Connection, owner: str, size: int) -> None:
        """Delete the oldest responses of a key until it may store so much more, or raise NoRoom.

        The rollback that follows NoRoom brings back what was deleted.
        """
        limits = self._journal.limits
        if size > limits.key_bytes:
            raise NoRoom
        oldest = """
            DELETE FROM responses WHERE id IN (SELECT id FROM responses
            WHERE owner = ? AND runner IS NULL ORDER BY created LIMIT ?)
        """
        while not has_room(connection, limits, owner, more_bytes=size):
            if connection.execute(oldest, (owner, MADE_ROOM_ROWS)).rowcount == 0:
                raise NoRoom

    async def could_insert(self, owner: str, size: int) -> bool:
        """Return whether a key could store a response of so many bytes, whatever makes room for it."""
        return await self._journal.read(partial(self._could_insert, owner=owner, size=size))

    def _could_insert(self, connection: sqlite3.Connection, owner: str, size: int) -> bool:
        limits = self._journal.limits
        if size > limits.key_bytes:
            return False
        if has_room(connection, limits, owner, more_bytes=size):
            return True
        assert limits.share is not None  # otherwise there is room
        removable = f"""
            SELECT count(*), ifnull(sum({COUNTED_RESPONSES.size.format(row="responses")}), 0)
            FROM responses WHERE owner = ? AND runner IS NULL
        """
        removable_rows, removable_bytes = connection.execute(removable, (owner,)).fetchone()
        usage = usage_of(connection, owner)
        fewest_bytes: int = usage.bytes - removable_bytes + size
        fewest_rows: int = usage.row_count - removable_rows + 1
        return fewest_bytes <= limits.share.bytes and fewest_rows <= limits.share.rows

    async def delete(self, id: str) -> None:
        """Delete a response; the process that runs it notices soon."""
        sql = "DELETE FROM responses WHERE id = ?"
        await self._journal.execute(sql, (id,))

    async def active(self, model: str) -> list[ActiveResponse]:
        """Return a model's background responses that have not ended, the oldest first."""
        sql = f"""
            SELECT {columns(ActiveResponse)} FROM responses
            WHERE runner IS NOT NULL AND model = ? ORDER BY created
        """
        return await self._journal.select(ActiveResponse, sql, (model,))

    async def take(self, id: str, runner: int) -> bool:
        """Make this process the runner in place of another; return False if a third one was faster."""
        sql = "UPDATE responses SET runner = ? WHERE id = ? AND runner = ?"
        values = (self._journal.lease.worker, id, runner)
        return await self._journal.execute(sql, values) == 1

    async def start(self, id: str) -> None:
        """Note that a process has begun to answer."""
        sql = "UPDATE responses SET started = coalesce(started, ?) WHERE id = ?"
        values = (self._journal.now(), id)
        await self._journal.execute(sql, values)

    def append(
        self, id: str, owner: str, position: int, records: Sequence[Record]
    ) -> "asyncio.Future[bool]":
        """Write the next records of a response that this process runs; the future may raise NoRoom.

        It is False if this process is not the runner any more: another one has ended the response, or
        deleted it.
        """
        data = encode(records)
        limits = self._journal.limits
        worker = self._journal.lease.worker

        def append(connection: sqlite3.Connection) -> bool:
            if not has_room(connection, limits, owner, more_bytes=ROW_BYTES + len(data)):
                raise NoRoom
            sql = """
                INSERT INTO log (response, position, owner, records)
                SELECT id, ?, owner, ? FROM responses WHERE id = ? AND runner = ?
            """
            inserted: int = connection.execute(sql, (position, data, id, worker)).rowcount
            return inserted == 1

        return self._journal.write(append)

    async def end(
        self,
        id: str,
        position: Callable[[], int],
        conclude: Callable[[Sequence[Record]], Conclusion],
    ) -> bool:
        """End a response behind all that any process has written of it.

        Return False if it has ended already, or is not there.

        Args:
            position: returns how many records the caller has.
            conclude: takes the further ones and returns the end. Both are called in the writer's thread,
                and again if the transaction is repeated.
        """

        def write_end(connection: sqlite3.Connection) -> bool:
            stored = _read_progress(connection, id, position())
            if stored is None:
                return False
            if stored.has_ended:
                return False
            end = conclude(_decode_all(stored.parts))
            sql = """
                UPDATE responses SET runner = NULL, response = ?, records = ?
                WHERE id = ? AND runner IS NOT NULL
            """
            updated: int = connection.execute(sql, (end.response, encode(end.records), id)).rowcount
            return updated == 1

        return await self._journal.write(write_end)

    def delete_oldest(self, connection: sqlite3.Connection, expiry: Expiry) -> int:
        sql = """
            DELETE FROM responses WHERE id IN (SELECT id FROM responses
            WHERE created < :before AND runner IS NULL AND (:owner IS NULL OR owner = :owner)
            ORDER BY created LIMIT :limit)
        """
        values = {"before": expiry.before, "owner": expiry.owner, "limit": MAX_DELETED}
        return connection.execute(sql, values).rowcount


def _read_progress(connection: sqlite3.Connection, id: str, position: int) -> StoredProgress | None:
    """Return what the file has of a response; of one that runs, the records from a position on."""
    sql = "SELECT runner IS NULL FROM responses WHERE id = ?"
    row = connection.execute(sql, (id,)).fetchone()
    if row is None:
        return None
    has_ended = bool(row[0])
    if has_ended:
        sql = "SELECT records FROM responses WHERE id = ? AND records IS NOT NULL"
        found = connection.execute(sql, (id,))
    else:
        sql = "SELECT records FROM log WHERE response = ? AND position >= ? ORDER BY position"
        found = connection.execute(sql, (id, position))
    return StoredProgress(has_ended, [data for (data,) in found])


def _decode_all(parts: Sequence[bytes]) -> list[Record]:
    return [record for part in parts for record in decode(part)]
