"""The messages of one answer, between the transport that receives them and the request that reads them."""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Arrivals(Generic[T]):
    """The messages of an answer, for one consumer, which takes all that are there in one step.

    Attributes:
        started: when the request was sent, by the event loop's clock.
        last_arrival: when the last message came; 0 before the first.
        complete: whether the consumer has seen the last message.
        close: drops the transport's stream.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.started = self._loop.time()
        self.last_arrival = 0.0
        self.complete = False
        self.close: Callable[[], object] = lambda: None
        self._messages: list[T] = []
        # Raised when all messages have been taken.
        self._error: BaseException | None = None
        self._end = self._loop.create_future()
        # Done at the next message or the end, if somebody waits for it.
        self._waiter: asyncio.Future[None] | None = None

    # For the transport

    def add(self, message: T) -> None:
        self.last_arrival = self._loop.time()
        self._messages.append(message)
        self._wake()

    def fail(self, error: BaseException) -> None:
        """Raise an error after the messages that have arrived; the stream may go on."""
        self._error = self._error or error
        self._wake()

    def end(self, error: BaseException | None = None) -> None:
        """End the stream, with an error or without one. Only the first call counts."""
        if not self._end.done():
            self._end.set_result(None)
            self._error = self._error or error
            self._wake()

    # For the consumer

    async def take(self) -> list[T]:
        """Wait for messages and return those that have arrived.

        At the end of the stream, raise its error; return an empty list if it ended without one.
        """
        while not self._messages:
            if self._error is not None:
                raise self._error
            if self._end.done():
                return []
            self._waiter = self._loop.create_future()
            await self._waiter
        messages = self._messages
        self._messages = []
        return messages

    # After the consumer has left

    @property
    def ended(self) -> bool:
        return self._end.done()

    async def ends_within(self, seconds: float) -> bool:
        """Wait for the end; return whether it came."""
        await asyncio.wait([self._end], timeout=seconds)
        return self._end.done()

    async def changes_within(self, seconds: float) -> None:
        """Wait for the end or the next message."""
        self._waiter = self._loop.create_future()
        await asyncio.wait(
            [self._end, self._waiter], timeout=seconds, return_when=asyncio.FIRST_COMPLETED
        )

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
