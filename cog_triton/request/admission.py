"""The queue in front of the engine: so many requests run, so many wait for a place, in order and in time.

It is part of the one path that every face uses. Places go to the flows (those of API keys, say) so that
each gets tokens by its weight: start-time fair queueing. Within a flow they go by priority, and then to who
came first, which with one priority and one flow is the order of arrival.
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
from dataclasses import dataclass, field
from typing import Literal

from cog_triton.errors import CogTritonError, TritonOverloaded, TritonUnavailable

Outcome = Literal["admitted", "full", "late", "closed"]

STOPPING = "the server is being stopped; send the request again"
"""What ``close`` is told when the process ends."""
_RATE_SAMPLES = 64
LONGEST_RETRY_SECONDS = 60.0
MOST_AHEAD = 256
"""Flows without requests that are remembered, those that ended last."""
KEPT_SHARE = 20
"""Where several flows have requests, one place in so many is kept for flows that have few."""


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


@dataclass(frozen=True)
class Share:
    """Whose a request is, and what it will take.

    Attributes:
        flow: whose requests share places as one; "" where nobody is told apart.
        weight: a flow of weight 2 gets twice the tokens of one of weight 1, while both wait.
        cost: tokens that the request is expected to take.
        priority: among the requests of the flow; lower ones come first.
    """

    flow: str = ""
    weight: float = 1.0
    cost: float = 1.0
    priority: int = 0


@dataclass
class Place:
    """A place that a request has.

    Attributes:
        waited: seconds for which it waited.
        used: tokens that it took, for its holder to set; None leaves it at what was expected.
    """

    waited: float = 0.0
    used: float | None = None


@dataclass(order=True)
class _Ticket:
    """One that waits; in the order in which those of one flow get their places."""

    priority: int
    number: int
    share: Share = field(compare=False)
    turn: asyncio.Future[None] = field(compare=False)


@dataclass
class _Flow:
    """The requests of one that run or wait.

    Attributes:
        start: virtual time at which its next request starts: tokens by weight.
        waiting: in the order in which they get their places.
    """

    start: float = 0.0
    running: int = 0
    waiting: list[_Ticket] = field(default_factory=list)


class Admission:
    """Gives places to requests. To be used from one event loop.

    Attributes:
        running: how many have a place.
        observers: are told what became of each request, and after how many seconds of waiting.
    """

    def __init__(
        self,
        bounds: Bounds,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nobody has a place yet."""
        self._bounds = bounds
        self.observers: list[Callable[[Outcome, float], object]] = []
        self._clock = clock
        self._numbers = itertools.count()
        self._flows: dict[str, _Flow] = {}  # those with requests that run or wait
        self._ahead: dict[
            str, float
        ] = {}  # starts of idle ones that have had more than their share
        self._now = 0.0  # virtual time: the start of the request that got the last place
        self._ends: deque[float] = deque(maxlen=_RATE_SAMPLES)  # while somebody waited
        self._tasks: set[asyncio.Task[object]] = set()
        self._closed: str | None = None
        self.running = 0

    @property
    def waiting(self) -> int:
        """How many wait for a place."""
        return sum(len(flow.waiting) for flow in self._flows.values())

    @property
    def closed(self) -> bool:
        """Whether nobody is let in any more."""
        return self._closed is not None

    @contextlib.asynccontextmanager
    async def place(self, share: Share = Share()) -> AsyncIterator[Place]:
        """A place, once it is this request's turn.

        To be entered and left in one task.

        Args:
            share: of whom; each flow gets its part.

        Raises:
            TritonOverloaded: too many wait, or the wait was too long; it says when to try again.
            TritonUnavailable: ``close`` was called, before or while the place was held.
        """
        start = self._ahead.pop(share.flow, 0.0)
        flow = self._flows.setdefault(share.flow, _Flow(start))
        try:
            place = Place(await self._enter(share, flow))
            async with self._held(share, flow, place):
                yield place
        finally:
            self._forget_idle(share.flow, flow)

    @contextlib.asynccontextmanager
    async def _held(self, share: Share, flow: _Flow, place: Place) -> AsyncIterator[None]:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if task in self._tasks:  # it is not ``close`` that cancelled it
                raise
            if sys.version_info >= (3, 11):  # which counts them
                task.uncancel()
            raise TritonUnavailable(self._closed or "") from None
        finally:
            self._tasks.discard(task)
            if place.used is not None:
                flow.start += (place.used - share.cost) / share.weight
            self._leave(flow)

    def _forget_idle(self, name: str, flow: _Flow) -> None:
        """Drop a flow without requests; of one that is ahead of the others, remember how far."""
        if flow.running or flow.waiting or self._flows.get(name) is not flow:
            return
        del self._flows[name]
        if not self._flows:
            self._ahead.clear()
        elif flow.start > self._now:
            self._ahead[name] = flow.start
            if len(self._ahead) > MOST_AHEAD:
                del self._ahead[next(iter(self._ahead))]

    def close(self, reason: str) -> None:
        """Ends all that run or wait, and lets nobody in any more: each gets TritonUnavailable."""
        self._closed = reason
        for flow in self._flows.values():
            for ticket in flow.waiting:
                _fail(ticket.turn, TritonUnavailable(reason))
        while self._tasks:
            self._tasks.pop().cancel()

    async def _enter(self, share: Share, flow: _Flow) -> float:
        """Waits for a place, and takes it."""
        self._check_open(flow)
        if not flow.waiting:  # who was away has nothing saved
            flow.start = max(flow.start, self._now)
        if self._has_place(flow):
            self._take(share, flow)
            self._observe("admitted", 0.0)
            return 0.0
        began = self._clock()
        try:
            await self._turn(share, flow)
        except CogTritonError as error:
            late = isinstance(error, TritonOverloaded)
            self._observe("late" if late else "closed", self._clock() - began)
            raise
        waited = self._clock() - began
        self._observe("admitted", waited)
        return waited

    def _observe(self, outcome: Outcome, seconds: float) -> None:
        for observe in self.observers:
            observe(outcome, seconds)

    def _check_open(self, flow: _Flow) -> None:
        if self._closed is not None:
            self._observe("closed", 0.0)
            raise TritonUnavailable(self._closed)
        if self._has_place(flow) or self.waiting < self._bounds.waiting:
            return
        if not self._push_out_for(flow):
            self._observe("full", 0.0)
            raise self._overloaded(f"{self.running} requests run and {self.waiting} wait")

    def _push_out_for(self, flow: _Flow) -> bool:
        """Refuses the last that waits of the flow with the most of them, if that has more than one more."""
        longest = max(self._flows.values(), key=lambda other: len(other.waiting))
        if len(longest.waiting) <= len(flow.waiting) + 1:
            return False
        refusal = self._overloaded(f"{self.waiting} requests wait, most of them yours")
        _fail(longest.waiting.pop().turn, refusal)
        return True

    def _has_place(self, flow: _Flow) -> bool:
        """Whether there is one for a flow: the last ones are kept for those that have few.

        A flow that has all of the others cannot be made to give one back before its requests end.
        """
        kept = self._bounds.running // KEPT_SHARE if len(self._flows) > 1 else 0
        free = self._bounds.running - self.running
        return free > (0 if flow.running < kept else kept)

    def _take(self, share: Share, flow: _Flow) -> None:
        self.running += 1
        flow.running += 1
        self._now = max(flow.start, self._now)
        flow.start += share.cost / share.weight

    async def _turn(self, share: Share, flow: _Flow) -> None:
        """Waits until a place has been given."""
        loop = asyncio.get_running_loop()
        ticket = _Ticket(share.priority, next(self._numbers), share, loop.create_future())
        bisect.insort(flow.waiting, ticket)
        timer = loop.call_later(self._bounds.seconds, self._expire, ticket.turn)
        try:
            await ticket.turn
        except asyncio.CancelledError:
            turn = ticket.turn
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._leave(flow)  # the place came in the same moment
            raise
        finally:
            timer.cancel()
            with contextlib.suppress(ValueError):  # it has been given a place, or been refused
                flow.waiting.remove(ticket)

    def _expire(self, turn: asyncio.Future[None]) -> None:
        what = f"no place became free in {self._bounds.seconds:g} s (QUEUE_TIMEOUT)"
        _fail(turn, self._overloaded(what))

    def _leave(self, flow: _Flow) -> None:
        """Gives a place back, and to the next who waits."""
        self.running -= 1
        flow.running -= 1
        if not self.waiting:
            self._ends.clear()  # the rate of a server that has nothing to do says nothing
            return
        self._ends.append(self._clock())
        while (next_flow := self._next()) is not None:
            ticket = next_flow.waiting.pop(0)
            if not ticket.turn.done():
                self._take(ticket.share, next_flow)
                ticket.turn.set_result(None)

    def _next(self) -> _Flow | None:
        """Whose turn it is, if there is a place for it."""
        flows = [flow for flow in self._flows.values() if flow.waiting and self._has_place(flow)]
        return min(flows, key=lambda flow: (flow.start, flow.waiting[0].number), default=None)

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
