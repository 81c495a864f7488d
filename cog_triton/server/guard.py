"""Runs a server and never outlives its starter.

    python guard.py ROLE SHM_PREFIX STOP_TIMEOUT TEMPORARY_DIRECTORY COMMAND...

ROLE is ``server``; ``group`` for an mpirun whose ranks are servers, each under a guard of its own; the
number of such a rank; or ``follower`` for a rank above 0 that something else than mpirun started.
SHM_PREFIX and TEMPORARY_DIRECTORY may be empty: there is nothing to remove then.

The starter holds the other end of standard input. When that end closes, because it asked for a stop or
because it was killed, the server gets SIGTERM, a bounded wait, and then SIGKILL for all processes that
descend from it. Its shared memory regions are removed, and the temporary directory if one is named. A
parent-death signal cannot do this: it is lost when the thread that forked ends, it reaches no
grandchildren, and it leaves /dev/shm behind.

The starter may write there, too: ``STOP``, which is the same as closing it, ``KILL`` for a server that
hangs or, after a stop, has nothing left to do, and ``WATCH`` once every model is ready: no stub is
started after that, so the guard no longer looks for new ones.
The end of a stub ends the server as well, from the stub's first moment on. Triton 2.51 does not notice it:
it waits forever for a stub that is killed as it starts, and keeps the requests of one that is killed
later. A stub that ends with status 0 was stopped by a server that unloads its model.

A rank above 0 begins with SIGTERM ignored. TensorRT-LLM's waits for rank 0 from its start on, before
tritonserver handles the signal, and ends when rank 0 has ended. The signal would kill it at once, and the
engine with it, in the middle of what rank 0 is finishing. Ranks of other engines come to handle it.

A rank is stopped by a signal, or by the end of its mpirun: under that, standard input is not the
starter's. One that ends unasked says so on standard error, see ``RANK_ENDED``, and its guard's status is
never 0 then: mpirun would take that for a rank that has done its work, and let the others wait forever.

Runs before the package can be imported, so it uses only the standard library.
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
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

SHARED_MEMORY = Path("/dev/shm")
RANK_ENDED = "tritonserver of rank {rank} ended without being told to, with status {status}"
STUB_ENDED = "the process of model {model} ended without being told to, with status {status}"
STUB = "triton_python_backend_stub"
SERVER = "tritonserver"
UNKNOWN = "(unknown)"
STOP, WATCH, KILL = b"s", b"w", b"k"
LOOK_SECONDS = {"server": 0.2, "group": 0.2, "follower": 1.0}
"""Between two looks for new stubs, by role. The guard of the group looks for those of its ranks."""
REAP_SECONDS = 0.1  # in which Triton takes the exit status of a stub that it ended itself
TRACKER_SECONDS = 5.0
LAST_BYTES_SECONDS = 0.2  # for a server that has answered every request to write its last output

# mpirun hands this one on to its ranks and waits for them. A SIGTERM it keeps back for a second, and
# kills them one second later.
_GROUP_STOP = signal.SIGUSR1
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Stub(NamedTuple):
    pid: int
    parent: int
    model: str


def run(role: str, prefix: str, stop_timeout: float, directory: str, command: list[str]) -> int:
    """Run ``command`` until it ends or is to stop; return its exit status.

    Args:
        prefix: of the command's shared memory, which is removed; empty if it has none.
        directory: removed at the end; empty for none.
    """
    is_rank = role.isdigit()
    follows = role == "follower" or (is_rank and role != "0")
    if is_rank:
        stops = [_readable_after(*_ENDING_SIGNALS, _GROUP_STOP), os.pidfd_open(os.getppid())]
    else:
        for name in _ENDING_SIGNALS:
            # Only the starter decides. A handler, not SIG_IGN: the server would inherit that.
            signal.signal(name, lambda *_: None)
        stops = [sys.stdin.fileno()]
    orphaned = [_readable_after(signal.SIGCHLD)] if role == "group" else []
    adopt_orphans()
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=_become_follower if follows else _die_with_guard,
    )
    try:
        ended = _ended_before(stops, server, orphaned, LOOK_SECONDS.get(role))
        if not ended:
            name = _GROUP_STOP if role == "group" else signal.SIGTERM
            # A rank still has to say goodbye to the others when its models have ended.
            starter = sys.stdin.fileno() if role == "server" else None
            if _stop(server, stop_timeout, name, starter):
                return 0
        status = server.wait()
        if is_rank and ended:
            print(RANK_ENDED.format(rank=role, status=status), file=sys.stderr, flush=True)
            return status or 1
        return status
    finally:
        kill_descendants()  # stubs of a server that crashed, ranks of an mpirun that was killed
        if prefix:
            remove_shared_memory(prefix)
        if directory:
            shutil.rmtree(directory, ignore_errors=True)


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent dies, to find them."""
    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)


