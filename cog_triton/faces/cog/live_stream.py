"""Live streaming, and messages of the front, in the predictor's process under Cog's server, coglet.

Measured with Cog 0.23: coglet drains an ``async def predict`` that yields into a list and sends it at the
end. It does stream from one that *returns* a synchronous generator, on a thread for each, which is what
``live`` makes of an asynchronous one.

Cancels come from the front, and ``cancel`` keeps those that come before their prediction: coglet drops a
cancel that reaches its worker early, and one that comes while it prepares the call makes the prediction
fail. Its own cancels, where no front stands before it, do not reach the generator.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import queue
import socket
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping
from concurrent.futures import Future
from typing import Any

from coglet import CancelationException

from cog_triton.faces.cog.predictions import VARIABLE, Channel

_IDENTIFIER = "_coglet_prediction_id"  # coglet's variable, which it does not publish
_End = BaseException | None
_front: Channel | None = None
_running: dict[Callable[[], None], str] = {}  # ids, by what stops their prediction
_cancelled_early: set[str] = set()


def listen(handlers: Mapping[str, Callable[..., object]], inputs: tuple[str, ...] = ()) -> None:
    """Act on the front's messages, on this event loop; does nothing where there is no front.

    Args:
        handlers: of messages other than cancels, by the first word; the others are their arguments.
        inputs: a prediction has to have one of them.
    """
    global _front
    if descriptor := os.environ.get(VARIABLE):
        _front, known = Channel(socket.socket(fileno=int(descriptor))), dict(handlers)
        known.update(cancel=cancel, forget=_cancelled_early.discard)

        def handle(name: str, *words: str) -> None:
            if name in known:
                known[name](*words)

        _front.listen(handle)
        tell("hello", *inputs)


def tell(*words: str) -> None:
    """Send a message to the front, if there is one that takes it."""
    if _front is not None:
        _front.send(*words)


def cancel(identifier: str) -> None:
    """Cancel the predictions with this id, or the next that begins."""
    # On the loop's thread, as ``live``; a prediction may end on its own thread meanwhile.
    found = [stop for stop, running in list(_running.items()) if running == identifier]
    if not found:
        _cancelled_early.add(identifier)
    for stop in found:
        stop()


def install() -> None:
    """Report predictions that end before ``live``. To be called once, before the first prediction.

    coglet begins each by looking up ``asyncio.run_coroutine_threadsafe``.
    """
    original: Any = asyncio.run_coroutine_threadsafe
    if original.__module__ == __name__:
        return

    def run_coroutine_threadsafe(
        coroutine: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop
    ) -> Future[Any]:
        return original(_begun(coroutine), loop)  # type: ignore[no-any-return]

    asyncio.run_coroutine_threadsafe = run_coroutine_threadsafe  # type: ignore[assignment]


async def _begun(coroutine: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await coroutine
    except BaseException as error:
        _tell_ended(_identifier())
        raise named_once(error) from None


def live(source: AsyncGenerator[str, None]) -> Generator[str, None, None]:
    """Return a synchronous generator of what ``source`` yields on the running event loop, as it does.

    Text that has piled up comes as one piece. Closing the generator, or cancelling the prediction
    that called this, cancels ``source``; a cancelled prediction ends with CancelationException.
    """
    loop = asyncio.get_running_loop()
    items: queue.SimpleQueue[str | _End] = queue.SimpleQueue()
    task = loop.create_task(_pump(source, items))

    def stop() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing is left to cancel
            loop.call_soon_threadsafe(task.cancel)

    identifier = _identifier()
    _running[stop] = identifier
    if identifier in _cancelled_early:
        _cancelled_early.discard(identifier)
        stop()
    texts = _drain(items, stop)
    next(texts)  # a generator that is closed before it has begun never runs its ``finally``
    return texts


def is_cancellation(error: BaseException) -> bool:
    """Return whether an error is the end of a cancelled prediction."""
    return isinstance(error, (CancelationException, GeneratorExit))


def named_once(error: BaseException) -> BaseException:
    """Return an error for Cog, which writes the class's name before the text.

    One whose text begins with that name (``E1001 PromptRequired: …``) has it in the class's place.
    """
    name, _, text = str(error).partition(": ")
    return type(name, (Exception,), {})(text) if type(error).__name__ in name.split() else error


async def _pump(source: AsyncGenerator[str, None], items: queue.SimpleQueue[str | _End]) -> None:
    end: _End = None
    try:
        async with contextlib.aclosing(source) as texts:
            async for text in texts:
                items.put(text)
    except asyncio.CancelledError:
        end = CancelationException("the prediction was canceled")
    except Exception as error:
        end = named_once(error)
    items.put(end)


def _drain(
    items: queue.SimpleQueue[str | _End], stop: Callable[[], None]
) -> Generator[str, None, None]:
    try:
        yield ""
        while True:
            texts, item = [], items.get()
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
        stop()
        _tell_ended(_running.pop(stop))


def _identifier() -> str:
    """Return the id of the prediction in whose context this runs; empty if there is none."""
    context = contextvars.copy_context()
    return next((context[var] for var in context if var.name == _IDENTIFIER), "")


def _tell_ended(identifier: str) -> None:
    if identifier:
        tell("ended", identifier)
