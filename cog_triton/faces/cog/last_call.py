"""How Cog's server tells the predictor, in its worker, that the time for running predictions is over.

A pipe that the worker inherits. It cannot be a signal: Python runs handlers in a process's main thread,
and that of the worker is coglet's for good.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable

VARIABLE = "COG_TRITON_LAST_CALL"


def offer() -> Callable[[], None]:
    """To be called in the server before it starts its worker; returns what tells the worker."""
    reader, writer = os.pipe()
    os.set_inheritable(reader, True)
    os.environ[VARIABLE] = str(reader)

    def tell() -> None:
        with contextlib.suppress(OSError):  # nobody listens any more
            os.write(writer, b"!")

    return tell


def listen(callback: Callable[[], object]) -> None:
    """Has ``callback`` called on this event loop when the time is over; nothing without such a server."""
    descriptor = os.environ.get(VARIABLE)
    if descriptor is None:
        return
    loop, reader = asyncio.get_running_loop(), int(descriptor)

    def ready() -> None:
        loop.remove_reader(reader)
        if os.read(reader, 1):  # else the server has ended, which others look after
            callback()

    loop.add_reader(reader, ready)
