"""Cog's HTTP server with what it lacks: ``python -m cog_triton.api.cog.server``.

Takes the options of ``python -m cog.server.http``. In an image, where Cog writes the command, a line in a
.pth file calls ``prepare`` instead. The front then has the public port, and Cog's server a free local one.
"""

from __future__ import annotations

import contextlib
import os
import resource
import runpy
import signal
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from cog_triton.api.cog.front import Front
    from cog_triton.settings import Settings

_OPEN_FILES = 16_384


def prepare() -> None:
    """Put the front before the server that Cog is about to run in this process."""
    import coglet

    vars(coglet)["server"] = SimpleNamespace(serve=partial(serve, coglet.server.serve))


def serve(
    cogs_serve: Callable[..., None],
    *,
    host: str = "0.0.0.0",
    port: int = 5000,
    await_explicit_shutdown: bool = False,
    **options: Any,
) -> None:
    """Serve in place of ``coglet.server.serve`` until the process is told to stop.

    Args:
        cogs_serve: the function that this one takes the place of, and its arguments.
    """
    from cog_triton.api.cog.front import Front
    from cog_triton.api.cog.lifetime import log
    from cog_triton.web.server import bound

    settings = _settings()
    _trace_if_configured(settings)
    _allow_open_files()
    stop = _signals_to_pipe(
        [signal.SIGINT] if await_explicit_shutdown else [signal.SIGINT, signal.SIGTERM]
    )
    front = Front(bound(host.strip("[]"), port), settings)
    problem = front.predictions.files.problem()
    # With each prediction, Cog's server would lose a slot, or write where another user wants.
    if problem:
        log(
            "ERROR",
            f"the server cannot start: {problem}; Cog stores the files of predictions there",
        )
        sys.exit(1)
    threading.Thread(target=run_front, args=[front, stop], name="front", daemon=True).start()
    _prevent_ignored_signals()
    # Cog's server ends by its route /shutdown.
    cogs_serve(host="127.0.0.1", port=0, await_explicit_shutdown=True, **options)
    front.predictions.files.remove_all()


def run_front(front: Front, stop: int) -> None:
    """Run the front until its end. Without it nobody reaches Cog's server: if it fails, so does all."""
    import uvloop

    from cog_triton.api.cog.front import EXIT_STATUS
    from cog_triton.api.cog.lifetime import log

    try:
        uvloop.run(front.serve(partial(_inner_port, front.cog_server.source), stop))
    except BaseException as error:
        log("ERROR", f"the server stops, because its front failed: {error!r}")
        os._exit(EXIT_STATUS)


def _settings() -> Settings:
    from cog_triton.errors import ConfigurationError
    from cog_triton.settings import read_settings

    try:
        return read_settings()
    except ConfigurationError:
        # The predictor reports it.
        return read_settings({})


def _trace_if_configured(settings: Settings) -> None:
    """Switch Cog's spans on, below which ``generate()`` has its own; unless COG_TRACE_… says otherwise."""
    if settings.otel_endpoint and all(map(find_spec, ("opentelemetry", "opentelemetry.sdk"))):
        os.environ.setdefault("COG_TRACE_CONFIGURED", "true")
        os.environ.setdefault("COG_TRACE_SAMPLER", "parentbased_always_on")


def _allow_open_files() -> None:
    """Raise the limit of open files, as far as Linux lets us.

    The usual 1,024 are not enough: Cog's server opens one for each of 512 slots, and a request three.
    """
    limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(limit, min(_OPEN_FILES, hard_limit))
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard_limit))


def _signals_to_pipe(signals: list[signal.Signals]) -> int:
    """Return a descriptor that is readable after a signal.

    The main thread is in Cog's server and runs no handlers; Python writes signals to the pipe.
    """
    stop, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in signals:
        signal.signal(number, lambda *_: None)
    return stop


def _prevent_ignored_signals() -> None:
    """Prevent Cog's server from ignoring SIGTERM, which its worker would inherit.

    A server that is told to wait for its route /shutdown ignores it.
    """
    set_handler = signal.signal

    def set_unless_ignored(number: int, handler: Any) -> Any:
        return handler if handler == signal.SIG_IGN else set_handler(number, handler)

    cast(Any, signal).signal = set_unless_ignored


def _inner_port(source: str) -> int | None:
    """Prepare the socket on which Cog's server listens; return the port, None if there is none yet.

    Only connections from ``source``, the front's, are let in. And Nagle's algorithm is turned off: measured
    with Cog 0.23.1, its server leaves it on, which delays each small event by up to 40 ms. Connections
    inherit TCP_NODELAY from the socket that they were accepted on.
    """
    from cog_triton.api.cog.inner_port import accept_only_from

    for name in os.listdir("/proc/self/fd"):
        # Most descriptors are no sockets of IPv4.
        with (
            contextlib.suppress(OSError),
            socket.fromfd(int(name), socket.AF_INET, socket.SOCK_STREAM) as listener,
        ):
            if listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                # A system that is not quite Linux may have no such filters.
                with contextlib.suppress(OSError):
                    accept_only_from(listener, source)
                return int(listener.getsockname()[1])
    return None


if __name__ == "__main__":
    prepare()
    runpy.run_module("cog.server.http", run_name="__main__", alter_sys=True)
