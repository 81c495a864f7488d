"""Rows that a process runs, each in a task: background responses and batches."""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

import anyio

from cog_triton.api.openai.storage.journal import Journal
from cog_triton.errors import JournalUnavailable

logger = logging.getLogger(__name__)
LOOK_SECONDS = 0.5  # between two looks for what other processes have left
MAX_ATTEMPTS = 5
FIRST_PAUSE = 1.0  # seconds before a failed job is tried again; each further pause is twice as long
LONGEST_PAUSE = 60.0


class ActiveJob(Protocol):
    """A row that has not ended; see ``Lease`` for its runner."""

    @property
    def id(self) -> str: ...
    @property
    def owner(self) -> str: ...
    @property
    def runner(self) -> int: ...


JobT = TypeVar("JobT", bound=ActiveJob)


class JobStore(Protocol[JobT]):
    """The table of the rows."""

    async def active(self, model: str) -> list[JobT]: ...
    async def take(self, id: str, runner: int) -> bool: ...


@dataclass
class RetryPolicy:
    """When a job whose task has failed is tried again in this process.

    - The first pause is a second; each further one is twice as long, up to a minute.
    - After five failures the job is abandoned, and ends as failed.
    - A journal that is not available is waited for, however long that takes.
    """

    failures: int = 0
    again_at: float = 0.0  # a time of the monotonic clock
    error: BaseException | None = None

    def on_failure(self, error: BaseException) -> None:
        pause = min(FIRST_PAUSE * 2.0**self.failures, LONGEST_PAUSE)
        self.failures += 1
        self.again_at = time.monotonic() + pause
        self.error = error

    @property
    def is_final(self) -> bool:
        """Whether the job is not tried again."""
        return self.failures >= MAX_ATTEMPTS and not isinstance(self.error, JournalUnavailable)


class Jobs(ABC, Generic[JobT]):
    """The rows of one table that this process runs. API keys take turns.

    Attributes:
        tasks: by the ids of the rows.
        wake: set it if there may be something new to run.
        closed: nothing more is begun.
    """

    def __init__(
        self,
        journal: Journal,
        store: JobStore[JobT],
        model: str,
        *,
        limit: int,
        limit_of_key: int | None = None,
    ) -> None:
        """Run the rows of a model.

        Args:
            limit: maximum number of rows that run at once.
            limit_of_key: maximum number of these that one API key may have, if there are several keys.
        """
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.wake = asyncio.Event()
        self.closed = False
        self._journal = journal
        self._store = store
        self._model = model
        self._limit = limit
        self._limit_of_key = limit_of_key
        self._retries: dict[str, RetryPolicy] = {}
        self._owners: dict[str, str] = {}  # by the ids of the rows that run

    @abstractmethod
    async def run(self, id: str) -> None:
        """Run a row to its end, from where another process has left it."""

    @abstractmethod
    async def give_up(self, id: str, reason: str) -> None:
        """End a row as failed, after its task has failed too often."""

    @abstractmethod
    def look(self, jobs: Sequence[JobT]) -> None:
        """Look at the rows that have not ended, before more are run."""

    async def work(self) -> None:
        """Run what no living process runs, until closed."""
        while not self.closed:
            try:
                await self._take_up()
            except JournalUnavailable:
                pass  # the writer has logged it
            except Exception:
                logger.exception("could not look for background work")
                await asyncio.sleep(FIRST_PAUSE)
            with anyio.move_on_after(LOOK_SECONDS):
                await self.wake.wait()
            self.wake.clear()

    def stop(self) -> "asyncio.Future[list[BaseException | None]]":
        """Close, and end what runs; the next process continues with it."""
        self.closed = True
        for task in self.tasks.values():
            task.cancel()
        return asyncio.gather(*self.tasks.values(), return_exceptions=True)

    async def _take_up(self) -> None:
        jobs = await self._store.active(self._model)
        self.look(jobs)
        if jobs:
            await self._journal.open()  # else nobody knows which processes live
        for id in self._retries.keys() - {job.id for job in jobs}:
            del self._retries[id]
        for job in in_turn(jobs):
            if not await self._may_run(job):
                continue
            if len(self.tasks) >= self._limit:
                return
            if await self._store.take(job.id, job.runner):
                self._begin(job)

    async def _may_run(self, job: JobT) -> bool:
        """Return whether to run a row now; end one that has failed too often."""
        if self.closed or job.id in self.tasks:
            return False
        if self._journal.lease.is_held_by_another(job.runner):
            return False
        retry = self._retries.get(job.id)
        if retry is not None and retry.is_final:
            await self._end_as_failed(job.id, retry)
            return False
        if retry is not None and time.monotonic() < retry.again_at:
            return False
        return not self._has_its_places(job.owner)

    def _has_its_places(self, owner: str) -> bool:
        if self._limit_of_key is None or self._journal.limits.share is None:
            return False
        return list(self._owners.values()).count(owner) >= self._limit_of_key

    def _begin(self, job: JobT) -> None:
        if self.closed:  # meanwhile
            return
        self._owners[job.id] = job.owner
        task = asyncio.create_task(self.run(job.id))
        self.tasks[job.id] = task
        task.add_done_callback(partial(self._on_end, job.id))

    async def _end_as_failed(self, id: str, retry: RetryPolicy) -> None:
        kind = type(retry.error).__name__
        reason = f"it failed {retry.failures} times, at last with {kind}"
        logger.error("giving up on %s: %s: %s", id, reason, retry.error)
        await self.give_up(id, f"{reason}; see the server's log")

    def _on_end(self, id: str, task: "asyncio.Task[None]") -> None:
        del self.tasks[id]
        del self._owners[id]
        error = None if task.cancelled() else task.exception()
        if error is None:
            self._retries.pop(id, None)
            self.wake.set()
        elif self.closed:
            logger.info("%s will continue when the server starts again", id)
        else:
            retry = self._retries.setdefault(id, RetryPolicy())
            retry.on_failure(error)
            pause = retry.again_at - time.monotonic()
            what = "is not retried" if retry.is_final else f"is retried in {pause:.0f} s"
            logger.warning("%s failed and %s", id, what, exc_info=error)


def in_turn(jobs: Sequence[JobT]) -> list[JobT]:
    """Return the first row of each owner, then the second of each, and so on."""
    places: Counter[str] = Counter()
    numbered: list[tuple[int, JobT]] = []
    for job in jobs:
        numbered.append((places[job.owner], job))
        places[job.owner] += 1
    numbered.sort(key=lambda pair: pair[0])
    return [job for _, job in numbered]
