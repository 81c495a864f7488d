"""The beginning of a tool's command: its log, its signals, its settings; and lines of progress."""

import logging
import os
import signal
import sys
from collections.abc import Sequence

from cog_triton.errors import ConfigurationError


def begin() -> None:
    """Log warnings, and make SIGTERM and SIGHUP an exception, so that all that was started is stopped."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    for name in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(name) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(name, lambda number, _frame: sys.exit(128 + number))


def environment(settings: Sequence[str]) -> dict[str, str]:
    """Return the environment with KEY=VALUE settings in it, or raise ConfigurationError."""
    if wrong := [item for item in settings if "=" not in item]:
        raise ConfigurationError(f"--settings: {wrong[0]!r} is not of the form KEY=VALUE")
    return {**os.environ, **dict(item.split("=", 1) for item in settings)}


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
