"""Batches, and the answers to their lines."""

import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from cog_triton.api.openai.storage.database import columns
from cog_triton.api.openai.storage.files import NewFile, insert_file
from cog_triton.api.openai.storage.housekeeping import MAX_DELETED, Expiry
from cog_triton.api.openai.storage.journal import Journal
from cog_triton.api.openai.storage.limits import NoRoom, has_room
from cog_triton.api.openai.storage.schema import BATCH_ROW_BYTES, ROW_BYTES

Status = Literal[
    "validating",
    "in_progress",
    "finalizing",
    "completed",
    "failed",
    "expired",
    "cancelling",
    "cancelled",
]
Part = Literal["output", "error"]
PARTS: tuple[Part, ...] = ("output", "error")
ACTIVE_STATUSES = ("validating", "in_progress", "finalizing", "cancelling")
WINDOW_SECONDS = 86400  # the time in which a batch is to be completed
DEFAULT_OUTPUT_SECONDS = 30 * 86400  # how long the files that a batch writes are kept
# The column of ``batches`` that counts the answers of a part.
_COUNTS = {"output": "completed", "error": "failed"}


class BatchError(BaseModel):
    """What is wrong with a batch, or with a line of its input."""

    model_config = ConfigDict(frozen=True)

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchErrors(BaseModel):
    """The errors of a batch in the form of OpenAI's API."""

    model_config = ConfigDict(frozen=True)

    object: Literal["list"] = "list"
    data: list[BatchError]


class OutputExpiry(BaseModel):
    """How long the files that a batch writes are kept."""

    model_config = ConfigDict(frozen=True)

    anchor: Literal["created_at"]
    seconds: int


class BatchObject(BaseModel):
    """A batch as a client reads it, without its counts; stored as JSON."""

    model_config = ConfigDict(frozen=True)

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: Status = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    metadata: dict[str, str] | None = None
    output_expires_after: OutputExpiry | None = None

    def output_seconds(self) -> int:
        """Return how long the files that the batch writes are kept."""
        if self.output_expires_after is None:
            return DEFAULT_OUTPUT_SECONDS
        return self.output_expires_after.seconds


@dataclass(frozen=True)
class StoredBatch:
    """A batch with its counts; ``object`` is the JSON of a ``BatchObject``."""

    object: str
    total: int
    completed: int
    failed: int
    input_tokens: int
    output_tokens: int

    def parsed(self) -> BatchObject:
        return BatchObject.model_validate_json(self.object)


@dataclass(frozen=True)
class ActiveBatch:
    """A batch that has not ended, as the processes look for work."""

    id: str
    owner: str
    runner: int
    status: Status
    expires: int


@dataclass(frozen=True)
class RunningBatch:
    """A batch as the process that runs it needs it; ``total`` is the number of its lines, once known."""

    id: str
    owner: str
    input: str
    endpoint: str
    status: Status
    expires: int
    total: int


@dataclass(frozen=True)
class LineAnswer:
    """The answer to a line, a line of the output or error file itself."""

    line: int
    part: Part
    data: bytes
    input_tokens: int = 0
    output_tokens: int = 0


