"""No key's data pushes out another's, whatever several keys write in any order."""

import asyncio
import contextlib
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cog_triton.api.openai.storage.batches import BatchObject, LineAnswer
from cog_triton.api.openai.storage.files import INPUT, NewFile, UploadChunk
from cog_triton.api.openai.storage.limits import NoRoom, Share, StorageLimits, all_usages
from cog_triton.api.openai.storage.records import ChunkRecord
from cog_triton.api.openai.storage.responses import NewResponse, TooManyInBackground
from cog_triton.api.openai.storage.schema import COUNTED_TABLES
from cog_triton.api.openai.storage.storage import Storage

OWNERS = ("alice", "bob", "carol")
LIMITS = StorageLimits(max_bytes=4 << 20, days=30, share=Share(bytes=1_600_000, rows=60))
QUIET = "quiet"  # a key whose few rows are there from the beginning
KINDS = ("response", "background", "record", "upload", "batch", "answer", "delete", "expire")


@dataclass(frozen=True)
class Step:
    """A write of one key; ``size`` is in bytes, where the kind has one."""

    owner: str
    kind: str
    size: int


STEPS = st.lists(
    st.builds(
        Step,
        owner=st.sampled_from(OWNERS),
        kind=st.sampled_from(KINDS),
        size=st.sampled_from((10, 1000, 30_000, 150_000, 300_000)),
    ),
    max_size=40,
)


class Writer:
    """Does the steps, and keeps what each key may expect to find."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._numbers = Counter[str]()
        self._running: dict[str, list[str]] = {owner: [] for owner in OWNERS}
        self._positions = Counter[str]()
        self._batches: dict[str, list[str]] = {owner: [] for owner in OWNERS}
        self._files: dict[str, list[str]] = {owner: [] for owner in OWNERS}

    async def do(self, step: Step) -> None:
        if step.kind == "expire":
            await self._storage.housekeeping.expire()
            return
        with contextlib.suppress(NoRoom, TooManyInBackground):  # a refusal harms nobody
            await getattr(self, f"_{step.kind}")(step.owner, step.size)

    def _id(self, owner: str) -> str:
        self._numbers[owner] += 1
        return f"{owner}-{self._numbers[owner]}"

    def _row(self, owner: str, size: int) -> NewResponse:
        id = self._id(owner)
        return NewResponse(id, owner, "m", self._storage.journal.now(), b"[]", b"x" * size)

    async def _response(self, owner: str, size: int) -> None:
        await self._storage.responses.insert(self._row(owner, size))

    async def _background(self, owner: str, size: int) -> None:
        row = self._row(owner, size)
        await self._storage.responses.insert_background(row, body=b"", request=b"{}", limit=100)
        await self._storage.responses.take(row.id, 0)
        self._running[owner].append(row.id)

    async def _record(self, owner: str, size: int) -> None:
        for id in self._running[owner][-1:]:
            record = ChunkRecord("x" * size, 1, 3, None, (), ())
            await self._storage.responses.append(id, owner, self._positions[id], [record])
            self._positions[id] += 1

    async def _upload(self, owner: str, size: int) -> None:
        files = self._storage.files
        id = self._id(owner)
        now = int(time.time())
        file = NewFile(id, owner, "coming", id, INPUT, now, now + 60, size, "f", "batch")
        await files.begin_upload(file)
        await files.append_chunks(file, [UploadChunk(1, b"x" * size)])
        assert await files.finish_upload(id, now + 3600)
        self._files[owner].append(id)

    async def _batch(self, owner: str, _: int) -> None:
        for file in self._files[owner][-1:]:
            id = self._id(owner)
            now = int(time.time())
            batch = BatchObject(
                id=id,
                endpoint="/v1/completions",
                input_file_id=file,
                completion_window="24h",
                created_at=now,
                expires_at=now + 86400,
            )
            await self._storage.batches.create(batch, owner, "m")
            self._batches[owner].append(id)

    async def _answer(self, owner: str, size: int) -> None:
        for id in self._batches[owner][-1:]:
            self._positions[id] += 1
            answer = LineAnswer(self._positions[id], "output", b"x" * size)
            batch = await self._storage.batches.running(id)
            await self._storage.batches.add_answers(batch, [answer])

    async def _delete(self, owner: str, _: int) -> None:
        for id in self._files[owner][-1:]:
            await self._storage.files.delete(id)


async def ids_of(storage: Storage, owner: str) -> set[str]:
    sql = """
        SELECT id FROM responses WHERE owner = ?1 UNION
        SELECT id FROM files WHERE owner = ?1 AND state = 'there' UNION
        SELECT id FROM batches WHERE owner = ?1
    """

    def read(connection: object) -> set[str]:
        return {id for (id,) in connection.execute(sql, (owner,))}  # type: ignore[attr-defined]

    return await storage.journal.read(read)


async def counted_again(storage: Storage) -> dict[str, tuple[int, int]]:
    """What each key has, from the rows themselves."""
    counts: dict[str, tuple[int, int]] = {}
    for table in COUNTED_TABLES:
        size = table.size.format(row=table.name)
        sql = f"SELECT owner, sum({size}), count(*) FROM {table.name} GROUP BY owner"
        for owner, size_of_rows, rows in await storage.journal.read(
            lambda own, sql=sql: own.execute(sql).fetchall()  # type: ignore[misc]
        ):
            before = counts.get(owner, (0, 0))
            counts[owner] = (before[0] + size_of_rows, before[1] + rows)
    return counts


async def check(storage: Storage) -> None:
    usages = await storage.journal.read(all_usages)
    assert {own.owner: (own.bytes, own.row_count) for own in usages} == await counted_again(storage)
    for usage in usages:
        assert usage.bytes <= LIMITS.key_bytes, usage
        assert LIMITS.share is not None
        assert usage.row_count <= LIMITS.share.rows, usage


async def run(steps: list[Step]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        storage = Storage.at(Path(directory) / "journal.db", LIMITS)
        writer = Writer(storage)
        try:
            for size in (10, 30_000, 60_000):
                id = f"{QUIET}-{size}"
                row = NewResponse(id, QUIET, "m", 1.0 + time.time() - 86400, b"[]", b"x" * size)
                await storage.responses.insert(row)
            quiet = await ids_of(storage, QUIET)
            for step in steps:
                others = [owner for owner in OWNERS if owner != step.owner]
                before = {owner: await ids_of(storage, owner) for owner in others}
                await writer.do(step)
                await check(storage)
                assert await ids_of(storage, QUIET) == quiet, step
                if step.kind != "expire":
                    after = {owner: await ids_of(storage, owner) for owner in others}
                    assert after == before, step
            # A key below its even part can always write.
            row = NewResponse("last", QUIET, "m", storage.journal.now(), b"[]", b"x" * 20_000)
            await storage.responses.insert(row)
            await storage.housekeeping.expire()
            assert await ids_of(storage, QUIET) == quiet | {"last"}
        finally:
            await storage.journal.close()


@settings(max_examples=15, deadline=None)
@given(STEPS)
def test_no_sequence_of_writes_harms_another_key(steps: list[Step]) -> None:
    asyncio.run(run(steps))


@pytest.mark.parametrize("kind", ["response", "background", "upload"])
def test_keys_that_fill_the_file_harm_nobody(kind: str) -> None:
    steps = [
        Step(owner, kind, size) for _ in range(14) for size in (150_000, 30_000) for owner in OWNERS
    ]
    steps.append(Step("alice", "expire", 0))
    asyncio.run(run(steps))
