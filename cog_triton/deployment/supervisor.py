"""Keeps a server running: starts it again when it ends unasked."""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from cog_triton.client.stream import TritonClient
from cog_triton.deployment.running import NOTICE_SECONDS, RunningServer
from cog_triton.errors import CogTritonError, TritonUnavailable

logger = logging.getLogger("tritonserver")

FIRST_PAUSE = 0.5  # after a start that failed; each further one doubles it
LONGEST_PAUSE = 30.0
FULL_DISK_PAUSE = 5.0


@dataclass(eq=False)
class Supervisor:
    """Keeps a server running from ``start`` to ``stop``, in one event loop.

    It gives up when the server has ended more than ``max_restarts`` times within ``window`` seconds.
    A failed start counts as an end, except for a full disk.

    Attributes:
        resume_timeout: seconds that ``client`` waits for a server.
        on_failure: called with the reason when it gives up.
        running: the server; None between two.
        restarts: how many there were.
        failure: why it has given up; None before that.
    """

    start_server: Callable[[], Awaitable[RunningServer]]
    max_restarts: int
    window: float
    resume_timeout: float = 60.0
    on_failure: Callable[[str], object] = lambda _: None
    running: RunningServer | None = field(default=None, init=False)
    restarts: int = field(default=0, init=False)
    failure: str | None = field(default=None, init=False)

    async def start(self) -> None:
        """Start the first server. An error of that is the caller's: there is no second attempt."""
        self._changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.running = await self.start_server()
        self._supervision = asyncio.create_task(self._supervise())

    async def stop(self) -> None:
        """Stop the server, and start no other."""
        self._supervision.cancel()
        await asyncio.wait([self._supervision])
        server, self.running = self.running, None
        if server is not None:
            await server.stop()

    async def client(self, failed: TritonClient | None) -> TritonClient:
        """Return the server's client, or the next one after ``failed``; see ``client.resume.Clients``."""
        server = self.running
        if server is None or server.client is failed:
            server = await self.after(server, self.resume_timeout)
        return server.client

    async def after(self, failed: RunningServer | None, timeout: float) -> RunningServer:
        """Return the server on which to retry what failed on ``failed``.

        That is the next one, or the same if it turns out to be well.

        Raises:
            TritonUnavailable: there is none within ``timeout`` seconds, or ever.
        """
        deadline = asyncio.get_running_loop().time() + timeout
        if failed is not None and self.running is failed:
            await self._wait_for_change(min(NOTICE_SECONDS, timeout))
            if self.running is failed:
                return failed
        while self.running is None:
            if self.failure is not None:
                raise TritonUnavailable(f"Triton has been given up: {self.failure}")
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                raise TritonUnavailable(f"Triton was not back after {timeout:g} s")
            await self._wait_for_change(left)
        return self.running

    async def _wait_for_change(self, seconds: float) -> None:
        # Not wait_for, which before Python 3.12 continues when it is cancelled at the very moment of the
        # change: a request whose client is gone would run on the next server.
        await asyncio.wait([self._changed], timeout=seconds)

    async def _supervise(self) -> None:
        ends: deque[float] = deque()
        while self.running is not None:
            server = self.running
            reason = await server.ended()
            self._set(None)
            await server.stop()
            self._set(await self._restart(ends, reason))

    async def _restart(self, ends: deque[float], reason: str) -> RunningServer | None:
        """Start the next server; None if it gives up.

        Args:
            ends: times of earlier ends within the window.
        """
        pause = 0.0
        while True:
            now = time.monotonic()
            ends.append(now)
            while ends[0] < now - self.window:
                ends.popleft()
            if len(ends) > self.max_restarts:
                break
            logger.warning("starting Triton again%s", f" in {pause:g} s" if pause else "")
            await asyncio.sleep(pause)
            try:
                server = await self.start_server()
            except CogTritonError as error:
                reason = str(error)
                logger.error("%s", reason)
                cause, longest = error.__cause__, LONGEST_PAUSE
                if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
                    ends.pop()  # not the server's fault, and over when there is space
                    longest = FULL_DISK_PAUSE
                pause = min(2 * pause or FIRST_PAUSE, longest)
            else:
                self.restarts += 1
                logger.warning("Triton is back (restart %d)", self.restarts)
                return server
        self.failure = reason.splitlines()[0]
        logger.error(
            "Triton is not started again: it ended %d times within %g s",
            self.max_restarts + 1,
            self.window,
        )
        self.on_failure(self.failure)
        return None

    def _set(self, server: RunningServer | None) -> None:
        self.running = server
        changed, self._changed = self._changed, asyncio.get_running_loop().create_future()
        changed.set_result(None)
