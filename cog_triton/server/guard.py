"""Run a server and end it with its starter; remove what killed servers left.

    python guard.py ROLE SHM_PREFIX STOP_TIMEOUT TEMPORARY_DIRECTORY COMMAND...

ROLE is one of these; SHM_PREFIX and TEMPORARY_DIRECTORY may be empty:

    server        a tritonserver
    group         an mpirun whose ranks are servers, each under a guard of its own
    0, 1, …       a rank of such an mpirun
    follower      a rank above 0 that Slurm, say, started
    outside-mpi   no guard: only run the command without the variables of its MPI job

The starter holds the other end of standard input. When that closes, because it stops or was killed, the
server gets SIGTERM, a bounded wait, and then SIGKILL for all its descendants; its shared memory and the
temporary directory are removed. A parent-death signal would reach no grandchildren. The starter may also
write ``STOP``, the same as closing; ``KILL`` for a server that hangs, or that after a stop has answered
every request; and ``READY`` when every model has been loaded. A stub that ends with a status other than 0
ends the server: Triton 2.51 waits forever.

A rank above 0 begins with SIGTERM ignored: TensorRT-LLM's waits for rank 0 before tritonserver handles the
signal, which would kill it in the middle of what rank 0 is finishing. A rank is stopped by a signal, or by
the end of its mpirun: under that, standard input is not the starter's. The status of one that ends unasked
is never 0: mpirun would let the others wait forever.

This runs before the package can be imported, so it uses only the standard library. What a guard itself does
not need is imported where it is used: each server waits for the start of its guard.
"""

import contextlib
import ctypes
import fcntl
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

# Files of a server

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "cog_triton_"
LOCK = "lock"
# Triton's Python backend has this directory built in.
ENVIRONMENTS = Path("/tmp")
# From a tritonserver's start until it makes its directory there.
ENVIRONMENT_SECONDS = 60.0
# By which a new directory may seem older than its server: their times come from clocks of milliseconds.
CLOCK_SECONDS = 1.0

# Names of programs, as the kernel shortens them

SERVER = "tritonserver"
STUB = "triton_python_backend_stub"
_NAME_CHARACTERS = 15
_STUB_NAME = STUB[:_NAME_CHARACTERS]
_TRACKER = b"multiprocessing.resource_tracker"

# Orders of the starter

STOP = b"s"
KILL = b"k"
READY = b"r"

# Lines of the log, which the starter reads

RANK_ENDED = "tritonserver of rank {rank} ended unexpectedly with status {status}"
STUB_ENDED = "the process of model {model} ended unexpectedly with status {status}"
UNKNOWN = "(unknown)"
GIVEN_UP = "its process got no CPU time for a second while loading, so tritonserver gave up on it"

# Times

# Between two looks at the server's processes.
LOOK_SECONDS = 0.2
# Between two looks at the system calls of its threads, which are many.
COUNT_SECONDS = 25 * LOOK_SECONDS
# In which a stub that does nothing ends, once every model has been loaded: its model is unloaded.
UNLOAD_SECONDS = 60.0
# Ticks of the processor, of ten milliseconds, that a stub which only waits may use between two counts.
IDLE_TICKS = 1
# For a server that has answered every request to write its last output.
LAST_BYTES_SECONDS = 0.2
# For a tracker of shared memory to end. On a busy machine one that was just started takes seconds.
TRACKER_SECONDS = 30.0

# mpirun hands this signal on and waits for its ranks. A SIGTERM it keeps for a second, and then kills them.
_GROUP_STOP = signal.SIGUSR1
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# Options of prctl, and a system call of x86-64.
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PDEATHSIG = 1
_WAIT4 = b"61"

# Variables of Open MPI 4 and 5 and PMIx that name the job of a process. The LLM API's workers are started
# by MPI_Comm_spawn from each model's stub, which with these takes itself for the one process of the job:
# two models abort or hang (Open MPI 4.1.4). Without OMPI_MCA_ess a process still looks for its mpirun.
_MPI_JOB = (
    "OMPI_APP_CTX_",
    "OMPI_COMMAND",
    "OMPI_COMM_WORLD_",
    "OMPI_FILE_LOCATION",
    "OMPI_FIRST_RANKS",
    "OMPI_MCA_ess",
    "OMPI_MCA_orte_",
    "OMPI_NUM_APP_CTX",
    "OMPI_UNIVERSE_SIZE",
    "ORTE_",
    "PMIX_",
    "PMI_",
)
# These begin in the same way, and name no job.
_MPI_CONFIGURATION = ("OMPI_MCA_orte_tmpdir_base", "PMIX_MCA_")


