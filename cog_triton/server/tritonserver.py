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
import subprocess
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from cog_triton import errors
from cog_triton.errors import ANSWERED, DRAINS, ConfigurationError, TritonStartError
from cog_triton.processes import write_whole
from cog_triton.protocol.names import CONTEXT_MODEL, GRPC_ADDRESS
from cog_triton.server import guard
from cog_triton.server.command import Endpoints, Launch, choose_ports, command, guarded
from cog_triton.server.installation import PACKAGE_ROOT, assemble, environment, locate
from cog_triton.server.log import ServerLog
from cog_triton.settings import Settings

logger = logging.getLogger("tritonserver")

TAKEN_SECONDS = 10.0  # in which a server without its port ends, or hangs (Triton 2.51, seen once)
OTLP_HEADERS = "OTEL_EXPORTER_OTLP_HEADERS"  # have the key of a collector
_ESTABLISHED = "01"  # in /proc/net/tcp; see include/net/tcp_states.h of Linux


@dataclass(eq=False, repr=False)
class TritonServer:
    """A tritonserver process, or a group of them, from ``start()`` to ``stop()``."""

    repository: Path  # filled
    runtime: Path  # an existing directory that the server may write to
    settings: Settings
    temporary: bool = False  # remove ``runtime`` when the server ends, however it does
    launch: Launch = field(default_factory=Launch)

    def __post_init__(self) -> None:
        rank = self.launch.rank
        self._name = "tritonserver" if rank is None else f"tritonserver of rank {rank}"
        self._has_endpoints = not rank
        self.status: int | None = None  # of the end: 128 plus the number for a signal
        self.endpoints = Endpoints(self.settings.host, 0, 0, 0)  # known once it has started
        name = guard.process_name(os.getpid())
        self.shm_prefix = f"{guard.PREFIX}{name}_{secrets.token_hex(4)}_"  # of its regions' names
        self._log = ServerLog(self.settings.world_size)
        self._stopping = self._started = False
        self._one_stop = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the server and return when every model is ready.

        A rank other than 0 that is started on its own has no endpoint to ask: this returns at once.

        Raises:
            ConfigurationError: there is no server or no mpirun, a port is in use, or the disk is full.
            TritonStartError: the server died or ran out of time, with its reasons. It is stopped then;
                TritonPortTaken if another process took a port in the same moment.
        """
        installation = locate(self.settings)
        environ = environment(installation, os.environ, self.settings.passed_secrets.split(","))
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
            # mpirun's files, in a directory that is removed even when it is killed: Open MPI 4, and 5.
            directories = ("OMPI_MCA_orte_tmpdir_base", "PRTE_MCA_prte_tmpdir_base")
            environ |= dict.fromkeys(directories, str(self.runtime))
        guard.sweep()
        if self._has_endpoints:
            self.endpoints = choose_ports(self.settings)
        try:
            self._set_address_of_relay()
            self._spawn(*assemble(installation, self.runtime), environ)
        except OSError as error:  # the disk is full, say
            raise ConfigurationError(errors.file_problem(error)) from error
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        self._started = True
        # Triton makes them readable for all, whatever the umask. All are there before the first request.
        for region in guard.SHARED_MEMORY.glob(f"{self.shm_prefix}*"):
            region.chmod(0o600)

    def _set_address_of_relay(self) -> None:
        """Tell the context model, if there is one, where it asks another model over gRPC."""
        file = self.repository / CONTEXT_MODEL / "config.pbtxt"
        if self._has_endpoints and file.is_file():
            config = text_format.Parse(file.read_text(), ModelConfig())
            config.parameters[GRPC_ADDRESS].string_value = self.endpoints.grpc
            write_whole(file, text_format.MessageToString(config))  # other ranks may be reading it

    def _spawn(self, binary: Path, backends: Path, environ: dict[str, str]) -> None:
        settings, launch = self.settings, self.launch
        paths = binary, self.repository, backends
        server = command(*paths, self.endpoints, self.shm_prefix, settings, launch)
        role = "group" if launch.under_mpirun(settings) else "follower" if launch.rank else "server"
        # The starter and the guard hold it. What is to be removed with it is its content.
        removed = str(self.runtime) if self.temporary else ""
        lock = guard.hold(guard.SHARED_MEMORY / f"{self.shm_prefix}{guard.LOCK}", removed)
        self._process = process = subprocess.Popen(
            guarded(role, self.shm_prefix, settings.stop_timeout, server, removed),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environ,
            cwd=PACKAGE_ROOT,  # the stubs' module search path begins there
            start_new_session=True,
            pass_fds=[lock],
        )

        def clear_up() -> None:
            # The guard's last work, if it was killed. Until then stubs hold the pipe of the log.
            if process.wait() == -signal.SIGKILL:
                guard.remove(self.shm_prefix, removed)
            os.close(lock)

        for work in (clear_up, partial(self._forward_log, process)):
            self._threads.append(threading.Thread(target=work, daemon=True))
            self._threads[-1].start()

    def _wait_until_ready(self) -> None:
        timeout = self.settings.start_timeout
        deadline = time.monotonic() + timeout
        # Another Triton may have taken a port in the last moment, and answer there.
        while self._has_endpoints and not (self._log.listens and self.is_ready()):
            if not self.alive:
                reason = self._log.reason(f"{self._name} died while starting", self.wait())
                in_use = errors.IN_USE in reason
                raise (errors.TritonPortTaken if in_use else TritonStartError)(reason)
            if errors.IN_USE in self._log.last_error:
                self._threads[0].join(TAKEN_SECONDS)  # which waits for its end
                if self.alive:
                    raise errors.TritonPortTaken(f"{self._name}: {self._log.last_error}")
            if time.monotonic() > deadline:
                what = f"{self._name} was not ready after {timeout:g} s (TRITON_START_TIMEOUT)"
                raise TritonStartError(self._log.reason(what))
            time.sleep(0.02)

    def is_ready(self) -> bool:
        """Return whether every model is ready. Takes at most a second."""
        if not self.alive or not self._has_endpoints:
            return self.alive
        connection = http.client.HTTPConnection(self.endpoints.http, timeout=1)
        failures = OSError, http.client.HTTPException
        with contextlib.suppress(*failures), contextlib.closing(connection):
            connection.request("GET", "/v2/health/ready")
            return connection.getresponse().status == 200
        return False

    @property
    def alive(self) -> bool:
        return (process := self._process) is not None and process.poll() is None

    @property
    def end(self) -> str:
        """The end of the process, in a line."""
        return f"{self._name} died{self._log.end(self.status)}"

    def wait(self) -> int:
        """Wait for the end of a started server, and for its log; return its exit status."""
        assert self._process is not None
        self.status = self._process.wait()
        for thread in self._threads:
            thread.join()
        return self.status

    def stop(self) -> None:
        """Stop the server, its stubs and all they hold. Safe to call again, and before a start."""
        with self._one_stop:  # a start that was given up and a deployment's end may meet here
            if (process := self._process) is None:
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

    def _tell_guard(self, order: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has just ended
            os.write(self._process.stdin.fileno(), order)

    def _forward_log(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for level, text in self._log.read(process.stdout):
            done = ANSWERED in text or (DRAINS in text and not self._has_clients())
            if self._stopping and done:
                self._tell_guard(guard.KILL)
            # The end of a server that was asked to end is not worth more.
            logger.log(logging.DEBUG if self._stopping else level, "%s", text)
        status = process.wait()
        if self._started and not self._stopping:
            logger.error("%s", self._log.reason(f"{self._name} died", status))

    def _has_clients(self) -> bool:
        # Triton 2.51 waits for requests of clients that are gone, and may count their connections.
        tables = filter(Path.exists, map(Path, ("/proc/net/tcp", "/proc/net/tcp6")))
        rows = [row.split() for table in tables for row in table.read_text().splitlines()[1:]]
        served = {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == _ESTABLISHED}
        return bool(served & {self.endpoints.http_port, self.endpoints.grpc_port})
