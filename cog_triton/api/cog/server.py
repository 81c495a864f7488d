"""Cog's HTTP server with what it lacks: ``python -m cog_triton.api.cog.server``.

Takes the options of ``python -m cog.server.http``. In an image, where Cog writes the command, a line in a
.pth file calls ``prepare`` instead. The front then has the public port, and Cog's server a free local one.
"""

import os
import resource
import runpy
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, cast

_OPEN_FILES = 16_384


def prepare() -> None:
    """Put the front before the server that Cog is about to run in this process."""
    import coglet

    vars(coglet)["server"] = SimpleNamespace(serve=partial(serve, coglet.server.serve))


def serve(
    cogs: Callable[..., None],
    *,
    host: str = "0.0.0.0",
    port: int = 5000,
    await_explicit_shutdown: bool = False,
    **options: Any,
) -> None:
    """Serve in place of ``coglet.server.serve``, which is given, until the process is told to stop."""
    import uvloop

    from cog_triton.api.cog.front import Front, log
    from cog_triton.errors import ConfigurationError
    from cog_triton.settings import read_settings
    from cog_triton.web.server import bound

    try:
        settings = read_settings()
    except ConfigurationError:  # which the predictor reports
        settings = read_settings({})
    if settings.otel_endpoint and all(map(find_spec, ("opentelemetry", "opentelemetry.sdk"))):
        # Cog's own spans, below which ``generate()`` has its; without a word of COG_TRACE_… there are none.
        os.environ.setdefault("COG_TRACE_CONFIGURED", "true")
        os.environ.setdefault("COG_TRACE_SAMPLER", "parentbased_always_on")
    # The usual 1,024 are not enough: Cog's server opens one for each of 512 slots, and a request three.
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # which Linux bounds
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limit, min(_OPEN_FILES, most)), most))
    # The main thread is in Cog's server and runs no handlers; Python writes signals to this pipe.
    stop, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in [signal.SIGINT] if await_explicit_shutdown else [signal.SIGINT, signal.SIGTERM]:
        signal.signal(number, lambda *_: None)
    front = Front(bound(host.strip("[]"), port), settings)
    problem = front.predictions.directory_problem()
    # With each prediction, Cog's server would lose a slot, or write where another user wants.
    if problem:
        log(
            "ERROR",
            f"the server cannot start: {problem}; Cog stores the files of predictions there",
        )
        sys.exit(1)
    serving = front.serve(partial(_inner_port, front.source), stop)
    threading.Thread(target=uvloop.run, args=[serving], daemon=True).start()
    set_handler = signal.signal

    def keep_handler(number: int, handler: Any) -> Any:
        """Cog's server ignores SIGTERM if it is told to leave it alone, which its worker would inherit."""
        return handler if handler == signal.SIG_IGN else set_handler(number, handler)

    cast(Any, signal).signal = keep_handler
    # It ends by its route /shutdown then.
    cogs(host="127.0.0.1", port=0, await_explicit_shutdown=True, **options)
    front.predictions.remove_all()


def _inner_port(source: str) -> int | None:
    """Prepare the socket on which Cog's server listens; return the port, None if there is none yet.

    Only connections from ``source``, the front's, are let in. And Nagle's algorithm is turned off: measured
    with Cog 0.23.1, its server leaves it on, which delays each small event by up to 40 ms. Connections
    inherit TCP_NODELAY from the socket that they were accepted on.
    """
    from cog_triton.api.cog.inner_port import accept_only_from

    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.fromfd(int(name), socket.AF_INET, socket.SOCK_STREAM) as own:
            if own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with suppress(OSError):  # a system that is not quite Linux
                    accept_only_from(own, source)
                return int(own.getsockname()[1])
    return None


if __name__ == "__main__":
    prepare()
    runpy.run_module("cog.server.http", run_name="__main__", alter_sys=True)