def run(role: str, prefix: str, stop_timeout: float, directory: str, command: list[str]) -> int:
    """Run ``command`` until it ends or is to stop; return its exit status."""
    try:
        return _Guard(role, stop_timeout, command).run()
    finally:
        # Stubs of a server that crashed, ranks of an mpirun that was killed.
        kill_descendants()
        _remove_files(prefix, directory)


# Processes


class _Process(NamedTuple):
    """What /proc says of a process."""

    pid: int
    # Of its program, shortened.
    name: str
    state: str
    parent: int
    # In clock ticks since the boot.
    started: str
    # Of the processor, in clock ticks.
    used: int
    # As waitpid has it, once the process has ended.
    status: int

    @property
    def has_ended(self) -> bool:
        return self.state == "Z"

    @property
    def is_stub(self) -> bool:
        return self.name == _STUB_NAME


def read(pid: object, name: str) -> bytes:
    """Return a file of a process in /proc; nothing if it has ended, or may not be looked at."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def process_name(pid: int) -> str:
    """Return a name that no other process has, in no other container either: its id and its start."""
    process = _read_process(pid)
    return f"{pid}_{process.started if process else ''}"


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent dies, to find them."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def signal_with_parent(number: signal.Signals) -> None:
    """Let the kernel send this process a signal when the thread ends that started it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def kill_descendants(besides: int | None = None) -> list[str]:
    """Kill all descendants of this process but one; return their names."""
    names = []
    while True:
        found = [child for child in _children(besides) if not _is_tracker(child)]
        if not found:
            break
        # Each round makes children of the killed children of this process. mpirun gives every rank a group.
        killed = [child for child in found if child.has_ended or _has_arguments(child)]
        names += [f"{child.pid}_{child.started}" for child in killed]
        for child in killed:
            _kill(child.pid)
        for child in killed:
            _wait_for(child.pid)
    # A tracker of Python's multiprocessing ends by itself when its processes have ended. It removes their
    # shared memory and semaphores, whose names nothing else knows.
    for tracker in _children(besides):
        _end_tracker(tracker.pid)
    return names


def kill_and_clean() -> None:
    """Kill all descendants, of a process that adopts orphans; remove their files without their guard."""
    import tempfile

    for name in [process_name(os.getpid()), *kill_descendants()]:
        _remove_files(f"{PREFIX}{name}_", "")
        for directory in Path(tempfile.gettempdir()).glob(f"cog-triton-{name}-*"):
            _remove_files("", str(directory))


def _children(besides: int | None) -> list[_Process]:
    """Return this process's children but one, adopted ones among them."""
    descendants = _descendants(foreign=set()).values()
    return [each for each in descendants if each.parent == os.getpid() and each.pid != besides]


def _is_tracker(process: _Process) -> bool:
    return _TRACKER in read(process.pid, "cmdline")


def _has_arguments(process: _Process) -> bool:
    """Whether it has arguments. In the middle of its exec a process has none, and may be a tracker."""
    return bool(read(process.pid, "cmdline"))


def _kill(pid: int) -> None:
    # Another thread may have waited for it.
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)


