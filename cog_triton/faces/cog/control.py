"""Messages between the front, in the process of Cog's server, and the predictor, in its worker.

A pair of sockets, of which the worker inherits one. It cannot be a signal: Python runs handlers in a
process's main thread, and that of the worker never returns from coglet.

To the predictor: ``drain`` (take no new requests by yourself), ``stop`` (fail what runs), ``cancel ID``,
``forget ID`` (that prediction has ended: its cancel is not for one that has the same id later). From it:
``hello INPUT …`` (it listens, and needs one of these inputs), ``busy`` and ``idle`` (it answers requests
that did not pass the front, or none), ``ended ID``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Mapping

VARIABLE = "COG_TRITON_CONTROL"
_LARGEST = 1024  # an id has at most 128 letters


class Control:
    """The server's end."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def fileno(self) -> int:
        """Return a descriptor to wait for, until there is something to ``receive``."""
        return self._end.fileno()

    def receive(self) -> list[list[str]]:
        """Return the messages that have come, as words."""
        return _received(self._end)

    def send(self, *words: str) -> None:
        with contextlib.suppress(OSError):  # the worker has ended
            self._end.send(" ".join(words).encode())


def offer() -> Control:
    """Open the channel; to be called in the server before it starts its worker."""
    ours, workers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, workers):
        end.setblocking(False)
    os.environ[VARIABLE] = str(workers.detach())
    os.set_inheritable(int(os.environ[VARIABLE]), True)
    return Control(ours)


_workers: socket.socket | None = None


def listen(handlers: Mapping[str, Callable[..., object]], inputs: tuple[str, ...] = ()) -> None:
    """Run these on this event loop for the server's messages; do nothing without such a server.

    Args:
        handlers: by a message's first word; the others are their arguments.
        inputs: a prediction has to have one of them.
    """
    global _workers
    descriptor = os.environ.get(VARIABLE)
    if descriptor is None:
        return
    loop, end = asyncio.get_running_loop(), socket.socket(fileno=int(descriptor))
    _workers = end

    def ready() -> None:
        messages = _received(end)
        for name, *arguments in messages:
            if name in handlers:
                handlers[name](*arguments)
            elif name == _CLOSED:
                loop.remove_reader(end)

    loop.add_reader(end, ready)
    tell("hello", *inputs)


def tell(*words: str) -> None:
    """Send a message to the server, if there is one that takes it. From any thread."""
    if _workers is not None:
        with contextlib.suppress(OSError):
            _workers.send(" ".join(words).encode())


_CLOSED = "closed"


def _received(end: socket.socket) -> list[list[str]]:
    messages = []
    with contextlib.suppress(OSError):  # nothing more is there
        while message := end.recv(_LARGEST):
            messages.append(message.decode().split(" "))
        messages.append([_CLOSED])
    return messages
