"""What arrives in a stream of messages, handed to one consumer."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Generic, TypeVar

from cog_triton.errors import CogTritonError, TritonTimeout, TritonUnavailable

CLOSED = "the connection was closed before the last response"
T = TypeVar("T")


class Arrivals(Generic[T]):
    """What arrives in a stream, for one consumer, who gets all that is there in one step.

    The stream is read apart from the consumer: one that is cancelled while it waits would tear the
    transport's stream down if it read itself.

    Attributes:
        drop: drops the transport's stream; to be set by who opened it.
    """

    def __init__(self, source: AsyncGenerator[T, None] | None, timeout: float | None) -> None:
        """Begins to read.

        Args:
            source: is read in a task; None if a transport calls ``add`` and ``end``.
            timeout: seconds of silence after which the stream fails; None waits for good.
        """
        self.drop: Callable[[], object] = lambda: None
        self._arrived: deque[T] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._error: BaseException | None = None
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[None] = self._loop.create_future()
        self._last = self.started = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        if timeout is not None:
            self._timer = self._loop.call_later(timeout, self._check_silence, timeout)
        self._reader = None if source is None else asyncio.create_task(self._read(source))

    @property
    def ended(self) -> bool:
        """Whether nothing more will arrive."""
        return self._end.done()

    @property
    def heard(self) -> float:
        """When something last arrived, on the loop's clock; 0 for never."""
        return self._last if self._last > self.started else 0.0

    def add(self, item: T) -> None:
        """Something has arrived."""
        self._last = self._loop.time()
        self._arrived.append(item)
        self._wake()

    def end(self, error: BaseException | None = None) -> None:
        """Nothing more will arrive: all has, or an error came. Only the first call counts."""
        if not self.ended:
            self._error = self._error or error
            self._end.set_result(None)
            self._wake()

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
            self._waiter = self._loop.create_future()
            await self._waiter
        arrived = list(self._arrived)
        self._arrived.clear()
        return arrived

    async def ends_within(self, seconds: float) -> bool:
        """Waits for the end for at most so many seconds; returns whether it came."""
        await asyncio.wait([self._end], timeout=seconds)
        return self.ended

    def fail(self, error: CogTritonError) -> None:
        """Ends the stream with an error, unless it has ended."""
        if not self.ended:
            self.end(error)
            self._stop_reading()

    async def close(self) -> None:
        """Drops the stream if it has not ended."""
        if self._timer is not None:
            self._timer.cancel()
        self._stop_reading()
        if self._reader is not None:
            await asyncio.wait([self._reader])

    def _stop_reading(self) -> None:
        self.drop()
        if self._reader is not None:
            self._reader.cancel()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _read(self, source: AsyncGenerator[T, None]) -> None:
        try:
            async with contextlib.aclosing(source) as items:
                async for item in items:
                    self.add(item)
        except asyncio.CancelledError:
            # By ``close``, when nobody listens any more; or by the transport, which was closed before.
            self.end(TritonUnavailable(CLOSED))
            raise
        except Exception as error:
            self.end(error)
        finally:
            self.end()

    def _check_silence(self, timeout: float) -> None:
        # One timer a request, not one a response.
        left = self._last + timeout - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._check_silence, timeout)
        elif not self.ended:
            self._error = TritonTimeout(f"Triton sent nothing for {timeout:g} s")
            self._wake()
