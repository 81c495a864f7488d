"""Live streaming, and messages of the front, in the predictor's process under Cog's server, coglet.

Measured with Cog 0.23: coglet collects what an ``async def predict`` yields, and sends it at the end. It
streams from one that *returns* a synchronous generator, on a thread for each, as ``live`` does. That takes
70 µs a piece, so the front gets each text by a message, and coglet all of ``_COGS_SECONDS`` as one.

    source ─ texts ─▶ _LiveStream ──┬─ a message for each turn of the event loop ──▶ front
                                    └─ a queue ──▶ coglet's thread ──▶ Cog's server

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

from cog_triton.api.cog.messages import VARIABLE, read_messages, send_message
from cog_triton.api.cog.passage import Inputs

# coglet's variable, which it does not publish.
_IDENTIFIER = "_coglet_prediction_id"
# Texts in a message, whose size is bounded.
_TEXTS_IN_MESSAGE = 64
# For which texts are kept for Cog's server, where the front has them at once.
_COGS_SECONDS = 0.25
_NO_INPUTS = Inputs()

_front: socket.socket | None = None
# The ids of the predictions that run, by their tasks.
_running: dict[asyncio.Task[None], str] = {}
_cancelled_early: set[str] = set()
# Of this turn of the event loop, as the front gets them: id, place, text.
_texts: list[tuple[str, int, str]] = []


def listen(handlers: Mapping[str, Callable[..., object]], inputs: Inputs = _NO_INPUTS) -> None:
    """Handle the front's messages on this event loop, if there is a front; tell it of the inputs."""
    global _front
    descriptor = os.environ.get(VARIABLE)
    if not descriptor:
        return
    _front = socket.socket(fileno=int(descriptor))
    known = {**handlers, "cancel": cancel, "forget": _cancelled_early.discard}

    def handle(name: str, *words: Any) -> None:
        if name in known:
            known[name](*words)

    read_messages(_front, handle)
    tell("hello", inputs)


def tell(*words: Any, wait: bool = True) -> None:
    """Send a message to the front, if there is one."""
    if _front is not None:
        send_message(_front, *words, wait=wait)


def cancel(identifier: str) -> None:
    """Cancel the predictions with this id, or the next that begins. To be called on the event loop."""
    # A prediction may end on its own thread meanwhile.
    running = list(_running.items())
    tasks = [task for task, prediction in running if prediction == identifier]
    if not tasks:
        _cancelled_early.add(identifier)
    for task in tasks:
        task.cancel()


def live(source: AsyncGenerator[str, None]) -> Generator[str, None, None]:
    """Return a synchronous generator of what ``source`` yields on the running event loop.

    Closing it, or cancelling the prediction, cancels ``source``, which runs in the context of the
    prediction: what it prints or records belongs there.
    """
    context = contextvars.copy_context()
    identifiers = [context[variable] for variable in context if variable.name == _IDENTIFIER]
    stream = _LiveStream(source, identifier=identifiers[0] if identifiers else "")
    generator = stream.texts()
    # One that is closed before it has begun never runs its ``finally``.
    next(generator)
    return generator


class _LiveStream:
    """A prediction whose texts are read on the event loop, and taken by a thread of coglet's."""

    def __init__(self, source: AsyncGenerator[str, None], *, identifier: str) -> None:
        """Begin to read."""
        self._source = source
        self._identifier = identifier
        self._loop = asyncio.get_running_loop()
        # Texts, then None or an error.
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # Texts that Cog's server has not got yet.
        self._kept: list[str] = []
        # Only with a front does Cog's server get its texts late.
        has_front = _front is not None and bool(identifier)
        self._keep_seconds = _COGS_SECONDS if has_front else 0.0
        self._task = self._loop.create_task(self._read())
        self._task.add_done_callback(self._end)
        _running[self._task] = identifier
        if identifier in _cancelled_early:
            _cancelled_early.discard(identifier)
            # Once it has begun.
            self._loop.call_soon(self._task.cancel)

    def texts(self) -> Generator[str, None, None]:
        """Yield an empty text, then the texts; on a thread."""
        try:
            yield ""
            while True:
                item = self._items.get()
                if not isinstance(item, str):
                    break
                yield item
            if item is not None:
                raise item
        finally:
            # Where the loop is closed, nothing is left to cancel.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._task.cancel)
            del _running[self._task]
            tell("ended", self._identifier)

    async def _read(self) -> None:
        place = 0
        async with contextlib.aclosing(self._source) as texts:
            async for text in texts:
                if not self._kept:
                    self._loop.call_later(self._keep_seconds, self._hand_over)
                self._kept.append(text)
                if not _texts:
                    self._loop.call_soon(_tell_texts)
                _texts.append((self._identifier, place, text))
                place += len(text)

    def _hand_over(self) -> None:
        """Give the texts that were kept to Cog's server, as one."""
        if self._kept:
            self._items.put("".join(self._kept))
            self._kept.clear()

    def _end(self, task: asyncio.Task[None]) -> None:
        self._hand_over()
        if task.cancelled():
            self._items.put(CancelationException("the prediction was canceled"))
            return
        error = task.exception()
        if error is not None:
            error = self._named_once(error)
        self._items.put(error)

    def _named_once(self, error: BaseException) -> BaseException:
        """Return an error whose name is not repeated in what clients see.

        Cog names an error's class before its text, which may begin so already: E1001 PromptRequired: …
        """
        name, _, text = str(error).partition(": ")
        if self._identifier and type(error).__name__ in name.split():
            error_class: type[Exception] = type(name, (Exception,), {})
            return error_class(text)
        return error


def _tell_texts() -> None:
    """Send the front the texts of this turn of the event loop."""
    texts = list(_texts)
    # First, because the next text asks for another turn only if there are none.
    _texts.clear()
    for begin in range(0, len(texts), _TEXTS_IN_MESSAGE):
        tell("texts", *texts[begin : begin + _TEXTS_IN_MESSAGE], wait=False)
