"""The pace of long work, so that it leaves the event loop to all requests."""

import asyncio
import time

SLICE_SECONDS = 0.002  # how long a thread works before a rest
RESTS_PER_WORK = 3.0  # how many times longer a rest is than the work before it
FREE_ROUND_SECONDS = 0.01  # a round of the event loop that takes no longer means that it is free
LOOK_SECONDS = 0.001  # between two looks whether it is
LONGEST_WAIT = 0.5  # seconds to wait for a free event loop


class ThreadPace:
    """The pace of a thread that computes in Python.

    A thread that never rests takes the interpreter from the event loop at each of the loop's system calls,
    for several milliseconds each time.
    """

    def __init__(self) -> None:
        self._began = time.perf_counter()

    def rest_if_due(self) -> None:
        """Sleep if this thread has worked for a slice of time."""
        worked = time.perf_counter() - self._began
        if worked >= SLICE_SECONDS:
            time.sleep(worked * RESTS_PER_WORK)
            self._began = time.perf_counter()


class Rounds:
    """Lets one of many tasks with long steps go on in each round of the event loop.

    Otherwise each of them takes its step in every round, and all other requests wait for all of them.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def wait_for_turn(self) -> None:
        async with self._turn:
            await asyncio.sleep(0)


class LoopPace:
    """The pace at which tasks are started on the event loop: one at a time, whenever it is free."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def wait_for_turn(self) -> None:
        """Return when the event loop is free, or after LONGEST_WAIT."""
        async with self._turn:
            give_up_at = time.monotonic() + LONGEST_WAIT
            while True:
                began = time.monotonic()
                await asyncio.sleep(LOOK_SECONDS)
                now = time.monotonic()
                if now - began - LOOK_SECONDS <= FREE_ROUND_SECONDS or now >= give_up_at:
                    return
