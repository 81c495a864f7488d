"""A process that ends with its parent."""

from __future__ import annotations

import os
import select
import signal
import threading


def end_with_parent() -> None:
    """Ends this process when its parent ends, however it does.

    By a thread that waits for it: a parent-death signal would come as well when only that thread of the
    parent ends which started this process.
    """
    parent = os.pidfd_open(os.getppid())
    threading.Thread(target=_end_after, args=[parent], name="end-with-parent", daemon=True).start()


def _end_after(process: int) -> None:
    select.select([process], [], [])
    os.kill(os.getpid(), signal.SIGKILL)