def _wait_for(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.waitpid(pid, 0)


def _end_tracker(pid: int) -> None:
    """Wait until a tracker has ended, for a bounded time, and kill it then."""
    with contextlib.suppress(OSError):
        ended = os.pidfd_open(pid)
        select.select([ended], [], [], TRACKER_SECONDS)
        os.close(ended)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _pids() -> set[int]:
    """Return the ids of all processes."""
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


def _read_process(pid: int) -> _Process | None:
    """Read /proc/PID/stat; None if the process has ended.

    It begins with PID (NAME) STATE PARENT. The name may have spaces and parentheses. The fields are those
    of proc(5), from the third on.
    """
    text = read(pid, "stat").decode(errors="replace")
    if not text:
        return None
    name, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()
    return _Process(
        pid=pid,
        name=name,
        state=fields[0],
        parent=int(fields[1]),
        started=fields[19],
        used=int(fields[11]) + int(fields[12]),
        status=int(fields[-1]),
    )


def _descendants(foreign: set[int]) -> dict[int, _Process]:
    """Return this process's descendants.

    Other processes are added to ``foreign``, so that the next look does not read them again.
    """
    pids = _pids() - {os.getpid()}
    foreign &= pids
    others: dict[int, _Process] = {}
    for pid in pids - foreign:
        process = _read_process(pid)
        if process is not None:
            others[pid] = process
    descendants = _pop_descendants(others, ancestors={os.getpid()})
    # Those that are left had a parent that has ended meanwhile: the next look sees who adopted them.
    foreign.update(_pop_descendants(others, ancestors={0, *foreign}))
    return descendants


def _pop_descendants(processes: dict[int, _Process], ancestors: set[int]) -> dict[int, _Process]:
    """Take the descendants of some processes out of a dictionary."""
    popped: dict[int, _Process] = {}
    generation = ancestors
    while True:
        generation = {pid for pid, each in processes.items() if each.parent in generation}
        if not generation:
            return popped
        for pid in generation:
            popped[pid] = processes.pop(pid)


def _awaited_children(pid: int) -> set[int]:
    """Return the children whose end a thread of a process waits for."""
    awaited = set()
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        call = read(pid, f"task/{thread.name}/syscall").split()
        if call and call[0] == _WAIT4:
            awaited.add(int(call[1], 16))
    return awaited


def _used(pid: int, processes: dict[int, _Process]) -> int:
    """Return the ticks of the processor that a process and its children have used."""
    return sum(each.used for each in processes.values() if pid in (each.pid, each.parent))


def _is_at_work(pid: int) -> bool:
    """Whether a thread of a process runs, waits for a processor, or waits for a disk."""
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        state = read(pid, f"task/{thread.name}/stat").rpartition(b")")[2].split()[:1]
        if state in ([b"R"], [b"D"]):
            return True
    return False


class _Wait(NamedTuple):
    """Triton's wait for the end of a stub that does nothing."""

    since: float
    # The ticks of the processor that the stub had used then.
    used: int


# The guard


class _Guard:
    """A running server. The guard waits for an order or its end, and looks at its processes in between."""

    def __init__(self, role: str, stop_timeout: float, command: list[str]) -> None:
        self._role = role
        self._is_rank = role.isdigit()
        self._stop_timeout = stop_timeout
        # A signal to stop has come.
        self._signalled = False
        # After a stop, the server has answered every request.
        self._answered = False
        self._killed = False
        # When a server that is to stop is killed.
        self._deadline: float | None = None
        # Processes that are no descendants.
        self._foreign: set[int] = set()
        # Names of models, by the process ids of their stubs.
        self._models: dict[int, str] = {}
        # Stubs that had failed at the last look.
        self._failed: set[int] = set()
        # Stubs whose end Triton waited for at the last count.
        self._awaited: dict[int, _Wait] = {}
        # Every model has been loaded.
        self._is_ready = False
        self._next_count = 0.0
        for number in (*_STOP_SIGNALS, _GROUP_STOP):
            # Not SIG_IGN, which the server would inherit.
            signal.signal(number, self._note_signal)
        adopt_orphans()
        # Before the server starts: a starter that ends at once is missed afterwards.
        self._starter: int | None = sys.stdin.fileno()
        if self._is_rank:
            self._starter = os.pidfd_open(os.getppid())
        self._server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=self._prepare_server,
        )

    def _prepare_server(self) -> None:
        """Prepare the new process before it runs its program."""
        signal_with_parent(signal.SIGKILL)
        if self._role not in ("server", "group", "0"):
            # Until TensorRT-LLM's handler takes its place.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def run(self) -> int:
        """Return the exit status of the server when it has ended."""
        process = os.pidfd_open(self._server.pid)
        ready: list[int] = []
        while process not in ready:
            watched = [process] if self._starter is None else [process, self._starter]
            ready = select.select(watched, [], [], self._seconds_to_wait())[0]
            if self._starter in ready:
                self._handle_order()
            if self._signalled:
                self._stop()
            if not ready:
                self._look()
        # A signal may come in the moment of the end.
        if self._signalled:
            self._stop()
        return self._exit_status(self._server.wait())

    def _seconds_to_wait(self) -> float:
        """Return the time until the next look, or until the deadline."""
        if self._deadline is None or self._killed:
            return LOOK_SECONDS
        return max(0.0, min(LOOK_SECONDS, self._deadline - time.monotonic()))

    def _exit_status(self, status: int) -> int:
        """Return the guard's status after a server that ended with this one."""
        if self._deadline is not None:
            ended_well = self._killed or self._role == "server"
            return 0 if self._answered and ended_well else status
        if self._is_rank:
            _log(RANK_ENDED.format(rank=self._role, status=status))
            return status or 1
        return status

    def _note_signal(self, *_: object) -> None:
        # Only the starter stops other roles.
        self._signalled = self._is_rank

    def _handle_order(self) -> None:
        assert self._starter is not None
        order = b"" if self._is_rank else os.read(self._starter, 1)
        if not order:
            self._starter = None
        if order == READY:
            self._is_ready = True
        elif order in (b"", STOP):
            self._stop()
        elif self._deadline is None:
            self._log_failed_stubs()
            self._kill()
        else:
            self._finish()

    def _stop(self) -> None:
        """Tell the server to stop, once."""
        if self._deadline is None:
            # To know the models: a stop is finished when the stubs of all known ones have ended.
            self._look()
            number = _GROUP_STOP if self._role == "group" else signal.SIGTERM
            self._server.send_signal(number)
            self._deadline = time.monotonic() + self._stop_timeout

    def _finish(self) -> None:
        """Shorten the stop of a server that has answered every request.

        Triton 2.51 begins to unload the models of an ensemble a second after a stop, and may count one for
        seconds that is gone; nothing is in them to lose. A starter that has ended cannot say when every
        request was answered: the end of the last stub does. A rank still has to tell the others.
        """
        self._answered = True
        if self._role == "server" and self._deadline is not None:
            self._deadline = min(self._deadline, time.monotonic() + LAST_BYTES_SECONDS)

    def _kill(self) -> None:
        self._killed = True
        self._server.kill()

    def _look(self) -> None:
        """Look at the server's processes, and end it if it cannot go on."""
        if self._killed:
            return
        processes = _descendants(self._foreign)
        if self._role == "group":
            self._end_ranks_without_guard(processes.values())
        servers = self._servers_among(processes)
        stubs = _stubs_of(servers, processes.values())
        self._note_models(stubs)
        if self._deadline is not None:
            self._look_at_stop(stubs)
            return
        now = time.monotonic()
        if now >= self._next_count:
            self._next_count = now + COUNT_SECONDS
            self._end_with_stub_given_up(servers, processes, now)
        self._end_with_failed_stub(stubs)

    def _end_ranks_without_guard(self, processes: Iterable[_Process]) -> None:
        """Kill what is left of a rank whose guard was killed.

        While its stubs hold its pipes, mpirun waits.
        """
        for process in processes:
            is_child = process.parent == os.getpid() and process.pid != self._server.pid
            if is_child and process.has_ended:
                kill_descendants(besides=self._server.pid)
                return

    def _servers_among(self, processes: dict[int, _Process]) -> dict[int, str]:
        """Return the names of the tritonservers' programs, by their process ids.

        The server may be of any name. Those of ranks or behind a launcher are found by theirs.
        """
        servers = {each.pid: each.name for each in processes.values() if each.name == SERVER}
        server = processes.get(self._server.pid)
        if self._role != "group" and server is not None:
            servers[server.pid] = server.name
        return servers

    def _note_models(self, stubs: list[_Process]) -> None:
        """Note the models of stubs that are seen for the first time.

        The first argument is the file in the directory of the model's version. A stub that has ended has
        no arguments.
        """
        for stub in stubs:
            if stub.is_stub and stub.pid not in self._models:
                arguments = os.fsdecode(read(stub.pid, "cmdline")).split("\0")
                if len(arguments) > 1:
                    self._models[stub.pid] = Path(arguments[1]).parent.parent.name

    def _look_at_stop(self, stubs: list[_Process]) -> None:
        if self._models and all(stub.has_ended for stub in stubs):
            self._finish()
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._kill()

    def _end_with_stub_given_up(
        self, servers: Iterable[int], processes: dict[int, _Process], now: float
    ) -> None:
        """Kill a server that waits for the end of a stub which does nothing: it would wait forever.

        A stub that Triton has told to end, because its model is unloaded or has failed, may take longer on
        a busy machine: it uses the processor, or waits for it.
        """
        before = self._awaited
        patience = UNLOAD_SECONDS if self._is_ready else COUNT_SECONDS
        awaited = {pid for server in servers for pid in _awaited_children(server)}
        self._awaited = {}
        for pid in awaited & self._models.keys():
            used = _used(pid, processes)
            wait = before.get(pid)
            if wait is None or used - wait.used > IDLE_TICKS or _is_at_work(pid):
                wait = _Wait(since=now, used=used)
            self._awaited[pid] = wait
            if now - wait.since >= patience:
                # In the words of Triton.
                _log(f"failed to load '{self._models[pid]}' version 1: {GIVEN_UP}")
                self._kill()

    def _end_with_failed_stub(self, stubs: list[_Process]) -> None:
        """Kill a server one of whose stubs has failed.

        Triton takes the exit status of a stub that it ended itself, until the next look.
        """
        failed = [stub for stub in stubs if stub.has_ended and stub.status]
        for stub in failed:
            if stub.pid in self._failed:
                self._log_end_of_stub(stub)
                self._kill()
        self._failed = {stub.pid for stub in failed}

    def _log_failed_stubs(self) -> None:
        """Log the stubs that have failed since the last look: one may be why the server is to be killed."""
        processes = _descendants(self._foreign)
        stubs = _stubs_of(self._servers_among(processes), processes.values())
        self._note_models(stubs)
        for stub in stubs:
            if stub.has_ended and stub.status:
                self._log_end_of_stub(stub)

    def _log_end_of_stub(self, stub: _Process) -> None:
        model = self._models.get(stub.pid, UNKNOWN)
        status = os.waitstatus_to_exitcode(stub.status)
        _log(STUB_ENDED.format(model=model, status=status))


