"""How Cog's server and the predictor, in its worker, tell each other what a stop needs.

A pair of sockets, of which the worker inherits one. It cannot be a signal: Python runs handlers in a
process's main thread, and that of the worker is coglet's for good.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable

VARIABLE = "COG_TRITON_LAST_CALL"
_DRAIN, _LAST_CALL = b"d", b"!"
_BUSY, _IDLE = b"+", b"-"


class Line:
    """The server's end."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self.busy = False
        """Whether the predictor answers requests that did not come by Cog's server."""

    def drain(self) -> None:
        """Tells the predictor to take no new requests by itself."""
        self._tell(_DRAIN)

    def last_call(self) -> None:
        """Tells it that the time of what runs is over."""
        self._tell(_LAST_CALL)

    def fileno(self) -> int:
        """To be waited for, until there is something to ``hear``."""
        return self._end.fileno()

    def hear(self) -> None:
        """Takes in what the predictor has said."""
        with contextlib.suppress(BlockingIOError):
            self.busy = self._end.recv(1024).endswith(_BUSY)

    def _tell(self, word: bytes) -> None:
        with contextlib.suppress(OSError):  # nobody listens any more
            self._end.send(word)


def offer() -> Line:
    """To be called in the server before it starts its worker."""
    ours, workers = socket.socketpair()
    for end in (ours, workers):
        end.setblocking(False)
    os.environ[VARIABLE] = str(workers.detach())
    os.set_inheritable(int(os.environ[VARIABLE]), True)
    return Line(ours)


def listen(last_call: Callable[[], object], drain: Callable[[], object] | None = None) -> None:
    """Has these called on this event loop when the server says so; nothing without such a server.

    Args:
        last_call: ends what runs.
        drain: sees to it that no more is begun; the server itself takes no more predictions then.
    """
    descriptor = os.environ.get(VARIABLE)
    if descriptor is None:
        return
    loop, end = asyncio.get_running_loop(), int(descriptor)

    def ready() -> None:
        words = os.read(end, 16)
        if _DRAIN in words and drain is not None:
            drain()
        if _LAST_CALL in words:
            last_call()
        if not words:  # the server has ended, which others look after
            loop.remove_reader(end)

    loop.add_reader(end, ready)


def tell_busy(busy: bool) -> None:
    """Tells the server whether requests run that did not come by it, so that a stop waits for them."""
    descriptor = os.environ.get(VARIABLE)
    if descriptor is not None:
        with contextlib.suppress(OSError):
            os.write(int(descriptor), _BUSY if busy else _IDLE)
