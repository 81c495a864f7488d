"""The tables of the journal, and how files of earlier versions get them.

``PRAGMA user_version`` of a file says which version made its tables; a newer file than this is refused. All
tables have a column ``owner``, the name of an API key or empty. Times are in seconds since 1970.
"""

import json
import sqlite3
from collections import defaultdict
from typing import Any

from cog_triton.api.openai.storage.database import transaction
from cog_triton.api.openai.storage.limits import USAGE_TABLE, CountedTable
from cog_triton.api.openai.storage.records import (
    CancelledRecord,
    ChunkRecord,
    FailedRecord,
    Record,
    encode,
)
from cog_triton.protocol.log_probs import TokenLogProb

VERSION = 2
# What a row takes in the file beside its data.
RESPONSE_ROW_BYTES = 400
ROW_BYTES = 200
BATCH_ROW_BYTES = 1500
RESPONSE_BLOBS = ("body", "request", "input", "response", "records")
# The records of background responses that run. position: the number of a row's first record.
_LOG_TABLE = """
    CREATE TABLE IF NOT EXISTS log (
        response TEXT, position INTEGER, owner TEXT, records BLOB, PRIMARY KEY (response, position)
    ) WITHOUT ROWID
"""

_TABLES = (
    # When the housekeeping last ran, by ``SteadyClock``.
    "CREATE TABLE IF NOT EXISTS clock (id INTEGER PRIMARY KEY CHECK (id = 1), seconds REAL)",
    # model: the server's own name of it. body, request: what a background response is made of. records: of
    # one that has ended. runner: see ``Lease``; null once the response has ended. started: null until a
    # process begins to answer. input: all items, with those of the previous responses.
    """
    CREATE TABLE IF NOT EXISTS responses (
        id TEXT PRIMARY KEY, owner TEXT, model TEXT, created REAL, runner INTEGER, started REAL,
        body BLOB, request BLOB, input BLOB, response BLOB, records BLOB
    )
    """,
    "CREATE INDEX IF NOT EXISTS responses_that_run ON responses (runner) WHERE runner IS NOT NULL",
    "CREATE INDEX IF NOT EXISTS responses_by_age ON responses (created)",
    "CREATE INDEX IF NOT EXISTS responses_by_owner ON responses (owner, created)",
    _LOG_TABLE,
    """
    CREATE TRIGGER IF NOT EXISTS log_of_ended_response AFTER UPDATE OF runner ON responses
    WHEN NEW.runner IS NULL BEGIN DELETE FROM log WHERE response = NEW.id; END
    """,
    """
    CREATE TRIGGER IF NOT EXISTS log_of_deleted_response AFTER DELETE ON responses
    BEGIN DELETE FROM log WHERE response = OLD.id; END
    """,
    # state: coming, there or gone. source, part: where the file's lines are.
    """
    CREATE TABLE IF NOT EXISTS files (
        number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, owner TEXT, state TEXT, source TEXT,
        part TEXT, created INTEGER, expires INTEGER, bytes INTEGER, name TEXT, purpose TEXT
    )
    """,
    # A row of an upload, whose source is the file, has some whole lines and the number of the first. A row
    # of a batch's output or error file, whose source is the batch, has the answer to one line.
    """
    CREATE TABLE IF NOT EXISTS lines (
        owner TEXT, source TEXT, line INTEGER, part TEXT, data BLOB, PRIMARY KEY (source, line)
    )
    """,
    # object: the batch as a client reads it, without its counts.
    """
    CREATE TABLE IF NOT EXISTS batches (
        number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, owner TEXT, model TEXT, input TEXT,
        endpoint TEXT, status TEXT, expires INTEGER, object TEXT, active INTEGER DEFAULT 1,
        runner INTEGER DEFAULT 0, total INTEGER DEFAULT 0, completed INTEGER DEFAULT 0,
        failed INTEGER DEFAULT 0, input_tokens INTEGER DEFAULT 0, output_tokens INTEGER DEFAULT 0
    )
    """,
    "CREATE INDEX IF NOT EXISTS active_batches ON batches (active) WHERE active",
    "CREATE INDEX IF NOT EXISTS files_by_owner ON files (owner, number)",
    "CREATE INDEX IF NOT EXISTS batches_by_owner ON batches (owner, number)",
)
_RESPONSE_SIZE = " + ".join(f"ifnull(length({{row}}.{name}), 0)" for name in RESPONSE_BLOBS)
COUNTED_RESPONSES = CountedTable(
    name="responses",
    size=f"({RESPONSE_ROW_BYTES} + {_RESPONSE_SIZE})",
    columns=RESPONSE_BLOBS,
)
COUNTED_TABLES = (
    COUNTED_RESPONSES,
    CountedTable(
        name="log",
        size=f"({ROW_BYTES} + length({{row}}.records))",
        columns=("records",),
    ),
    # An upload counts as a whole from its beginning, and until the last of it is deleted.
    CountedTable(
        name="files",
        size=f"({ROW_BYTES} + length(CAST({{row}}.name AS BLOB))"
        " + CASE {row}.part WHEN 'input' THEN {row}.bytes ELSE 0 END)",
        columns=("name", "part", "bytes"),
    ),
    CountedTable(
        name="lines",
        size=f"({ROW_BYTES} + CASE {{row}}.part WHEN 'input' THEN 0 ELSE length({{row}}.data) END)",
        columns=("part", "data"),
    ),
    CountedTable(
        name="batches",
        size=f"({BATCH_ROW_BYTES} + length(CAST({{row}}.object AS BLOB)))",
        columns=("object",),
    ),
)


