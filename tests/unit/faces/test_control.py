"""The channel between Cog's server and the predictor, between two processes."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from cog_triton.faces.cog import control

WORKER = """
import asyncio
from cog_triton.faces.cog import control

async def main():
    stopped = asyncio.Event()
    handlers = {"stop": stopped.set, "cancel": lambda name: print("cancel", name, flush=True)}
    control.listen(handlers, ("prompt", "messages"))
    print("listening", flush=True)
    await stopped.wait()
    control.tell("ended", "x")

asyncio.run(main())
"""


def test_messages_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(control.VARIABLE, "")
    channel = control.offer()
    command = [sys.executable, "-c", WORKER]

    async def exchange(worker: subprocess.Popen[str]) -> list[tuple[str, ...]]:
        received: list[tuple[str, ...]] = []
        channel.listen(lambda *words: received.append(words))
        assert worker.stdout is not None
        assert worker.stdout.readline() == "listening\n"
        channel.send("cancel", "a")
        channel.send("unknown")
        channel.send("cancel", "b")
        assert [worker.stdout.readline() for _ in range(2)] == ["cancel a\n", "cancel b\n"]
        channel.send("stop")
        assert worker.stdout.read() == ""
        await asyncio.sleep(0.1)
        return received

    # Cog's server is written in Rust, which closes no descriptor of its children.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, close_fds=False) as worker:
        received = asyncio.run(exchange(worker))
    assert received == [("hello", "prompt", "messages"), ("ended", "x")]


def test_without_such_a_server_nothing_is_listened_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(control.VARIABLE, raising=False)

    async def test() -> None:
        control.listen({"stop": lambda: pytest.fail("there is no server")})

    asyncio.run(test())
