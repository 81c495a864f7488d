"""The load of malformed requests: each is refused, and the figures of a phase are those of its answers."""

import asyncio
import time
from collections import Counter

import httpx

from cog_triton.api.openai.app import create_app
from tests.unit.api.openai.support import Backend, served
from tools.benchmark.malformed import Answer, Phase, malformed_requests, row, send_all


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


def test_a_phase_has_the_answers_that_began_and_ended_in_it() -> None:
    phase = Phase("uploads", began=10.0, ended=20.0, replies=Counter({200: 50}))
    answers = [
        Answer(began=9.0, first_token=0.5, gaps=[0.5]),
        Answer(began=11.0, first_token=0.1, gaps=[0.02, 0.02, 0.02]),
        Answer(began=19.0, first_token=0.5, gaps=[0.6]),
    ]
    values = ["10.0", "5/s", "1", "100.0", "100.0", "20.0", "20.0"]
    assert row(phase, answers).split() == ["uploads", *values]


def test_a_load_keeps_to_its_rate_and_counts_what_it_gets() -> None:
    replies: Counter[int] = Counter()

    async def send() -> int:
        return 400

    began = time.monotonic()
    sends = iter([send] * 20)
    asyncio.run(send_all(sends, per_second=100, at_once=4, replies=replies))
    assert replies == {400: 20}
    assert time.monotonic() - began >= 0.19
