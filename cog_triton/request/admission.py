"""The queue in front of the engine: so many requests run, so many wait for a slot.

Tenants (API keys, say) get tokens by their weight: start-time fair queueing. A tenant's own requests go by
priority, then in the order of their arrival. Batches get what all others leave free.
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

STOPPING = "the server is being stopped; send the request again"  # for ``close``
LONGEST_RETRY_SECONDS = 60.0
# While several tenants have requests, one slot in so many is kept for tenants that have few.
RESERVED = 20
# Batches leave one slot in so many free, and those that other requests had more of lately.
LEFT_FREE = 50
HALF_LIFE_SECONDS = 10.0  # of how many they had
LOOK_SECONDS = 0.02  # between looks for slots that time or another process made free
Clock = Callable[[], float]
_RATE_SAMPLES = 64
_REMEMBERED = 256  # idle tenants


@dataclass(frozen=True)
class Tenant:
    """The sender of requests, and its rank."""

    name: str = ""  # requests of one name share slots
    weight: float = 1.0  # one of weight 2 gets twice the tokens of one of 1 while both wait
    cost: float = 1.0  # tokens that the request is expected to take
    priority: int = 0  # among the tenant's requests; lower ones come first
    batch: bool = False  # waits, however long, for a slot that nobody else wants


@dataclass(eq=False)
class Slot:
    """A request's place in the queue, and the right to run once ``granted`` is done."""

    tenant: Tenant = Tenant()
    number: int = 0  # in the order of arrival
    granted: asyncio.Future[None] = field(default_factory=asyncio.Future)
    waited: float = 0.0  # seconds
    used: float | None = None  # tokens, as its holder sets them


@dataclass
class _Flow:
    """A tenant's requests; ``start`` is the virtual time, in tokens by weight, of its next one."""

    start: float
    running: int = 0
    waiting: list[Slot] = field(default_factory=list)


class Lender:
    """The slots of several processes, each of which lends the others those that it does not need."""

    def __init__(self, file: str, number: int, processes: int, slots: int) -> None:
        """Begin as one of some processes that map a file; each of them brings so many ``slots``."""
        with open(file, "a+b") as shared:
            shared.truncate(4 * processes)
            self._claims = memoryview(mmap.mmap(shared.fileno(), 0)).cast("I")
        self._number, self._slots = number, slots * processes
        self.claim(0)  # a killed one of this number gave nothing back

    def claim(self, slots: int) -> int:
        """Claim so many slots, and return how many the others leave, which may be fewer."""
        self._claims[self._number] = slots  # before it reads: two could take the same otherwise
        return self._slots - sum(self._claims) + slots


