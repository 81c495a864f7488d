"""What a command's end is told by: its exit status, and the cause as its last line."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

from cog_triton.errors import CogTritonError
from tools.benchmark.measure import BenchmarkError


def exit_status(run: Callable[[list[str] | None], bool], argv: list[str] | None) -> int:
    """Runs what measures, and stops it cleanly on SIGTERM.

    Args:
        run: returns whether what is promised was kept.

    Returns:
        0 if it was, 1 if it was not, 2 if something could not be measured, 130 after Ctrl-C.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        kept = run(argv)
    except (BenchmarkError, CogTritonError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0 if kept else 1
