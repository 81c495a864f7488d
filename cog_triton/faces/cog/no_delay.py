"""Cog's HTTP server without Nagle's algorithm.

Measured with Cog 0.23.1: its server leaves Nagle's algorithm on, so that each small event of a stream waits
until the other side has acknowledged the one before, for which it takes up to 40 ms. Connections inherit
TCP_NODELAY from the socket that they were accepted on. Cog gives no access to that, but it is one of this
process's own.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator


def listening_port() -> int | None:
    """The port that this process listens on, with Nagle's algorithm off there; None if on none yet.

    To be asked before connections come.
    """
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), _borrowed(int(name)) as sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6) and _listens(sock):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return int(sock.getsockname()[1])
    return None


def _listens(sock: socket.socket) -> bool:
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1


@contextlib.contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    """A socket that somebody else will close; OSError if it is none."""
    sock = socket.socket(fileno=fd)
    try:
        yield sock
    finally:
        sock.detach()
