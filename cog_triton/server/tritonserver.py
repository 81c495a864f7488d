"""A tritonserver: found, started, watched until it is ready or dead, and stopped.

An engine that is spread over several GPUs has one tritonserver a GPU, its ranks, which mpirun starts and
the guard stops as one group. Rank 0 loads every model and opens the endpoints; the others load only the
engine and wait for rank 0. The death of one is the death of all.
"""

import contextlib
import http.client
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from google.protobuf import text_format

from cog_triton import errors
from cog_triton.errors import ANSWERED, DRAINS, ConfigurationError, TritonStartError
from cog_triton.processes import write_whole
from cog_triton.protocol.names import CONTEXT_MODEL, GRPC_ADDRESS
from cog_triton.protocol.triton_messages import ModelConfig
from cog_triton.server import guard
from cog_triton.server.command import Endpoints, Launch, choose_ports, command, guarded
from cog_triton.server.installation import (
    PACKAGE_ROOT,
    Installation,
    assemble,
    environment,
    locate,
)
from cog_triton.server.log import ServerLog
from cog_triton.settings import Settings

logger = logging.getLogger("tritonserver")

# In which a server without its port ends, or hangs (Triton 2.51, seen once).
TAKEN_SECONDS = 10.0
READY_POLL_SECONDS = 0.02
# Its value has the key of a collector.
OTLP_HEADERS = "OTEL_EXPORTER_OTLP_HEADERS"
# mpirun's files, in a directory that is removed even when it is killed: Open MPI 4, and 5.
MPIRUN_DIRECTORIES = ("OMPI_MCA_orte_tmpdir_base", "PRTE_MCA_prte_tmpdir_base")
# A state in /proc/net/tcp; see include/net/tcp_states.h of Linux.
_ESTABLISHED = "01"


