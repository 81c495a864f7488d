"""The queue in front of the engine, without one."""

import asyncio
import contextlib
import itertools
import random
import tracemalloc
from pathlib import Path
from typing import Any

import anyio
import pytest

from cog_triton.errors import TritonOverloaded, TritonUnavailable
from cog_triton.request import admission
from cog_triton.request.admission import Admission, Lender, Tenant

pytestmark = pytest.mark.anyio


async def settle() -> None:
    """Let every task run that can."""
    for _ in range(10):
        await asyncio.sleep(0)


class Guests:
    """Requests that hold a place until they are made to leave it, on a clock that stands still."""

    def __init__(self, running: int = 1, waiting: int = 9, seconds: float = 60) -> None:
        self.now = 0.0
        self.queue = Admission(running, waiting, seconds, clock=lambda: self.now)
        self.seen: list[tuple[str, float]] = []
        self.queue.observers.append(lambda *outcome: self.seen.append(outcome))
        self._leave: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[Any]] = {}
        self.admitted: list[str] = []

    @property
    def counts(self) -> tuple[int, int]:
        return self.queue.running, self.queue.waiting

    async def come(self, *names: str, priority: int = 0, batch: bool = False) -> None:
        for name in names:
            self._leave[name] = asyncio.Event()
            tenant = Tenant(priority=priority, batch=batch)
            self.tasks[name] = asyncio.create_task(self._stay(name, tenant))
        await settle()

    async def leave(self, *names: str) -> None:
        for name in names:
            self._leave[name].set()
            await self.tasks[name]
            await settle()

    async def reach(self, *counts: int) -> None:
        with anyio.fail_after(60):
            while self.counts != counts:
                await asyncio.sleep(admission.LOOK_SECONDS)

    async def _stay(self, name: str, tenant: Tenant) -> None:
        async with self.queue.acquire(tenant):
            self.admitted.append(name)
            await self._leave[name].wait()


async def test_places_go_to_those_that_came_first() -> None:
    guests = Guests(running=2)
    await guests.come("a", "b", "c", "d")
    assert (guests.admitted, guests.counts) == (["a", "b"], (2, 2))
    guests.now = 4.0
    await guests.leave("b")
    assert (guests.admitted, guests.counts) == (["a", "b", "c"], (2, 1))
    await guests.leave("a", "c", "d")
    assert (guests.admitted[-1], guests.counts) == ("d", (0, 0))
    assert guests.seen == [("admitted", 0.0)] * 2 + [("admitted", 4.0)] * 2


async def test_a_lower_priority_comes_first() -> None:
    guests = Guests()
    await guests.come("a")
    await guests.come("b", "c", priority=2)
    await guests.come("d", priority=1)
    await guests.leave("a", "d", "b", "c")
    assert guests.admitted == ["a", "d", "b", "c"]


async def test_batches_get_what_others_leave_free() -> None:
    guests = Guests(running=4, waiting=1)
    await guests.come("A", "B", "C", "D", "E", "F", batch=True)
    assert (guests.admitted, guests.counts) == (["A", "B", "C"], (3, 0)), "one is left free"
    await guests.come("a", "b")
    assert (guests.admitted[3:], guests.counts) == (["a"], (4, 1))
    await guests.leave("A")
    assert guests.admitted[4:] == ["b"], "who waits goes before every batch"
    await guests.leave("a", "b")
    assert guests.admitted[5:] == [], "as many are left free as others had lately"
    guests.now = admission.HALF_LIFE_SECONDS
    await guests.leave("B", "C")
    assert guests.admitted[5:] == ["D", "E"]
    guests.tasks["F"].cancel()
    await settle()
    await guests.leave("D", "E")
    assert guests.counts == (0, 0)
    assert [outcome for outcome, _ in guests.seen] == ["admitted"] * 2, "of others alone"


async def test_a_batch_begins_once_others_had_enough_time_to_come_again() -> None:
    guests = Guests(running=2)
    await guests.come("a", "b")
    await guests.come("A", batch=True)
    await guests.leave("a", "b")
    assert guests.counts == (0, 0)
    guests.now = admission.HALF_LIFE_SECONDS * 3
    await asyncio.wait_for(guests.leave("A"), 60)


async def test_a_batch_that_waits_ends_when_the_queue_closes() -> None:
    guests = Guests(running=2)
    await guests.come("A", "B", batch=True)
    guests.queue.close("closed")
    for name in "AB":
        with pytest.raises(TritonUnavailable, match="closed"):
            await guests.tasks[name]
    assert guests.counts == (0, 0)


