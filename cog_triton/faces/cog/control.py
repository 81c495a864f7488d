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
_LARGEST = 1024  # an id has at most 128 letters
_worker: Control | None = None


class Control:
    """One end of the channel."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end

    def send(self, *words: str) -> None:
        """Send a message; from any thread. One to an end that is closed is lost."""
        with contextlib.suppress(OSError):
            self._end.send(" ".join(words).encode())

    def listen(self, handle: Callable[..., object]) -> None:
        """Call ``handle`` with the words of each message, on the running event loop."""
        loop = asyncio.get_running_loop()

        def ready() -> None:
            with contextlib.suppress(OSError):
                if message := self._end.recv(_LARGEST):
                    handle(*message.decode().split(" "))
                else:
                    loop.remove_reader(self._end)  # the other end is closed

        loop.add_reader(self._end, ready)


def offer() -> Control:
    """Open the channel; to be called in the server before it starts its worker."""
    ours, workers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    os.set_inheritable(workers.fileno(), True)
    os.environ[VARIABLE] = str(workers.detach())
    return Control(ours)


def listen(handlers: Mapping[str, Callable[..., object]], inputs: tuple[str, ...] = ()) -> None:
    """Call the handlers of the server's messages on this event loop; nothing without such a server.

    Args:
        handlers: by a message's first word; the others are their arguments.
        inputs: a prediction has to have one of them.
    """
    global _worker
    if descriptor := os.environ.get(VARIABLE):
        _worker = Control(socket.socket(fileno=int(descriptor)))

        def handle(name: str, *words: str) -> None:
            if name in handlers:
                handlers[name](*words)

        _worker.listen(handle)
        tell("hello", *inputs)


def tell(*words: str) -> None:
    """Send a message to the server, if there is one that takes it."""
    if _worker is not None:
        _worker.send(*words)
