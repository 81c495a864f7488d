"""The pipe from Cog's server to the predictor, between two processes."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from cog_triton.faces.cog import last_call

WORKER = """
import asyncio
from cog_triton.faces.cog import last_call

async def main():
    told = asyncio.Event()
    last_call.listen(told.set, lambda: print("drain", flush=True))
    last_call.tell_busy(True)
    print("listening", flush=True)
    await told.wait()
    last_call.tell_busy(False)
    print("told", flush=True)

asyncio.run(main())
"""


def test_the_server_tells_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(last_call.VARIABLE, "")
    line = last_call.offer()
    command = [sys.executable, "-c", WORKER]
    # Cog's server is written in Rust, which closes no descriptor of its children.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, close_fds=False) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "listening\n"
        line.hear()
        assert line.busy
        line.drain()
        assert worker.stdout.readline() == "drain\n"
        line.last_call()
        assert worker.stdout.read() == "told\n"
        line.hear()
        assert not line.busy


def test_without_such_a_server_nothing_is_listened_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(last_call.VARIABLE, raising=False)

    async def test() -> None:
        last_call.listen(lambda: pytest.fail("nobody said anything"))

    asyncio.run(test())
