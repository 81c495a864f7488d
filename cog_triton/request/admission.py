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
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from cog_triton.errors import TritonOverloaded, TritonUnavailable

Outcome = Literal["admitted", "full", "late", "closed"]

STOPPING = "the server is being stopped; send the request again"
"""The reason for ``close`` when the process ends."""
LONGEST_RETRY_SECONDS = 60.0
RESERVED = 20
"""While several tenants have requests, one slot in so many is kept for tenants that have few."""
_RATE_SAMPLES = 64
_REMEMBERED = 256  # idle tenants


@dataclass(frozen=True)
class Tenant:
    """The sender of requests, and its rank."""

    name: str = ""  # requests of one name share slots
    weight: float = 1.0  # one of weight 2 gets twice the tokens of one of 1 while both wait
    cost: float = 1.0  # tokens that the request is expected to take
    priority: int = 0  # among the tenant's requests; lower ones come first


@dataclass
class Slot:
    """The right to run, after so many seconds; its holder sets the tokens that it ``used``."""

    waited: float = 0.0
    used: float | None = None


@dataclass
class _Flow:
    """A tenant's requests; ``start`` is the virtual time, in tokens by weight, of its next one."""

    start: float
    running: int = 0
    waiting: list[_Ticket] = field(default_factory=list)


@dataclass(order=True)
class _Ticket:
    """A request, which has a slot once ``granted`` is done."""

    priority: int
    number: int
    tenant: Tenant = field(compare=False)
    flow: _Flow = field(compare=False)
    task: asyncio.Task[Any] = field(compare=False)
    granted: asyncio.Future[None] = field(compare=False)


