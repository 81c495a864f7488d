"""Deletes what is too old or too much, a few rows at a time, because writes wait meanwhile."""

import asyncio
import logging
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from cog_triton.api.openai.storage.journal import Journal
from cog_triton.api.openai.storage.limits import Usage, all_usages, usage_of, used_pages
from cog_triton.errors import JournalUnavailable

logger = logging.getLogger(__name__)
KEEP_SECONDS = 5.0  # between two rounds
MAX_DELETED = 100  # rows at once
VACUUMED_PAGES = 1000  # free pages that are returned to the disk in a round


@dataclass(frozen=True)
class Expiry:
    """Which finished rows to delete now.

    Attributes:
        before: the time before which they were made.
        now: the journal's time.
        owner: the key whose rows they are; None for all keys.
    """

    before: float
    now: float
    owner: str | None = None


class Expiring(Protocol):
    """A store whose rows expire."""

    def delete_oldest(self, connection: sqlite3.Connection, expiry: Expiry) -> int:
        """Delete at most MAX_DELETED rows, the oldest first; return how many."""
        ...


class Housekeeping:
    """The work on a journal that no request waits for.

    - What is older than its time is deleted, of all keys.
    - A key that has more than its share loses its oldest rows.
    - If the file is fuller than it may stay, the key with the most bytes loses its oldest rows, then the
      next one, but never a key that has less than its even part of the file.
    """

    def __init__(self, journal: Journal, stores: Sequence[Expiring]) -> None:
        self._journal = journal
        self._stores = stores

    async def run(self) -> None:
        """Do the housekeeping until cancelled; errors of the file are logged by the writer."""
        while True:
            try:
                await self.expire()
                await self._journal.read(_checkpoint)
                await self._journal.shrink_wal()
            except JournalUnavailable:
                pass
            except Exception:
                logger.exception("the housekeeping of the journal %s failed", self._journal.path)
            await asyncio.sleep(KEEP_SECONDS)

    async def expire(self) -> None:
        """Delete what is too old, and the oldest of what is too much."""
        await self._journal.open()  # the file has the journal's time
        now = self._journal.now()
        old = Expiry(before=now - self._journal.limits.days * 86400, now=now)
        while await self._delete(old):
            pass
        for usage in await self._journal.read(all_usages):
            await self._cut_to_share(usage, now)
        while await self._journal.read(used_pages) > self._journal.limits.kept_pages:
            if not await self._delete_of_the_largest(now):
                break
        await self._journal.write(partial(_note_time, now=now))
        await self._journal.write(_vacuum)

    async def _cut_to_share(self, usage: Usage, now: float) -> None:
        """Delete the oldest rows of a key until it has no more than its share."""
        while self._is_over_share(usage):
            deleted = await self._delete(Expiry(before=now, now=now, owner=usage.owner))
            if not deleted:
                return  # everything that is left is in use
            usage = await self._journal.read(partial(usage_of, owner=usage.owner))

    def _is_over_share(self, usage: Usage) -> bool:
        share = self._journal.limits.share
        if share is None:
            return False
        return usage.bytes > share.bytes or usage.row_count > share.rows

    async def _delete_of_the_largest(self, now: float) -> int:
        """Delete some of the oldest rows of the largest key that has any to delete."""
        usages = await self._journal.read(all_usages)
        even_part = self._journal.limits.even_part(len(usages))
        for place, usage in enumerate(usages):
            if place > 0 and usage.bytes < even_part:
                return 0
            deleted = await self._delete(Expiry(before=now, now=now, owner=usage.owner))
            if deleted:
                return deleted
        return 0

    async def _delete(self, expiry: Expiry) -> int:
        def delete(connection: sqlite3.Connection) -> int:
            return sum(store.delete_oldest(connection, expiry) for store in self._stores)

        return await self._journal.write(delete)


def _checkpoint(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()


def _note_time(connection: sqlite3.Connection, now: float) -> None:
    connection.execute("UPDATE clock SET seconds = ?", (now,))


def _vacuum(connection: sqlite3.Connection) -> None:
    connection.execute(f"PRAGMA incremental_vacuum({VACUUMED_PAGES})").fetchall()
