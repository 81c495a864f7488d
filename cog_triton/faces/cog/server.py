"""Cog's HTTP server with what it lacks: ``python -m cog_triton.faces.cog.server``.

Takes the options of ``python -m cog.server.http``. Where Cog writes the command, as in an image, a line in
a .pth file calls ``prepare`` in the same process. Cog's server then listens on a free port of the loopback
address, and the front on the public one.
"""

from __future__ import annotations

import contextlib
import os
import resource
import runpy
import signal
import socket
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

_OPEN_FILES = 16_384


def prepare() -> None:
    """Put the front before the server that Cog is about to run in this process."""
    import coglet

    module: Any = coglet
    module.server = SimpleNamespace(serve=partial(serve, module.server.serve))


def serve(
    cogs: Callable[..., None],
    *,
    host: str = "0.0.0.0",
    port: int = 5000,
    await_explicit_shutdown: bool = False,
    **options: Any,
) -> None:
    """Serve until the process is told to stop, in place of ``coglet.server.serve``, which is given.

    Raises:
        OSError: nothing can listen on the address.
    """
    from cog_triton.errors import ConfigurationError
    from cog_triton.faces.cog.front import Front
    from cog_triton.settings import read_settings
    from cog_triton.web.server import bound

    try:
        settings = read_settings()
    except ConfigurationError:  # which the predictor reports
        settings = read_settings({})
    # The usual limit of open files is 1,024. Cog's server takes one for each slot, used or not, and a
    # request takes three, two of them because of the front: 512 of each go beyond it.
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if most == resource.RLIM_INFINITY else min(_OPEN_FILES, most)
    if limit not in (resource.RLIM_INFINITY, most):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(limit, wanted), most))
    # The main thread is in Cog's server, which lets no handler of Python's run; Python writes the
    # signal to this pipe all the same.
    stop, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, lambda *_: None)
    if not await_explicit_shutdown:
        signal.signal(signal.SIGTERM, lambda *_: None)
    front = Front(bound(host.strip("[]"), port), settings)
    threading.Thread(target=front.run, args=[_port_without_delay, stop], daemon=True).start()
    original = signal.signal

    def keep_sigterm(number: int, handler: Any) -> Any:
        if number == signal.SIGTERM and handler == signal.SIG_IGN:
            return signal.getsignal(number)  # Cog's worker would inherit that it is ignored
        return original(number, handler)

    signal_module: Any = signal
    signal_module.signal = keep_sigterm
    # Told so, Cog's server leaves SIGTERM to the front, and ends by its route /shutdown.
    cogs(host="127.0.0.1", port=0, await_explicit_shutdown=True, **options)
    front.predictions.remove_all()


def _port_without_delay() -> int | None:
    """Turn Nagle's algorithm off where Cog's server listens; return the port, None if there is none yet.

    Measured with Cog 0.23.1: its server leaves it on, which delays each small event by up to 40 ms.
    Connections inherit TCP_NODELAY from the socket that they were accepted on.
    """
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            sock = socket.socket(fileno=int(name))
            try:
                if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    return int(sock.getsockname()[1])
            finally:
                sock.detach()  # it is not ours to close
    return None


if __name__ == "__main__":
    prepare()
    runpy.run_module("cog.server.http", run_name="__main__", alter_sys=True)
