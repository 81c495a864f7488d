"""Storms of cancels, through every API: none is lost, and the engine is idle a second later.

CANCELS=5000 pytest tests/integration/test_cancels.py
"""

import asyncio
import os
import random
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import httpx
import pytest

from tests.support import CogServer, limit

TOGETHER = 60
CANCELS = int(os.environ.get("CANCELS", "60"))
PAST_ANY_TEST = 5000  # tokens: 100 seconds at 20 ms a token
INPUTS = {"prompt": "What is machine learning?", "max_tokens": PAST_ANY_TEST}


class Storm:
    """A server, and where its engine can be asked."""

    def __init__(self, server: CogServer) -> None:
        self.server = server
        self.openai = f"http://127.0.0.1:{server.environment['OPENAI_PORT']}"
        limits = httpx.Limits(max_connections=None)
        self.client = httpx.AsyncClient(trust_env=False, timeout=limit(60), limits=limits)

    async def delay(self) -> None:
        """Wait for a moment anywhere in the start of a request."""
        await asyncio.sleep(random.choice([0, 0.001, 0.01, 0.12]) * random.random())


async def cancelled_by_route(storm: Storm) -> None:
    """A prediction that answers JSON, cancelled under its id."""
    path = f"{storm.server.url}/predictions/{uuid.uuid4().hex}"
    running = asyncio.create_task(storm.client.put(path, json={"input": INPUTS}))
    await storm.delay()
    while (await storm.client.post(f"{path}/cancel")).status_code == 404:  # it has not come yet
        assert not running.done(), running.result().text
    assert (await running).json()["status"] == "canceled"


CHAT = {
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": PAST_ANY_TEST,
    "model": "demo",
}
EVENTS = {"Accept": "text/event-stream"}
DISCONNECTS: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "cog": ("{cog}/predictions", {"input": INPUTS}, {}),
    "cog, streaming": ("{cog}/predictions", {"input": INPUTS}, EVENTS),
    "chat": ("{openai}/v1/chat/completions", CHAT, {}),
    "chat, streaming two": ("{openai}/v1/chat/completions", {**CHAT, "stream": True, "n": 2}, {}),
    "messages": ("{openai}/v1/messages", CHAT, {}),
    "messages, streaming": ("{openai}/v1/messages", {**CHAT, "stream": True}, {}),
}


async def disconnected(name: str, storm: Storm) -> None:
    """A request whose client goes away."""
    url, body, headers = DISCONNECTS[name]
    url = url.format(cog=storm.server.url, openai=storm.openai)
    running = asyncio.create_task(storm.client.post(url, json=body, headers=headers))
    await storm.delay()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


WAYS: dict[str, Callable[[Storm], Awaitable[None]]] = {
    "cancelled by route": cancelled_by_route,
    **{name: partial(disconnected, name) for name in DISCONNECTS},
}


@pytest.mark.anyio
@pytest.mark.parametrize("way", WAYS)
async def test_no_cancel_is_lost(paced_cog_server: CogServer, way: str) -> None:
    """None of the requests runs a second after the last cancel of each wave."""
    storm, lost = Storm(paced_cog_server), 0
    async with storm.client:
        for begun in range(0, CANCELS, TOGETHER):
            count = min(TOGETHER, CANCELS - begun)
            await asyncio.gather(*(WAYS[way](storm) for _ in range(count)))
            lost += await still_running(paced_cog_server)
    assert lost == 0, f"{lost} of {CANCELS} cancels were lost"


async def still_running(server: CogServer) -> int:
    """Return how many requests the engine has, once it had a second to stop them."""
    for _ in range(10):
        await asyncio.sleep(0.1)
        # What the engine reports of this one is newer than what it was told before.
        await asyncio.to_thread(server.predict, prompt="Hi", max_tokens=2)
        if server.engine["active"] == 0:
            return 0
    return int(server.engine["active"])