def _stubs_of(servers: dict[int, str], processes: Iterable[_Process]) -> list[_Process]:
    """Return the stubs among the children of tritonservers.

    A stub that was killed before its exec has its parent's name: Triton forks a bash, which becomes the
    stub.
    """
    children = [each for each in processes if each.parent in servers]
    return [each for each in children if each.name in (_STUB_NAME, "bash", servers[each.parent])]


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# Files


def hold(file: Path, content: str = "") -> int:
    """Make a locked file and return its descriptor.

    Who can lock it knows that all have ended who hold the descriptor, in other containers too.
    """
    # A name that nobody looks for until the file is locked.
    new = file.with_name(f".{file.name}")
    descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(descriptor, os.fsencode(content))
        new.rename(file)
    except BaseException:
        # /dev/shm is full, say. Nothing would find the file under its first name.
        new.unlink(missing_ok=True)
        os.close(descriptor)
        raise
    return descriptor


def sweep() -> None:
    """Remove what this user's servers left whose starter and guard were both killed."""
    import logging

    for file in SHARED_MEMORY.glob(f"{PREFIX}*_{LOCK}"):
        with contextlib.suppress(OSError), file.open("rb") as lock:
            if os.fstat(lock.fileno()).st_uid != os.getuid():
                continue
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock.fileno()).st_nlink == 0:
                # Another process has just removed all of it.
                continue
            logging.getLogger("tritonserver").warning(
                "cleaning up after a killed server (%s)", file.name
            )
            remove(file.name.removesuffix(LOCK), os.fsdecode(lock.read()))


