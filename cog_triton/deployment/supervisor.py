"""Lives of a server, one after another: where one ends unasked, the next begins.

It knows nothing of tritonserver: a life is what ``begin`` returns.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from cog_triton.errors import CogTritonError, TritonUnavailable

logger = logging.getLogger("tritonserver")

FIRST_PAUSE = 0.5
LONGEST_PAUSE = 30.0
ROOM_PAUSE = 5.0  # while a disk is full
NOTICE_SECONDS = 2.0
"""In which the end of a server is noticed."""


class Life(Protocol):
    """One life of a server: ready when it begins, until it ends."""

    async def ended(self) -> str:
        """Waits for the end, or for what makes it useless; returns why."""

    async def stop(self) -> None:
        """Ends it, and what belongs to it; safe after its end."""


L = TypeVar("L", bound=Life)


@dataclass(frozen=True)
class RestartPolicy:
    """When a server is started again.

    Attributes:
        restarts: at most so many within ``window``; 0 for none.
        window: seconds.
    """

    restarts: int
    window: float

    def allows(self, ends: deque[float], now: float) -> bool:
        """Whether to start again.

        Args:
            ends: when lives and attempts at one ended, this one included; those before the window are
                dropped.
        """
        while ends and ends[0] < now - self.window:
            ends.popleft()
        return len(ends) <= self.restarts


def pause(failed_starts: int) -> float:
    """Seconds before the next start: none after a life, ever longer after starts that failed."""
    return min(FIRST_PAUSE * 2.0 ** (failed_starts - 1), LONGEST_PAUSE) if failed_starts else 0.0


def lacks_room(error: CogTritonError) -> bool:
    """Return whether a server did not start because a disk is full."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)


class Supervisor(Generic[L]):
    """Keeps a server alive, from ``start`` to ``stop``, in one event loop.

    Attributes:
        restarts: how many there were.
        failure: why there is no server any more, and will be none; None while there is hope.
    """

    def __init__(
        self,
        begin: Callable[[], Awaitable[L]],
        policy: RestartPolicy,
        *,
        on_failure: Callable[[str], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts nothing yet.

        Args:
            begin: starts a server and returns it once it is ready.
            on_failure: is called when the server is given up, with the reason.
        """
        self._begin = begin
        self._policy = policy
        self._on_failure = on_failure
        self._clock = clock
        self._life: L | None = None
        self._task: asyncio.Task[None] | None = None
        self.restarts = 0
        self.failure: str | None = None

    async def start(self) -> None:
        """Begins the first life; what fails then is the caller's."""
        self._changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._life = await self._begin()
        self._task = asyncio.create_task(self._supervise(self._life))

    async def stop(self) -> None:
        """Ends the present life, and begins no other."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        life, self._life = self._life, None
        if life is not None:
            await life.stop()

    @property
    def running(self) -> L | None:
        """The life that goes on; None between two."""
        return self._life

    async def after(self, failed: L | None, timeout: float) -> L:
        """A life on which to try again what failed on ``failed``.

        That is the next one, or the same if it turns out to go on.

        Raises:
            TritonUnavailable: none begins within ``timeout`` seconds, or ever.
        """
        deadline = asyncio.get_running_loop().time() + timeout
        if failed is not None and self._life is failed:
            # Its end is noticed in a moment; or it is well, and something between was not.
            await self._change(min(NOTICE_SECONDS, timeout))
            if self._life is failed:
                return failed
        while self._life is None:
            if self.failure is not None:
                raise TritonUnavailable(f"Triton has been given up: {self.failure}")
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                raise TritonUnavailable(f"Triton was not back after {timeout:g} s")
            await self._change(left)
        return self._life

    async def _change(self, seconds: float) -> None:
        """Waits until a life begins or ends, at most so long."""
        # Not wait_for, which before Python 3.12 goes on when it is cancelled at the very moment of the
        # change: a request whose client is gone would run on the next life.
        await asyncio.wait([self._changed], timeout=seconds)

    async def _supervise(self, life: L) -> None:
        ends: deque[float] = deque()
        while True:
            reason = await life.ended()
            self._set(None)
            await life.stop()
            restarted = await self._restart(ends, reason)
            if restarted is None:
                return
            life = restarted
            self.restarts += 1
            logger.warning("Triton is back (restart %d)", self.restarts)
            self._set(life)

    async def _restart(self, ends: deque[float], reason: str) -> L | None:
        """The next life; None if the policy allows no more."""
        full = False
        for failed_starts in itertools.count():
            now = self._clock()
            ends.append(now)
            if not self._policy.allows(ends, now):
                break
            seconds = min(pause(failed_starts), ROOM_PAUSE) if full else pause(failed_starts)
            logger.warning("starting Triton again%s", f" in {seconds:g} s" if seconds else "")
            await asyncio.sleep(seconds)
            try:
                return await self._begin()
            except CogTritonError as error:
                reason, full = str(error), lacks_room(error)
                logger.error("%s", reason)
                if full:  # it is not the server's fault, and ends when there is room
                    ends.pop()
        self._give_up(reason)
        return None

    def _set(self, life: L | None) -> None:
        self._life = life
        changed, self._changed = self._changed, asyncio.get_running_loop().create_future()
        changed.set_result(None)

    def _give_up(self, reason: str) -> None:
        self.failure = reason.splitlines()[0]
        logger.error(
            "Triton is not started again: it ended %d times within %g s",
            self._policy.restarts + 1,
            self._policy.window,
        )
        self._set(None)
        if self._on_failure is not None:
            self._on_failure(self.failure)