def remove_shared_memory(prefix: str) -> None:
    """Remove the regions that Triton's Python backend named with ``prefix``."""
    for region in SHARED_MEMORY.glob(f"{prefix}*"):
        region.unlink(missing_ok=True)


def make_private(prefix: str) -> None:
    """Make the shared memory readable only for this user.

    Triton makes it readable for all, whatever the umask: it sets the mode itself. Its regions are all there
    when every model is ready, and nothing of a request is in them before.
    """
    for region in SHARED_MEMORY.glob(f"{prefix}*"):
        region.chmod(0o600)


def kill_and_clean() -> None:
    """Kill all descendants of this process, and remove the files of their servers.

    Needs ``adopt_orphans`` before anything was started. For those who cannot wait for a guard.
    """
    for name in [process_name(os.getpid()), *kill_descendants()]:
        remove_shared_memory(f"cog_triton_{name}_")
        for directory in Path(tempfile.gettempdir()).glob(f"cog-triton-{name}-*"):
            shutil.rmtree(directory, ignore_errors=True)


def process_name(pid: int) -> str:
    """Return a name that no other process has, in no other container either: its id and its start."""
    return f"{pid}_{_stat(pid)[19]}"


def kill_descendants(besides: int | None = None) -> list[str]:
    """Kill all descendants of this process but one; return their names."""
    # Each round makes the children of the killed this process's own. Process groups are no help: mpirun
    # gives every rank one.
    names = []
    while children := [c for c in _children() if c != besides and not _is_tracker(c)]:
        with contextlib.suppress(OSError):  # another thread has waited for it
            names += [process_name(child) for child in children]
        for child in children:
            os.kill(child, signal.SIGKILL)
        for child in children:
            with contextlib.suppress(ChildProcessError):  # another thread has waited for it
                os.waitpid(child, 0)
    # A tracker of Python's multiprocessing ends by itself when its processes have ended. It removes their
    # shared memory and semaphores, whose names nothing else knows.
    for tracker in filter(_is_tracker, _children()):
        with contextlib.suppress(OSError):  # another thread has waited for it
            process = os.pidfd_open(tracker)
            select.select([process], [], [], TRACKER_SECONDS)
            os.close(process)
            os.kill(tracker, signal.SIGKILL)
            os.waitpid(tracker, 0)
    return names


