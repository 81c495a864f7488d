#!/usr/bin/env python3
"""Run a server or a prediction in a recipe of the Makefile: python scripts/_recipe.py COMMAND ARGUMENT …

Ctrl-C reaches make as well, which ends with status 130 by itself once the command has ended; the command's
130 becomes 0, or make would call it an error. SIGTERM is passed on, and make waits until the command has
ended: a shell in this place would end, and leave the command running.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SIGNALS = {signal.SIGTERM, signal.SIGCHLD}
# In which a signal to the whole group has come from make as well.
GROUP_SECONDS = 0.3


def run(command: Sequence[str]) -> int:
    """Run a command to its end; return its status, 0 for Ctrl-C."""
    # Blocked before the start, so that none is lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    signal.signal(signal.SIGINT, lambda *_: None)
    process = subprocess.Popen(
        command, preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    )
    while process.poll() is None:
        received = signal.sigwaitinfo(SIGNALS)
        if received.si_signo == signal.SIGTERM and not _sent_to_group(received.si_pid):
            process.send_signal(signal.SIGTERM)
    status = process.returncode
    if status < 0:
        status = 128 - status
    return 0 if status == 128 + signal.SIGINT else status


def _sent_to_group(sender: int) -> bool:
    """Return whether a SIGTERM reached the command by itself: a second one would mean "at once".

    `timeout` sends it to make and to make's process group; make passes it on to this process only. Linux
    keeps one of two signals that come before this process runs. If that is make's, the command gets two.
    """
    make = os.getppid()
    senders = {sender}
    while True:
        received = signal.sigtimedwait({signal.SIGTERM}, GROUP_SECONDS)
        if received is None:
            return senders != {make} and not _catches_sigterm(make)
        senders.add(received.si_pid)


def _catches_sigterm(make: int) -> bool:
    """Return whether make has had no SIGTERM yet: it catches one."""
    status = Path(f"/proc/{make}/status").read_text(encoding="utf-8")
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
