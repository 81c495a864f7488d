"""The end of a running server, without a server."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any, cast

import pytest

from cog_triton.deployment.running import RunningServer


class FakeServer:
    """Ends when the event is set."""

    end = "it was killed"

    def __init__(self) -> None:
        self.killed = threading.Event()

    def wait(self) -> None:
        self.killed.wait()


class SilentClient:
    """Runs nothing."""

    def silence(self) -> float:
        return 0.0


def running(server: FakeServer) -> RunningServer:
    parts: list[Any] = [server, SilentClient(), None, contextlib.ExitStack(), 0.0]
    return RunningServer(*parts)


def test_the_end_has_its_reason() -> None:
    async def test() -> None:
        server = FakeServer()
        ended = asyncio.create_task(running(server).ended())
        await asyncio.sleep(0.01)
        server.killed.set()
        assert await asyncio.wait_for(ended, 10) == "it was killed"

    asyncio.run(test())


@pytest.mark.parametrize("steps", range(6))
def test_the_watch_can_be_cancelled_at_the_moment_of_the_end(steps: int) -> None:
    """Else a server that is stopped just when it dies is started again, and the stop never ends."""

    async def test() -> None:
        server, begun = FakeServer(), asyncio.Event()
        loop = asyncio.get_running_loop()
        watching = asyncio.create_task(_watch(running(server)))
        await asyncio.sleep(0.01)
        call = loop.call_soon_threadsafe

        def note(callback: Any, *arguments: Any) -> Any:
            handle = call(callback, *arguments)
            call(begun.set)
            return handle

        cast("Any", loop).call_soon_threadsafe = note
        server.killed.set()
        while not begun.is_set():
            await asyncio.sleep(0)
        for _ in range(steps):
            await asyncio.sleep(0)
        watching.cancel()
        await asyncio.wait([watching], timeout=1)
        assert watching.cancelled()

    asyncio.run(test())


async def _watch(server: RunningServer) -> None:
    await server.ended()
    await asyncio.sleep(60)
