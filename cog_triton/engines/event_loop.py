"""The base of engines whose requests are coroutines, on an event loop in a thread of its own."""

import asyncio
import logging
import threading
from abc import abstractmethod
from collections.abc import AsyncGenerator
from concurrent.futures import Future
from contextlib import aclosing, suppress
from dataclasses import dataclass

import uvloop

from cog_triton.engines.base import Engine, GenerationRequest, Sink, Step, failed_request, stopped
from cog_triton.errors import EngineError, EngineUnavailable

logger = logging.getLogger(__name__)

Steps = AsyncGenerator[Step, None]


@dataclass(eq=False)
class _Running:
    """A request that has been submitted and has not ended."""

    request: GenerationRequest
    steps: Steps
    sink: Sink
    # None until the loop has begun the request.
    task: asyncio.Task[None] | None = None


class EventLoopEngine(Engine):
    """Runs the ``steps`` of each request on one event loop: libraries are not safe on several.

    The loop is uvloop's; tools/benchmark/notes.md has the measurements. Whatever the methods of a subclass
    raise for one request becomes that request's error. If the loop itself ends, all requests end with the
    reason.
    """

    def __init__(self, thread: str) -> None:
        # Guards the next three. The loop's thread alone removes single requests that have finished.
        self._lock = threading.Lock()
        self.running: dict[str, _Running] = {}
        self._arrived: list[_Running] = []
        # Why no more requests are taken.
        self._stopped: str | None = None
        started: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = threading.Thread(
            target=self._run_loop, args=[started], name=thread, daemon=True
        )
        self._thread.start()
        self._loop = started.result()

    @abstractmethod
    def steps(self, request: GenerationRequest) -> Steps:
        """Check a request at once, and return the generator of its steps, which runs on the loop.

        The last step is finished. When the generator is closed early, it drops the request.
        """

    def ends_engine(self, error: Exception) -> bool:
        """Return whether an exception of a request's generator says that the library has died."""
        del error
        return False

    def request_error(self, error: Exception, request: GenerationRequest) -> EngineError:
        """Return an exception of a request's generator as the error of that request."""
        return failed_request(error, request)

    def submit(self, request: GenerationRequest, sink: Sink) -> None:
        running = _Running(request, self.steps(request), sink)
        with self._lock:
            if self._stopped is not None:
                raise stopped(self._stopped)
            # Requests that arrive together wake the loop once.
            if not self._arrived:
                try:
                    self._loop.call_soon_threadsafe(self._begin)
                except RuntimeError as error:
                    raise stopped(error) from error
            self._arrived.append(running)
            self.running[request.key] = running

    def abort(self, key: str) -> None:
        with self._lock:
            running = self.running.pop(key, None)
            if running is not None and running.task is not None:
                self._loop.call_soon_threadsafe(running.task.cancel)

    def close(self) -> None:
        self._take_all("it was closed")
        # The loop may have ended meanwhile.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._closed.set)
        self._thread.join()

    def die(self, reason: str) -> None:
        """End all requests, on the loop, after the library has died."""
        if self._stopped is not None:
            return
        error = stopped(reason)
        logger.error(error)
        for running in self._take_all(reason):
            if running.task is not None:
                running.task.cancel()
            self._loop.call_soon(running.sink, Step(finished=True, error=error))
        self._loop.call_soon(self.on_death)

    def deliver(self, key: str, step: Step) -> None:
        """Hand a step to a request's sink, on the loop, unless the request was dropped.

        It leaves in the loop's next turn, with all steps of this turn: that wakes the delivery thread once.
        """
        if step.finished:
            with self._lock:
                running = self.running.pop(key, None)
        else:
            running = self.running.get(key)
        if running is not None:
            self._loop.call_soon(running.sink, step)

    def _take_all(self, reason: str) -> list[_Running]:
        """Take no more requests, and return those that were running."""
        with self._lock:
            if self._stopped is None:
                self._stopped = reason
            ended = list(self.running.values())
            self.running.clear()
        return ended

    def _run_loop(self, started: "Future[asyncio.AbstractEventLoop]") -> None:
        """Run the loop to its end, on its thread. If nobody asked it to end, the engine has died."""
        reason = "its event loop has ended"
        try:
            uvloop.run(self._run(started))
        except BaseException as error:
            # Even a SystemExit: nothing reads what a thread raises.
            if not started.done():
                started.set_exception(error)
                return
            logger.exception("the engine's event loop has ended")
            reason = f"its event loop has ended: {type(error).__name__}: {error}"
        if self._stopped is None:
            step = Step(finished=True, error=stopped(reason))
            for running in self._take_all(reason):
                running.sink(step)
            self.on_death()

    async def _run(self, started: "Future[asyncio.AbstractEventLoop]") -> None:
        self._closed = asyncio.Event()
        started.set_result(asyncio.get_running_loop())
        await self._closed.wait()

    def _begin(self) -> None:
        """Create the tasks of the requests that have arrived, but for those aborted meanwhile."""
        with self._lock:
            for running in self._arrived:
                if self.running.get(running.request.key) is running:
                    running.task = self._loop.create_task(self._forward(running))
            self._arrived = []

    async def _forward(self, running: _Running) -> None:
        """Deliver the steps of one request, and its error if they end without a last one."""
        key = running.request.key
        try:
            async with aclosing(running.steps) as steps:
                async for step in steps:
                    self.deliver(key, step)
            # Without effect after a last step, with which the request left ``running``.
            self._fail(key, "it made no last step")
        except asyncio.CancelledError:
            # ``abort``, ``close`` and ``die`` have taken the request out of ``running`` before.
            self._fail(key, "it was cancelled")
            # So that the error leaves even if the loop ends after this turn.
            await asyncio.sleep(0)
            raise
        except Exception as error:
            self._end_failed(running, error)

    def _end_failed(self, running: _Running, error: Exception) -> None:
        """End a request with what its generator raised, or the engine if the library has died."""
        try:
            if self.ends_engine(error):
                self.die(str(error) or repr(error))
                return
            request_error = self.request_error(error, running.request)
        except Exception:
            logger.exception("the error of request %s could not be read", running.request.key)
            request_error = failed_request(error, running.request)
        self.deliver(running.request.key, Step(finished=True, error=request_error))

    def _fail(self, key: str, reason: str) -> None:
        error = EngineUnavailable(f"the engine failed a request: {reason}")
        self.deliver(key, Step(finished=True, error=error))
