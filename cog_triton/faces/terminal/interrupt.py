"""Ctrl-C where there is nothing to wait for: one line, everything ended, exit status 130.

Imports little, so that it can be in force before anything else is imported.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable

from cog_triton.server.guard import adopt_orphans, kill_and_clean

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def end_at_once_on_signals(before: Callable[[], str] = lambda: "\n") -> None:
    """Make Ctrl-C, SIGTERM and SIGHUP end this process and all that it started, with 128 plus the signal.

    Args:
        before: returns what begins a line, where a terminal shows ^C.
    """

    def end(number: int, _: object) -> None:
        logging.disable()  # the ends of what is killed
        start = before() if sys.stderr.isatty() else ""
        os.write(sys.stderr.fileno(), f"{start}stopped\n".encode())
        kill_and_clean()
        # No Python code is to run any more: it may be in the middle of anything.
        os._exit(128 + number)

    adopt_orphans()
    for name in ENDING:
        signal.signal(name, end)
