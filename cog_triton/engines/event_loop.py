"""An engine whose requests are coroutines on an event loop, which one thread of its own runs.

What such a library promises holds on one loop: its queues belong to the loop that they were made on, and
its sockets to one thread at a time. So everything of it happens there, after its start.

The loop is uvloop's. On asyncio's own, vLLM's tokens came in pieces of 80 on two busy cores, the first
after 1.2 s; on this one in pieces of 3, after 70 ms.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from abc import abstractmethod
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import uvloop

from cog_triton.engines.base import (
    Engine,
    EngineUnavailable,
    GenerationRequest,
    Sink,
    Tokens,
    stopped_text,
)

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Running:
    """A request on its way through the library; but for the first three, the loop's thread alone uses it.

    Attributes:
        sampling: the request's parameters as the library takes them.
        output: what the library gave for it, if that is to be aborted.
        last_id: the last id that was handed over.
    """

    request: GenerationRequest
    sink: Sink
    sampling: Any
    output: Any = None
    task: asyncio.Task[None] | None = None
    last_id: int | None = None


class EventLoopEngine(Engine):
    """See the module's docstring."""

    def __init__(self, name: str) -> None:
        """Start the loop's thread.

        Args:
            name: the thread's.
        """
        self._lock = threading.Lock()  # guards the next two, and that the loop is open
        self._running: dict[str, Running] = {}
        self._stopped: str | None = None  # why no more requests are taken
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @abstractmethod
    def _prepared(self, request: GenerationRequest) -> Any:
        """The request's parameters as the library takes them; raises EngineError."""

    @abstractmethod
    def _tokens(self, running: Running) -> AsyncIterator[Tokens]:
        """Yield what the library makes for a request, on the loop."""

    @abstractmethod
    def _abort(self, running: Running) -> None:
        """Make the library drop a request, on the loop; it may have ended."""

    @abstractmethod
    def _is_fatal(self, error: Exception) -> bool:
        """Tell an error that ends the library from one of a request."""

    @abstractmethod
    def _failure(self, error: Exception, request: GenerationRequest, /) -> Tokens:
        """The end of a request by an error that is not fatal."""

    @abstractmethod
    def _shut_down(self) -> None:
        """End the library, after the loop."""

    def submit(self, request: GenerationRequest, sink: Sink) -> None:
        running = Running(request, sink, self._prepared(request))
        with self._lock:
            if self._stopped is not None:
                raise EngineUnavailable(stopped_text(self._stopped))
            self._running[request.key] = running
            self._loop.call_soon_threadsafe(self._start, running)

    def abort(self, key: str) -> None:
        with self._lock:
            running = self._running.pop(key, None)
            if running is not None:
                self._loop.call_soon_threadsafe(self._cancel, running)

    def active(self) -> int:
        return len(self._running)

    def close(self) -> None:
        with self._lock:
            self._stopped = self._stopped or "it was closed"
            self._running.clear()
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._shut_down()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.run_until_complete(self._drop_tasks())
        with self._lock:
            self._loop.close()

    # What follows runs on the loop.

    async def _drop_tasks(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, running: Running) -> None:
        running.task = self._loop.create_task(self._generate(running))

    def _cancel(self, running: Running) -> None:
        # _start has run: the loop keeps the order of its callbacks.
        assert running.task is not None
        running.task.cancel()
        self._abort(running)

    async def _generate(self, running: Running) -> None:
        try:
            async for tokens in self._tokens(running):
                running.last_id = tokens.ids[-1] if tokens.ids else running.last_id
                self._deliver(running, tokens)
        except Exception as error:
            if self._is_fatal(error):
                self._stop(str(error) or repr(error))
            else:
                self._deliver(running, self._failure(error, running.request))
                self._abort(running)

    def _deliver(self, running: Running, tokens: Tokens) -> None:
        if tokens.finished:
            with self._lock:
                if self._running.pop(running.request.key, None) is None:
                    return
        running.sink(tokens)

    def _stop(self, reason: str) -> None:
        """End all requests after the library has died."""
        with self._lock:
            if self._stopped is not None:
                return
            self._stopped = reason
            ended = list(self._running.values())
            self._running.clear()
        logger.error(stopped_text(reason))
        for running in ended:
            if running.task is not None:
                running.task.cancel()
            running.sink(Tokens([], finished=True, error=stopped_text(reason)))
