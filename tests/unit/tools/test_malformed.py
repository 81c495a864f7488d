"""The load of malformed requests: each is refused, and the figures of a phase are those of its answers."""

import asyncio
import time
from collections import Counter

import httpx

from cog_triton.api.openai.app import create_app
from tests.unit.api.openai.support import Backend, served
from tools.benchmark.malformed import malformed_requests, send_all


async def statuses() -> Counter[int]:
    found: Counter[int] = Counter()
    transport = httpx.ASGITransport(create_app(served(Backend())), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for request in set(malformed_requests(200)):
            headers = {"content-type": request.content_type}
            reply = await client.post(request.path, content=request.body, headers=headers)
            found[reply.status_code] += 1
    return found


def test_every_malformed_request_is_refused() -> None:
    assert {status // 100 for status in asyncio.run(statuses())} == {4}
    assert list(malformed_requests(50)) == list(malformed_requests(50))


def test_a_load_keeps_to_its_rate_and_counts_what_it_gets() -> None:
    replies: Counter[int] = Counter()

    async def send() -> int:
        return 400

    began = time.monotonic()
    sends = iter([send] * 20)
    asyncio.run(send_all(sends, per_second=100, at_once=4, replies=replies))
    assert replies == {400: 20}
    assert time.monotonic() - began >= 0.19
