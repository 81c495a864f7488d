"""Items that arrive in a stream, for one consumer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from cog_triton.errors import CogTritonError, TritonTimeout

CLOSED = "the connection was closed before the last response"
T = TypeVar("T")


class Arrivals(Generic[T]):
    """Items that arrive in a stream, for one consumer, which gets all that are there in one step.

    Attributes:
        drop: closes the transport's stream; set by the transport.
    """

    def __init__(self, timeout: float | None = None) -> None:
        """Start to wait for items.

        Args:
            timeout: seconds of silence after which the stream fails; None waits permanently.
        """
        self.drop: Callable[[], object] = lambda: None
        self._arrived: list[T] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error: BaseException | None = None
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[None] = self._loop.create_future()
        self._last = self.started = self._loop.time()
        self._timers: dict[Callable[..., object], asyncio.TimerHandle] = {}
        if timeout is not None:
            self._call_later(timeout, self._check_silence, timeout)

    @property
    def ended(self) -> bool:
        return self._end.done()

    @property
    def last_arrival(self) -> float:
        """The time of the last item on the loop's clock; 0 if there was none."""
        return self._last if self._last > self.started else 0.0

    def add(self, item: T) -> None:
        """Take in an item."""
        self._last = self._loop.time()
        self._arrived.append(item)
        self._wake()

    def end(self, error: BaseException | None = None) -> None:
        """End the stream, with an error or without one. Only the first call counts."""
        if not self.ended:
            self._error = self._error or error
            self._end.set_result(None)
            self._wake()

    async def take(self) -> list[T]:
        """Wait for items and return those that have arrived, in order; empty at the end.

        Raises:
            BaseException: the stream's, once all items before it have been taken.
            TritonTimeout: the stream was silent for too long.
        """
        while not self._arrived:
            if self._error is not None:
                raise self._error
            if self.ended:
                return []
            self._waiter = self._loop.create_future()
            await self._waiter
        arrived, self._arrived = self._arrived, []
        return arrived

    async def ends_within(self, seconds: float) -> bool:
        """Wait for the end for at most so many seconds; return whether it came."""
        await asyncio.wait([self._end], timeout=seconds)
        return self.ended

    def close(self) -> None:
        """Drop the stream if it has not ended."""
        for timer in self._timers.values():
            timer.cancel()
        self.drop()

    def _call_later(self, seconds: float, callback: Callable[..., object], *args: Any) -> None:
        self._timers[callback] = self._loop.call_later(seconds, callback, *args)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _check_silence(self, timeout: float) -> None:
        # One timer a request, not one a response.
        left = self._last + timeout - self._loop.time()
        if left > 0:
            self._call_later(left, self._check_silence, timeout)
        else:
            self._fail(TritonTimeout(f"Triton sent nothing for {timeout:g} s"))

    def _fail(self, error: CogTritonError) -> None:
        """Raise an error at the consumer, although the transport's stream has not ended."""
        if not self.ended:
            self._error = error
            self._wake()