async def test_beyond_the_bound_a_request_learns_when_to_come_again() -> None:
    guests = Guests(waiting=3)
    names = iter("abcdefghijklmnop")
    await guests.come(*itertools.islice(names, 4))

    async def refused() -> TritonOverloaded:
        name = next(names)
        await guests.come(name)
        with pytest.raises(
            TritonOverloaded, match="1 requests are running and 3 are waiting"
        ) as caught:
            await guests.tasks[name]
        return caught.value

    assert (await refused()).retry_after == 1
    for now, after in ((0, 1), (0, 1), (4, 8), (1000, 60)):  # of those that ended, by the clock
        guests.now = now
        await guests.leave(guests.admitted[-1])
        await guests.come(next(names))
        error = await refused()
        assert f"try again in {error.retry_after:g} s" in str(error)
        assert error.retry_after == after
        assert error.retryable


async def test_a_wait_has_an_end() -> None:
    guests = Guests(seconds=0.01)
    await guests.come("a", "b")
    with pytest.raises(TritonOverloaded, match=r"no slot became free within 0.01 s.*try again"):
        await guests.tasks["b"]
    await guests.leave("a")
    assert guests.counts == (0, 0)
    assert [outcome for outcome, _ in guests.seen] == ["admitted", "late"]


async def test_one_that_is_cancelled_takes_no_place() -> None:
    guests = Guests()
    await guests.come("a", "b", "c", "d")
    guests.tasks["b"].cancel()  # while it waits
    await settle()
    assert guests.counts == (1, 2)
    guests._leave["a"].set()
    await guests.tasks["a"]
    guests.tasks["c"].cancel()  # as its turn comes
    await settle()
    assert guests.admitted == ["a", "d"]
    guests.tasks["d"].cancel()  # while it runs, and not with an error of ours
    with pytest.raises(asyncio.CancelledError):
        await guests.tasks["d"]
    assert guests.counts == (0, 0)


async def test_closing_ends_those_that_run_and_those_that_wait_with_an_error_to_try_again() -> None:
    guests = Guests()
    await guests.come("a", "b")
    guests.queue.close("the server is being stopped")
    await guests.come("c")
    for task in guests.tasks.values():
        with pytest.raises(TritonUnavailable, match="is being stopped") as ended:
            await task
        assert ended.value.retryable
    assert guests.counts == (0, 0)


@pytest.mark.parametrize("seed", range(10))
async def test_no_place_is_lost_in_a_storm_of_cancels(seed: int) -> None:
    dice = random.Random(seed)
    queue = Admission(dice.choice([1, 3]), 100, dice.choice([0.01, 60]))
    most = 0

    async def stay() -> None:
        nonlocal most
        async with queue.acquire(Tenant(priority=dice.choice([0, 1]))):
            most = max(most, queue.running)
            await asyncio.sleep(dice.choice([0, 0.001]))

    tasks = [asyncio.create_task(stay()) for _ in range(100)]
    for _ in range(60):
        dice.choice(tasks).cancel()
        await asyncio.sleep(dice.choice([0, 0.001]))
        if dice.random() < 0.01:
            queue.close("closed")
    ends = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
    expected = (asyncio.CancelledError, TritonOverloaded, TritonUnavailable)
    assert all(end is None or isinstance(end, expected) for end in ends)
    assert (queue.running, queue.waiting) == (0, 0)
    assert most == queue.max_running


async def test_a_process_lends_what_it_does_not_need(tmp_path: Path) -> None:
    here, there = pair = Guests(running=4), Guests(running=4)
    for number, guests in enumerate(pair):
        guests.queue.lender = Lender(str(tmp_path / "slots"), number, 2, 4)
    await here.come(*"abcdefg")
    await there.come("A")
    await here.come("h")
    assert (here.counts, there.counts) == ((7, 1), (1, 0)), "as many run as both have"
    await there.come("B", "C")
    await here.leave("a", "b")
    await there.reach(3, 0)
    assert here.counts == (5, 1), "a process's own slots come before what it lends"
    await there.come("D")
    await there.come("E", batch=True)
    await here.leave("c")
    await there.reach(4, 0)
    await here.leave("d")
    assert (here.counts, there.counts) == ((4, 0), (4, 0)), "a batch has nothing lent"
    there.tasks["E"].cancel()
    await settle()
    Lender(str(tmp_path / "slots"), 1, 2, 4)  # in the place of one that was killed
    await here.come("i")
    assert here.counts == (5, 0)


# Places by weight, by the event loop's turns; tests/integration/test_openai_operation.py has a hog


