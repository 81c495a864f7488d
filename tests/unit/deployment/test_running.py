"""A life of a server, without a server."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any, cast

import pytest

from cog_triton.deployment.running import RunningServer


class FakeServer:
    """Ends when it is told to."""

    end = "it was told to end"

    def __init__(self) -> None:
        self.told = threading.Event()

    def wait(self) -> None:
        self.told.wait()


class SilentClient:
    """Runs nothing."""

    def silence(self) -> float:
        return 0.0


def life_of(server: FakeServer) -> RunningServer:
    parts: list[Any] = [server, SilentClient(), None, contextlib.ExitStack()]
    return RunningServer(*parts, hang_timeout=0.0)


def test_the_end_of_a_life_has_its_reason() -> None:
    async def test() -> None:
        server = FakeServer()
        ended = asyncio.create_task(life_of(server).ended())
        await asyncio.sleep(0.01)
        server.told.set()
        assert await asyncio.wait_for(ended, 10) == "it was told to end"

    asyncio.run(test())


@pytest.mark.parametrize("steps", range(6))
def test_who_watches_a_life_can_be_cancelled_at_the_moment_of_its_end(steps: int) -> None:
    """Else a server that is stopped just when it dies is started again, and the stop waits for good."""

    async def test() -> None:
        server, begun = FakeServer(), asyncio.Event()
        loop = asyncio.get_running_loop()
        watching = asyncio.create_task(_watch(life_of(server)))
        await asyncio.sleep(0.01)
        call = loop.call_soon_threadsafe

        def note(callback: Any, *arguments: Any) -> Any:
            handle = call(callback, *arguments)
            call(begun.set)
            return handle

        cast("Any", loop).call_soon_threadsafe = note
        server.told.set()
        while not begun.is_set():
            await asyncio.sleep(0)
        for _ in range(steps):
            await asyncio.sleep(0)
        watching.cancel()
        await asyncio.wait([watching], timeout=1)
        assert watching.cancelled()

    asyncio.run(test())


async def _watch(life: RunningServer) -> None:
    await life.ended()
    await asyncio.sleep(60)
