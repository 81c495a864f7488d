"""The queue in front of the engine: a limited number of requests run, and others wait for a slot.

Tenants (API keys, say) get tokens by their weight: start-time fair queueing. The requests of one tenant go
by priority, then in the order of their arrival. Batches get what all others leave free.
"""

import asyncio
import bisect
import contextlib
import itertools
import math
import mmap
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from cog_triton.errors import TritonOverloaded, TritonUnavailable

Outcome = Literal["admitted", "full", "late", "closed"]

# Said by ``close``.
STOPPING = "the server is being stopped; send the request again"
LONGEST_RETRY_SECONDS = 60.0
# While several tenants have requests, one slot in RESERVED is kept for tenants that have few.
RESERVED = 20
# Batches leave one slot in LEFT_FREE free, and those that other requests had lately. What they had is
# forgotten by half in HALF_LIFE_SECONDS.
LEFT_FREE = 50
HALF_LIFE_SECONDS = 10.0
# Between looks for slots that time or another process made free.
LOOK_SECONDS = 0.02
Clock = Callable[[], float]
# The rate is made of so many ends of requests.
_RATE_SAMPLES = 64
# Idle tenants that had more than their share.
_REMEMBERED_TENANTS = 256


@dataclass(frozen=True)
class Tenant:
    """The sender of requests, and its rank."""

    # Requests of one name share slots.
    name: str = ""
    # A tenant of weight 2 gets twice the tokens of one of weight 1 while both wait.
    weight: float = 1.0
    # Tokens that the request is expected to take.
    cost: float = 1.0
    # Among the tenant's requests; lower numbers come first.
    priority: int = 0
    # Whether it waits, however long, for a slot that nobody else wants.
    batch: bool = False


@dataclass(eq=False)
class Slot:
    """A request's place in the queue, and the right to run once ``granted`` is done."""

    tenant: Tenant = Tenant()
    # In the order of arrival.
    number: int = 0
    granted: asyncio.Future[None] = field(default_factory=asyncio.Future)
    # In seconds.
    waited: float = 0.0
    # Number of tokens, as its holder sets it.
    used: float | None = None


@dataclass
class _Flow:
    """A tenant's requests; ``start`` is the virtual time, in tokens by weight, of its next one."""

    start: float
    running: int = 0
    waiting: list[Slot] = field(default_factory=list)


class Lender:
    """The slots of several processes, each of which lends the others those that it does not need."""

    def __init__(self, file: str, number: int, processes: int, slots: int) -> None:
        """Begin as process ``number`` of ``processes`` that map a file; each brings ``slots`` slots."""
        with open(file, "a+b") as shared:
            shared.truncate(4 * processes)
            self._claims = memoryview(mmap.mmap(shared.fileno(), 0)).cast("I")
        self._number = number
        self._slots = slots * processes
        # A killed process of this number gave nothing back.
        self.claim(0)

    def claim(self, slots: int) -> int:
        """Claim slots, and return how many the others leave, which may be fewer."""
        # Written before the others' are read: two processes could take the same slots otherwise.
        self._claims[self._number] = slots
        return self._slots - sum(self._claims) + slots


