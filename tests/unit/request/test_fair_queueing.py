"""Places by weight: a simulated engine whose clock is an event list, so that every figure is exact."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import random
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import pytest

from cog_triton.errors import TritonOverloaded
from cog_triton.request import admission
from cog_triton.request.admission import Admission, Tenant
from tests.unit.request.test_admission import settle

PREFILL, STEP = 0.05, 0.01
"""Seconds to the first token, and between two tokens, of a request that runs."""


@dataclass
class Clock:
    """Simulated seconds; those that sleep are woken in order, each when all others have had their say."""

    now: float = 0.0
    _sleepers: list[tuple[float, int, asyncio.Future[None]]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    async def sleep(self, seconds: float) -> None:
        woken = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self.now + seconds, next(self._numbers), woken))
        await woken

    async def run(self, until: float) -> None:
        await settle()
        while self._sleepers[0][0] <= until:
            self.now, _, woken = heapq.heappop(self._sleepers)
            woken.set_result(None)
            await settle()


@dataclass
class Traffic:
    """Streams that send one request after another.

    Attributes:
        tokens: that each flow has had.
        first_tokens: seconds from a request to its first token.
    """

    admission: Admission
    clock: Clock
    fair: bool = True
    tokens: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    first_tokens: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    async def stream(
        self, flow: str, length: Callable[[], int], *, weight: float = 1.0, expected: float = 100
    ) -> None:
        tenant = Tenant(flow, weight, expected) if self.fair else Tenant()
        while True:
            came, tokens = self.clock.now, length()
            async with self.admission.acquire(tenant) as slot:
                await self.clock.sleep(PREFILL)
                self.first_tokens[flow].append(self.clock.now - came)
                await self.clock.sleep(STEP * tokens)
                slot.used = tokens
                self.tokens[flow] += tokens


async def run(
    streams: Callable[[Traffic], list[asyncio.Task[None]]],
    *,
    places: int,
    seconds: float,
    fair: bool = True,
) -> Traffic:
    clock = Clock()
    traffic = Traffic(Admission(places, 1000, 1e9, clock=lambda: clock.now), clock, fair)
    tasks = streams(traffic)
    await clock.run(seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return traffic


def p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * len(values))]


def hog_and_light(light: int, hog: int) -> Callable[[Traffic], list[asyncio.Task[None]]]:
    dice = random.Random(1)

    def streams(traffic: Traffic) -> list[asyncio.Task[None]]:
        lengths = [("light", lambda: 20)] * light + [("hog", lambda: dice.randint(50, 200))] * hog
        return [asyncio.create_task(traffic.stream(*one)) for one in lengths]

    return streams


@pytest.mark.parametrize("places", [32, 64])
def test_a_hog_does_not_starve_a_light_one(places: int) -> None:
    async def test() -> None:
        alone = await run(hog_and_light(1, 0), places=places, seconds=60)
        fair = await run(hog_and_light(1, 80), places=places, seconds=60)
        unfair = await run(hog_and_light(1, 80), places=places, seconds=60, fair=False)
        assert p99(fair.first_tokens["light"]) <= 2 * p99(alone.first_tokens["light"])
        assert p99(unfair.first_tokens["light"]) > 4 * p99(alone.first_tokens["light"])
        assert sum(fair.tokens.values()) >= 0.95 * sum(unfair.tokens.values())

    asyncio.run(test())


def test_tokens_go_by_weight_whatever_was_expected() -> None:
    async def test() -> None:
        def streams(traffic: Traffic) -> list[asyncio.Task[None]]:
            flows = [("a", 1.0, 40), ("b", 1.0, 160), ("c", 2.0, 40)]
            return [
                asyncio.create_task(traffic.stream(name, lambda n=n: n, weight=weight))  # type: ignore[misc]
                for name, weight, n in flows
                for _ in range(20)
            ]

        tokens = (await run(streams, places=8, seconds=300)).tokens
        assert tokens["b"] == pytest.approx(tokens["a"], rel=0.1)
        assert tokens["c"] == pytest.approx(2 * tokens["a"], rel=0.1)

    asyncio.run(test())


def test_who_was_away_has_nothing_saved() -> None:
    async def test() -> list[str]:
        queue, order = Admission(1, 99, 60), []

        async def ask(flow: str) -> None:
            async with queue.acquire(Tenant(flow, cost=10)):
                order.append(flow)
                await asyncio.sleep(0)

        await asyncio.gather(*(ask("a") for _ in range(5)))
        await asyncio.gather(*(ask(flow) for flow in "aaabbb"))
        return order[5:]

    assert asyncio.run(test()) == ["a", "b", "a", "b", "a", "b"]


def test_a_flow_that_has_ended_keeps_no_places_from_the_others() -> None:
    async def test() -> None:
        queue = Admission(40, 100, 60)
        async with queue.acquire(Tenant("second")):
            pass
        ended = asyncio.Event()

        async def ask() -> None:
            async with queue.acquire(Tenant("first")):
                await ended.wait()

        tasks = [asyncio.create_task(ask()) for _ in range(50)]
        await settle()
        assert (queue.running, queue.waiting) == (40, 10)
        ended.set()
        await asyncio.gather(*tasks)

    asyncio.run(test())


def test_flows_that_have_ended_take_no_memory() -> None:
    async def test() -> None:
        queue = Admission(2, 3, 60)
        ended = asyncio.Event()

        async def ask(flow: str) -> None:
            with contextlib.suppress(TritonOverloaded):
                async with queue.acquire(Tenant(flow)):
                    await ended.wait()

        async def storm(flows: int) -> int:
            tracemalloc.start()
            for number in range(flows):
                await asyncio.gather(*(ask(f"{number}-{flow}") for flow in range(9)))
            taken = tracemalloc.take_snapshot()
            tracemalloc.stop()
            own = taken.filter_traces([tracemalloc.Filter(True, admission.__file__)])
            return sum(trace.size for trace in own.traces)

        async with queue.acquire(Tenant("busy")):
            ended.set()
            assert await storm(500) < 100_000
        assert await storm(500) < 10_000

    asyncio.run(test())


def test_a_flow_that_asks_one_by_one_pays_for_what_it_had() -> None:
    async def test() -> None:
        def streams(traffic: Traffic) -> list[asyncio.Task[None]]:
            return [
                asyncio.create_task(traffic.stream(flow, partial(int, tokens), expected=10))
                for flow, tokens, many in (("one by one", 1000, 1), ("many", 100, 20))
                for _ in range(many)
            ]

        tokens = (await run(streams, places=1, seconds=600)).tokens
        assert tokens["one by one"] == pytest.approx(tokens["many"], rel=0.1)

    asyncio.run(test())