async def shares(
    places: int, *streams: tuple[Tenant, int, int], turns: int = 30_000
) -> dict[str, float]:
    """What tenants get who send one request after another: the tokens of each, and how many do."""
    queue, shares = Admission(places, 1000, 1e9), dict[str, float]()

    async def send(tenant: Tenant, tokens: int) -> None:
        while True:
            async with queue.acquire(tenant) as slot:
                for _ in range(tokens):
                    await asyncio.sleep(0)
                slot.used = tokens
                shares[tenant.name] = shares.get(tenant.name, 0) + tokens

    senders = [send(tenant, tokens) for tenant, tokens, count in streams for _ in range(count)]
    tasks = [asyncio.create_task(sender) for sender in senders]
    for _ in range(turns):
        await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return shares


async def test_tokens_go_by_weight_whatever_was_expected() -> None:
    a, b, c = Tenant("a", cost=100), Tenant("b", cost=100), Tenant("c", 2.0, cost=100)
    tokens = await shares(8, (a, 40, 20), (b, 160, 20), (c, 40, 20), turns=10_000)
    assert tokens["b"] == pytest.approx(tokens["a"], rel=0.1)
    assert tokens["c"] == pytest.approx(2 * tokens["a"], rel=0.1)


async def test_one_that_asks_one_by_one_pays_for_what_it_had() -> None:
    tokens = await shares(1, (Tenant("a", cost=10), 1000, 1), (Tenant("b", cost=10), 100, 20))
    assert tokens["b"] == pytest.approx(tokens["a"], rel=0.1)


async def test_who_was_away_has_nothing_saved() -> None:
    queue, order = Admission(1, 99, 60), []

    async def ask(name: str) -> None:
        async with queue.acquire(Tenant(name, cost=10)):
            order.append(name)
            await asyncio.sleep(0)

    await asyncio.gather(*(ask("a") for _ in range(5)))
    await asyncio.gather(*(ask(name) for name in "aaabbb"))
    assert order[5:] == ["a", "b", "a", "b", "a", "b"]


async def test_tenants_that_are_gone_keep_no_places_and_no_memory() -> None:
    queue, ended = Admission(40, 100, 60), asyncio.Event()

    async def ask(name: str) -> None:
        with contextlib.suppress(TritonOverloaded):
            async with queue.acquire(Tenant(name)):
                await ended.wait()

    async def storm(tenants: int) -> int:
        tracemalloc.start()
        for number in range(tenants):
            await asyncio.gather(*(ask(f"{number}-{name}") for name in range(9)))
        taken = tracemalloc.take_snapshot()
        tracemalloc.stop()
        own = taken.filter_traces([tracemalloc.Filter(True, admission.__file__)])
        return sum(trace.size for trace in own.traces)

    async with queue.acquire(Tenant("second")):
        pass
    tasks = [asyncio.create_task(ask("first")) for _ in range(50)]
    await settle()
    assert (queue.running, queue.waiting) == (40, 10)
    ended.set()
    await asyncio.gather(*tasks)
    queue.max_running = 2
    async with queue.acquire(Tenant("busy")):
        assert await storm(100) < 100_000
    assert await storm(100) < 10_000


async def test_a_full_queue_has_room_for_a_tenant_that_has_less_than_its_part() -> None:
    queue = Admission(1, 4, 60)
    release = asyncio.Event()

    async def hold(name: str) -> str:
        try:
            async with queue.acquire(Tenant(name)):
                await release.wait()
        except TritonOverloaded:
            return "full"
        return "answered"

    async def came(name: str, count: int) -> list[asyncio.Task[str]]:
        tasks = [asyncio.create_task(hold(name)) for _ in range(count)]
        await settle()
        return tasks

    busy = await came("busy", 6)
    other = await came("other", 3)
    release.set()
    assert [await task for task in busy] == ["answered"] * 5 + ["full"]
    assert [await task for task in other] == ["answered"] * 2 + ["full"]


@pytest.mark.parametrize(("slots", "kept"), [(40, 2), (20, 1), (19, 0)])
async def test_one_slot_in_twenty_is_kept_for_tenants_that_have_few_requests(
    slots: int, kept: int
) -> None:
    queue = Admission(slots, 100, 60)

    async def ask(name: str, end: asyncio.Event) -> None:
        async with queue.acquire(Tenant(name)):
            await end.wait()

    ends = [asyncio.Event() for _ in range(slots + 9)]
    tasks = [asyncio.create_task(ask("hog", end)) for end in ends]
    await settle()
    assert queue.running == slots, "nobody else has a request"
    tasks.append(asyncio.create_task(ask("light", asyncio.Event())))
    for end in ends[: kept + 1]:
        await settle()
        end.set()
    await settle()
    assert queue.running == slots - kept, "the light tenant has one, and the hog gets no other"
    waiting = queue.waiting
    tasks.append(asyncio.create_task(ask("other", asyncio.Event())))
    await settle()
    assert (queue.waiting == waiting) is (kept > 0), "who comes has a slot that was kept"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