def _is_tracker(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _readable_after(*names: signal.Signals) -> int:
    """Return a descriptor that becomes readable at one of the signals."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def note(*_: object) -> None:
        with contextlib.suppress(BlockingIOError):  # noted often enough
            os.write(writer, b".")

    for name in names:
        signal.signal(name, note)
    return reader


def signal_with_parent(number: signal.Signals) -> None:
    """Let the kernel send this process a signal when the thread ends that started it."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, number)


def _die_with_guard() -> None:
    signal_with_parent(signal.SIGKILL)


def _become_follower() -> None:
    _die_with_guard()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # outlasts the exec, until there is a handler


def _ended_before(
    stops: list[int],
    server: subprocess.Popen[bytes],
    orphaned: list[int],
    look_seconds: float | None,
) -> bool:
    """Wait for the end of the server or a stop; return whether it was the former.

    Args:
        orphaned: becomes readable when a rank ends whose guard was killed, and which is this process's
            child since. Its stubs are killed then: while they hold its pipes, mpirun waits.
        look_seconds: between two looks for new stubs; None for none.
    """
    process = os.pidfd_open(server.pid)
    stubs: dict[int, _Stub] = {}
    while True:
        waited_for = [process, *stops, *orphaned, *stubs]
        ready = set(select.select(waited_for, [], [], look_seconds)[0])
        order = None
        if ready & set(stops):  # nothing to read if the pipe has closed, or a rank is to stop
            starter = sys.stdin.fileno()
            order = os.read(starter, 1) if starter in ready else b""
        if order in (b"", STOP):
            return False
        if order == KILL:
            server.kill()
        elif process in ready:
            return True
        elif ready & set(orphaned):
            os.read(orphaned[0], 4096)
            kill_descendants(besides=server.pid)
        for descriptor in ready & set(stubs):
            os.close(descriptor)
            if _report_end(stubs.pop(descriptor)):
                server.kill()
        if order == WATCH or not ready:
            known = {stub.pid for stub in stubs.values()}
            stubs |= _opened(stub for stub in _stubs() if stub.pid not in known)
        if order == WATCH:
            look_seconds = None


def _report_end(stub: _Stub) -> bool:
    """Report that a stub has ended unasked; return whether it has."""
    time.sleep(REAP_SECONDS)
    try:
        # Its exit status is the last field while tritonserver, its parent, has not asked for it. It
        # asks when it has told the stub to end.
        fields = _stat(stub.pid)
    except OSError:
        return False
    status = int(fields[-1])
    # With another parent, its own has ended before, which is what is to be reported then.
    if status == 0 or int(fields[1]) != stub.parent:
        return False
    ending = STUB_ENDED.format(model=stub.model, status=os.waitstatus_to_exitcode(status))
    print(ending, file=sys.stderr, flush=True)
    return True


def _stop(
    server: subprocess.Popen[bytes], timeout: float, name: signal.Signals, starter: int | None
) -> bool:
    """End the server; return whether it had answered every request when it was killed.

    Triton 2.51 begins to unload the models of an ensemble a second later, when it looks again. Nothing is
    in them to lose, and the kernel or ``run`` takes back what they hold. A starter that has ended, as Cog's
    worker does at once, cannot say when that is: the end of the last stub does. After it, Triton looks
    again a second later, and may count a model for seconds that is gone.

    Args:
        starter: where KILL says that every request has been answered; None for a rank or a group, which
            has until ``timeout`` for its goodbye.
    """
    stubs = set(_opened(_stubs()))
    watched = {os.pidfd_open(server.pid), *stubs, *(() if starter is None else (starter,))}
    server.send_signal(name)
    deadline = time.monotonic() + timeout
    answered = False
    while (left := deadline - time.monotonic()) > 0 and server.poll() is None:
        ready = set(select.select([*watched], [], [], left)[0])
        watched -= ready
        told = starter is not None and starter in ready and os.read(starter, 1) == KILL
        if told or (stubs & ready and not stubs & watched):
            answered = True
            if starter is not None:
                deadline = min(deadline, time.monotonic() + LAST_BYTES_SECONDS)
    alive = server.poll() is None
    server.kill()
    return answered and (alive or starter is not None)


def _opened(stubs: Iterable[_Stub]) -> dict[int, _Stub]:
    """Return the stubs by descriptors, each of which becomes readable when its stub ends."""
    opened = {}
    for stub in stubs:
        with contextlib.suppress(ProcessLookupError):  # it has ended since
            opened[os.pidfd_open(stub.pid)] = stub
    return opened


def _stubs() -> list[_Stub]:
    """Return the stubs of Triton's Python backend that descend from this process."""
    parents, stubs = _parents(), []
    for pid, parent in parents.items():
        ancestor = parent
        while ancestor not in (0, os.getpid()):
            ancestor = parents.get(ancestor, 0)
        if ancestor and (model := _model_of(pid, parent)):
            stubs.append(_Stub(pid, parent, model))
    return stubs


def _model_of(pid: int, parent: int) -> str | None:
    """Return the model whose stub a process is; None if it is not a stub."""
    with contextlib.suppress(OSError):
        name = _name_of(pid)
        if name == STUB[:15]:  # all that the kernel keeps of it
            arguments = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
            # The file in the directory of the model's version. One that has ended has no arguments.
            return Path(arguments[1]).parent.parent.name if arguments[1:] else UNKNOWN
        # A stub that was killed before its exec: Triton forks a bash, which becomes the stub.
        if name in (SERVER, "bash") and _name_of(parent) == SERVER and _stat(pid)[0] == "Z":
            return UNKNOWN
    return None


def _name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def _children() -> list[int]:
    return [pid for pid, parent in _parents().items() if parent == os.getpid()]


def _parents() -> dict[int, int]:
    parents = {}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):  # ended since
            parents[pid] = int(_stat(pid)[1])
    return parents


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on: state, parent, ..., exit status."""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


if __name__ == "__main__":
    status = run(sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4], sys.argv[5:])
    # A shell's convention: 128 plus the signal's number.
    sys.exit(status if status >= 0 else 128 - status)