class Admission:
    """Gives slots to requests of one event loop."""

    def __init__(
        self, max_running: int, max_waiting: int, timeout: float, clock: Clock = time.monotonic
    ) -> None:
        self.max_running = max_running
        self.max_waiting = max_waiting
        self.timeout = timeout
        # Requests that have a slot.
        self.running = 0
        # Requests that wait for one, without those of batches.
        self.waiting = 0
        # Why no request is let in any more.
        self.closed: str | None = None
        # Lends slots beyond ``max_running``.
        self.lender: Lender | None = None
        # Called with the outcome of each request and its seconds of waiting.
        self.observers: list[Callable[[Outcome, float], object]] = []
        self._clock = clock
        self._numbers = itertools.count()
        # Tasks of requests that run, until ``close`` ends them.
        self._tasks: dict[Slot, asyncio.Task[Any]] = {}
        # Of tenants with requests.
        self._flows: dict[str, _Flow] = {}
        # Starts of idle tenants that had more than their share.
        self._ahead: dict[str, float] = {}
        # Virtual time: the start of the request that got the last slot.
        self._now = 0.0
        # When requests ended while others waited.
        self._ends: deque[float] = deque(maxlen=_RATE_SAMPLES)
        self._waiting_batches: deque[Slot] = deque()
        self._running_batches = 0
        # Maximum number of requests that ran at once lately, without those of batches.
        self._peak = 0.0
        self._peak_time = 0.0
        self._look: asyncio.TimerHandle | None = None

    @contextlib.asynccontextmanager
    async def acquire(self, tenant: Tenant | None = None) -> AsyncIterator[Slot]:
        """Wait for a slot and hold it; enter and leave in one task.

        Raises TritonOverloaded if too many wait or for too long, TritonUnavailable after ``close``.
        """
        if self.closed is not None:
            self._observe("closed")
            raise TritonUnavailable(self.closed)
        task = asyncio.current_task()
        assert task is not None
        slot = Slot(tenant or Tenant(), next(self._numbers))
        self._tasks[slot] = task
        flow = self._queued(slot)
        self._hand_out()
        try:
            if flow is None:
                # A batch's request waits, however long.
                await asyncio.wait([slot.granted])
            else:
                await self._granted(slot, flow)
            yield slot
        except asyncio.CancelledError:
            if slot in self._tasks:
                # ``close`` did not cancel it.
                raise
            if not slot.granted.done():
                self._observe("closed")
            if sys.version_info >= (3, 11):
                # A task counts its cancellations.
                task.uncancel()
            raise TritonUnavailable(self.closed or "") from None
        finally:
            self._leave(slot, flow)

    def close(self, reason: str) -> None:
        """End all that run or wait, and let nobody in any more: each gets TritonUnavailable."""
        self.closed = reason
        while self._tasks:
            _, task = self._tasks.popitem()
            task.cancel()

    def _queued(self, slot: Slot) -> _Flow | None:
        """Put a request into its tenant's flow and return that; or put it among those of batches."""
        if slot.tenant.batch:
            self._waiting_batches.append(slot)
            return None
        name = slot.tenant.name
        flow = self._flows.get(name)
        if flow is None:
            flow = _Flow(self._ahead.pop(name, 0.0))
            self._flows[name] = flow
        if not flow.waiting:
            # An idle tenant saves nothing.
            flow.start = max(flow.start, self._now)
        bisect.insort(flow.waiting, slot, key=lambda slot: (slot.tenant.priority, slot.number))
        self.waiting += 1
        return flow

    def _is_full_for(self, flow: _Flow) -> bool:
        """Return whether too many wait, unless the tenant has no more than its even part of the queue.

        One tenant cannot fill the queue for the others; at most twice ``max_waiting`` wait.
        """
        even_part = self.max_waiting // len(self._flows)
        return self.waiting > self.max_waiting and len(flow.waiting) > even_part

    async def _granted(self, slot: Slot, flow: _Flow) -> None:
        """Wait for a slot, or raise TritonOverloaded."""
        if not slot.granted.done():
            if self._is_full_for(flow):
                self._observe("full")
                raise self._overloaded(
                    f"{self.running} requests are running and {self.waiting - 1} are waiting"
                )
            began = self._clock()
            # Not wait_for, which before Python 3.12 continues when it is cancelled as the slot comes.
            await asyncio.wait([slot.granted], timeout=self.timeout)
            slot.waited = self._clock() - began
        if not slot.granted.done():
            self._observe("late", slot.waited)
            raise self._overloaded(f"no slot became free within {self.timeout:g} s (QUEUE_TIMEOUT)")
        self._observe("admitted", slot.waited)

    def _leave(self, slot: Slot, flow: _Flow | None) -> None:
        """Give back what a request has: its slot, or its place in the queue."""
        self._tasks.pop(slot, None)
        has_slot = slot.granted.done()
        if has_slot:
            self.running -= 1
        if flow is None:
            self._leave_batches(slot, has_slot=has_slot)
        elif has_slot:
            flow.running -= 1
            self._settle(slot, flow)
        else:
            flow.waiting.remove(slot)
            self.waiting -= 1
        self._hand_out()
        # Only now: the slot that is kept for a tenant stays kept between two of its requests.
        if flow is not None and not flow.running and not flow.waiting:
            self._forget(slot.tenant.name, flow)

    def _leave_batches(self, slot: Slot, *, has_slot: bool) -> None:
        """Note that a request of a batch runs or waits no more."""
        if has_slot:
            self._running_batches -= 1
        else:
            self._waiting_batches.remove(slot)

    def _settle(self, slot: Slot, flow: _Flow) -> None:
        """Charge a tenant what a request took in place of what it was expected to, and note its end."""
        if slot.used is not None:
            flow.start += (slot.used - slot.tenant.cost) / slot.tenant.weight
        if self.waiting:
            self._ends.append(self._clock())
        else:
            # An idle server's rate says nothing.
            self._ends.clear()

    def _forget(self, name: str, flow: _Flow) -> None:
        """Forget a tenant without requests, unless it has had more than its share."""
        del self._flows[name]
        if not self._flows:
            self._ahead.clear()
        elif flow.start > self._now:
            self._ahead[name] = flow.start
            if len(self._ahead) > _REMEMBERED_TENANTS:
                oldest = next(iter(self._ahead))
                del self._ahead[oldest]

    def _hand_out(self) -> None:
        """Give the free slots to those that wait: to the tenants by their starts, then to batches."""
        self._hand_out_to_tenants()
        self._hand_out_to_batches()
        self._free(0)
        if self._look is not None:
            self._look.cancel()
        if self._waiting_batches or (self.lender and self.waiting):
            self._look = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._hand_out)

    def _hand_out_to_tenants(self) -> None:
        # A tenant that has all slots cannot be made to give one back.
        kept = self.max_running // RESERVED if len(self._flows) > 1 else 0
        while self.waiting:
            free = self._free(1)
            if free <= 0:
                return
            flows = [
                flow
                for flow in self._flows.values()
                if flow.waiting and (flow.running < kept or free > kept)
            ]
            if not flows:
                return
            flow = min(flows, key=lambda flow: (flow.start, flow.waiting[0].number))
            slot = flow.waiting.pop(0)
            self.waiting -= 1
            self.running += 1
            flow.running += 1
            self._now = max(flow.start, self._now)
            flow.start += slot.tenant.cost / slot.tenant.weight
            slot.granted.set_result(None)

    def _hand_out_to_batches(self) -> None:
        free = min(self.max_running - self.running, self._free(1)) - self._left_free()
        while self._waiting_batches and free > 0 and not self.waiting:
            slot = self._waiting_batches.popleft()
            self.running += 1
            self._running_batches += 1
            free -= 1
            slot.granted.set_result(None)

    def _free(self, more: int) -> int:
        """Return how many slots are free, and claim what is needed to take ``more`` of them."""
        slots = self.max_running
        if self.lender is not None:
            needed = max(self.running + more, min(slots, self.running + self.waiting))
            slots = self.lender.claim(needed)
        return slots - self.running

    def _left_free(self) -> int:
        """Return how many slots batches leave free: a few, and what others had lately and have not now.

        Notes what others have now as the peak, once it is above what is left of the last one.
        """
        others = self.running - self._running_batches
        now = self._clock()
        faded: float = self._peak * 0.5 ** ((now - self._peak_time) / HALF_LIFE_SECONDS)
        if others >= faded:
            self._peak = others
            self._peak_time = now
        few = min(self.max_running - 1, max(1, self.max_running // LEFT_FREE))
        return few + max(0, round(faded) - others)

    def _observe(self, outcome: Outcome, seconds: float = 0.0) -> None:
        for observe in self.observers:
            observe(outcome, seconds)

    def _overloaded(self, what: str) -> TritonOverloaded:
        """Estimate when those that wait will have slots, from when requests ended."""
        seconds = 1.0
        ends = self._ends
        if len(ends) > 1 and ends[-1] > ends[0]:
            rate = (len(ends) - 1) / (ends[-1] - ends[0])
            seconds = min(max(math.ceil(self.waiting / rate), 1.0), LONGEST_RETRY_SECONDS)
        return TritonOverloaded(f"{what}; try again in {seconds:g} s", retry_after=seconds)
