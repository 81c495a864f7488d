"""``cog-triton`` and ``python -m cog_triton``.

Neither Ctrl-C nor a pipe whose reader leaves, such as ``head``, ends them with a traceback.
"""

import os
import signal
import sys
from collections.abc import Sequence

BROKEN_PIPE = 128 + signal.SIGPIPE


def main(argv: Sequence[str] | None = None, prog: str = "") -> int:
    """Run a command and return its status; see ``cog_triton.cli.main``."""
    # A KeyboardInterrupt in an import would show a traceback of Python's.
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from cog_triton import cli

    signal.signal(signal.SIGINT, handler)
    try:
        try:
            return cli.main(argv, prog)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes standard output once more at its end, and would report that it cannot.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


if __name__ == "__main__":
    sys.exit(main())
