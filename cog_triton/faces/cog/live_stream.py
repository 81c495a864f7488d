"""Live streaming, and messages of the front, in the predictor's process under Cog's server, coglet.

Measured with Cog 0.23: coglet collects what an ``async def predict`` yields, and sends it at the end. It
streams from one that *returns* a synchronous generator, on a thread for each, as ``live`` does.

Cancels come from the front, and ``cancel`` keeps those that come before their prediction. coglet drops a
cancel that reaches its worker early, one that comes while it prepares the call makes the prediction fail,
and where no front stands before it, its cancels do not reach the generator.
"""

import asyncio
import contextlib
import contextvars
import os
import queue
import socket
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from typing import Any

from coglet import CancelationException

from cog_triton.faces.cog.predictions import VARIABLE, read_messages, send_message

_IDENTIFIER = "_coglet_prediction_id"  # coglet's variable, which it does not publish
_front: socket.socket | None = None
_running: dict[asyncio.Task[None], str] = {}  # with the ids of their predictions
_cancelled_early: set[str] = set()


def listen(handlers: Mapping[str, Callable[..., object]], inputs: tuple[str, ...] = ()) -> None:
    """Handle the front's messages on this event loop, if there is a front; say which inputs are needed."""
    global _front
    if descriptor := os.environ.get(VARIABLE):
        _front = socket.socket(fileno=int(descriptor))
        known = {**handlers, "cancel": cancel, "forget": _cancelled_early.discard}
        read_messages(_front, lambda name, *words: name in known and known[name](*words))
        tell("hello", *inputs)


def tell(*words: str) -> None:
    """Send a message to the front, if there is one that takes it."""
    if _front is not None:
        send_message(_front, *words)


def cancel(identifier: str) -> None:
    """Cancel the predictions with this id, or the next that begins. To be called on the event loop."""
    # A prediction may end on its own thread meanwhile.
    found = [task for task, running in list(_running.items()) if running == identifier]
    if not found:
        _cancelled_early.add(identifier)
    for task in found:
        task.cancel()


def live(source: AsyncGenerator[str, None]) -> Generator[str, None, None]:
    """Return a synchronous generator of what ``source`` yields on the running event loop, as it does.

    Text that has piled up comes as one piece. Closing the generator, or cancelling the prediction, cancels
    ``source``, which runs in the context of the prediction: what it prints or records belongs there.
    """
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    identifier = next((context[var] for var in context if var.name == _IDENTIFIER), "")
    items: queue.SimpleQueue[Any] = queue.SimpleQueue()  # texts, then None or an error

    async def read() -> None:
        async with contextlib.aclosing(source) as texts:
            async for text in texts:
                items.put(text)

    def end(task: asyncio.Task[None]) -> None:
        cancelled = CancelationException("the prediction was canceled")
        error = cancelled if task.cancelled() else task.exception()
        # Cog names an error's class before its text, which may begin so: E1001 PromptRequired: …
        name, _, text = str(error).partition(": ")
        if identifier and type(error).__name__ in name.split():
            error = type(name, (Exception,), {})(text)
        items.put(error)

    def texts() -> Generator[str, None, None]:
        try:
            yield ""
            # Woken in the loop's turn, a usual thread takes the loop's processor and waits for its lock.
            with contextlib.suppress(OSError):
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            piece, item = "", items.get()
            while isinstance(item, str):
                piece += item
                if items.empty():
                    yield piece
                    piece = ""
                item = items.get()
            if piece:
                yield piece
            if item is not None:
                raise item
        finally:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nothing is left to cancel
                loop.call_soon_threadsafe(task.cancel)
            del _running[task]
            if identifier:
                tell("ended", identifier)

    task = loop.create_task(read())
    task.add_done_callback(end)
    _running[task] = identifier
    if identifier in _cancelled_early:
        _cancelled_early.discard(identifier)
        loop.call_soon(task.cancel)  # once it has begun
    generator = texts()
    next(generator)  # one that is closed before it has begun never runs its ``finally``
    return generator
