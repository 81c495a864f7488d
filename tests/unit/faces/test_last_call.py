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
    last_call.listen(told.set)
    print("listening", flush=True)
    await told.wait()
    print("told", flush=True)

asyncio.run(main())
"""


def test_the_server_tells_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(last_call.VARIABLE, "")
    tell = last_call.offer()
    command = [sys.executable, "-c", WORKER]
    # Cog's server is written in Rust, which closes no descriptor of its children.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, close_fds=False) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "listening\n"
        tell()
        assert worker.stdout.read() == "told\n"


def test_without_such_a_server_nothing_is_listened_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(last_call.VARIABLE, raising=False)

    async def test() -> None:
        last_call.listen(lambda: pytest.fail("nobody said anything"))

    asyncio.run(test())
