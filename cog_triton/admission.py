"""The queue in front of the engine: so many requests run, so many wait for a place, in order and in time.

It is part of the one path that every face uses. Places go to the lowest rank first, and within a rank to
who came first, which with one rank for all is the order of arrival.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import itertools
import math
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from cog_triton.errors import CogTritonError, TritonOverloaded, TritonUnavailable

Outcome = Literal["admitted", "full", "late", "closed"]

_RATE_SAMPLES = 64
LONGEST_RETRY_SECONDS = 60.0


@dataclass(frozen=True)
class Bounds:
    """How much is let in.

    Attributes:
        running: requests in the engine at once.
        waiting: requests that wait for a place at once.
        seconds: the longest wait for one.
    """

    running: int
    waiting: int
    seconds: float


class _Ticket(NamedTuple):
    """One that waits; in the order in which places are given."""

    rank: float
    number: int
    turn: asyncio.Future[None]


class Admission:
    """Gives places to requests. To be used from one event loop.

    Attributes:
        running: how many have a place.
    """

    def __init__(
        self,
        bounds: Bounds,
        *,
        observe: Callable[[Outcome, float], object] = lambda *_: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nobody has a place yet.

        Args:
            observe: is told what became of each request, and after how many seconds of waiting.
        """
        self._bounds = bounds
        self._observe = observe
        self._clock = clock
        self._waiting: list[_Ticket] = []
        self._numbers = itertools.count()
        self._ends: deque[float] = deque(maxlen=_RATE_SAMPLES)  # while somebody waited
        self._tasks: set[asyncio.Task[object]] = set()
        self._closed: str | None = None
        self.running = 0

    @property
    def waiting(self) -> int:
        """How many wait for a place."""
        return len(self._waiting)

    @property
    def closed(self) -> bool:
        """Whether nobody is let in any more."""
        return self._closed is not None

    @contextlib.asynccontextmanager
    async def place(self, rank: float = 0.0) -> AsyncIterator[float]:
        """A place, once it is this request's turn; yields the seconds that it waited for it.

        To be entered and left in one task.

        Args:
            rank: lower ones come first.

        Raises:
            TritonOverloaded: too many wait, or the wait was too long; it says when to try again.
            TritonUnavailable: ``close`` was called, before or while the place was held.
        """
        waited = await self._enter(rank)
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            yield waited
        except asyncio.CancelledError:
            if task in self._tasks:  # it is not ``close`` that cancelled it
                raise
            if sys.version_info >= (3, 11):  # which counts them
                task.uncancel()
            raise TritonUnavailable(self._closed or "") from None
        finally:
            self._tasks.discard(task)
            self._leave()

    def close(self, reason: str) -> None:
        """Ends all that run or wait, and lets nobody in any more: each gets TritonUnavailable."""
        self._closed = reason
        for ticket in self._waiting:
            _fail(ticket.turn, TritonUnavailable(reason))
        while self._tasks:
            self._tasks.pop().cancel()

    async def _enter(self, rank: float) -> float:
        """Waits for a place, and takes it."""
        self._check_open()
        if self.running < self._bounds.running:
            self.running += 1
            self._observe("admitted", 0.0)
            return 0.0
        began = self._clock()
        try:
            await self._turn(rank)
        except CogTritonError as error:
            late = isinstance(error, TritonOverloaded)
            self._observe("late" if late else "closed", self._clock() - began)
            raise
        waited = self._clock() - began
        self._observe("admitted", waited)
        return waited

    def _check_open(self) -> None:
        if self._closed is not None:
            self._observe("closed", 0.0)
            raise TritonUnavailable(self._closed)
        bounds = self._bounds
        if self.running >= bounds.running and self.waiting >= bounds.waiting:
            self._observe("full", 0.0)
            raise self._overloaded(f"{self.running} requests run and {self.waiting} wait")

    async def _turn(self, rank: float) -> None:
        """Waits until a place has been given."""
        loop = asyncio.get_running_loop()
        ticket = _Ticket(rank, next(self._numbers), loop.create_future())
        bisect.insort(self._waiting, ticket)
        timer = loop.call_later(self._bounds.seconds, self._expire, ticket.turn)
        try:
            await ticket.turn
        except asyncio.CancelledError:
            turn = ticket.turn
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._leave()  # the place came in the same moment
            raise
        finally:
            timer.cancel()
            with contextlib.suppress(ValueError):  # a place that was given left nobody waiting
                self._waiting.remove(ticket)

    def _expire(self, turn: asyncio.Future[None]) -> None:
        what = f"no place became free in {self._bounds.seconds:g} s (QUEUE_TIMEOUT)"
        _fail(turn, self._overloaded(what))

    def _leave(self) -> None:
        """Gives a place back, and to the next who waits."""
        self.running -= 1
        if not self._waiting:
            self._ends.clear()  # the rate of a server that has nothing to do says nothing
            return
        self._ends.append(self._clock())
        while self._waiting and self.running < self._bounds.running:
            turn = self._waiting.pop(0).turn
            if not turn.done():
                self.running += 1
                turn.set_result(None)

    def _overloaded(self, what: str) -> TritonOverloaded:
        seconds = retry_seconds(self.waiting, self._ends)
        return TritonOverloaded(f"{what}; try again in {seconds:g} s", retry_after=seconds)


def retry_seconds(waiting: int, ends: deque[float]) -> float:
    """Whole seconds, 1 to 60, in which those that wait will have a place, at the rate of late.

    Args:
        ends: when requests ended, in seconds of a clock, the oldest first.
    """
    if len(ends) < 2 or ends[-1] <= ends[0]:
        return 1.0
    rate = (len(ends) - 1) / (ends[-1] - ends[0])
    return min(max(math.ceil(waiting / rate), 1.0), LONGEST_RETRY_SECONDS)


def _fail(turn: asyncio.Future[None], error: CogTritonError) -> None:
    if not turn.done():
        turn.set_exception(error)
