"""One command: its output line by line as it comes, a time limit, and an end that leaves nothing."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from cog_triton.server.command import guarded

STOP_TIMEOUT = 10.0  # seconds from SIGTERM to SIGKILL


class Expired(Exception):
    """The command ran into its time limit, and was stopped."""


def run(
    command: Sequence[str],
    on_line: Callable[[str], None],
    *,
    cwd: Path,
    environ: Mapping[str, str],
    timeout: float | None = None,
) -> int:
    """Runs a command, and returns its exit status.

    It ends with the call, and so do all processes that it started, whatever ends the call: the guard of
    tritonserver sees to it, even when this process is killed. A status above 128 is 128 plus the number
    of the signal that ended it.

    Args:
        on_line: called with each line of standard output and standard error. A progress bar that is
            drawn over itself comes as one line a step.
        timeout: seconds; None is no limit.

    Raises:
        Expired: the time limit was reached.
    """
    process = subprocess.Popen(
        guarded("server", "", STOP_TIMEOUT, [*command]),
        cwd=cwd,
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,  # Ctrl-C reaches this process alone, which stops the command
    )
    assert process.stdin is not None
    assert process.stdout is not None
    expired = threading.Event()

    def expire() -> None:
        expired.set()
        process.stdin.close()  # type: ignore[union-attr]

    limit = threading.Timer(timeout, expire) if timeout else None
    try:
        if limit:
            limit.start()
        for line in process.stdout:
            on_line(line.rstrip("\n"))
        status = process.wait()
    finally:
        if limit:
            limit.cancel()
        process.stdin.close()  # the guard stops what still runs
        process.wait()
        process.stdout.close()
    if expired.is_set():
        raise Expired
    return status
