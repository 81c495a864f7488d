"""The pace of batches beside an event loop that is busy or free."""

import asyncio
import time

import pytest

from cog_triton.faces.openai import pacing
from cog_triton.faces.openai.pacing import LoopPace, ThreadPace

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
    monkeypatch.setattr(pacing, "FREE_ROUND_SECONDS", 0.02)
    monkeypatch.setattr(pacing, "LONGEST_WAIT", 60.0)
    busy = True

    async def keep_busy() -> None:
        while busy:
            time.sleep(0.05)
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
