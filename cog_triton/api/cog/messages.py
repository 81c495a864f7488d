"""Messages between the front and the predictor, on a pair of sockets.

The front is in the process of Cog's server, the predictor in its worker, which inherits one socket of the
pair. Signals would not do: the worker's main thread, where Python handles them, never leaves coglet.

    to the predictor    drain        take no new requests that do not pass the front
                        stop         fail what runs
                        cancel ID    cancel this prediction
                        forget ID    it has ended: a cancel of it is not for the next one with this id
    from it             hello {…}    it listens, and takes these ``Inputs``
                        busy, idle   it answers requests that did not pass the front, or none
                        ended ID     a prediction has ended
                        texts [ID, PLACE, TEXT] …   new texts of several predictions, see ``answer.py``

A message is a JSON list of its words.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Any

import orjson

# Names the worker's socket in its environment.
VARIABLE = "COG_TRITON_CONTROL"
_LARGEST_BYTES = 1 << 16


def send_message(end: socket.socket, *words: Any, wait: bool = False) -> None:
    """Send a message from any thread.

    It is lost if it is too large, if the other end is closed, or, unless ``wait`` is set, if the socket is
    full.
    """
    message = orjson.dumps(words)
    if len(message) <= _LARGEST_BYTES:
        with contextlib.suppress(OSError):
            end.send(message, 0 if wait else socket.MSG_DONTWAIT)


def read_messages(end: socket.socket, handle: Callable[..., object]) -> None:
    """Call ``handle`` with the words of each message, on the running event loop."""
    loop = asyncio.get_running_loop()

    def read() -> None:
        with contextlib.suppress(OSError):
            while True:
                message = end.recv(_LARGEST_BYTES, socket.MSG_DONTWAIT)
                if not message:
                    # The other end is closed.
                    loop.remove_reader(end)
                    return
                handle(*orjson.loads(message))

    loop.add_reader(end, read)
