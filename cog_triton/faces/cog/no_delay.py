"""Cog's HTTP server without Nagle's algorithm.

Measured with Cog 0.23.1: its server leaves Nagle's algorithm on, so that each small event of a stream waits
until the client has acknowledged the one before, for which it takes up to 40 ms. Connections inherit
TCP_NODELAY from the socket that they were accepted on. Cog gives no access to that, but it is one of this
process's own.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator

_POLL_SECONDS = 0.01
_GIVE_UP_SECONDS = 60.0


def send_at_once(port: int) -> None:
    """Turns Nagle's algorithm off on the port that this process is about to listen on."""
    threading.Thread(target=_watch, args=(port,), name="tcp-nodelay", daemon=True).start()


def _watch(port: int) -> None:
    deadline = time.monotonic() + _GIVE_UP_SECONDS
    while not _set_nodelay(port) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    # Once more, for connections that were on their way.
    time.sleep(_POLL_SECONDS)
    _set_nodelay(port)


def _set_nodelay(port: int) -> bool:
    """Sets TCP_NODELAY on this process's sockets at the port; returns whether one listens."""
    listening = False
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), _borrowed(int(name)) as sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.getsockname()[1] == port:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                listening |= sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
    return listening


@contextlib.contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    """A socket that somebody else will close; OSError if it is none."""
    sock = socket.socket(fileno=fd)
    try:
        yield sock
    finally:
        sock.detach()
