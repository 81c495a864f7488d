"""Storms of cancels, through every API: none is lost.

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

from tests.support import CogServer, limit, wait_until

TOGETHER = 60
CANCELS = int(os.environ.get("CANCELS", "60"))
PAST_ANY_TEST = (
    20_000  # tokens: 400 seconds at 20 ms a token, longer than a test waits for their end
)
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
    """After each wave of cancels, nothing runs."""
    storm = Storm(paced_cog_server)
    async with storm.client:
        for begun in range(0, CANCELS, TOGETHER):
            count = min(TOGETHER, CANCELS - begun)
            await asyncio.gather(*(WAYS[way](storm) for _ in range(count)))
            await asyncio.to_thread(
                wait_until, partial(is_idle, paced_cog_server), 15, "no request"
            )


def is_idle(server: CogServer) -> bool:
    """Return whether the engine has no request."""
    # What the engine reports of this one is newer than what it was told before.
    server.predict(prompt="Hi", max_tokens=2)
    return server.engine["active"] == 0
