"""Cog's server ends when its worker does.

Measured with Cog 0.23.1: when the worker, in which the predictor runs, is killed, the server goes on for
good, answers every request with an error, and says UNHEALTHY; it starts no other. So whatever runs the
container finds a process that runs. To be deleted when Cog starts a worker again, or ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

EXIT_STATUS = 70
"""EX_SOFTWARE of sysexits.h."""
_WORKER = b"coglet.server._run_worker"
_POLL_SECONDS = 0.1
_GRACE_SECONDS = 1.0  # a server that was told to stop ends by itself
_ASK_SECONDS = 2.0


ended = threading.Event()
"""The worker was there, and is not any more."""


def end_with_worker(port: Callable[[], int]) -> None:
    """Ends this process, which is about to be Cog's server, soon after its worker has ended.

    Not if the worker ended because its setup failed: then the server tells why to who asks.

    Args:
        port: that the server listens on, by then.
    """
    threading.Thread(target=_watch, args=[port], name="end-with-worker", daemon=True).start()


def _watch(port: Callable[[], int]) -> None:
    before = _faults_of_ended_children()
    # A worker that is killed as it appears may be gone before it is seen.
    while (worker := _worker()) is None and _faults_of_ended_children() == before:
        time.sleep(_POLL_SECONDS)
    if worker is not None:
        with contextlib.suppress(ProcessLookupError):
            select.select([os.pidfd_open(worker)], [], [])
    ended.set()
    time.sleep(_GRACE_SECONDS)
    if _status(port()) == "SETUP_FAILED":
        return
    print(
        "the predictor's process has ended, and Cog's server with it", file=sys.stderr, flush=True
    )
    os._exit(EXIT_STATUS)


def _worker() -> int | None:
    """The process id of this process's worker; None before there is one."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # the thread or the child has ended
            for pid in Path("/proc/self/task", thread, "children").read_text().split():
                if _WORKER in Path("/proc", pid, "cmdline").read_bytes():
                    return int(pid)
    return None


def _faults_of_ended_children() -> int:
    """Return a number that grows with each child that has ended and been waited for."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt


def _status(port: int) -> str | None:
    """What the server says of itself; None if it does not answer."""
    try:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port}/health-check", None, _ASK_SECONDS
        ) as reply:
            return str(json.load(reply)["status"])
    except (OSError, ValueError, KeyError):
        return None