class Admission:
    """Gives slots to requests of one event loop.

    Attributes:
        running: requests that have a slot.
        waiting: requests that wait for one.
        closed: why no request is let in any more; None while they are.
        observers: called with the outcome of each request and its seconds of waiting.
    """

    def __init__(
        self,
        max_running: int,
        max_waiting: int,
        timeout: float,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.running = self.waiting = 0
        self.closed: str | None = None
        self.observers: list[Callable[[Outcome, float], object]] = []
        self._max_running, self._max_waiting, self._timeout = max_running, max_waiting, timeout
        self._clock = clock
        self._numbers = itertools.count()
        self._tickets: dict[int, _Ticket] = {}  # by number, until ``close`` ends them
        self._flows: dict[str, _Flow] = {}  # those with requests
        self._ahead: dict[str, float] = {}  # starts of idle ones that had more than their share
        self._now = 0.0  # virtual time: the start of the request that got the last slot
        self._ends: deque[float] = deque(maxlen=_RATE_SAMPLES)  # of requests, while others waited

    @contextlib.asynccontextmanager
    async def acquire(self, tenant: Tenant | None = None) -> AsyncIterator[Slot]:
        """Wait for a slot and hold it. Enter and leave in one task.

        Raises:
            TritonOverloaded: too many wait, or the wait was too long; it says when to try again.
            TritonUnavailable: ``close`` was called, before or while the slot was held.
        """
        ticket, slot = self._line_up(tenant or Tenant()), Slot()
        try:
            slot.waited = await self._granted(ticket)
            yield slot
        except asyncio.CancelledError:
            if ticket.number in self._tickets:  # ``close`` did not cancel it
                raise
            if sys.version_info >= (3, 11):  # which counts them
                ticket.task.uncancel()
            raise TritonUnavailable(self.closed or "") from None
        finally:
            self._leave(ticket, slot)

    def close(self, reason: str) -> None:
        """End all that run or wait, and let nobody in any more: each gets TritonUnavailable."""
        self.closed = reason
        while self._tickets:
            self._tickets.popitem()[1].task.cancel()

    def _line_up(self, tenant: Tenant) -> _Ticket:
        if self.closed is not None:
            self._observe("closed")
            raise TritonUnavailable(self.closed)
        task = asyncio.current_task()
        assert task is not None
        flow = self._flows.get(tenant.name)
        if flow is None:
            flow = self._flows[tenant.name] = _Flow(self._ahead.pop(tenant.name, 0.0))
        if not flow.waiting:  # an idle tenant saves nothing
            flow.start = max(flow.start, self._now)
        granted = asyncio.get_running_loop().create_future()
        ticket = _Ticket(tenant.priority, next(self._numbers), tenant, flow, task, granted)
        self._tickets[ticket.number] = ticket
        bisect.insort(flow.waiting, ticket)
        self.waiting += 1
        self._hand_out()
        return ticket

    async def _granted(self, ticket: _Ticket) -> float:
        """Wait until a ticket has a slot; returns the seconds."""
        if ticket.granted.done():
            self._observe("admitted")
            return 0.0
        if self.waiting > self._max_waiting:
            self._observe("full")
            raise self._overloaded(f"{self.running} requests run and {self.waiting - 1} wait")
        began = self._clock()
        try:
            # Not wait_for, which before Python 3.12 continues when it is cancelled as the slot comes.
            await asyncio.wait([ticket.granted], timeout=self._timeout)
        except asyncio.CancelledError:
            if ticket.number not in self._tickets:
                self._observe("closed", self._clock() - began)
            raise
        waited = self._clock() - began
        if not ticket.granted.done():
            self._observe("late", waited)
            raise self._overloaded(f"no place became free in {self._timeout:g} s (QUEUE_TIMEOUT)")
        self._observe("admitted", waited)
        return waited

    def _leave(self, ticket: _Ticket, slot: Slot) -> None:
        self._tickets.pop(ticket.number, None)
        flow, tenant = ticket.flow, ticket.tenant
        if ticket.granted.done():
            self.running -= 1
            flow.running -= 1
            if slot.used is not None:
                flow.start += (slot.used - tenant.cost) / tenant.weight
            if self.waiting:
                self._ends.append(self._clock())
            else:
                self._ends.clear()  # an idle server's rate says nothing
        else:
            self.waiting -= 1
            flow.waiting.remove(ticket)
        self._hand_out()
        # Only now: the slot that is kept for a tenant stays kept between two of its requests.
        if not flow.running and not flow.waiting:
            self._forget(tenant.name, flow)

    def _forget(self, name: str, flow: _Flow) -> None:
        """Drop a tenant without requests; remember how far it is ahead of the others."""
        del self._flows[name]
        if not self._flows:
            self._ahead.clear()
        elif flow.start > self._now:
            self._ahead[name] = flow.start
            if len(self._ahead) > _REMEMBERED:
                del self._ahead[next(iter(self._ahead))]

    def _hand_out(self) -> None:
        """Give the free slots to those that wait, by the tenants' starts."""
        while flows := [f for f in self._flows.values() if f.waiting and self._has_slot(f)]:
            flow = min(flows, key=lambda flow: (flow.start, flow.waiting[0].number))
            ticket = flow.waiting.pop(0)
            self.waiting -= 1
            self.running += 1
            flow.running += 1
            self._now = max(flow.start, self._now)
            flow.start += ticket.tenant.cost / ticket.tenant.weight
            ticket.granted.set_result(None)

    def _has_slot(self, flow: _Flow) -> bool:
        """Say whether a tenant may take a slot. Who has all of them cannot be made to give one back."""
        kept = self._max_running // RESERVED if len(self._flows) > 1 else 0
        free = self._max_running - self.running
        return free > (0 if flow.running < kept else kept)

    def _observe(self, outcome: Outcome, seconds: float = 0.0) -> None:
        for observe in self.observers:
            observe(outcome, seconds)

    def _overloaded(self, what: str) -> TritonOverloaded:
        seconds = retry_seconds(self.waiting, self._ends)
        return TritonOverloaded(f"{what}; try again in {seconds:g} s", retry_after=seconds)


def retry_seconds(waiting: int, ends: deque[float]) -> float:
    """Estimate the whole seconds, 1 to 60, until those that wait have slots, by when requests ended."""
    if len(ends) < 2 or ends[-1] <= ends[0]:
        return 1.0
    rate = (len(ends) - 1) / (ends[-1] - ends[0])
    return min(max(math.ceil(waiting / rate), 1.0), LONGEST_RETRY_SECONDS)
