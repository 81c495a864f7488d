"""Runs a server and never outlives its starter.

    python guard.py ROLE SHM_PREFIX STOP_TIMEOUT TEMPORARY_DIRECTORY COMMAND...

ROLE is ``server``, or ``group`` for an mpirun whose ranks are servers, each under a guard of its own,
or the number of such a rank; or ``follower`` for a rank that something else than mpirun has started, and
that is not rank 0.

The starter holds the other end of standard input. When that end closes, because it asked for a stop or
because it was killed, the server gets SIGTERM, a bounded wait, and then SIGKILL for all processes that
descend from it. Its shared memory regions are removed, and the temporary directory if one is named. A
parent-death signal cannot do this: it is lost when the thread that forked ends, it reaches no
grandchildren, and it leaves /dev/shm behind.

Ranks above 0 follow rank 0: TensorRT-LLM's wait for it from their start on, before tritonserver can
handle a signal, and end when it has ended. A SIGTERM would kill them at once, and the engine of rank 0 with
them, in the middle of what it is finishing. So a stop leaves them alone until rank 0 has ended, and a
moment longer; then they get SIGTERM and SIGKILL like any other, since other engines' ranks do not follow.

A rank is told to stop by a signal, or by the end of its mpirun: under that, standard input is not the
starter's. One that ends without being told says so on standard error, see ``RANK_ENDED``, and its guard's
status is never 0 then: mpirun would take that for a rank that has done its work, and let the others
wait for it for good.

Runs before the package can be imported, so it uses the standard library alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
RANK_ENDED = "tritonserver of rank {rank} ended without being told to, with status {status}"

# Shares of STOP_TIMEOUT. Where nothing else shows when rank 0 ends, so much to end by itself: tritonserver
# limits its own end to half.
_FOLLOWER_SHARE = 0.6
# Once rank 0 has ended, so much, and at most so many seconds.
_LEAVING_SHARE, _LEAVING_SECONDS = 0.1, 1.0
# From SIGTERM to SIGKILL, at least.
_LAST_SHARE = 0.15

_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# mpirun hands this one on to its ranks and waits for them. A SIGTERM it keeps back for a second, and
# kills them one second later.
_GROUP_STOP = signal.SIGUSR1


def run(role: str, prefix: str, stop_timeout: float, directory: str, command: list[str]) -> int:
    """Runs ``command`` until it ends or is to stop; returns its exit status."""
    is_rank = role not in ("server", "group", "follower")
    stops = _stops_of_a_rank() if is_rank else _stops_of_the_starter()
    orphaned = [_readable_after(signal.SIGCHLD)] if role == "group" else []
    _adopt_orphans()
    server = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_die_with_guard
    )
    try:
        ended = _ended_before(stops, server, orphaned)
        if not ended:
            _stop_as(role, server, stop_timeout, in_order=is_rank and _is_group_stop(stops[0]))
        status = server.wait()
        if is_rank and ended:
            print(RANK_ENDED.format(rank=role, status=status), file=sys.stderr, flush=True)
            return status or 1
        # A follower cannot handle the signal that it is to end by, see above.
        return 0 if not ended and _follows(role) and status == -signal.SIGTERM else status
    finally:
        _kill_descendants()  # stubs of a server that crashed, ranks of an mpirun that was killed
        remove_shared_memory(prefix)
        if directory:
            shutil.rmtree(directory, ignore_errors=True)


def remove_shared_memory(prefix: str) -> None:
    """Removes the regions that Triton's Python backend named with ``prefix``."""
    for region in SHARED_MEMORY.glob(f"{prefix}*"):
        region.unlink(missing_ok=True)


def _stops_of_the_starter() -> list[int]:
    """What becomes readable when the starter wants the server to stop."""
    for name in _ENDING_SIGNALS:
        # Only the starter's end of the pipe decides. A handler, not SIG_IGN: the server would inherit that.
        signal.signal(name, lambda *_: None)
    return [sys.stdin.fileno()]


def _stops_of_a_rank() -> list[int]:
    """What becomes readable when a rank is to stop."""
    return [_readable_after(*_ENDING_SIGNALS, _GROUP_STOP), os.pidfd_open(os.getppid())]


