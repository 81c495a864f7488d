"""What arrives on a stream, read in a task of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator
from typing import Generic, TypeVar

from cog_triton.errors import CogTritonError, TritonTimeout, TritonUnavailable

T = TypeVar("T")

CLOSED = "the connection was closed before the last response"


class Arrivals(Generic[T]):
    """Reads a stream in a task of its own, and hands on what has arrived.

    A consumer that is cancelled while it waits would tear the transport's stream down if it read
    itself. And one that falls behind catches up in one step.
    """

    def __init__(self, source: AsyncGenerator[T, None], timeout: float | None) -> None:
        """Begins to read.

        Args:
            timeout: seconds of silence after which the stream fails; None waits for good.
        """
        self._source = source
        self._arrived: deque[T] = deque()
        self._wake = asyncio.Event()
        self._error: BaseException | None = None
        self._loop = asyncio.get_running_loop()
        self._last = self.started = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        if timeout is not None:
            self._timer = self._loop.call_later(timeout, self._check_silence, timeout)
        self._reader = asyncio.create_task(self._read())

    @property
    def ended(self) -> bool:
        """Whether nothing more will arrive."""
        return self._reader.done()

    @property
    def heard(self) -> float:
        """When something last arrived, on the loop's clock; 0 for never."""
        return self._last if self._last > self.started else 0.0

    async def take(self) -> list[T]:
        """What has arrived since the last time, in order; it waits for something. Empty at the end.

        Raises:
            BaseException: the source's, once all that came before it has been taken.
            TritonTimeout: the source was silent for too long.
        """
        while not self._arrived:
            if self._error is not None:
                raise self._error
            if self.ended:
                return []
            self._wake.clear()
            await self._wake.wait()
        arrived = list(self._arrived)
        self._arrived.clear()
        return arrived

    async def ends_within(self, seconds: float) -> bool:
        """Waits for the end for at most so many seconds; returns whether it came."""
        await asyncio.wait([self._reader], timeout=seconds)
        return self.ended

    def fail(self, error: CogTritonError) -> None:
        """Ends the stream with an error, unless it has ended."""
        if not self.ended:
            self._error = error
            self._reader.cancel()
            self._wake.set()

    async def close(self) -> None:
        """Drops the stream if it has not ended."""
        if self._timer is not None:
            self._timer.cancel()
        self._reader.cancel()
        await asyncio.wait([self._reader])

    async def _read(self) -> None:
        try:
            async with contextlib.aclosing(self._source) as source:
                async for item in source:
                    self._last = self._loop.time()
                    self._arrived.append(item)
                    self._wake.set()
        except asyncio.CancelledError:
            # By ``close``, when nobody listens any more; or by the transport, which was closed before.
            self._error = self._error or TritonUnavailable(CLOSED)
            raise
        except Exception as error:
            self._error = error
        finally:
            self._wake.set()

    def _check_silence(self, timeout: float) -> None:
        # One timer a request, not one a response.
        left = self._last + timeout - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._check_silence, timeout)
        elif not self.ended:
            self._error = TritonTimeout(f"Triton sent nothing for {timeout:g} s")
            self._wake.set()
