"""The supervisor, with servers that are not processes."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from cog_triton.deployment import running as module
from cog_triton.deployment.running import Supervisor
from cog_triton.errors import ConfigurationError, TritonStartError, TritonUnavailable


class FakeServer:
    """Runs until ``end`` is set."""

    def __init__(self) -> None:
        self.end = asyncio.Event()
        self.stopped = False
        self.client = object()

    async def ended(self) -> str:
        await self.end.wait()
        return "it was killed\nand more"

    async def stop(self) -> None:
        self.stopped = True


class Starter:
    """Starts servers; some attempts fail."""

    def __init__(self, *failing: int) -> None:
        self.servers: list[FakeServer] = []
        self.attempts = 0
        self._failing = failing
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self) -> FakeServer:
        await self.gate.wait()
        self.attempts += 1
        if self.attempts in self._failing:
            raise TritonStartError(f"attempt {self.attempts}")
        self.servers.append(FakeServer())
        return self.servers[-1]


def run(
    starter: Callable[[], Starter], test: Callable[[Starter, Any], Awaitable[None]], **options: Any
) -> None:
    """Run a test with a supervisor that has started its first server."""

    async def supervised() -> None:
        start = starter()
        given = {"max_restarts": 3, "window": 60, **options}
        supervisor = Supervisor(cast(Any, start), **given)
        await supervisor.start()
        await test(start, supervisor)
        await supervisor.stop()
        assert supervisor.running is None

    asyncio.run(asyncio.wait_for(supervised(), 30))


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE", 0.0)


def test_a_server_that_ends_is_started_again() -> None:
    async def test(starter: Starter, supervisor: Any) -> None:
        first, client = supervisor.running, supervisor.running.client
        assert await supervisor.client(None) is client
        first.end.set()
        second = await supervisor.after(first, 10)
        assert second is starter.servers[1]
        assert await supervisor.client(client) is second.client
        assert (first.stopped, second.stopped, supervisor.restarts) == (True, False, 1)

    run(Starter, test)


def test_a_failed_start_is_tried_again() -> None:
    async def test(starter: Starter, supervisor: Any) -> None:
        first = supervisor.running
        first.end.set()
        assert await supervisor.after(first, 10) is starter.servers[1]
        assert starter.attempts == 4

    run(lambda: Starter(2, 3), test)


def test_it_gives_up_after_too_many_ends() -> None:
    reasons: list[str] = []

    async def test(_: Starter, supervisor: Any) -> None:
        first = supervisor.running
        first.end.set()
        second = await supervisor.after(first, 10)
        second.end.set()
        for failed in (second, None):
            with pytest.raises(TritonUnavailable, match=r"given up: it was killed$"):
                await supervisor.after(failed, 10)
        assert reasons == [supervisor.failure] == ["it was killed"]

    run(Starter, test, max_restarts=1, on_failure=reasons.append)


def test_ends_before_the_window_do_not_count() -> None:
    async def test(starter: Starter, supervisor: Any) -> None:
        while len(starter.servers) < 4:
            server = supervisor.running
            await asyncio.sleep(0.05)
            server.end.set()
            await supervisor.after(server, 10)
        assert supervisor.restarts == 3

    run(Starter, test, max_restarts=1, window=0.04)


def test_waiting_for_a_server_has_an_end() -> None:
    async def test(starter: Starter, supervisor: Any) -> None:
        first = supervisor.running
        starter.gate.clear()
        first.end.set()
        with pytest.raises(TritonUnavailable, match=r"not back after 0\.05 s"):
            await supervisor.after(first, 0.05)
        starter.gate.set()
        await supervisor.after(first, 10)

    run(Starter, test)


def test_a_server_that_is_well_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NOTICE_SECONDS", 0.01)

    async def test(_: Starter, supervisor: Any) -> None:
        assert await supervisor.after(supervisor.running, 10) is supervisor.running

    run(Starter, test)


@pytest.mark.parametrize(
    ("attempts", "full", "expected"),
    [
        (9, False, [0, 0.5, 1, 2, 4, 8, 16, 30, 30]),
        (1200, True, [0, 0.5, 1, 2, 4, *[5] * 1195]),
    ],
)
def test_pauses_grow_with_failed_starts_and_a_full_disk_is_waited_for(
    attempts: int, full: bool, expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    class Failing(Starter):
        async def __call__(self) -> FakeServer:
            if 1 <= self.attempts < attempts:
                self.attempts += 1
                cause = OSError(errno.ENOSPC, "full") if full else None
                raise ConfigurationError("it did not start") from cause
            return await super().__call__()

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    async def test(starter: Starter, supervisor: Any) -> None:
        first = supervisor.running
        first.end.set()
        monkeypatch.setattr(asyncio, "sleep", sleep)
        assert await supervisor.after(first, 10) is starter.servers[1]
        monkeypatch.undo()

    monkeypatch.setattr(module, "FIRST_PAUSE", 0.5)
    run(Failing, test, max_restarts=1 if full else attempts)
    assert pauses == expected


@pytest.mark.parametrize("steps", range(12))
def test_a_waiting_request_can_be_cancelled_at_the_moment_of_a_start(steps: int) -> None:
    async def wait_and_continue(supervisor: Any) -> None:
        await supervisor.after(None, 10)
        await asyncio.sleep(60)

    async def test(starter: Starter, supervisor: Any) -> None:
        starter.gate.clear()
        starter.servers[0].end.set()
        while supervisor.running is not None:
            await asyncio.sleep(0)
        waiting = asyncio.create_task(wait_and_continue(supervisor))
        await asyncio.sleep(0.01)
        starter.gate.set()
        while supervisor.running is None:
            await asyncio.sleep(0)
        for _ in range(steps):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting], timeout=1)
        assert waiting.cancelled()

    run(Starter, test)
