"""Messages between the front, in the process of Cog's server, and the predictor, in its worker.

A pair of sockets, of which the worker inherits one. Signals would not do: Python runs their handlers in a
process's main thread, and that of the worker never returns from coglet.

To the predictor: ``drain`` (take no new requests that do not pass the front), ``stop`` (fail what runs),
``cancel ID``, ``forget ID`` (that prediction has ended: a cancel of it is not for the next with this id).
From it: ``hello INPUT …`` (it listens, and needs one of these inputs), ``busy`` and ``idle`` (it answers
requests that did not pass the front, or none), ``ended ID``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Mapping

VARIABLE = "COG_TRITON_CONTROL"
CLOSED = "closed"
_LARGEST = 1024  # an id has at most 128 letters
_worker: Control | None = None


class Control:
    """One end."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end

    def fileno(self) -> int:
        """Return a descriptor to wait for, until there is something to ``receive``."""
        return self._end.fileno()

    def send(self, *words: str) -> None:
        with contextlib.suppress(OSError):  # the other end is closed
            self._end.send(" ".join(words).encode())

    def receive(self) -> list[list[str]]:
        """Return the messages that have come, as words; the last is ``closed``."""
        messages = []
        with contextlib.suppress(OSError):  # nothing more is there
            while message := self._end.recv(_LARGEST):
                messages.append(message.decode().split(" "))
            messages.append([CLOSED])
        return messages


def offer() -> Control:
    """Open the channel; to be called in the server before it starts its worker."""
    ours, workers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    os.set_inheritable(workers.fileno(), True)
    os.environ[VARIABLE] = str(workers.detach())
    return Control(ours)


def listen(handlers: Mapping[str, Callable[..., object]], inputs: tuple[str, ...] = ()) -> None:
    """Run these on this event loop for the server's messages; do nothing without such a server.

    Args:
        handlers: by a message's first word; the others are their arguments.
        inputs: a prediction has to have one of them.
    """
    global _worker
    descriptor = os.environ.get(VARIABLE)
    if descriptor is None:
        return
    loop, end = asyncio.get_running_loop(), Control(socket.socket(fileno=int(descriptor)))

    def ready() -> None:
        for name, *arguments in end.receive():
            if name in handlers:
                handlers[name](*arguments)
            elif name == CLOSED:
                loop.remove_reader(end)

    loop.add_reader(end, ready)
    _worker = end
    tell("hello", *inputs)


def tell(*words: str) -> None:
    """Send a message to the server, if there is one that takes it. From any thread."""
    if _worker is not None:
        _worker.send(*words)