def remove(prefix: str, directory: str) -> None:
    """Kill and remove what is left of a server whose guard was killed: processes, files."""
    for pid in _pids():
        if prefix.encode() in read(pid, "cmdline"):
            _kill(pid)
    _remove_files(prefix, directory)


def _remove_files(prefix: str, directory: str) -> None:
    """Remove shared memory, if there is a prefix of its names, and a directory."""
    shutil.rmtree(directory, ignore_errors=True)
    if not prefix:
        return
    for region in SHARED_MEMORY.glob(f"{prefix}*"):
        region.unlink(missing_ok=True)
    remove_environments()


def remove_environments() -> None:
    """Remove the empty directories in /tmp that killed tritonservers left.

    Triton's Python backend makes one as it loads, for environments of models, and removes it only at an
    orderly end. Which server made one is not known: it is kept if a living one may have.
    """
    starts = _starts_of_servers()
    for directory in ENVIRONMENTS.glob("python_env_??????"):
        # It may be gone, or not empty.
        with contextlib.suppress(OSError):
            status = directory.stat()
            ages = [status.st_mtime - start for start in starts]
            may_be_used = any(-CLOCK_SECONDS <= age <= ENVIRONMENT_SECONDS for age in ages)
            if status.st_uid == os.getuid() and not may_be_used:
                directory.rmdir()


def _starts_of_servers() -> list[float]:
    """Return when the living tritonservers started, in seconds since the epoch."""
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    ticks_per_second = os.sysconf("SC_CLK_TCK")
    starts = []
    for pid in _pids():
        process = _read_process(pid)
        if process is not None and process.name == SERVER and not process.has_ended:
            starts.append(booted + int(process.started) / ticks_per_second)
    return starts


def run_outside_mpi(command: list[str]) -> None:
    """Become ``command``, without the variables that name an MPI job."""
    for name in tuple(os.environ):
        if name.startswith(_MPI_JOB) and not name.startswith(_MPI_CONFIGURATION):
            del os.environ[name]
    os.execvp(command[0], command)


if __name__ == "__main__":
    role, prefix, timeout, directory, *command = sys.argv[1:]
    if role == "outside-mpi":
        run_outside_mpi(command)
    status = run(role, prefix, float(timeout), directory, command)
    # A shell's convention: 128 plus the signal's number.
    sys.exit(status if status >= 0 else 128 - status)