def migrate(connection: sqlite3.Connection) -> None:
    """Make the tables of a new file, or change those of an earlier version."""
    version = _version(connection)
    if version > VERSION:
        raise sqlite3.OperationalError(
            f"it was created by a newer version of cog-triton ({version})"
        )
    if version == VERSION:
        return
    with transaction(connection):
        if _has_table(connection, "log"):
            _migrate_from_version_1(connection)
        for statement in _TABLES:
            connection.execute(statement)
        _count_usage(connection)
        connection.execute(f"PRAGMA user_version={VERSION}")


def _version(connection: sqlite3.Connection) -> int:
    row: tuple[int] = connection.execute("PRAGMA user_version").fetchone()
    return row[0]


def _has_table(connection: sqlite3.Connection, name: str) -> bool:
    sql = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?"
    return connection.execute(sql, (name,)).fetchone() is not None


def _count_usage(connection: sqlite3.Connection) -> None:
    """Make the table ``usage``, and count what is there."""
    connection.execute(USAGE_TABLE)
    for table in COUNTED_TABLES:
        connection.execute(table.count())
        for trigger in table.triggers():
            connection.execute(trigger)


def _migrate_from_version_1(connection: sqlite3.Connection) -> None:
    """Change the tables of version 1.

    It had one log of all responses: a row was a JSON list of the records of one transaction, each a list
    with the id of its response first. ``responses.first`` was the last row of the log before a response
    began. Some files had no table ``usage``, or another one.
    """
    connection.execute("DROP TABLE IF EXISTS usage")
    triggers = "SELECT name FROM sqlite_master WHERE type = 'trigger' AND name LIKE 'usage_%'"
    for (trigger,) in connection.execute(triggers).fetchall():
        connection.execute(f"DROP TRIGGER {trigger}")
    connection.execute("ALTER TABLE log RENAME TO old_log")
    connection.execute(_LOG_TABLE)
    if _has_table(connection, "responses"):
        connection.execute("ALTER TABLE responses RENAME COLUMN first TO started")
        _move_old_log(connection)
        _rewrite_old_records(connection)
    connection.execute("DROP TABLE old_log")


def _move_old_log(connection: sqlite3.Connection) -> None:
    """Give each response that runs its rows of the log."""
    running = (
        "SELECT id, owner, started FROM responses WHERE runner IS NOT NULL AND started IS NOT NULL"
    )
    owners: dict[str, str] = {}
    begins: dict[str, int] = {}
    for id, owner, begin in connection.execute(running).fetchall():
        owners[id] = owner
        begins[id] = begin
    records: defaultdict[str, list[Record]] = defaultdict(list)
    for row, data in connection.execute("SELECT id, records FROM old_log ORDER BY id"):
        for value in json.loads(data):
            id = value[0]
            if id in begins and row > begins[id]:
                records[id].append(record_of_version_1(value))
    insert = "INSERT INTO log (response, position, owner, records) VALUES (?, 0, ?, ?)"
    for id, moved in records.items():
        connection.execute(insert, (id, owners[id], encode(moved)))


def _rewrite_old_records(connection: sqlite3.Connection) -> None:
    """Give the records of responses that have ended their new form."""
    ended = "SELECT id FROM responses WHERE records IS NOT NULL"
    for (id,) in connection.execute(ended).fetchall():
        select = "SELECT records FROM responses WHERE id = ?"
        (data,) = connection.execute(select, (id,)).fetchone()
        records = [record_of_version_1(value) for value in json.loads(data)]
        update = "UPDATE responses SET records = ? WHERE id = ?"
        connection.execute(update, (encode(records), id))


def record_of_version_1(value: list[Any]) -> Record:
    """Return a record of version 1, which is told by its length; the first value is the response's id."""
    if len(value) == 1:
        return CancelledRecord()
    if len(value) == 4:
        _, status, code, message = value
        return FailedRecord(status=status, code=code, message=message)
    _, text, output_tokens, input_tokens, finish_reason, ids, log_probs = value
    return ChunkRecord(
        text=text,
        output_tokens=output_tokens,
        input_tokens=input_tokens,
        finish_reason=finish_reason,
        ids=tuple(ids),
        log_probs=tuple(_log_prob_of_version_1(token) for token in log_probs),
    )


def _log_prob_of_version_1(token: dict[str, Any]) -> TokenLogProb:
    top = tuple((id, log_prob) for id, log_prob in token["top"])
    return TokenLogProb(token["id"], token["log_prob"], top)
