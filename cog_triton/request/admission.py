"""The queue in front of the engine: so many requests run, so many wait for a slot, in order and in time.

Slots go to tenants (API keys, say) so that each gets tokens by its weight: start-time fair queueing. A
tenant's own requests go by priority, then in the order of their arrival.
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
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from cog_triton.errors import CogTritonError, TritonOverloaded, TritonUnavailable

Outcome = Literal["admitted", "full", "late", "closed"]

STOPPING = "the server is being stopped; send the request again"
"""The reason for ``close`` when the process ends."""
LONGEST_RETRY_SECONDS = 60.0
RESERVED = 20
"""While several tenants have requests, one slot in so many is kept for tenants that have few."""
_RATE_SAMPLES = 64
_REMEMBERED = 256  # idle tenants


@dataclass(frozen=True)
class Bounds:
    """The most requests that run and that wait at once, and the longest wait in seconds."""

    running: int
    waiting: int
    seconds: float


@dataclass(frozen=True)
class Tenant:
    """The sender of requests, and its rank.

    Attributes:
        name: requests of one name share slots; "" where nobody is told apart.
        weight: a tenant of weight 2 gets twice the tokens of one of weight 1 while both wait.
        cost: tokens that the request is expected to take.
        priority: among the tenant's requests; lower ones come first.
    """

    name: str = ""
    weight: float = 1.0
    cost: float = 1.0
    priority: int = 0


@dataclass
class Slot:
    """The right to run, after so many seconds; its holder sets the tokens that it ``used``."""

    waited: float = 0.0
    used: float | None = None


@dataclass(order=True)
class _Ticket:
    priority: int
    number: int
    tenant: Tenant = field(compare=False)
    granted: asyncio.Future[None] = field(compare=False)

    def refuse(self, error: CogTritonError) -> None:
        if not self.granted.done():
            self.granted.set_exception(error)


@dataclass
class _Flow:
    """A tenant's requests; ``start`` is the virtual time, in tokens by weight, of its next one."""

    start: float = 0.0
    running: int = 0
    waiting: list[_Ticket] = field(default_factory=list)


