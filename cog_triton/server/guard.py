"""Run a server and end it with its starter; remove what killed servers left.

    python guard.py ROLE SHM_PREFIX STOP_TIMEOUT TEMPORARY_DIRECTORY COMMAND...

ROLE is ``server``; ``group`` for an mpirun whose ranks are servers, each under a guard of its own; the
number of such a rank; ``follower`` for a rank above 0 that Slurm, say, started; or ``outside-mpi`` to
only run the command without the variables of its MPI job. SHM_PREFIX and TEMPORARY_DIRECTORY may be empty.

The starter holds the other end of standard input. When that closes, because it stops or was killed, the
server gets SIGTERM, a bounded wait, and then SIGKILL for all its descendants; its shared memory and the
temporary directory are removed. A parent-death signal cannot do this: it is lost when the thread that
forked ends, reaches no grandchildren, and leaves /dev/shm behind.

The starter may also write ``STOP``, the same as closing; ``KILL`` for a server that hangs, or that after a
stop has answered every request; and ``WATCH`` once every model is ready: no stub starts after that. The
unasked end of a stub ends the server: Triton 2.51 does not notice it, and waits forever. A stub that ends
with status 0 was stopped by a server that unloads its model.

A rank above 0 begins with SIGTERM ignored. TensorRT-LLM's waits for rank 0 from its start on, before
tritonserver handles the signal, and ends when rank 0 has ended. The signal would kill it, and the engine
with it, in the middle of what rank 0 is finishing.

A rank is stopped by a signal, or by the end of its mpirun: under that, standard input is not the starter's.
A rank that ends unasked reports ``RANK_ENDED`` and its guard's status is never 0: mpirun would take that
for a rank that has done its work, and let the others wait forever.

This runs before the package can be imported, so it uses only the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

SHARED_MEMORY = Path("/dev/shm")
PREFIX, LOCK = "cog_triton_", "lock"
RANK_ENDED = "tritonserver of rank {rank} ended without being told to, with status {status}"
STUB_ENDED = "the process of model {model} ended without being told to, with status {status}"
STUB, SERVER, UNKNOWN = "triton_python_backend_stub", "tritonserver", "(unknown)"
STOP, WATCH, KILL = b"s", b"w", b"k"
LOOK_SECONDS = {"server": 0.2, "group": 0.2, "follower": 1.0}
"""Between two looks for new stubs, by role. The guard of the group looks for those of its ranks."""
REAP_SECONDS = 0.1  # in which Triton takes the exit status of a stub that it ended itself
TRACKER_SECONDS = 5.0
_TRACKER = b"multiprocessing.resource_tracker"
LAST_BYTES_SECONDS = 0.2  # for a server that has answered every request to write its last output

# mpirun hands this one on to its ranks and waits for them. A SIGTERM it keeps back for a second, and
# kills them one second later.
_GROUP_STOP = signal.SIGUSR1
_STOPS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
_SUBREAPER, _PARENT_DEATH_SIGNAL = 36, 1  # of prctl

# Variables of Open MPI 4 and 5 and PMIx that name the job of a process. The LLM API's workers are started
# by MPI_Comm_spawn from each model's stub, which with these takes itself for the one process of the job:
# two models abort or hang (Open MPI 4.1.4). Without OMPI_MCA_ess a process still looks for its mpirun.
_MPI_JOB = (
    *("OMPI_APP_CTX_", "OMPI_COMMAND", "OMPI_COMM_WORLD_", "OMPI_FILE_LOCATION"),
    *("OMPI_FIRST_RANKS", "OMPI_MCA_ess", "OMPI_MCA_orte_", "OMPI_NUM_APP_CTX"),
    *("OMPI_UNIVERSE_SIZE", "ORTE_", "PMIX_", "PMI_"),
)
_MPI_CONFIGURATION = ("OMPI_MCA_orte_tmpdir_base", "PMIX_MCA_")  # these name no job


class _Process(NamedTuple):
    pid: int
    name: str  # of its program, at most 15 characters
    state: str
    parent: int
    started: str
    status: int  # as waitpid has it, once it has ended


def run(role: str, prefix: str, stop_timeout: float, directory: str, command: list[str]) -> int:
    """Run ``command`` until it ends or is to stop; return its exit status.

    Args:
        prefix: of the command's shared memory, which is removed; empty if it has none.
        directory: removed at the end; empty for none.
    """
    signals = _signals({*_STOPS, signal.SIGCHLD if role == "group" else _GROUP_STOP})
    adopt_orphans()
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=partial(_before_exec, role not in ("server", "group", "0")),
    )
    try:
        watch = _Watch(role, server, signals, stop_timeout)
        while not watch.ended():
            pass
        status = server.wait()
        if watch.stopping:
            return 0 if watch.answered and (watch.killed or role == "server") else status
        if role.isdigit():
            print(RANK_ENDED.format(rank=role, status=status), file=sys.stderr, flush=True)
            return status or 1
        return status
    finally:
        kill_descendants()  # stubs of a server that crashed, ranks of an mpirun that was killed
        _remove_files(prefix, directory)


class _Watch:
    """The events of a running server, handled one after another."""

    def __init__(
        self, role: str, server: subprocess.Popen[bytes], signals: int, stop_timeout: float
    ) -> None:
        self._role, self._server, self._timeout = role, server, stop_timeout
        self._process, self._signals = os.pidfd_open(server.pid), signals
        self._starter = os.pidfd_open(os.getppid()) if role.isdigit() else sys.stdin.fileno()
        self._watched = {self._process, self._signals, self._starter}
        self._stubs: dict[int, tuple[_Process, str]] = {}  # with their models, by descriptors
        self._look_seconds = LOOK_SECONDS.get(role)
        self._deadline = 0.0
        self.stopping = self.answered = self.killed = False

    def ended(self) -> bool:
        """Wait for an event and handle it; return whether the server has ended."""
        left: float | None = self._look_seconds
        if self.stopping:
            left = None if self.killed else max(0.0, self._deadline - time.monotonic())
        ready = set(select.select([*self._watched, *self._stubs], [], [], left)[0])
        if not ready and self.stopping:
            self._server.kill()
            self.killed = True
        elif not ready:
            self._look()
        if self._signals in ready:
            self._handle_signals()
        if self._starter in ready:
            self._handle_order()
        for stub in ready & self._stubs.keys():
            self._handle_stub(stub)
        return self._process in ready

    def _handle_signals(self) -> None:
        numbers = set(os.read(self._signals, 4096))
        # Only the starter stops other roles.
        if self._role.isdigit() and numbers & {*_STOPS, _GROUP_STOP}:
            self._stop()
        if signal.SIGCHLD in numbers:
            # A rank has ended whose guard was killed. While its stubs hold its pipes, mpirun waits.
            kill_descendants(besides=self._server.pid)

    def _handle_order(self) -> None:
        order = b"" if self._role.isdigit() else os.read(self._starter, 1)
        if not order:
            self._watched.remove(self._starter)
        if order in (b"", STOP):
            self._stop()
        elif order == WATCH:
            self._look()
            self._look_seconds = None
        elif not self.stopping:
            self._server.kill()
        elif self._role == "server":
            self._finish()

    def _handle_stub(self, descriptor: int) -> None:
        os.close(descriptor)
        stub, model = self._stubs.pop(descriptor)
        if not self.stopping:
            if _report_end(stub, model):
                self._server.kill()
        elif not self._stubs:
            self._finish()

    def _stop(self) -> None:
        if self.stopping:
            return
        self.stopping = True
        self._look()
        self._server.send_signal(_GROUP_STOP if self._role == "group" else signal.SIGTERM)
        self._deadline = time.monotonic() + self._timeout

    def _finish(self) -> None:
        # Triton 2.51 begins to unload the models of an ensemble a second after a stop, and may count one
        # for seconds that is gone; nothing is in them to lose. A starter that has ended cannot say when
        # every request was answered: the end of the last stub does. A rank still has to tell the others.
        self.answered = True
        if self._role == "server":
            self._deadline = min(self._deadline, time.monotonic() + LAST_BYTES_SECONDS)

    def _look(self) -> None:
        known = {stub.pid for stub, _ in self._stubs.values()}
        processes = _descendants()
        for pid in processes.keys() - known:
            if model := _model_of(processes[pid], processes):
                with contextlib.suppress(ProcessLookupError):  # it has ended since
                    self._stubs[os.pidfd_open(pid)] = processes[pid], model


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent dies, to find them."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def signal_with_parent(number: signal.Signals) -> None:
    """Let the kernel send this process a signal when the thread ends that started it."""
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, number)


def process_name(pid: int) -> str:
    """Return a name that no other process has, in no other container either: its id and its start."""
    process = _read_process(pid)
    return f"{pid}_{process.started if process else ''}"


def kill_descendants(besides: int | None = None) -> list[str]:
    """Kill all descendants of this process but one; return their names."""

    def children() -> list[_Process]:
        own = [p for p in _descendants().values() if p.parent == os.getpid()]
        return [process for process in own if process.pid != besides]

    # Each round makes the children of the killed this process's own. Process groups are no help: mpirun
    # gives every rank one.
    names = []
    while killed := [p for p in children() if _TRACKER not in _command_line(p.pid)]:
        names += [f"{process.pid}_{process.started}" for process in killed]
        for process in killed:
            with contextlib.suppress(OSError):  # another thread has waited for it
                os.kill(process.pid, signal.SIGKILL)
        for process in killed:
            with contextlib.suppress(OSError):
                os.waitpid(process.pid, 0)
    # A tracker of Python's multiprocessing ends by itself when its processes have ended. It removes their
    # shared memory and semaphores, whose names nothing else knows.
    for tracker in children():
        with contextlib.suppress(OSError):
            ended = os.pidfd_open(tracker.pid)
            select.select([ended], [], [], TRACKER_SECONDS)
            os.close(ended)
            os.kill(tracker.pid, signal.SIGKILL)
            os.waitpid(tracker.pid, 0)
    return names


def kill_and_clean() -> None:
    """Kill all descendants of this process, and remove the files of their servers.

    Needs ``adopt_orphans`` before anything was started. For those who cannot wait for a guard.
    """
    for name in [process_name(os.getpid()), *kill_descendants()]:
        _remove_files(f"{PREFIX}{name}_", "")
        for directory in Path(tempfile.gettempdir()).glob(f"cog-triton-{name}-*"):
            _remove_files("", str(directory))


def hold(prefix: str, directory: str) -> int:
    """Make and hold the lock of a server that is about to start; return its descriptor.

    The starter and the guard hold it: who can lock it knows that both have ended, also where /dev/shm is
    shared by containers whose process ids mean nothing to each other.

    Args:
        prefix: of the server's shared memory, where the lock is a file.
        directory: removed with it, and so the file's content; empty for none.
    """
    new = SHARED_MEMORY / f".{prefix}{LOCK}"  # a name that nobody looks for until it is locked
    descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.write(descriptor, os.fsencode(directory))
    new.rename(SHARED_MEMORY / f"{prefix}{LOCK}")
    return descriptor


def sweep() -> None:
    """Remove what this user's servers left whose starter and guard were both killed."""
    for file in SHARED_MEMORY.glob(f"{PREFIX}*_{LOCK}"):
        with contextlib.suppress(OSError), file.open("rb") as lock:
            if os.fstat(lock.fileno()).st_uid == os.getuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                text = "removing what a server left that was killed (%s)"
                logging.getLogger("tritonserver").warning(text, file.name)
                remove(file.name.removesuffix(LOCK), os.fsdecode(lock.read()))