@dataclass(eq=False, repr=False)
class TritonServer:
    """A tritonserver process, or a group of them, from ``start()`` to ``stop()``.

    Args:
        repository: a filled model repository.
        runtime: an existing directory that the server may write to.
        temporary: remove ``runtime`` when the server ends, however it does.
    """

    repository: Path
    runtime: Path
    settings: Settings
    temporary: bool = False
    launch: Launch = field(default_factory=Launch)

    def __post_init__(self) -> None:
        rank = self.launch.rank
        self._name = "tritonserver" if rank is None else f"tritonserver of rank {rank}"
        self._has_endpoints = not rank
        # Of the end: 128 plus the number for a signal.
        self.status: int | None = None
        # Known once it has started.
        self.endpoints = Endpoints(self.settings.host, 0, 0, 0)
        # Names of its regions of shared memory begin with this.
        starter = guard.process_name(os.getpid())
        self.shm_prefix = f"{guard.PREFIX}{starter}_{secrets.token_hex(4)}_"
        self._log = ServerLog(self.settings.world_size)
        self._started = False
        self._stopping = False
        # A start that was given up and a deployment's end may both stop it.
        self._one_stop = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end_thread: threading.Thread | None = None
        self._log_thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the server and return when every model is ready.

        A rank other than 0 that is started on its own has no endpoint to ask: this returns at once.

        Raises:
            ConfigurationError: there is no server or no mpirun, a port is in use, or the disk is full.
            TritonStartError: the server died or ran out of time, with its reasons. It is stopped then;
                TritonPortTaken if another process took a port in the same moment.
        """
        self.spawn()
        self.wait_until_ready()

    def spawn(self) -> None:
        """Start the process, or raise ConfigurationError as ``start`` does."""
        installation = locate(self.settings)
        environ = self._environment(installation)
        guard.sweep()
        if self._has_endpoints:
            self.endpoints = choose_ports(self.settings)
        try:
            self._set_address_of_relay()
            server, backends = assemble(installation, self.runtime)
            self._spawn(server, backends, environ)
        except OSError as error:
            # The disk is full, say.
            raise ConfigurationError(errors.file_problem(error)) from error

    def wait_until_ready(self) -> None:
        """Return when every model is ready; stop the server and raise TritonStartError if that fails."""
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        self._started = True
        if self.alive:
            self._tell_guard(guard.READY)
        # Triton makes them readable for all, whatever the umask. All are there before the first request.
        for region in guard.SHARED_MEMORY.glob(f"{self.shm_prefix}*"):
            region.chmod(0o600)

    def _environment(self, installation: Installation) -> dict[str, str]:
        """Return the variables of the server, or raise ConfigurationError if there is no mpirun."""
        passed_secrets = self.settings.passed_secrets.split(",")
        environ = environment(installation, os.environ, passed_secrets)
        if self.settings.otel_endpoint and OTLP_HEADERS in os.environ.keys() - environ.keys():
            logger.warning(
                "Triton exports its spans without %s; to pass it on, add it to TRITON_SECRETS",
                OTLP_HEADERS,
            )
        environ |= self.launch.environment
        if self.launch.under_mpirun(self.settings):
            if shutil.which("mpirun", path=environ["PATH"]) is None:
                raise ConfigurationError(
                    f"WORLD_SIZE={self.settings.world_size} requires mpirun, which is not in PATH: run in "
                    "NVIDIA's Triton container, or install Open MPI (Debian: openmpi-bin)"
                )
            environ |= dict.fromkeys(MPIRUN_DIRECTORIES, str(self.runtime))
        return environ

    def _set_address_of_relay(self) -> None:
        """Tell the context model, if there is one, where it asks another model over gRPC."""
        file = self.repository / CONTEXT_MODEL / "config.pbtxt"
        if self._has_endpoints and file.is_file():
            config = text_format.Parse(file.read_text(), ModelConfig())
            config.parameters[GRPC_ADDRESS].string_value = self.endpoints.grpc
            # Other ranks may be reading it.
            write_whole(file, text_format.MessageToString(config))

    def _spawn(self, binary: Path, backends: Path, environ: dict[str, str]) -> None:
        """Start the guard, which starts the server, and the threads that follow both."""
        server = command(
            binary,
            self.repository,
            backends,
            self.endpoints,
            self.shm_prefix,
            self.settings,
            self.launch,
        )
        # To be removed with the server; also by the next start, which reads it in the lock's file.
        removed = str(self.runtime) if self.temporary else ""
        lock_file = guard.SHARED_MEMORY / f"{self.shm_prefix}{guard.LOCK}"
        lock = guard.hold(lock_file, removed)
        stop_timeout = self.settings.stop_timeout
        try:
            process = subprocess.Popen(
                guarded(self._role(), self.shm_prefix, stop_timeout, server, removed),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environ,
                # The stubs' module search path begins there.
                cwd=PACKAGE_ROOT,
                start_new_session=True,
                pass_fds=[lock],
            )
        except BaseException:
            lock_file.unlink(missing_ok=True)
            os.close(lock)
            raise
        self._process = process
        self._end_thread = _start_thread(self._clear_up, process, lock, removed)
        self._log_thread = _start_thread(self._forward_log, process)

    def _role(self) -> str:
        """Return the guard's role, see there."""
        if self.launch.under_mpirun(self.settings):
            return "group"
        return "follower" if self.launch.rank else "server"

    def _clear_up(self, process: subprocess.Popen[bytes], lock: int, removed: str) -> None:
        """Wait for the guard, and do its last work if it was killed.

        Until then stubs hold the pipe of the log.
        """
        try:
            if process.wait() == -signal.SIGKILL:
                guard.remove(self.shm_prefix, removed)
        finally:
            os.close(lock)

    def _wait_until_ready(self) -> None:
        """Wait, or raise TritonStartError with the reason."""
        timeout = self.settings.start_timeout
        deadline = time.monotonic() + timeout
        # Another Triton may have taken a port in the last moment, and answer there.
        while self._has_endpoints and not (self._log.listens and self.is_ready()):
            if not self.alive:
                reason = self._log.reason(f"{self._name} died while starting", self.wait())
                if errors.IN_USE in reason:
                    raise errors.TritonPortTaken(reason)
                raise TritonStartError(reason)
            if errors.IN_USE in self._log.last_error:
                self._wait_for_end(TAKEN_SECONDS)
                if self.alive:
                    raise errors.TritonPortTaken(f"{self._name}: {self._log.last_error}")
            if time.monotonic() > deadline:
                what = f"{self._name} was not ready after {timeout:g} s (TRITON_START_TIMEOUT)"
                raise TritonStartError(self._log.reason(what))
            time.sleep(READY_POLL_SECONDS)

    def is_ready(self) -> bool:
        """Return whether every model is ready. Takes at most a second."""
        if not self.alive or not self._has_endpoints:
            return self.alive
        connection = http.client.HTTPConnection(self.endpoints.http, timeout=1)
        with contextlib.closing(connection):
            try:
                connection.request("GET", "/v2/health/ready")
                return connection.getresponse().status == 200
            except (OSError, http.client.HTTPException):
                return False

    def listens(self) -> bool:
        """Return whether it listens on its HTTP port, as it does until it ends. Takes at most a second."""
        address = (self.endpoints.host, self.endpoints.http_port)
        try:
            socket.create_connection(address, timeout=1).close()
        except ConnectionRefusedError:
            return False
        except OSError:
            # Its queue of connections is full, say.
            return True
        return True

    @property
    def alive(self) -> bool:
        process = self._process
        return process is not None and process.poll() is None

    @property
    def end(self) -> str:
        """The end of the process, in a line."""
        return f"{self._name} died{self._log.end(self.status)}"

    def wait(self) -> int:
        """Wait for the end of a started server, and for its log; return its exit status."""
        assert self._process is not None
        self.status = self._process.wait()
        self._wait_for_end(None)
        if self._log_thread is not None:
            self._log_thread.join()
        return self.status

    def stop(self) -> None:
        """Stop the server, its stubs and all they hold. Safe to call again, and before a start."""
        with self._one_stop:
            process = self._process
            if process is None:
                return
            self._stopping = True
            self._tell_guard(guard.STOP)
            self.wait()
            assert process.stdin is not None
            process.stdin.close()
            self._process = None

    def kill(self) -> None:
        """End a server that hangs: its guard kills it, and clears up. Returns at once."""
        self._tell_guard(guard.KILL)

    def _wait_for_end(self, seconds: float | None) -> None:
        """Wait until the guard has ended, and what it left is removed."""
        if self._end_thread is not None:
            self._end_thread.join(seconds)

    def _tell_guard(self, order: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        # It may have just ended.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._process.stdin.fileno(), order)

    def _forward_log(self, process: subprocess.Popen[bytes]) -> None:
        """Log what the server writes, until its end; whatever happens, read all of it.

        A server whose pipe nobody reads waits for room there, and answers no more.
        """
        assert process.stdout is not None
        try:
            for level, text in self._log.read(process.stdout):
                self._forward_line(level, text)
        except Exception:
            logger.exception("the rest of the log of %s is not shown", self._name)
            for _ in process.stdout:
                pass
        status = process.wait()
        if self._started and not self._stopping:
            logger.error("%s", self._log.reason(f"{self._name} died", status))

    def _forward_line(self, level: int, text: str) -> None:
        """Log a line; in a stop, kill the server once it has answered every request."""
        has_answered = ANSWERED in text or (DRAINS in text and not self._has_clients())
        if self._stopping and has_answered:
            self._tell_guard(guard.KILL)
        # The end of a server that was asked to end is not worth more.
        logger.log(logging.DEBUG if self._stopping else level, "%s", text)

    def _has_clients(self) -> bool:
        """Whether anybody is connected to the server.

        Triton 2.51 waits for requests of clients that are gone, and may count their connections.
        """
        served_ports = (self.endpoints.http_port, self.endpoints.grpc_port)
        for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
            if not table.exists():
                continue
            # A number, the local and the remote address, the state, and more. A head of names comes first.
            for row in table.read_text().splitlines()[1:]:
                _, local_address, _, state, *_ = row.split()
                port = int(local_address.rpartition(":")[2], 16)
                if state == _ESTABLISHED and port in served_ports:
                    return True
        return False


def _start_thread(work: Callable[..., None], *args: object) -> threading.Thread:
    thread = threading.Thread(target=work, args=args, daemon=True)
    thread.start()
    return thread
