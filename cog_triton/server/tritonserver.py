"""One life of tritonserver: find it, start it, wait until it is ready or dead, watch it, stop it.

An engine that is spread over several GPUs has one tritonserver a GPU, its ranks, which mpirun starts and
the guard stops as one group. Rank 0 loads every model and opens the endpoints; the others load the engine
alone and wait for rank 0. The death of one is the death of all.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
import secrets
import signal
import subprocess
import threading
import time
from pathlib import Path

from cog_triton.errors import (
    ANSWERED,
    DRAINS,
    IN_USE,
    ConfigurationError,
    TritonPortTaken,
    TritonStartError,
    file_problem,
)
from cog_triton.server import leftovers
from cog_triton.server.command import (
    Endpoints,
    Launch,
    _mpirun_environment,
    check_mpirun,
    choose_ports,
    command,
    guard_role,
    guarded,
    launch_command,
)
from cog_triton.server.guard import KILL, STOP, WATCH, make_private, process_name
from cog_triton.server.installation import PACKAGE_ROOT, assemble, environment, locate
from cog_triton.server.log import LoadTimes, ServerLog
from cog_triton.settings import Settings
from cog_triton.wire import ADDRESS_FILE, CONTEXT_MODEL

logger = logging.getLogger("tritonserver")
_progress = logging.getLogger(__name__)

_ESTABLISHED = "01"  # in /proc/net/tcp; see include/net/tcp_states.h of Linux


class TritonServer:
    """One life of a tritonserver process, or of a group of them, from ``start()`` to ``stop()``.

    Attributes:
        endpoints: where it listens, once started.
        shm_prefix: what the names of its shared memory regions begin with.
        status: its exit status once it has ended, 128 plus the number for a signal.
    """

    def __init__(
        self,
        repository: Path,
        runtime: Path,
        settings: Settings,
        *,
        temporary: bool = False,
        launch: Launch | None = None,
    ) -> None:
        """Prepares a life; nothing runs before ``start``.

        Args:
            repository: the filled model repository.
            runtime: an existing directory that this server may write to.
            temporary: whether ``runtime`` is removed when the server ends, however it does.
            launch: how to start it, beyond what the settings say.
        """
        self._temporary = runtime if temporary else None
        self._settings = settings
        self._repository = repository
        self._runtime = runtime
        self._launch = launch or Launch()
        self._log = ServerLog(settings.world_size)
        rank = self._launch.rank
        self._name = "tritonserver" if rank is None else f"tritonserver of rank {rank}"
        self._stopping = False
        self._started = False
        self._process: subprocess.Popen[bytes] | None = None
        self._threads: list[threading.Thread] = []
        self.shm_prefix = f"cog_triton_{process_name(os.getpid())}_{secrets.token_hex(4)}_"
        self.endpoints = Endpoints(settings.host, 0, 0, 0)
        self.status: int | None = None

    def start(self) -> None:
        """Starts the server and returns when every model is ready.

        A rank other than 0 that is started on its own has no endpoint to ask: this returns at once.

        Raises:
            ConfigurationError: no server or no mpirun was found, a port is in use, or a file could not
                be written.
            TritonPortTaken: somebody else took a port in the same moment.
            TritonStartError: the server died or ran out of time, with its reasons. It is stopped then.
        """
        installation = locate(self._settings)
        environ = {
            **environment(installation, os.environ, self._settings.secrets_passed_on),
            **self._launch.environment,
        }
        group = self._launch.under_mpirun(self._settings)
        if group:
            check_mpirun(environ, self._settings)
            environ |= _mpirun_environment(self._runtime)
        if self._has_endpoints:
            self.endpoints = choose_ports(self._settings)
            self._tell_address()
        leftovers.sweep()
        try:
            server, backends = assemble(installation, self._runtime)
            self._spawn(
                command(
                    server,
                    self._repository,
                    backends,
                    self.endpoints,
                    self.shm_prefix,
                    self._settings,
                ),
                environ,
            )
        except OSError as error:  # the disk is full, say
            raise ConfigurationError(file_problem(error)) from error
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        self._started = True
        make_private(self.shm_prefix)
        if self._has_endpoints:  # else nothing tells that the stubs have started
            self._tell_guard(WATCH)

    def stop(self) -> None:
        """Stops the server, its stubs and all they hold. Safe to call again, and before a start."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._stopping = True
        self._tell_guard(STOP)
        self.status = self._process.wait()
        self._join_threads()
        with contextlib.suppress(BrokenPipeError):  # what it was told last came after its end
            self._process.stdin.close()
        self._process = None

    def kill(self) -> None:
        """Ends a server that hangs: its guard kills it, and clears up. Returns at once."""
        self._tell_guard(KILL)

    @property
    def end(self) -> str:
        """How it ended, in a line."""
        return f"{self._name} died{self._log.end(self.status)}"

    def wait(self) -> int:
        """Waits for the end of a server that was started, and returns its exit status.

        If nobody asked for that end, its reason has been logged by then.
        """
        assert self._process is not None
        self.status = self._process.wait()
        self._join_threads()
        return self.status

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def ends_within(self, seconds: float) -> bool:
        """Waits for the end at most so long; returns whether it came."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return not self.alive

    def is_ready(self) -> bool:
        """Whether the server says that every model is ready. Takes at most a second."""
        return self.alive and (not self._has_endpoints or _ready(self.endpoints))

    @property
    def _has_endpoints(self) -> bool:
        return not self._launch.rank

    def _spawn(self, server: list[str], environ: dict[str, str]) -> None:
        """Starts the guard of a server, given by its command line, and what reads its log."""
        lock = leftovers.hold(self.shm_prefix, self._temporary)
        self._process = subprocess.Popen(
            guarded(
                guard_role(self._launch, self._settings),
                self.shm_prefix,
                self._settings.stop_timeout,
                launch_command(server, self.shm_prefix, self._settings, self._launch),
                directory=str(self._temporary or ""),
            ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environ,
            cwd=PACKAGE_ROOT,  # the stubs' module search path begins there
            start_new_session=True,
            pass_fds=[lock],
        )
        self._threads = [
            threading.Thread(target=target, args=arguments, name="tritonserver", daemon=True)
            for target, *arguments in (
                (self._forward_log, self._process),
                (self._clear_up, self._process, lock),
            )
        ]
        for thread in self._threads:
            thread.start()

    def _tell_guard(self, what: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has just ended
            self._process.stdin.write(what)
            self._process.stdin.flush()

    def _tell_address(self) -> None:
        """Writes down where the server will listen, for the model that asks another over gRPC."""
        model = self._repository / CONTEXT_MODEL
        if model.is_dir():
            (model / ADDRESS_FILE).write_text(self.endpoints.grpc)

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self._settings.start_timeout
        # Another Triton may have taken a port in the last moment, and answer there.
        while self._has_endpoints and not (self._log.listens and _ready(self.endpoints)):
            if not self.alive:
                assert self._process is not None
                self._join_threads()
                what = f"{self._name} died while starting"
                reason = self._log.reason(what, self._process.returncode)
                raise TritonPortTaken(reason) if IN_USE in reason else TritonStartError(reason)
            if time.monotonic() > deadline:
                raise TritonStartError(
                    self._log.reason(
                        f"{self._name} was not ready after {self._settings.start_timeout:g} s "
                        "(TRITON_START_TIMEOUT)"
                    )
                )
            time.sleep(0.02)

    def _join_threads(self) -> None:
        for thread in self._threads:
            thread.join()

    def _clear_up(self, process: subprocess.Popen[bytes], lock: int) -> None:
        """Does the guard's last work if it was killed. Until then stubs hold the pipe of the log."""
        if process.wait() == -signal.SIGKILL:
            leftovers.remove(self.shm_prefix, self._temporary)
        os.close(lock)

    def _forward_log(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        load_times = LoadTimes()
        for level, text in self._log.read(process.stdout):
            if progress := load_times.note(text, time.monotonic()):
                _progress.info("%s", progress)
            done = ANSWERED in text or (DRAINS in text and not self._has_clients())
            if self._stopping and done:
                self._tell_guard(KILL)
            # That the server ends is news only if it was not asked to.
            logger.log(logging.DEBUG if self._stopping else level, "%s", text)
        status = process.wait()
        if self._started and not self._stopping:
            logger.error("%s", self._log.reason(f"{self._name} died", status))

    def _has_clients(self) -> bool:
        """Return whether somebody is connected who may wait for an answer.

        Triton 2.51 waits for requests of clients that are gone, and may count their connections.
        """
        ports = {self.endpoints.http_port, self.endpoints.grpc_port}
        rows = [
            line.split()[1:4]
            for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
            if table.exists()
            for line in table.read_text().splitlines()[1:]
        ]
        return any(
            state == _ESTABLISHED and int(local.rpartition(":")[2], 16) in ports
            for local, _, state in rows
        )


def _ready(endpoints: Endpoints) -> bool:
    connection = http.client.HTTPConnection(endpoints.http, timeout=1)
    try:
        connection.request("GET", "/v2/health/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