def _readable_after(*names: signal.Signals) -> int:
    """What becomes readable at one of the signals; a byte for each is its number."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def note(number: int, _: object) -> None:
        with contextlib.suppress(BlockingIOError):  # noted often enough
            os.write(writer, bytes([number]))

    for name in names:
        signal.signal(name, note)
    return reader


def _adopt_orphans() -> None:
    """Makes this process the parent of descendants whose parent dies, so that it can find them."""
    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)


def _die_with_guard() -> None:
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _ended_before(stops: list[int], server: subprocess.Popen[bytes], orphaned: list[int]) -> bool:
    """Waits for the end of the server or a stop; tells whether it was the former.

    Args:
        orphaned: becomes readable when a rank ends whose guard was killed, and which is this process's
            child since. Its stubs are killed then: while they hold its pipes, mpirun waits.
    """
    process = os.pidfd_open(server.pid)
    ends = {process, *stops}
    while True:
        ready = set(select.select([*ends, *orphaned], [], [])[0])
        if ends & ready:
            os.close(process)
            return not ready & set(stops)
        os.read(orphaned[0], 4096)
        _kill_descendants(besides=server.pid)


def _is_group_stop(signals: int) -> bool:
    """Whether mpirun told its ranks to stop, rather than kills them or has ended."""
    ready, _, _ = select.select([signals], [], [], 0)
    return bool(ready) and bytes([_GROUP_STOP]) in os.read(signals, 4096)


def _follows(role: str) -> bool:
    return role == "follower" or (role.isdigit() and role != "0")


def _stop_as(role: str, server: subprocess.Popen[bytes], timeout: float, *, in_order: bool) -> None:
    """Ends the server in the way of its role.

    Args:
        in_order: whether rank 0 of the same mpirun was told to stop, too.
    """
    deadline = time.monotonic() + timeout
    if role == "follower":
        _ends_within(server, _FOLLOWER_SHARE * timeout)
    elif in_order and _follows(role):
        _wait_for_rank_0(server, (1 - _LAST_SHARE - _LEAVING_SHARE) * timeout)
        _ends_within(server, min(_LEAVING_SECONDS, _LEAVING_SHARE * timeout))
    rest = max(_LAST_SHARE * timeout, deadline - time.monotonic())
    _stop(server, rest, _GROUP_STOP if role == "group" else signal.SIGTERM)


def _stop(server: subprocess.Popen[bytes], timeout: float, name: signal.Signals) -> None:
    server.send_signal(name)
    if not _ends_within(server, timeout):
        server.kill()


def _ends_within(server: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        server.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _wait_for_rank_0(server: subprocess.Popen[bytes], timeout: float) -> None:
    """Returns when rank 0 of the same mpirun has ended, this rank's server has, or the time is over."""
    guards = [pid for pid in _children(os.getppid()) if _is_guard_of_rank_0(pid)]
    with contextlib.ExitStack() as opened:
        ends = []
        for pid in (server.pid, *guards):
            with contextlib.suppress(ProcessLookupError):  # ended since
                ends.append(os.pidfd_open(pid))
                opened.callback(os.close, ends[-1])
        select.select(ends, [], [], timeout if guards else _FOLLOWER_SHARE * timeout)


def _is_guard_of_rank_0(pid: int) -> bool:
    with contextlib.suppress(OSError, ValueError):  # ended since, or no guard
        arguments = Path("/proc", str(pid), "cmdline").read_bytes().split(b"\0")
        return arguments[arguments.index(os.fsencode(__file__)) + 1] == b"0"
    return False


def _kill_descendants(besides: int | None = None) -> None:
    # Each round makes the children of the killed this process's own. Process groups are no help: mpirun
    # gives every rank one.
    while children := [child for child in _children(os.getpid()) if child != besides]:
        for child in children:
            os.kill(child, signal.SIGKILL)
        for child in children:
            os.waitpid(child, 0)


def _children(parent: int) -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # ended since
            stat = Path("/proc", name, "stat").read_text(errors="replace")
            if int(stat.rpartition(")")[2].split()[1]) == parent:
                found.append(int(name))
    return found


if __name__ == "__main__":
    status = run(sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4], sys.argv[5:])
    # A shell's convention: 128 plus the signal's number.
    sys.exit(status if status >= 0 else 128 - status)
