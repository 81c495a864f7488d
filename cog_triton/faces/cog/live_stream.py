"""Live streaming and cancelling under Cog's server, coglet, and nothing else.

Measured with Cog 0.23: coglet drains an ``async def predict`` that yields into a list and sends it at
the end. It does stream from one that *returns* a synchronous generator, on a thread for each, which is
what ``live`` makes of an asynchronous one. Cancelling such a prediction does not reach the generator:
its coroutine returned long ago. But coglet starts each prediction by looking up
``asyncio.run_coroutine_threadsafe`` and cancels by calling ``cancel`` on the future it got, so
``install`` gives it one that tells ``live``. That is an internal of coglet: without it, predictions
still stream and finish.

coglet drops a cancel that reaches its worker before the prediction, and one that comes while it prepares
the call makes the prediction fail. So the front sends cancels by the control channel to ``cancel``, which
keeps those that come early.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import queue
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from concurrent.futures import Future
from typing import Any

from coglet import CancelationException

from cog_triton.faces.cog import control
from cog_triton.faces.cog.error_names import name_once

_cancellation: contextvars.ContextVar[_Cancellation | None] = contextvars.ContextVar(
    "cancellation", default=None
)
_End = BaseException | None
_IDENTIFIER = "_coglet_prediction_id"  # coglet's variable, which it does not publish


class _Cancellation:
    """Whether a prediction was cancelled, and whom to tell. Used from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancelled = False
        self._tell: Callable[[], object] | None = None

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            tell = self._tell
        if tell is not None:
            tell()

    def tell(self, callback: Callable[[], object]) -> None:
        with self._lock:
            self._tell = callback
            cancelled = self._cancelled
        if cancelled:
            callback()


def install() -> None:
    """Lets ``live`` learn of cancelled predictions. To be called once, before the first."""
    original = asyncio.run_coroutine_threadsafe
    if getattr(original, "tells_live", False):
        return

    def run_coroutine_threadsafe(
        coroutine: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop
    ) -> Future[Any]:
        cancellation = _Cancellation()
        # The loop copies this thread's context for the coroutine while ``original`` runs.
        token = _cancellation.set(cancellation)
        try:
            future = original(_begun(coroutine), loop)
        finally:
            _cancellation.reset(token)
        # A strong reference would be a cycle, which keeps the result of a future that coglet drops, and
        # with it the generator that is to be closed then, until the next collection.
        dropped = weakref.ref(future)

        def cancel_and_tell() -> bool:
            cancellation.cancel()
            future = dropped()
            return future is not None and Future.cancel(future)

        future.cancel = cancel_and_tell  # type: ignore[method-assign]
        return future

    run_coroutine_threadsafe.tells_live = True  # type: ignore[attr-defined]
    asyncio.run_coroutine_threadsafe = run_coroutine_threadsafe  # type: ignore[assignment]


_lock = threading.Lock()
_running: dict[Callable[[], None], str] = {}
_cancelled_early: set[str] = set()


def cancel(identifier: str) -> None:
    """Cancel the predictions with this id, or the next that begins."""
    with _lock:
        found = [cancel for cancel, running in _running.items() if running == identifier]
        if not found:
            _cancelled_early.add(identifier)
    for cancel_one in found:
        cancel_one()


def forget(identifier: str) -> None:
    """Drop a cancel that came after the prediction's end."""
    _cancelled_early.discard(identifier)


def live(source: AsyncGenerator[str, None]) -> Generator[str, None, None]:
    """A synchronous generator of what ``source`` yields on the running event loop, as it yields it.

    Text that has piled up comes as one piece. Closing the generator, or cancelling the prediction
    that called this, cancels ``source``; a cancelled prediction ends with CancelationException.
    """
    loop = asyncio.get_running_loop()
    items: queue.SimpleQueue[str | _End] = queue.SimpleQueue()
    task = loop.create_task(_pump(source, items))

    def cancel() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing is left to cancel
            loop.call_soon_threadsafe(task.cancel)

    cancellation = _cancellation.get()
    if cancellation is not None:
        cancellation.tell(cancel)
    identifier = _identifier()
    with _lock:
        _running[cancel] = identifier
        cancelled = identifier in _cancelled_early
        _cancelled_early.discard(identifier)
    if cancelled:
        cancel()
    texts = _drain(items, cancel)
    next(texts)
    return texts


def is_cancellation(error: BaseException) -> bool:
    """Whether an error is how a cancelled prediction ends."""
    return isinstance(error, (CancelationException, GeneratorExit))


async def _begun(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a prediction's coroutine; its error names its class once."""
    try:
        return await coroutine
    except BaseException as error:
        _ended(_identifier())
        if isinstance(error, Exception):
            name_once(error)
        raise


def _ended(identifier: str) -> None:
    if identifier:
        control.tell("ended", identifier)


def _identifier() -> str:
    """Return the id of the prediction in whose context this runs; empty if there is none."""
    context = contextvars.copy_context()
    return next((context[var] for var in context if var.name == _IDENTIFIER), "")


async def _pump(source: AsyncGenerator[str, None], items: queue.SimpleQueue[str | _End]) -> None:
    end: _End = None
    try:
        async with contextlib.aclosing(source) as texts:
            async for text in texts:
                items.put(text)
    except asyncio.CancelledError:
        end = CancelationException("the prediction was canceled")
    except Exception as error:
        end = name_once(error)
    items.put(end)


def _drain(
    items: queue.SimpleQueue[str | _End], cancel: Callable[[], None]
) -> Generator[str, None, None]:
    """What ``live`` returns, once it has been advanced to the first yield.

    A generator that is closed before it has begun never runs its ``finally``: one that coglet drops
    because the prediction was cancelled at once would leave its source running.
    """
    try:
        yield ""
        while True:
            item = items.get()
            texts = []
            while isinstance(item, str):
                texts.append(item)
                if items.empty():
                    break
                item = items.get()
            if texts:
                yield "".join(texts)
            if isinstance(item, BaseException):
                raise item
            if item is None:
                return
    finally:
        cancel()
        with _lock:
            identifier = _running.pop(cancel)
        _ended(identifier)
