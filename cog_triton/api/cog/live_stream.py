"""Live streaming, and messages of the front, in the predictor's process under Cog's server, coglet.

Measured with Cog 0.23: coglet collects what an ``async def predict`` yields, and sends it at the end. It
streams from one that *returns* a synchronous generator, on a thread for each, as ``live`` does. That takes
70 µs a piece, so the front gets each text by a message, and coglet all of ``_COGS_SECONDS`` as one.

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

from cog_triton.api.cog.predictions import VARIABLE, Inputs, read_messages, send_message

_IDENTIFIER = "_coglet_prediction_id"  # coglet's variable, which it does not publish
_AT_ONCE = 64  # texts in a message, whose size is bounded
_COGS_SECONDS = 0.25  # for which texts are kept for Cog's server, where the front has them at once
_NO_INPUTS = Inputs()
_front: socket.socket | None = None
_running: dict[asyncio.Task[None], str] = {}  # with the ids of their predictions
_cancelled_early: set[str] = set()
_texts: list[tuple[str, int, str]] = []  # of this turn of the loop, as the front gets them


def listen(handlers: Mapping[str, Callable[..., object]], inputs: Inputs = _NO_INPUTS) -> None:
    """Handle the front's messages on this event loop, if there is a front; tell it of the inputs."""
    global _front
    if descriptor := os.environ.get(VARIABLE):
        _front = socket.socket(fileno=int(descriptor))
        known = {**handlers, "cancel": cancel, "forget": _cancelled_early.discard}
        read_messages(_front, lambda name, *words: name in known and known[name](*words))
        tell("hello", inputs)


def tell(*words: Any, wait: bool = True) -> None:
    """Send a message to the front, if there is one."""
    if _front is not None:
        send_message(_front, *words, wait=wait)


def _tell_texts() -> None:
    for first in range(0, len(_texts), _AT_ONCE):
        tell("texts", *_texts[first : first + _AT_ONCE], wait=False)
    _texts.clear()


def cancel(identifier: str) -> None:
    """Cancel the predictions with this id, or the next that begins. To be called on the event loop."""
    # A prediction may end on its own thread meanwhile.
    found = [task for task, running in list(_running.items()) if running == identifier]
    if not found:
        _cancelled_early.add(identifier)
    for task in found:
        task.cancel()


def live(source: AsyncGenerator[str, None]) -> Generator[str, None, None]:
    """Return a synchronous generator of what ``source`` yields on the running event loop.

    Closing it, or cancelling the prediction, cancels ``source``, which runs in the context of the
    prediction: what it prints or records belongs there.
    """
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    identifier = next((context[var] for var in context if var.name == _IDENTIFIER), "")
    items: queue.SimpleQueue[Any] = queue.SimpleQueue()  # texts, then None or an error
    kept: list[str] = []  # for Cog's server

    def put() -> None:
        if kept:
            items.put("".join(kept))
        kept.clear()

    async def read() -> None:
        count = 0
        async with contextlib.aclosing(source) as texts:
            async for text in texts:
                if not kept:
                    loop.call_later(_COGS_SECONDS if _front and identifier else 0.0, put)
                if not _texts:
                    loop.call_soon(_tell_texts)
                kept.append(text)
                _texts.append((identifier, count, text))
                count += len(text)

    def end(task: asyncio.Task[None]) -> None:
        cancelled = CancelationException("the prediction was canceled")
        error = cancelled if task.cancelled() else task.exception()
        # Cog names an error's class before its text, which may begin so: E1001 PromptRequired: …
        name, _, text = str(error).partition(": ")
        if identifier and type(error).__name__ in name.split():
            error = type(name, (Exception,), {})(text)
        put()
        items.put(error)

    def texts() -> Generator[str, None, None]:
        try:
            yield ""
            while isinstance(item := items.get(), str):
                yield item
            if item is not None:
                raise item
        finally:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nothing is left to cancel
                loop.call_soon_threadsafe(task.cancel)
            del _running[task]
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
