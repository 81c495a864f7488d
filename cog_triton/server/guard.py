"""Run a server and end it with its starter; remove what killed servers left.

    python guard.py ROLE SHM_PREFIX STOP_TIMEOUT TEMPORARY_DIRECTORY COMMAND...

ROLE is ``server``; ``group`` for an mpirun whose ranks are servers, each under a guard of its own; the
number of such a rank; ``follower`` for a rank above 0 that Slurm, say, started; or ``outside-mpi`` to
only run the command without the variables of its MPI job. SHM_PREFIX and TEMPORARY_DIRECTORY may be empty.

The starter holds the other end of standard input. When that closes, because it stops or was killed, the
server gets SIGTERM, a bounded wait, and then SIGKILL for all its descendants; its shared memory and the
temporary directory are removed. A parent-death signal would reach no grandchildren. The starter may also
write ``STOP``, the same as closing; and ``KILL`` for a server that hangs, or that after a stop has answered
every request. A stub that ends with a status other than 0 ends the server: Triton 2.51 waits forever.

A rank above 0 begins with SIGTERM ignored: TensorRT-LLM's waits for rank 0 before tritonserver handles the
signal, which would kill it in the middle of what rank 0 is finishing. A rank is stopped by a signal, or by
the end of its mpirun: under that, standard input is not the starter's. The status of one that ends unasked
is never 0: mpirun would let the others wait forever.

This runs before the package can be imported, so it uses only the standard library.
"""

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
from pathlib import Path
from typing import NamedTuple

SHARED_MEMORY = Path("/dev/shm")
ENVIRONMENTS = Path("/tmp")  # fixed in Triton's Python backend
ENVIRONMENT_SECONDS = 60.0  # from a tritonserver's start until it makes its directory there
PREFIX, LOCK = "cog_triton_", "lock"
RANK_ENDED = "tritonserver of rank {rank} ended unexpectedly with status {status}"
STUB_ENDED = "the process of model {model} ended unexpectedly with status {status}"
GIVEN_UP = "its process got no CPU time for a second while loading, so tritonserver gave up on it"
STUB, SERVER, UNKNOWN = "triton_python_backend_stub", "tritonserver", "(unknown)"
STOP, KILL = b"s", b"k"
LOOK_SECONDS = 0.2  # between two looks at the server's processes
TRACKER_SECONDS = 30.0  # on a busy machine one that was just started takes seconds
_TRACKER = b"multiprocessing.resource_tracker"
LAST_BYTES_SECONDS = 0.2  # for a server that has answered every request to write its last output

# mpirun hands this on and waits for its ranks; a SIGTERM it keeps for a second, and then kills them.
_GROUP_STOP = signal.SIGUSR1
_STOPS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
_SUBREAPER, _PARENT_DEATH_SIGNAL, _WAIT4 = 36, 1, b"61"  # of prctl; a system call of x86-64

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
    """Run ``command`` until it ends or is to stop; return its exit status."""
    try:
        return _Guard(role, stop_timeout, command).run()
    finally:
        kill_descendants()  # stubs of a server that crashed, ranks of an mpirun that was killed
        _remove_files(prefix, directory)


