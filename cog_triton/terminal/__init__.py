"""The output of ``make serve`` and ``make predict`` in a terminal or a pipe, and Ctrl-C there.

This file imports little, so that Ctrl-C can be in force before anything else. Imports errors and server.
After a change: pytest tests/unit/api/test_terminal.py tests/integration/test_terminal.py
"""

import logging
import os
import signal
import sys
from collections.abc import Callable

from cog_triton.server.guard import adopt_orphans, kill_and_clean

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def end_at_once_on_signals(before: Callable[[], str] = lambda: "\n") -> None:
    """Make Ctrl-C, SIGTERM and SIGHUP end this process and all that it started, with 128 plus the signal.

    On a terminal, which shows ^C, the text of ``before`` comes before the "stopped".
    """

    def end(number: int, _: object) -> None:
        # The killed processes' ends are not errors.
        logging.disable()
        start = before() if sys.stderr.isatty() else ""
        os.write(sys.stderr.fileno(), f"{start}stopped\n".encode())
        kill_and_clean()
        # Without exit handlers: the signal may have interrupted anything.
        os._exit(128 + number)

    adopt_orphans()
    for name in ENDING:
        signal.signal(name, end)