class BatchStore:
    """The table ``batches``, and the answers in ``lines``."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    async def create(self, batch: BatchObject, owner: str, model: str) -> None:
        """Keep a new batch, or raise NoRoom; ``model`` is the server's own name of the model."""
        text = batch.model_dump_json()
        size = BATCH_ROW_BYTES + len(text.encode())
        sql = """
            INSERT INTO batches (id, owner, model, input, endpoint, status, expires, object)
            VALUES (?, ?, ?, ?, ?, ?, ?, ?)
        """
        values = (
            *(batch.id, owner, model, batch.input_file_id),
            *(batch.endpoint, batch.status, batch.expires_at, text),
        )

        def create(connection: sqlite3.Connection) -> None:
            if not has_room(connection, self._journal.limits, owner, more_bytes=size):
                raise NoRoom
            connection.execute(sql, values)

        await self._journal.write(create)

    async def find(self, owner: str, id: str) -> StoredBatch | None:
        """Return a key's batch."""
        sql = f"SELECT {columns(StoredBatch)} FROM batches WHERE owner = ? AND id = ?"
        rows = await self._journal.select(StoredBatch, sql, (owner, id))
        return rows[0] if rows else None

    async def page(
        self, owner: str, *, limit: int, after: str | None = None, oldest_first: bool = False
    ) -> list[StoredBatch]:
        """Return a key's batches, from the one behind ``after`` on."""
        order, compare = ("ASC", ">") if oldest_first else ("DESC", "<")
        sql = f"""
            SELECT {columns(StoredBatch)} FROM batches WHERE owner = :owner
            AND (:after IS NULL OR number {compare}
                (SELECT number FROM batches WHERE id = :after AND owner = :owner))
            ORDER BY number {order} LIMIT :limit
        """
        values = {"owner": owner, "after": after, "limit": limit}
        return await self._journal.select(StoredBatch, sql, values)

    async def active(self, model: str) -> list[ActiveBatch]:
        """Return a model's batches that have not ended, the oldest first."""
        sql = f"""
            SELECT {columns(ActiveBatch)} FROM batches WHERE active AND model = ? ORDER BY number
        """
        return await self._journal.select(ActiveBatch, sql, (model,))

    async def take(self, id: str, runner: int) -> bool:
        """Make this process the runner in place of another; return False if a third one was faster."""
        sql = "UPDATE batches SET runner = ? WHERE id = ? AND runner = ? AND active"
        values = (self._journal.lease.worker, id, runner)
        return await self._journal.execute(sql, values) == 1

    async def running(self, id: str) -> RunningBatch:
        """Return a batch that is run: it is there until it has ended."""
        sql = f"SELECT {columns(RunningBatch)} FROM batches WHERE id = ?"
        rows = await self._journal.select(RunningBatch, sql, (id,))
        return rows[0]

    async def set_total(self, id: str, total: int) -> None:
        sql = "UPDATE batches SET total = ? WHERE id = ?"
        await self._journal.execute(sql, (total, id))

    async def change_status(
        self,
        id: str,
        status: Status,
        *,
        was: Sequence[Status],
        errors: Sequence[BatchError] = (),
    ) -> bool:
        """Give a batch another status; return False if it has one that this may not follow."""
        return await self._journal.write(
            partial(_change_status, id=id, status=status, was=was, errors=errors)
        )

    async def answered_lines(self, id: str) -> set[int]:
        """Return the numbers of the lines that have an answer."""

        def read(connection: sqlite3.Connection) -> set[int]:
            return {line for (line,) in connection.execute(sql, (id,))}

        sql = "SELECT line FROM lines WHERE source = ?"
        return await self._journal.read(read)

    async def add_answers(self, batch: RunningBatch, answers: Sequence[LineAnswer]) -> None:
        """Write answers and count them, or raise NoRoom; a line that has an answer keeps it."""

        def add(connection: sqlite3.Connection) -> None:
            for answer in answers:
                self._add_answer(connection, batch, answer)

        await self._journal.write(add)

    def _add_answer(
        self, connection: sqlite3.Connection, batch: RunningBatch, answer: LineAnswer
    ) -> None:
        size = ROW_BYTES + len(answer.data)
        if not has_room(connection, self._journal.limits, batch.owner, more_bytes=size):
            raise NoRoom
        insert = """
            INSERT OR IGNORE INTO lines (owner, source, line, part, data) VALUES (?, ?, ?, ?, ?)
        """
        values = (batch.owner, batch.id, answer.line, answer.part, answer.data)
        if connection.execute(insert, values).rowcount == 0:
            return  # the line has an answer
        count = _COUNTS[answer.part]
        update = f"""
            UPDATE batches SET {count} = {count} + 1, input_tokens = input_tokens + ?,
            output_tokens = output_tokens + ? WHERE id = ?
        """
        connection.execute(update, (answer.input_tokens, answer.output_tokens, batch.id))

    async def finish(
        self,
        batch: RunningBatch,
        status: Status,
        *,
        file_ids: dict[Part, str],
        errors: Sequence[BatchError] = (),
    ) -> bool:
        """Give a batch its last status, and files of the answers that it has; see ``change_status``.

        Args:
            file_ids: the ids of the files, of which those without a line are not made.
        """
        return await self._journal.write(
            partial(_finish, batch=batch, status=status, file_ids=file_ids, errors=errors)
        )

    def delete_oldest(self, connection: sqlite3.Connection, expiry: Expiry) -> int:
        sql = """
            DELETE FROM batches WHERE number IN (SELECT number FROM batches WHERE NOT active
            AND expires - :window < :before AND (:owner IS NULL OR owner = :owner)
            ORDER BY number LIMIT :limit)
        """
        values = {
            "window": WINDOW_SECONDS,
            "before": expiry.before,
            "owner": expiry.owner,
            "limit": MAX_DELETED,
        }
        return connection.execute(sql, values).rowcount


def _change_status(
    connection: sqlite3.Connection,
    id: str,
    status: Status,
    was: Sequence[Status],
    errors: Sequence[BatchError] = (),
    file_ids: dict[Part, str] | None = None,
) -> bool:
    row = connection.execute("SELECT object FROM batches WHERE id = ?", (id,)).fetchone()
    if row is None:
        return False
    batch = BatchObject.model_validate_json(row[0])
    if batch.status not in was:
        return False
    changes: dict[str, Any] = {"status": status, f"{status}_at": int(time.time())}
    if errors:
        changes["errors"] = BatchErrors(data=list(errors))
    for part, file_id in (file_ids or {}).items():
        changes[f"{part}_file_id"] = file_id
    text = batch.model_copy(update=changes).model_dump_json()
    sql = "UPDATE batches SET object = ?, status = ?, active = ? WHERE id = ?"
    connection.execute(sql, (text, status, status in ACTIVE_STATUSES, id))
    return True


def _finish(
    connection: sqlite3.Connection,
    batch: RunningBatch,
    status: Status,
    file_ids: dict[Part, str],
    errors: Sequence[BatchError],
) -> bool:
    sizes = _sizes(connection, batch.id)
    made = {part: file_ids[part] for part in PARTS if sizes[part]}
    if not _change_status(connection, batch.id, status, (batch.status,), errors, made):
        return False
    row = connection.execute("SELECT object FROM batches WHERE id = ?", (batch.id,)).fetchone()
    seconds = BatchObject.model_validate_json(row[0]).output_seconds()
    now = int(time.time())
    for part, file_id in made.items():
        file = NewFile(
            id=file_id,
            owner=batch.owner,
            state="there",
            source=batch.id,
            part=part,
            created=now,
            expires=now + seconds,
            bytes=sizes[part],
            name=f"{batch.id}_{part}.jsonl",
            purpose="batch_output",
        )
        insert_file(connection, file)
    return True


def _sizes(connection: sqlite3.Connection, id: str) -> dict[Part, int]:
    """Return how many bytes of answers a batch has."""
    sql = "SELECT ifnull(sum(length(data)), 0) FROM lines WHERE source = ? AND part = ?"
    sizes: dict[Part, int] = {}
    for part in PARTS:
        (size,) = connection.execute(sql, (id, part)).fetchone()
        sizes[part] = size
    return sizes