class _Guard:
    """A running server. The guard waits for an order or its end, and looks at its processes in between."""

    def __init__(self, role: str, stop_timeout: float, command: list[str]) -> None:
        self._role, self._rank, self._timeout = role, role.isdigit(), stop_timeout
        self._signalled = self._answered = self._killed = False
        self._deadline: float | None = None  # of a stop
        self._foreign: set[int] = set()
        self._models: dict[int, str] = {}  # of stubs, by process ids
        self._failed: set[int] = set()  # stubs, at the last look
        self._waited_for: set[int] = set()  # stubs whose end Triton waited for, at the last count
        self._next_count = 0.0
        for number in (*_STOPS, _GROUP_STOP):
            signal.signal(number, self._note_signal)  # not SIG_IGN, which the server would inherit
        adopt_orphans()
        # Before the server starts: a starter that ends at once is missed afterwards.
        starter = os.pidfd_open(os.getppid()) if self._rank else sys.stdin.fileno()
        self._starter: int | None = starter

        def before_exec() -> None:
            signal_with_parent(signal.SIGKILL)
            if role not in ("server", "group", "0"):
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # until there is a handler

        self._server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=before_exec
        )

    def run(self) -> int:
        """Return the exit status of the server when it has ended."""
        process = os.pidfd_open(self._server.pid)
        ready = []
        while process not in ready:
            left = LOOK_SECONDS
            if self._deadline is not None and not self._killed:
                left = max(0.0, min(left, self._deadline - time.monotonic()))
            watched = [process] if self._starter is None else [process, self._starter]
            ready = select.select(watched, [], [], left)[0]
            if self._starter in ready:
                self._handle_order()
            if self._signalled:
                self._stop()
            if not ready:
                self._look()
        if self._signalled:  # in the moment of the end
            self._stop()
        status = self._server.wait()
        if self._deadline is not None:
            return 0 if self._answered and (self._killed or self._role == "server") else status
        if self._rank:
            print(RANK_ENDED.format(rank=self._role, status=status), file=sys.stderr, flush=True)
            return status or 1
        return status

    def _note_signal(self, *_: object) -> None:
        self._signalled = self._rank  # only the starter stops other roles

    def _handle_order(self) -> None:
        assert self._starter is not None
        order = b"" if self._rank else os.read(self._starter, 1)
        if not order:
            self._starter = None
        if order in (b"", STOP):
            self._stop()
        elif self._deadline is None:
            self._kill()
        else:
            self._finish()

    def _stop(self) -> None:
        if self._deadline is None:
            self._look()
            self._server.send_signal(_GROUP_STOP if self._role == "group" else signal.SIGTERM)
            self._deadline = time.monotonic() + self._timeout

    def _finish(self) -> None:
        # Triton 2.51 begins to unload the models of an ensemble a second after a stop, and may count one
        # for seconds that is gone; nothing is in them to lose. A starter that has ended cannot say when
        # every request was answered: the end of the last stub does. A rank still has to tell the others.
        self._answered = True
        if self._role == "server" and self._deadline is not None:
            self._deadline = min(self._deadline, time.monotonic() + LAST_BYTES_SECONDS)

    def _kill(self) -> None:
        self._killed = True
        self._server.kill()

    def _look(self) -> None:
        if self._killed:
            return
        processes = _descendants(self._foreign)
        # A rank has ended whose guard was killed. While its stubs hold its pipes, mpirun waits.
        own = [p for p in processes.values() if p.parent == os.getpid() and p.state == "Z"]
        if self._role == "group" and any(p.pid != self._server.pid for p in own):
            kill_descendants(besides=self._server.pid)
        # The server may be of any name, and those of ranks or behind a launcher are found by theirs. A stub
        # that was killed before its exec has its parent's: Triton forks a bash, which becomes the stub.
        servers = {p.pid: p.name for p in processes.values() if p.name == SERVER}
        if self._role != "group" and (server := processes.get(self._server.pid)):
            servers[server.pid] = server.name
        children = [p for p in processes.values() if p.parent in servers]
        stubs = [p for p in children if p.name in (STUB[:15], "bash", servers[p.parent])]
        for pid in {p.pid for p in stubs if p.name == STUB[:15]} - self._models.keys():
            # The file in the directory of the model's version. One that has ended has no arguments.
            if (arguments := os.fsdecode(read(pid, "cmdline")).split("\0"))[1:]:
                self._models[pid] = Path(arguments[1]).parent.parent.name
        if self._deadline is not None:
            if self._models and all(stub.state == "Z" for stub in stubs):
                self._finish()
            if time.monotonic() >= self._deadline:
                self._kill()
            return
        if (now := time.monotonic()) >= self._next_count:
            self._next_count, before = now + 25 * LOOK_SECONDS, self._waited_for  # threads are many
            self._waited_for = self._models.keys() & set().union(*map(_waited_for_by, servers))
            for pid in before & self._waited_for:
                text = f"failed to load '{self._models[pid]}' version 1: {GIVEN_UP}"  # as Triton's
                print(text, file=sys.stderr, flush=True)
                self._kill()
        # Triton takes the exit status of a stub that it ended itself, until the next look.
        failed = {stub.pid: stub.status for stub in stubs if stub.state == "Z" and stub.status}
        for pid in failed.keys() & self._failed:
            model, status = self._models.get(pid, UNKNOWN), os.waitstatus_to_exitcode(failed[pid])
            print(STUB_ENDED.format(model=model, status=status), file=sys.stderr, flush=True)
            self._kill()
        self._failed = set(failed)


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
        own = _descendants(set()).values()
        return [p for p in own if p.parent == os.getpid() and p.pid != besides]

    # Each round makes the children of the killed this process's own. mpirun gives every rank a group.
    names = []
    while found := [p for p in children() if _TRACKER not in read(p.pid, "cmdline")]:
        # In the middle of its exec a process has none, and may be a tracker: it is looked at again.
        killed = [p for p in found if p.state == "Z" or read(p.pid, "cmdline")]
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
    """Kill all descendants, of one that adopts orphans, and remove their files without their guard."""
    for name in [process_name(os.getpid()), *kill_descendants()]:
        _remove_files(f"{PREFIX}{name}_", "")
        for directory in Path(tempfile.gettempdir()).glob(f"cog-triton-{name}-*"):
            _remove_files("", str(directory))