def remove(prefix: str, directory: str) -> None:
    """Kill and remove what is left of a server whose guard was killed: processes, files."""
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        if prefix.encode() in _command_line(pid):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
    _remove_files(prefix, directory)


def _remove_files(prefix: str, directory: str) -> None:
    for region in SHARED_MEMORY.glob(f"{prefix}*") if prefix else ():
        region.unlink(missing_ok=True)
    if directory:
        shutil.rmtree(directory, ignore_errors=True)


def _signals(handled: set[signal.Signals]) -> int:
    """Return a descriptor from which the numbers of these signals are read."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in handled:
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which the server would inherit
    return reader


def _before_exec(follows: bool) -> None:
    signal_with_parent(signal.SIGKILL)
    if follows:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # outlasts the exec, until there is a handler


def _report_end(stub: _Process, model: str) -> bool:
    """Report that a stub has ended unasked; return whether it has."""
    time.sleep(REAP_SECONDS)
    now = _read_process(stub.pid)
    # Its exit status is there while tritonserver, its parent, has not asked for it, as it does when it has
    # told the stub to end. With another parent, its own has ended before, which is to be reported then.
    if now is None or now.status == 0 or now.parent != stub.parent:
        return False
    status = os.waitstatus_to_exitcode(now.status)
    print(STUB_ENDED.format(model=model, status=status), file=sys.stderr, flush=True)
    return True


def _model_of(process: _Process, processes: Mapping[int, _Process]) -> str | None:
    """Return the model whose stub a process is; None if it is not a stub."""
    if process.name == STUB[:15]:
        # The file in the directory of the model's version. One that has ended has no arguments.
        arguments = os.fsdecode(_command_line(process.pid)).split("\0")
        return Path(arguments[1]).parent.parent.name if arguments[1:] else UNKNOWN
    # A stub that was killed before its exec: Triton forks a bash, which becomes the stub.
    parent = processes.get(process.parent)
    forked = parent is not None and parent.name == SERVER and process.name in (SERVER, "bash")
    return UNKNOWN if forked and process.state == "Z" else None


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # ended since
        return b""


def _read_process(pid: int) -> _Process | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:  # ended since
        return None
    name, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()
    return _Process(pid, name, fields[0], int(fields[1]), fields[19], int(fields[-1]))


def _descendants() -> dict[int, _Process]:
    everyone = map(_read_process, map(int, filter(str.isdigit, os.listdir("/proc"))))
    processes = {process.pid: process for process in everyone if process is not None}
    found: set[int] = set()
    new = {os.getpid()}
    while new := {pid for pid, process in processes.items() if process.parent in new} - found:
        found |= new
    return {pid: processes[pid] for pid in found}


if __name__ == "__main__":
    role, prefix, timeout, directory, *command = sys.argv[1:]
    if role == "outside-mpi":
        for name in tuple(os.environ):
            if name.startswith(_MPI_JOB) and not name.startswith(_MPI_CONFIGURATION):
                del os.environ[name]
        os.execvp(command[0], command)
    status = run(role, prefix, float(timeout), directory, command)
    # A shell's convention: 128 plus the signal's number.
    sys.exit(status if status >= 0 else 128 - status)
