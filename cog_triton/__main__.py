"""``cog-triton`` and ``python -m cog_triton``. Ctrl-C ends them without a traceback, whenever it comes."""

import signal
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None, prog: str = "") -> int:
    """Run a command and return its status; see ``cog_triton.cli.main``."""
    # A KeyboardInterrupt in an import would show a traceback of Python's.
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from cog_triton import cli

    signal.signal(signal.SIGINT, handler)
    return cli.main(argv, prog)


if __name__ == "__main__":
    sys.exit(main())