def hold(file: Path, content: str = "") -> int:
    """Make a locked file and return its descriptor.

    Who can lock it knows that all have ended who hold the descriptor, in other containers too.
    """
    new = file.with_name(f".{file.name}")  # a name that nobody looks for until it is locked
    descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.write(descriptor, os.fsencode(content))
    new.rename(file)
    return descriptor


def sweep() -> None:
    """Remove what this user's servers left whose starter and guard were both killed."""
    for file in SHARED_MEMORY.glob(f"{PREFIX}*_{LOCK}"):
        with contextlib.suppress(OSError), file.open("rb") as lock:
            if os.fstat(lock.fileno()).st_uid == os.getuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                text = "cleaning up after a killed server (%s)"
                logging.getLogger("tritonserver").warning(text, file.name)
                remove(file.name.removesuffix(LOCK), os.fsdecode(lock.read()))


def remove(prefix: str, directory: str) -> None:
    """Kill and remove what is left of a server whose guard was killed: processes, files."""
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        if prefix.encode() in read(pid, "cmdline"):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
    _remove_files(prefix, directory)


def _remove_files(prefix: str, directory: str) -> None:
    for region in SHARED_MEMORY.glob(f"{prefix}*") if prefix else ():
        region.unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)
    if prefix:
        remove_environments()


def remove_environments() -> None:
    """Remove the empty directories in /tmp that killed tritonservers left.

    Triton's Python backend makes one as it loads, for environments of models, and removes it only at an
    orderly end. Which server made one is not known: it is kept if a living one may have.
    """
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    ticks = os.sysconf("SC_CLK_TCK")
    starts = [
        booted + int(process.started) / ticks
        for process in map(_read_process, map(int, filter(str.isdigit, os.listdir("/proc"))))
        if process is not None and process.name == SERVER and process.state != "Z"
    ]
    for directory in ENVIRONMENTS.glob("python_env_??????"):
        with contextlib.suppress(OSError):  # it is gone, or not empty
            status = directory.stat()
            may_be_used = any(
                0 <= status.st_mtime - start <= ENVIRONMENT_SECONDS for start in starts
            )
            if status.st_uid == os.getuid() and not may_be_used:
                directory.rmdir()


def read(pid: object, name: str) -> bytes:
    """Return a file of a process in /proc; nothing if it has ended, or may not be looked at."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _waited_for_by(pid: int) -> set[int]:
    threads = Path(f"/proc/{pid}/task").glob("*")
    calls = [read(pid, f"task/{thread.name}/syscall").split() for thread in threads]
    return {int(call[1], 16) for call in calls if call[:1] == [_WAIT4]}


def _read_process(pid: int) -> _Process | None:
    if not (text := read(pid, "stat").decode(errors="replace")):
        return None
    name, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()
    return _Process(pid, name, fields[0], int(fields[1]), fields[19], int(fields[-1]))


def _descendants(foreign: set[int]) -> dict[int, _Process]:
    """Return this process's descendants; note other processes in ``foreign``, to read them once."""
    pids = {int(name) for name in os.listdir("/proc") if name.isdigit()} - {os.getpid()}
    foreign &= pids
    everyone = map(_read_process, pids - foreign)
    processes = {process.pid: process for process in everyone if process is not None}

    def pop_descendants(of: set[int]) -> dict[int, _Process]:
        popped: dict[int, _Process] = {}
        while of := {pid for pid, process in processes.items() if process.parent in of}:
            popped |= {pid: processes.pop(pid) for pid in of}
        return popped

    own = pop_descendants({os.getpid()})
    # Those that are left had a parent that has ended meanwhile: the next look sees who adopted them.
    foreign.update(pop_descendants({0, *foreign}))
    return own


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
