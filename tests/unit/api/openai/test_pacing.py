"""The pace of batches and of long answers beside an event loop that is busy or free."""

import asyncio
import time
from typing import Any

import httpx
import pytest

from cog_triton.api.openai import pacing
from cog_triton.api.openai.app import create_app
from cog_triton.api.openai.pacing import LoopPace, Rounds, ThreadPace
from cog_triton.generation import Chunk
from cog_triton.protocol.log_probs import TokenLogProb
from tests.unit.api.openai.support import TEXT, served, talkative

pytestmark = pytest.mark.anyio


def test_a_thread_rests_longer_than_it_has_worked(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, rests = [0.0], list[float]()
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", rests.append)
    pace = ThreadPace()
    for _ in range(4):
        clock[0] += pacing.SLICE_SECONDS / 2
        pace.rest_if_due()
    assert rests == pytest.approx([pacing.SLICE_SECONDS * pacing.RESTS_PER_WORK] * 2)


async def test_tasks_wait_for_an_event_loop_that_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "FREE_ROUND_SECONDS", 0.005)
    monkeypatch.setattr(pacing, "LONGEST_WAIT", 60.0)
    busy = True

    async def keep_busy() -> None:
        while busy:
            time.sleep(0.01)
            await asyncio.sleep(0)

    work = asyncio.create_task(keep_busy())
    turn = asyncio.create_task(LoopPace().wait_for_turn())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not turn.done()
    busy = False
    await turn
    await work


async def test_tasks_begin_slowly_if_the_event_loop_is_never_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pacing, "FREE_ROUND_SECONDS", -1.0)
    monkeypatch.setattr(pacing, "LONGEST_WAIT", 0.01)
    pace = LoopPace()
    await asyncio.gather(*(pace.wait_for_turn() for _ in range(3)))


async def test_one_of_many_long_steps_is_taken_in_each_round_of_the_event_loop() -> None:
    rounds, number, taken = Rounds(), 0, list[int]()

    async def step() -> None:
        await rounds.wait_for_turn()
        taken.append(number)

    steps = [asyncio.create_task(step()) for _ in range(5)]
    while not all(task.done() for task in steps):
        await asyncio.sleep(0)
        number += 1
    assert len(set(taken)) == len(steps)


@pytest.mark.parametrize("asked", [{}, {"logprobs": 5}], ids=["text", "log probabilities"])
async def test_answers_with_log_probabilities_take_turns(asked: dict[str, Any]) -> None:
    turns: list[None] = []
    token = TokenLogProb(97, -1.0, ((97, -1.0),))
    values: Any = {"ids": (97,), "log_probs": (token,) if asked else ()}
    chunks = [
        Chunk("a", 1, 3, **values),
        Chunk("a", 2, 3, **values),
        Chunk("a", 3, 3, "stop", **values),
    ]
    application = served(talkative(*chunks))

    async def noted() -> None:
        turns.append(None)

    application.rounds.wait_for_turn = noted  # type: ignore[method-assign]
    transport = httpx.ASGITransport(create_app(application))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        body = {"prompt": "xy", "n": 2, "stream": True, **asked}
        assert (await client.post(TEXT, json=body)).status_code == 200
    assert len(turns) == (2 * len(chunks) if asked else 0)