class Admission:
    """Gives slots to requests of one event loop.

    Attributes:
        running: requests that have a slot.
        observers: called with the outcome of each request and its seconds of waiting.
    """

    def __init__(self, bounds: Bounds, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._bounds = bounds
        self.observers: list[Callable[[Outcome, float], object]] = []
        self._clock = clock
        self._numbers = itertools.count()
        self._flows: dict[str, _Flow] = {}  # those with requests
        self._ahead: dict[str, float] = {}  # starts of idle ones that had more than their share
        self._now = 0.0  # virtual time: the start of the request that got the last slot
        self._ends: deque[float] = deque(maxlen=_RATE_SAMPLES)  # of requests, while others waited
        self._tasks: set[asyncio.Task[object]] = set()
        self._closed: str | None = None
        self.running = 0

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot."""
        return sum(len(flow.waiting) for flow in self._flows.values())

    @property
    def closed(self) -> bool:
        return self._closed is not None

    @contextlib.asynccontextmanager
    async def acquire(self, tenant: Tenant = Tenant()) -> AsyncIterator[Slot]:
        """Wait for a slot and hold it. Enter and leave in one task.

        Raises:
            TritonOverloaded: too many wait, or the wait was too long; it says when to try again.
            TritonUnavailable: ``close`` was called, before or while the slot was held.
        """
        flow = self._flows.setdefault(tenant.name, _Flow(self._ahead.pop(tenant.name, 0.0)))
        try:
            slot = Slot(await self._enter(tenant, flow))
            try:
                with self._ended_by_close():
                    yield slot
            finally:
                if slot.used is not None:
                    flow.start += (slot.used - tenant.cost) / tenant.weight
                self._release(flow)
        finally:
            self._forget_idle(tenant.name, flow)

    def close(self, reason: str) -> None:
        """End all that run or wait, and let nobody in any more: each gets TritonUnavailable."""
        self._closed = reason
        for flow in self._flows.values():
            for ticket in flow.waiting:
                ticket.refuse(TritonUnavailable(reason))
        while self._tasks:
            self._tasks.pop().cancel()

    async def _enter(self, tenant: Tenant, flow: _Flow) -> float:
        """Take a slot; returns the seconds of waiting."""
        if self._closed is not None:
            self._observe("closed", 0.0)
            raise TritonUnavailable(self._closed)
        if not flow.waiting:  # an idle tenant saves nothing
            flow.start = max(flow.start, self._now)
        if self._has_slot(flow):
            self._take(tenant, flow)
            self._observe("admitted", 0.0)
            return 0.0
        if self.waiting >= self._bounds.waiting:
            self._observe("full", 0.0)
            raise self._overloaded(f"{self.running} requests run and {self.waiting} wait")
        began = self._clock()
        try:
            await self._granted(tenant, flow)
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

    async def _granted(self, tenant: Tenant, flow: _Flow) -> None:
        loop = asyncio.get_running_loop()
        ticket = _Ticket(tenant.priority, next(self._numbers), tenant, loop.create_future())
        bisect.insort(flow.waiting, ticket)
        late = f"no place became free in {self._bounds.seconds:g} s (QUEUE_TIMEOUT)"
        timer = loop.call_later(self._bounds.seconds, lambda: ticket.refuse(self._overloaded(late)))
        try:
            await ticket.granted
        except asyncio.CancelledError:
            granted = ticket.granted
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                self._release(flow)  # the slot came in the same moment
            raise
        finally:
            timer.cancel()
            with contextlib.suppress(ValueError):  # it has been granted
                flow.waiting.remove(ticket)

    @contextlib.contextmanager
    def _ended_by_close(self) -> Iterator[None]:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if task in self._tasks:  # ``close`` did not cancel it
                raise
            if sys.version_info >= (3, 11):  # which counts them
                task.uncancel()
            raise TritonUnavailable(self._closed or "") from None
        finally:
            self._tasks.discard(task)

    def _has_slot(self, flow: _Flow) -> bool:
        """Say whether a tenant may take a slot. Who has all of them cannot be made to give one back."""
        kept = self._bounds.running // RESERVED if len(self._flows) > 1 else 0
        free = self._bounds.running - self.running
        return free > (0 if flow.running < kept else kept)

    def _take(self, tenant: Tenant, flow: _Flow) -> None:
        self.running += 1
        flow.running += 1
        self._now = max(flow.start, self._now)
        flow.start += tenant.cost / tenant.weight

    def _release(self, flow: _Flow) -> None:
        self.running -= 1
        flow.running -= 1
        if not self.waiting:
            self._ends.clear()  # an idle server's rate says nothing
            return
        self._ends.append(self._clock())
        while flows := [f for f in self._flows.values() if f.waiting and self._has_slot(f)]:
            chosen = min(flows, key=lambda flow: (flow.start, flow.waiting[0].number))
            ticket = chosen.waiting.pop(0)
            if not ticket.granted.done():
                self._take(ticket.tenant, chosen)
                ticket.granted.set_result(None)

    def _forget_idle(self, name: str, flow: _Flow) -> None:
        """Drop a flow without requests; remember how far it is ahead of the others."""
        if flow.running or flow.waiting or self._flows.get(name) is not flow:
            return
        del self._flows[name]
        if not self._flows:
            self._ahead.clear()
        elif flow.start > self._now:
            self._ahead[name] = flow.start
            if len(self._ahead) > _REMEMBERED:
                del self._ahead[next(iter(self._ahead))]

    def _overloaded(self, what: str) -> TritonOverloaded:
        seconds = retry_seconds(self.waiting, self._ends)
        return TritonOverloaded(f"{what}; try again in {seconds:g} s", retry_after=seconds)


def retry_seconds(waiting: int, ends: deque[float]) -> float:
    """Estimate the whole seconds, 1 to 60, until those that wait have slots, by when requests ended."""
    if len(ends) < 2 or ends[-1] <= ends[0]:
        return 1.0
    rate = (len(ends) - 1) / (ends[-1] - ends[0])
    return min(max(math.ceil(waiting / rate), 1.0), LONGEST_RETRY_SECONDS)
