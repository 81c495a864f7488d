"""Stored records, and journals of an earlier version."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from cog_triton.api.openai.storage.limits import StorageLimits, all_usages
from cog_triton.api.openai.storage.records import (
    LEAST_LOG_PROB,
    CancelledRecord,
    ChunkRecord,
    FailedRecord,
    Record,
    decode,
    encode,
)
from cog_triton.api.openai.storage.schema import VERSION
from cog_triton.api.openai.storage.storage import Storage
from cog_triton.generation import Chunk
from cog_triton.protocol.log_probs import TokenLogProb

pytestmark = pytest.mark.anyio
TOKEN = TokenLogProb(7, -0.5, ((7, -0.5), (8, -1.25)))
PIECE = ChunkRecord("a é", 1, 3, None, (7,), (TOKEN,))
LAST = ChunkRecord("", 2, None, "stop", (), ())
RECORDS: list[Record] = [PIECE, LAST, FailedRecord(500, None, "text"), CancelledRecord()]


def test_records_are_read_as_they_were_written() -> None:
    assert decode(encode(RECORDS)) == RECORDS


def test_a_stored_record_says_its_kind_and_the_list_its_format() -> None:
    stored = json.loads(encode(RECORDS))
    assert stored["format"] == 1
    kinds = [record["kind"] for record in stored["records"]]
    assert kinds == ["chunk", "chunk", "failed", "cancelled"]


@pytest.mark.parametrize(
    "stored",
    [
        b'{"format": 2, "records": []}',
        b'{"format": 1, "records": [{"kind": "paused"}]}',
        b'{"format": 1, "records": [["resp_1"]]}',
        b"[]",
    ],
    ids=["another format", "unknown kind", "untagged", "no object"],
)
def test_records_of_another_form_are_refused(stored: bytes) -> None:
    with pytest.raises(ValueError, match="validation error"):
        decode(stored)


def test_a_chunk_comes_back_from_its_record() -> None:
    chunk = Chunk("a", 1, 3, "length", ids=(7,), log_probs=(TOKEN,))
    assert ChunkRecord.of_chunk(chunk).chunk() == chunk


def test_a_log_probability_of_zero_can_be_stored() -> None:
    token = TokenLogProb(7, float("-inf"), ((8, float("-inf")),))
    record = ChunkRecord.of_chunk(Chunk("a", 1, 3, log_probs=(token,)))
    (read,) = decode(encode([record]))
    assert isinstance(read, ChunkRecord)
    assert read.log_probs == (TokenLogProb(7, LEAST_LOG_PROB, ((8, LEAST_LOG_PROB),)),)


VERSION_1 = """
CREATE TABLE log (id INTEGER PRIMARY KEY, records BLOB);
CREATE TABLE clock (id INTEGER PRIMARY KEY CHECK (id = 1), seconds REAL);
CREATE TABLE responses (id TEXT PRIMARY KEY, owner TEXT, model TEXT, created REAL,
    runner INTEGER, first INTEGER, body BLOB, request BLOB, input BLOB, response BLOB, records BLOB);
CREATE INDEX responses_that_run ON responses (runner) WHERE runner IS NOT NULL;
CREATE TABLE batches (number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, owner TEXT,
    model TEXT, input TEXT, endpoint TEXT, status TEXT, expires INTEGER, object TEXT,
    active INTEGER DEFAULT 1, runner INTEGER DEFAULT 0, total INTEGER DEFAULT 0,
    completed INTEGER DEFAULT 0, failed INTEGER DEFAULT 0, input_tokens INTEGER DEFAULT 0,
    output_tokens INTEGER DEFAULT 0);
PRAGMA user_version=1;
"""
USAGE_1 = """
CREATE TABLE usage (owner TEXT PRIMARY KEY, bytes INTEGER, row_count INTEGER) WITHOUT ROWID;
CREATE TRIGGER usage_delete_responses AFTER DELETE ON responses BEGIN
    UPDATE usage SET bytes = bytes - 1 WHERE owner = OLD.owner; END;
INSERT INTO usage VALUES ('a', 5, 1);
"""
OLD_TOKEN = {"id": 7, "log_prob": -0.5, "top": [[7, -0.5], [8, -1.25]]}


def write_version_1(file: Path, *, with_usage: bool) -> None:
    """A journal with a response that has ended, and two that run."""
    with closing(sqlite3.connect(file, isolation_level=None)) as old:
        old.executescript(VERSION_1)
        if with_usage:
            old.executescript(USAGE_1)
        rows = [
            ("ended", None, 0, json.dumps([["ended", "a é", 1, 3, None, [7], [OLD_TOKEN]]])),
            ("runs", 5, 1, None),
            ("waits", 0, None, None),
        ]
        for id, runner, first, records in rows:
            old.execute(
                "INSERT INTO responses VALUES (?, 'a', 'm', 1, ?, ?, '{}', '{}', '[]', '{}', ?)",
                (id, runner, first, records),
            )
        log = [
            [["runs", "of an earlier run", 1, 3, None, [1], []]],
            [["runs", "a é", 1, 3, None, [7], [OLD_TOKEN]], ["other"]],
            [["runs", 500, None, "text"]],
        ]
        for records_of_row in log:
            old.execute("INSERT INTO log (records) VALUES (?)", (json.dumps(records_of_row),))


@pytest.mark.parametrize("with_usage", [False, True], ids=["without usage", "with usage"])
async def test_a_journal_of_version_1_is_migrated(tmp_path: Path, with_usage: bool) -> None:
    file = tmp_path / "journal.db"
    write_version_1(file, with_usage=with_usage)
    storage = Storage.at(file, StorageLimits(1 << 24, 30))
    ended = await storage.responses.progress("ended", 0)
    assert ended is not None
    assert (ended.has_ended, ended.records) == (True, [PIECE])
    runs = await storage.responses.progress("runs", 0)
    assert runs is not None
    assert (runs.has_ended, runs.records) == (False, [PIECE, FailedRecord(500, None, "text")])
    waits = await storage.responses.find("waits")
    assert waits is not None
    assert (waits.runner, waits.started) == (0, None)
    (usage,) = await storage.journal.read(all_usages)
    assert usage.row_count == 4  # with the row of the log
    await storage.journal.close()
    with closing(sqlite3.connect(file)) as new:
        assert new.execute("PRAGMA user_version").fetchone() == (VERSION,)


async def test_a_migration_that_fails_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "journal.db"
    write_version_1(file, with_usage=True)
    with closing(sqlite3.connect(file, isolation_level=None)) as old:
        old.execute("UPDATE responses SET records = '[[1, 2]]' WHERE id = 'ended'")
        before = list(old.iterdump())
    storage = Storage.at(file, StorageLimits(1 << 24, 30))
    with pytest.raises(ValueError, match="unpack"):
        await storage.responses.find("ended")
    await storage.journal.close()
    with closing(sqlite3.connect(file)) as old:
        assert list(old.iterdump()) == before
        assert old.execute("PRAGMA user_version").fetchone() == (1,)
