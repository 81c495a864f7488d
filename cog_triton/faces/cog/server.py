"""Cog's HTTP server with what it lacks: ``python -m cog_triton.faces.cog.server``.

Takes the options of ``python -m cog.server.http``. Where Cog writes the command, as in an image, a line in
a .pth file calls ``prepare`` in the same process. Cog's server then listens on a free port of the loopback
address, and the front (``cog_triton.faces.front``) on the public one.
"""

from __future__ import annotations

import contextlib
import os
import resource
import runpy
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

COG = "cog.server.http"
OPEN_FILES = 16_384


def main() -> None:
    """Runs Cog's server in this process."""
    prepare()
    runpy.run_module(COG, run_name="__main__", alter_sys=True)


def prepare() -> None:
    """To be called in the process that Cog's server is about to run in."""
    import coglet

    module: Any = coglet
    module.server = FrontedServer(module.server)


class FrontedServer:
    """In place of ``coglet.server``, whose attributes it has."""

    def __init__(self, server: Any) -> None:
        self._server = server

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)

    def serve(
        self,
        *,
        host: str = "0.0.0.0",
        port: int = 5000,
        await_explicit_shutdown: bool = False,
        **options: Any,
    ) -> None:
        """Serves until the process is told to stop, as the original does.

        Raises:
            OSError: nothing can listen on the address.
        """
        from cog_triton.faces.cog import control, no_delay, worker
        from cog_triton.faces.front.front import Front
        from cog_triton.faces.front.predictions import Predictions

        _allow_open_files()
        stop = _told_to_stop(not await_explicit_shutdown)
        listener = _bound(host, port)
        channel = control.offer()
        predictions = Predictions(channel.send)
        front = Front(listener, _limits(), predictions, worker.ended.is_set, channel)
        worker.end_with_worker(lambda: front.port)
        listening = no_delay.listening_port
        threading.Thread(
            target=front.run, args=[listening, stop], name="front", daemon=True
        ).start()
        with _sigterm_kept():
            # Told so, it leaves SIGTERM to the front, and ends by its route /shutdown.
            self._server.serve(host="127.0.0.1", port=0, await_explicit_shutdown=True, **options)
        predictions.remove_all()


def _limits() -> Any:
    """What the front allows, by the settings. If they are bad, the predictor says so."""
    from cog_triton.errors import ConfigurationError
    from cog_triton.faces.front.rules import Limits
    from cog_triton.settings import read_settings

    try:
        settings = read_settings()
    except ConfigurationError:
        settings = read_settings({})
    return Limits(
        settings.max_request_bytes,
        request_seconds=settings.receive_timeout,
        drain_seconds=settings.drain_seconds,
        busy_seconds=settings.busy_timeout,
    )


def _bound(host: str, port: int) -> socket.socket:
    """A socket at an address, which does not listen yet."""
    host = host.strip("[]")
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # its connections inherit it
    try:
        listener.bind((host, port))
    except OSError as error:
        raise OSError(error.errno, f"{host}, port {port}: {error.strerror}") from None
    return listener


def _told_to_stop(by_sigterm: bool) -> int:
    """A descriptor that can be read when SIGTERM or SIGINT has come.

    The main thread is in Cog's server, which lets no handler of Python's run; Python writes the signal to
    this descriptor all the same.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in (signal.SIGINT, signal.SIGTERM) if by_sigterm else (signal.SIGINT,):
        signal.signal(number, lambda *_: None)
    return reader


@contextlib.contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Keeps Cog's server from ignoring SIGTERM, by Python's ``signal``: its worker would inherit that."""
    module: Any = signal
    original = signal.signal

    def keeping(number: int, handler: Any) -> Any:
        if number == signal.SIGTERM and handler == signal.SIG_IGN:
            return signal.getsignal(number)
        return original(number, handler)

    module.signal = keeping
    try:
        yield
    finally:
        module.signal = original


def _allow_open_files() -> None:
    """Lets this process and its children open enough files, as far as the system allows it.

    The usual limit is 1,024. Cog's server takes a descriptor for each slot, used or not, and a request
    takes three, two of them because of the front: 512 of each go beyond it.
    """
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if most == resource.RLIM_INFINITY else min(OPEN_FILES, most)
    if limit != resource.RLIM_INFINITY and limit < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


if __name__ == "__main__":
    main()
