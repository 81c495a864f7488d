"""Lives of a server, one after another, without a server."""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from collections.abc import Awaitable, Callable

import pytest

from cog_triton.deployment import supervisor as module
from cog_triton.deployment.supervisor import RestartPolicy, Supervisor, pause
from cog_triton.errors import ConfigurationError, TritonStartError, TritonUnavailable


class FakeLife:
    """Ends when it is told to."""

    def __init__(self) -> None:
        self.end = asyncio.Event()
        self.stopped = False

    async def ended(self) -> str:
        await self.end.wait()
        return "it was told to end\nand more"

    async def stop(self) -> None:
        self.stopped = True


class Lives:
    """Begins lives; some attempts fail."""

    def __init__(self, *failing: int) -> None:
        self.begun: list[FakeLife] = []
        self.attempts = 0
        self._failing = failing
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self) -> FakeLife:
        await self.gate.wait()
        self.attempts += 1
        if self.attempts in self._failing:
            raise TritonStartError(f"attempt {self.attempts}")
        self.begun.append(FakeLife())
        return self.begun[-1]


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE", 0.0)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30))


def test_the_next_life_begins_where_one_ends() -> None:
    async def test() -> None:
        lives = Lives()
        supervisor = Supervisor(lives, RestartPolicy(3, 60))
        await supervisor.start()
        first = supervisor.running
        lives.begun[0].end.set()
        second = await supervisor.after(first, 10)
        assert second is lives.begun[1]
        assert lives.begun[0].stopped
        assert supervisor.restarts == 1
        await supervisor.stop()
        assert lives.begun[1].stopped
        assert supervisor.running is None

    run(test)


def test_a_failed_start_is_tried_again() -> None:
    async def test() -> None:
        lives = Lives(2, 3)
        supervisor = Supervisor(lives, RestartPolicy(3, 60))
        await supervisor.start()
        first = supervisor.running
        lives.begun[0].end.set()
        assert await supervisor.after(first, 10) is lives.begun[1]
        assert lives.attempts == 4
        await supervisor.stop()

    run(test)


def test_after_too_many_ends_it_is_given_up_with_the_reason() -> None:
    async def test() -> None:
        reasons: list[str] = []
        lives = Lives()
        supervisor = Supervisor(lives, RestartPolicy(1, 60), on_failure=reasons.append)
        await supervisor.start()
        first = supervisor.running
        lives.begun[0].end.set()
        second = await supervisor.after(first, 10)
        second.end.set()
        for failed in (second, None):
            with pytest.raises(TritonUnavailable, match=r"given up: it was told to end$"):
                await supervisor.after(failed, 10)
        assert reasons == ["it was told to end"]
        assert supervisor.failure == "it was told to end"
        await supervisor.stop()

    run(test)


def test_what_waits_too_long_is_told_so() -> None:
    async def test() -> None:
        lives = Lives()
        supervisor = Supervisor(lives, RestartPolicy(3, 60))
        await supervisor.start()
        first = supervisor.running
        lives.gate.clear()
        lives.begun[0].end.set()
        with pytest.raises(TritonUnavailable, match=r"not back after 0\.05 s"):
            await supervisor.after(first, 0.05)
        lives.gate.set()
        await supervisor.after(first, 10)
        await supervisor.stop()

    run(test)


def test_a_life_that_goes_on_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NOTICE_SECONDS", 0.01)

    async def test() -> None:
        supervisor = Supervisor(Lives(), RestartPolicy(3, 60))
        await supervisor.start()
        assert await supervisor.after(supervisor.running, 10) is supervisor.running
        await supervisor.stop()

    run(test)


def test_only_ends_within_the_window_count() -> None:
    policy = RestartPolicy(restarts=2, window=10)
    assert policy.allows(deque([0.0, 1.0]), 1.0)
    assert not policy.allows(deque([0.0, 1.0, 2.0]), 2.0)
    assert policy.allows(deque([0.0, 1.0, 10.5]), 10.5)
    assert not RestartPolicy(0, 10).allows(deque([0.0]), 0.0)


def test_pauses_grow_with_failed_starts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE", 0.5)
    assert [pause(n) for n in range(5)] == [0, 0.5, 1, 2, 4]
    assert pause(50) == module.LONGEST_PAUSE


def test_a_full_disk_is_waited_for_and_no_end_of_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    class NoRoom(Lives):
        async def __call__(self) -> FakeLife:
            if 1 <= self.attempts < 30:
                self.attempts += 1
                raise ConfigurationError("/run: full") from OSError(errno.ENOSPC, "full")
            return await super().__call__()

    async def test() -> None:
        lives = NoRoom()
        supervisor = Supervisor(lives, RestartPolicy(2, 60))
        await supervisor.start()
        first = supervisor.running
        lives.begun[0].end.set()
        monkeypatch.setattr(asyncio, "sleep", sleep)
        assert await supervisor.after(first, 10) is lives.begun[1]
        monkeypatch.undo()
        await supervisor.stop()

    monkeypatch.setattr(module, "FIRST_PAUSE", 0.5)
    run(test)
    assert pauses == [0, 0.5, 1, 2, 4, *[5] * 25]


@pytest.mark.parametrize("steps", range(12))
def test_who_is_cancelled_while_it_waits_does_not_go_on(steps: int) -> None:
    """However closely the next life's begin and the cancelling follow one another."""

    async def test() -> None:
        lives = Lives()
        supervisor = Supervisor(lives, RestartPolicy(3, 60))
        await supervisor.start()
        lives.gate.clear()
        lives.begun[0].end.set()
        while supervisor.running is not None:
            await asyncio.sleep(0)
        waiting = asyncio.create_task(_wait_and_go_on(supervisor))
        await asyncio.sleep(0.01)
        lives.gate.set()
        while supervisor.running is None:
            await asyncio.sleep(0)
        for _ in range(steps):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting], timeout=1)
        assert waiting.cancelled()
        await supervisor.stop()

    run(test)


async def _wait_and_go_on(supervisor: Supervisor[FakeLife]) -> None:
    await supervisor.after(None, 10)
    await asyncio.sleep(60)
