"""A tritonserver: found, started, watched until it is ready or dead, and stopped.

An engine that is spread over several GPUs has one tritonserver a GPU, its ranks, which mpirun starts and
the guard stops as one group. Rank 0 loads every model and opens the endpoints; the others load only the
engine and wait for rank 0. The death of one is the death of all.
"""

from __future__ import annotations

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
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from cog_triton.errors import (
    ANSWERED,
    DRAINS,
    IN_USE,
    ConfigurationError,
    TritonPortTaken,
    TritonStartError,
    file_problem,
)
from cog_triton.server import guard
from cog_triton.server.command import Endpoints, Launch, choose_ports, command, guarded
from cog_triton.server.installation import PACKAGE_ROOT, assemble, environment, locate
from cog_triton.server.log import ServerLog
from cog_triton.settings import Settings
from cog_triton.wire import CONTEXT_MODEL, GRPC_ADDRESS

logger = logging.getLogger("tritonserver")

_ESTABLISHED = "01"  # in /proc/net/tcp; see include/net/tcp_states.h of Linux


class TritonServer:
    """A tritonserver process, or a group of them, from ``start()`` to ``stop()``.

    Attributes:
        endpoints: its addresses, once started.
        shm_prefix: the beginning of the names of its shared memory regions.
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
        """Start nothing yet.

        Args:
            repository: the filled model repository.
            runtime: an existing directory that this server may write to.
            temporary: remove ``runtime`` when the server ends, however it does.
            launch: how to start it, in addition to the settings.
        """
        self._temporary = str(runtime) if temporary else ""
        self._settings, self._launch = settings, launch or Launch()
        self._repository, self._runtime = repository, runtime
        self._log = ServerLog(settings.world_size)
        rank = self._launch.rank
        self._name = "tritonserver" if rank is None else f"tritonserver of rank {rank}"
        self._has_endpoints = not rank
        self._stopping = self._started = False
        self._one_stop = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._threads: list[threading.Thread] = []
        name = guard.process_name(os.getpid())
        self.shm_prefix = f"{guard.PREFIX}{name}_{secrets.token_hex(4)}_"
        self.endpoints = Endpoints(settings.host, 0, 0, 0)
        self.status: int | None = None

    def start(self) -> None:
        """Start the server and return when every model is ready.

        A rank other than 0 that is started on its own has no endpoint to ask: this returns at once.

        Raises:
            ConfigurationError: no server or no mpirun was found, a port is in use, or a file could not
                be written.
            TritonPortTaken: another process took a port in the same moment.
            TritonStartError: the server died or ran out of time, with its reasons. It is stopped then.
        """
        settings = self._settings
        installation = locate(settings)
        environ = environment(installation, os.environ, settings.secrets_passed_on)
        environ |= self._launch.environment
        if self._launch.under_mpirun(settings):
            if shutil.which("mpirun", path=environ["PATH"]) is None:
                raise ConfigurationError(
                    f"no mpirun in PATH, which WORLD_SIZE={settings.world_size} needs: run in NVIDIA's "
                    "Triton container, or install Open MPI (Debian: openmpi-bin)"
                )
            # mpirun's files, in a directory that is removed even when it is killed: Open MPI 4, and 5.
            for name in ("OMPI_MCA_orte_tmpdir_base", "PRTE_MCA_prte_tmpdir_base"):
                environ[name] = str(self._runtime)
        guard.sweep()
        if self._has_endpoints:
            self.endpoints = choose_ports(settings)
        try:
            self._set_address_of_relay()
            binary, backends = assemble(installation, self._runtime)
            paths = binary, self._repository, backends
            line = command(*paths, self.endpoints, self.shm_prefix, settings, self._launch)
            self._spawn(line, environ)
        except OSError as error:  # the disk is full, say
            raise ConfigurationError(file_problem(error)) from error
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        self._started = True
        # Readable for this user only: Triton makes it readable for all, whatever the umask. Its regions are
        # all there now, and nothing of a request is in them before.
        for region in guard.SHARED_MEMORY.glob(f"{self.shm_prefix}*"):
            region.chmod(0o600)
        if self._has_endpoints:  # else nothing tells that the stubs have started
            self._tell_guard(guard.WATCH)

    def _set_address_of_relay(self) -> None:
        """Tell the context model, if there is one, where it asks another model over gRPC."""
        file = self._repository / CONTEXT_MODEL / "config.pbtxt"
        if self._has_endpoints and file.is_file():
            config = text_format.Parse(file.read_text(), ModelConfig())
            config.parameters[GRPC_ADDRESS].string_value = self.endpoints.grpc
            new = file.with_suffix(".new")
            new.write_text(text_format.MessageToString(config))
            new.replace(file)  # at once: other ranks may be reading it

    def stop(self) -> None:
        """Stop the server, its stubs and all they hold. Safe to call again, and before a start."""
        with self._one_stop:  # a start that was given up and a deployment's end may meet here
            if (process := self._process) is None:
                return
            self._stopping = True
            self._tell_guard(guard.STOP)
            self.wait()
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # the last order came after its end
                process.stdin.close()
            self._process = None

    def kill(self) -> None:
        """End a server that hangs: its guard kills it, and clears up. Returns at once."""
        self._tell_guard(guard.KILL)

    @property
    def end(self) -> str:
        """The end of the process, in a line."""
        return f"{self._name} died{self._log.end(self.status)}"

    def wait(self) -> int:
        """Wait for the end of a server that was started, and return its exit status.

        If nobody asked for that end, its reason has been logged by then.
        """
        assert self._process is not None
        self.status = self._process.wait()
        for thread in self._threads:
            thread.join()
        return self.status

    @property
    def alive(self) -> bool:
        return (process := self._process) is not None and process.poll() is None

    def ends_within(self, seconds: float) -> bool:
        """Wait for the end at most so long; return whether it came."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return not self.alive

    def is_ready(self) -> bool:
        """Return whether every model is ready. Takes at most a second."""
        if not self.alive or not self._has_endpoints:
            return self.alive
        connection = http.client.HTTPConnection(self.endpoints.http, timeout=1)
        try:
            connection.request("GET", "/v2/health/ready")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _spawn(self, server: list[str], environ: dict[str, str]) -> None:
        """Start the guard of a server, given by its command line, and the threads that watch it."""
        role = "follower" if self._launch.rank else "server"
        if self._launch.under_mpirun(self._settings):
            role = "group"
        timeout = self._settings.stop_timeout
        lock = guard.hold(self.shm_prefix, self._temporary)
        self._process = process = subprocess.Popen(
            guarded(role, self.shm_prefix, timeout, server, self._temporary),
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
                guard.remove(self.shm_prefix, self._temporary)
            os.close(lock)

        work = clear_up, self._forward_log
        self._threads = [threading.Thread(target=target, daemon=True) for target in work]
        for thread in self._threads:
            thread.start()

    def _tell_guard(self, order: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has just ended
            self._process.stdin.write(order)
            self._process.stdin.flush()

    def _wait_until_ready(self) -> None:
        timeout = self._settings.start_timeout
        deadline = time.monotonic() + timeout
        # Another Triton may have taken a port in the last moment, and answer there.
        while self._has_endpoints and not (self._log.listens and self.is_ready()):
            if not self.alive:
                reason = self._log.reason(f"{self._name} died while starting", self.wait())
                raise TritonPortTaken(reason) if IN_USE in reason else TritonStartError(reason)
            if time.monotonic() > deadline:
                what = f"{self._name} was not ready after {timeout:g} s (TRITON_START_TIMEOUT)"
                raise TritonStartError(self._log.reason(what))
            time.sleep(0.02)

    def _forward_log(self) -> None:
        process = self._process
        assert process is not None
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
        """Return whether a client is connected that may wait for a response.

        Triton 2.51 waits for requests of clients that are gone, and may count their connections.
        """
        ports = {self.endpoints.http_port, self.endpoints.grpc_port}
        for table in filter(Path.exists, map(Path, ("/proc/net/tcp", "/proc/net/tcp6"))):
            for _, local, _, state, *_ in map(str.split, table.read_text().splitlines()[1:]):
                if state == _ESTABLISHED and int(local.rpartition(":")[2], 16) in ports:
                    return True
        return False