class Admission:
    """Gives slots to requests of one event loop."""

    def __init__(
        self, max_running: int, max_waiting: int, timeout: float, clock: Clock = time.monotonic
    ) -> None:
        self.max_running, self.max_waiting, self.timeout = max_running, max_waiting, timeout
        self.running = self.waiting = 0  # requests that have a slot, and that wait for one
        self.closed: str | None = None  # why no request is let in any more
        self.lender: Lender | None = None  # of whom more than ``max_running`` can be had
        self._look: asyncio.TimerHandle | None = None
        # Called with the outcome of each request and its seconds of waiting.
        self.observers: list[Callable[[Outcome, float], object]] = []
        self._clock, self._numbers = clock, itertools.count()
        self._tasks: dict[Slot, asyncio.Task[Any]] = {}  # until ``close`` ends them
        self._flows: dict[str, _Flow] = {}  # those with requests
        self._ahead: dict[str, float] = {}  # starts of idle ones that had more than their share
        self._batches: deque[Slot] = deque()  # those of batches, that wait
        self._batched = 0  # and that run
        self._peak, self._peaked = 0.0, 0.0  # most others that ran at once, and when that was
        self._now = 0.0  # virtual time: the start of the request that got the last slot
        self._ends: deque[float] = deque(maxlen=_RATE_SAMPLES)  # of requests, while others waited

    @contextlib.asynccontextmanager
    async def acquire(self, tenant: Tenant | None = None) -> AsyncIterator[Slot]:
        """Wait for a slot and hold it; enter and leave in one task.

        Raises TritonOverloaded if too many wait or for too long, TritonUnavailable after ``close``.
        """
        if self.closed is not None:
            self._observe("closed")
            raise TritonUnavailable(self.closed)
        task, slot = asyncio.current_task(), Slot(tenant or Tenant(), next(self._numbers))
        assert task is not None
        self._tasks[slot] = task
        flow = self._queued(slot)
        self._hand_out()
        try:
            await (self._granted(slot, flow) if flow else asyncio.wait([slot.granted]))
            yield slot
        except asyncio.CancelledError:
            if slot in self._tasks:  # ``close`` did not cancel it
                raise
            if not slot.granted.done():
                self._observe("closed")
            if sys.version_info >= (3, 11):  # which counts them
                task.uncancel()
            raise TritonUnavailable(self.closed or "") from None
        finally:
            self._leave(slot, flow)

    def close(self, reason: str) -> None:
        """End all that run or wait, and let nobody in any more: each gets TritonUnavailable."""
        self.closed = reason
        while self._tasks:
            self._tasks.popitem()[1].cancel()

    def _queued(self, slot: Slot) -> _Flow | None:
        """Put a request into its tenant's flow, or among those of batches."""
        if slot.tenant.batch:
            self._batches.append(slot)
            return None
        if (flow := self._flows.get(name := slot.tenant.name)) is None:
            flow = self._flows[name] = _Flow(self._ahead.pop(name, 0.0))
        if not flow.waiting:  # an idle tenant saves nothing
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
        self._observe("admitted" if slot.granted.done() else "late", slot.waited)
        if not slot.granted.done():
            raise self._overloaded(f"no slot became free within {self.timeout:g} s (QUEUE_TIMEOUT)")

    def _leave(self, slot: Slot, flow: _Flow | None) -> None:
        self._tasks.pop(slot, None)
        tenant, had = slot.tenant, slot.granted.done()
        self.running -= had
        if flow is None:
            self._batched -= had
            if not had:
                self._batches.remove(slot)
        elif had:
            flow.running -= 1
            if slot.used is not None:
                flow.start += (slot.used - tenant.cost) / tenant.weight
            if self.waiting:
                self._ends.append(self._clock())
            else:
                self._ends.clear()  # an idle server's rate says nothing
        else:
            self.waiting -= 1
            flow.waiting.remove(slot)
        self._hand_out()
        # Only now: the slot that is kept for a tenant stays kept between two of its requests.
        if flow is not None and not flow.running and not flow.waiting:
            del self._flows[tenant.name]
            if not self._flows:
                self._ahead.clear()
            elif flow.start > self._now:  # it has had more than its share
                self._ahead[tenant.name] = flow.start
                if len(self._ahead) > _REMEMBERED:
                    del self._ahead[next(iter(self._ahead))]

    def _hand_out(self) -> None:
        """Give the free slots to those that wait, by the tenants' starts."""
        # A tenant that has all slots cannot be made to give one back.
        kept = self.max_running // RESERVED if len(self._flows) > 1 else 0
        while self.waiting and (free := self._free(1)) > 0:
            flows = [own for own in self._flows.values() if own.waiting]
            flows = [own for own in flows if own.running < kept or free > kept]
            if not flows:
                break
            flow = min(flows, key=lambda flow: (flow.start, flow.waiting[0].number))
            slot = flow.waiting.pop(0)
            self.waiting -= 1
            self.running += 1
            flow.running += 1
            self._now = max(flow.start, self._now)
            flow.start += slot.tenant.cost / slot.tenant.weight
            slot.granted.set_result(None)
        free = min(self.max_running - self.running, self._free(1)) - self._left_free()
        while self._batches and free > 0 and not self.waiting:
            self.running, self._batched, free = self.running + 1, self._batched + 1, free - 1
            self._batches.popleft().granted.set_result(None)
        self._free(0)
        if self._look is not None:
            self._look.cancel()
        if self._batches or (self.lender and self.waiting):
            self._look = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._hand_out)

    def _free(self, more: int) -> int:
        """Return how many slots are free, and claim what is needed to take so many ``more``."""
        own, running = self.max_running, self.running
        if self.lender is not None:
            own = self.lender.claim(max(running + more, min(own, running + self.waiting)))
        return own - running

    def _left_free(self) -> int:
        """Return how many slots batches leave free: a few, and what others had more than now."""
        others, now = self.running - self._batched, self._clock()
        faded: float = self._peak * 0.5 ** ((now - self._peaked) / HALF_LIFE_SECONDS)
        if others >= faded:
            self._peak, self._peaked = others, now
        few = min(self.max_running - 1, max(1, self.max_running // LEFT_FREE))
        return few + max(0, round(faded) - others)

    def _observe(self, outcome: Outcome, seconds: float = 0.0) -> None:
        for observe in self.observers:
            observe(outcome, seconds)

    def _overloaded(self, what: str) -> TritonOverloaded:
        """Estimate when those that wait will have slots, from when requests ended."""
        seconds, ends = 1.0, self._ends
        if len(ends) > 1 and ends[-1] > ends[0]:
            rate = (len(ends) - 1) / (ends[-1] - ends[0])
            seconds = min(max(math.ceil(self.waiting / rate), 1.0), LONGEST_RETRY_SECONDS)
        return TritonOverloaded(f"{what}; try again in {seconds:g} s", retry_after=seconds)
