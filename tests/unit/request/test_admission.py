"""The queue in front of the engine, without one."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from typing import Any

import pytest

from cog_triton.errors import TritonOverloaded, TritonUnavailable
from cog_triton.request.admission import Admission, Tenant, retry_seconds


class Guests:
    """Requests that hold a place until they are told to leave it."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._leave: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[Any]] = {}
        self.admitted: list[str] = []

    async def come(self, *names: str, priority: int = 0) -> None:
        for name in names:
            self._leave[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._stay(name, priority))
        await settle()

    async def leave(self, name: str) -> None:
        self._leave[name].set()
        await self.tasks[name]
        await settle()

    async def _stay(self, name: str, priority: int) -> None:
        async with self._admission.acquire(Tenant(priority=priority)):
            self.admitted.append(name)
            await self._leave[name].wait()


async def settle() -> None:
    """Lets every task run that can."""
    for _ in range(10):
        await asyncio.sleep(0)


def admission(running: int = 1, waiting: int = 9, seconds: float = 60, **kwargs: Any) -> Admission:
    return Admission(running, waiting, seconds, **kwargs)


def test_places_go_to_those_that_came_first() -> None:
    async def test() -> None:
        queue = admission(running=2)
        guests = Guests(queue)
        await guests.come("a", "b", "c", "d")
        assert (guests.admitted, queue.running, queue.waiting) == (["a", "b"], 2, 2)
        await guests.leave("b")
        assert (guests.admitted, queue.running, queue.waiting) == (["a", "b", "c"], 2, 1)
        await guests.leave("a")
        await guests.leave("c")
        await guests.leave("d")
        assert (guests.admitted[-1], queue.running, queue.waiting) == ("d", 0, 0)

    asyncio.run(test())


def test_a_lower_priority_comes_first() -> None:
    async def test() -> None:
        guests = Guests(admission())
        await guests.come("a")
        await guests.come("b", "c", priority=2)
        await guests.come("d", priority=1)
        for name in ("a", "d", "b", "c"):
            await guests.leave(name)
        assert guests.admitted == ["a", "d", "b", "c"]

    asyncio.run(test())


def test_beyond_the_bound_a_request_is_told_when_to_come_again() -> None:
    async def test() -> None:
        now = iter(range(100))
        queue = admission(waiting=3, clock=lambda: next(now))
        guests = Guests(queue)
        await guests.come("a", "b", "c", "d")
        with pytest.raises(TritonOverloaded, match="1 requests run and 3 wait; try again in 1 s"):
            await guests._stay("e", 0)
        for name in ("a", "b"):
            await guests.leave(name)
        await guests.come("e", "f")
        with pytest.raises(TritonOverloaded) as refused:
            await guests._stay("g", 0)
        assert refused.value.retry_after > 1
        assert refused.value.retryable

    asyncio.run(test())


@pytest.mark.parametrize(
    ("waiting", "ends", "seconds"),
    [
        (10, [], 1),
        (10, [5.0], 1),
        (10, [5.0, 5.0], 1),  # a clock that stands still
        (10, [0.0, 0.5, 1.0], 5),
        (1, [0.0, 0.1], 1),
        (1000, [0.0, 1.0], 60),
    ],
)
def test_the_time_to_come_again(waiting: int, ends: list[float], seconds: float) -> None:
    assert retry_seconds(waiting, deque(ends)) == seconds


def test_a_wait_has_an_end() -> None:
    async def test() -> None:
        seen: list[str] = []
        queue = admission(seconds=0.01)
        queue.observers.append(lambda *told: seen.append(told[0]))
        guests = Guests(queue)
        await guests.come("a", "b")
        with pytest.raises(TritonOverloaded, match=r"no place became free in 0.01 s.*try again"):
            await guests.tasks["b"]
        assert queue.waiting == 0
        await guests.leave("a")
        assert seen == ["admitted", "late"]

    asyncio.run(test())


def test_one_that_is_cancelled_while_it_waits_takes_no_place() -> None:
    async def test() -> None:
        queue = admission()
        guests = Guests(queue)
        await guests.come("a", "b", "c")
        guests.tasks["b"].cancel()
        await settle()
        assert queue.waiting == 1
        await guests.leave("a")
        await guests.leave("c")
        assert (guests.admitted, queue.running) == (["a", "c"], 0)

    asyncio.run(test())


def test_one_that_is_cancelled_as_its_turn_comes_passes_it_on() -> None:
    async def test() -> None:
        queue = admission()
        guests = Guests(queue)
        async with queue.acquire():
            await guests.come("b", "c")
        guests.tasks["b"].cancel()  # which has its turn, and has not run since
        await settle()
        assert guests.admitted == ["c"]
        await guests.leave("c")
        assert queue.running == 0

    asyncio.run(test())


def test_closing_ends_those_that_run_and_those_that_wait_with_an_error_to_try_again() -> None:
    async def test() -> None:
        queue = admission()
        guests = Guests(queue)
        await guests.come("a", "b")
        queue.close("the server is being stopped")
        for name in ("a", "b"):
            with pytest.raises(TritonUnavailable, match="is being stopped") as ended:
                await guests.tasks[name]
            assert ended.value.retryable
        with pytest.raises(TritonUnavailable):
            await guests._stay("c", 0)
        assert (queue.running, queue.waiting) == (0, 0)

    asyncio.run(test())


def test_a_cancelled_one_is_not_told_of_an_error() -> None:
    async def test() -> None:
        queue = admission()
        guests = Guests(queue)
        await guests.come("a")
        guests.tasks["a"].cancel()
        with pytest.raises(asyncio.CancelledError):
            await guests.tasks["a"]
        assert queue.running == 0

    asyncio.run(test())


def test_waiting_times_are_seen() -> None:
    async def test() -> None:
        seen: list[tuple[str, float]] = []
        now = iter([0.0, 1.0, 4.0])  # b begins to wait; a leaves; b has a place
        queue = admission(clock=lambda: next(now))
        queue.observers.append(lambda outcome, seconds: seen.append((outcome, seconds)))
        guests = Guests(queue)
        await guests.come("a", "b")
        await guests.leave("a")
        await guests.leave("b")
        assert seen == [("admitted", 0.0), ("admitted", 4.0)]

    asyncio.run(test())


@pytest.mark.parametrize("seed", range(20))
def test_no_place_is_lost_in_a_storm_of_cancels(seed: int) -> None:
    dice = random.Random(seed)
    queue = admission(running=dice.choice([1, 3]), waiting=100, seconds=dice.choice([0.01, 60]))
    most = 0

    async def stay() -> None:
        nonlocal most
        async with queue.acquire(Tenant(priority=dice.choice([0, 1]))):
            most = max(most, queue.running)
            await asyncio.sleep(dice.choice([0, 0.001]))

    async def test() -> None:
        tasks = [asyncio.create_task(stay()) for _ in range(100)]
        for _ in range(60):
            dice.choice(tasks).cancel()
            await asyncio.sleep(dice.choice([0, 0.001]))
            if dice.random() < 0.01:
                queue.close("closed")
        ends = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
        expected = (asyncio.CancelledError, TritonOverloaded, TritonUnavailable)
        assert all(end is None or isinstance(end, expected) for end in ends)

    asyncio.run(test())
    assert (queue.running, queue.waiting) == (0, 0)
    assert most == queue._max_running
