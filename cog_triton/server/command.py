"""Command lines of tritonserver, as one process or as one rank for each GPU under mpirun; and ports."""

from __future__ import annotations

import contextlib
import errno
import shutil
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cog_triton.errors import ConfigurationError
from cog_triton.settings import Settings

GUARD = Path(__file__).with_name("guard.py")


@dataclass(frozen=True)
class Endpoints:
    """The addresses of a running server."""

    host: str
    http_port: int
    grpc_port: int
    metrics_port: int

    @property
    def http(self) -> str:
        return self._address(self.http_port)

    @property
    def grpc(self) -> str:
        return self._address(self.grpc_port)

    @property
    def metrics(self) -> str:
        return self._address(self.metrics_port)

    def _address(self, port: int) -> str:
        return f"{'127.0.0.1' if self.host == '0.0.0.0' else self.host}:{port}"


@dataclass(frozen=True)
class Launch:
    """The options of NVIDIA's launch script, which are not settings.

    Attributes:
        engine_models: the models that a rank other than 0 loads.
        options: options of tritonserver on every rank, after all others.
        first_rank_options: further ones on rank 0.
        launcher: command that runs each tritonserver, such as trtllm-llmapi-launch.
        mpi: run under mpirun even a single rank, whose backend spawns processes through MPI.
        environment: further environment variables.
        rank: the one rank to run, where something else than mpirun, such as Slurm, starts the others.
    """

    engine_models: tuple[str, ...] = ("tensorrt_llm",)
    options: tuple[str, ...] = ()
    first_rank_options: tuple[str, ...] = ()
    launcher: tuple[str, ...] = ()
    mpi: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    rank: int | None = None

    def under_mpirun(self, settings: Settings) -> bool:
        """Return whether this process starts an mpirun."""
        return self.rank is None and (self.mpi or settings.world_size > 1)

    def guard_role(self, settings: Settings) -> str:
        """Return the role of the guard; see ``cog_triton.server.guard``."""
        if self.under_mpirun(settings):
            return "group"
        return "follower" if self.rank else "server"


def command(
    server: Path,
    repository: Path,
    backends: Path,
    endpoints: Endpoints,
    shm_prefix: str,
    settings: Settings,
) -> list[str]:
    """Return the command line of tritonserver."""
    options = {
        "model-repository": repository,
        "backend-directory": backends,
        "http-address": endpoints.host,
        "http-port": endpoints.http_port,
        "grpc-address": endpoints.host,
        "grpc-port": endpoints.grpc_port,
        "metrics-address": endpoints.host,
        "metrics-port": endpoints.metrics_port,
        "backend-config": _shm_config(shm_prefix),
        # Below stop_timeout, so that the server ends by itself and cleans up.
        "exit-timeout-secs": max(1, int(settings.stop_timeout) - 2),
        "log-verbose": settings.log_verbose,
    }
    return [
        str(server),
        *(f"--{name}={value}" for name, value in options.items()),
        *closed(settings.closed_apis),
        "--disable-auto-complete-config",
    ]


def closed(apis: str) -> list[str]:
    """Return the options that close parts of Triton's API, named with commas between, or ``none``.

    Triton restricts them to those who send a header with a certain value. Neither HTTP nor gRPC can send
    this one, a line break. A random value could be read from the command line by all on the machine.
    """
    options = () if apis == "none" else ("http-restricted-api", "grpc-restricted-protocol")
    return [f"--{option}={apis}:closed=\n" for option in options]


def launch_command(
    server_command: list[str], shm_prefix: str, settings: Settings, launch: Launch
) -> list[str]:
    """Return the command line to run under a guard: tritonserver, mpirun with its ranks, or one rank."""
    if launch.under_mpirun(settings):
        return mpirun_command(
            server_command, settings.world_size, shm_prefix, settings.stop_timeout, launch
        )
    if launch.rank is not None:
        return rank_command(server_command, launch.rank, shm_prefix, launch)
    return [*launch.launcher, *server_command, *launch.options, *launch.first_rank_options]


def mpirun_command(
    server_command: list[str],
    world_size: int,
    shm_prefix: str,
    stop_timeout: float,
    launch: Launch = Launch(),
) -> list[str]:
    """Return the command line of mpirun that starts one tritonserver a rank, each under its own guard.

    For Open MPI 4.1, as in NVIDIA's containers, and 5, which takes the same options.

    Args:
        server_command: tritonserver's, with ``shm_prefix`` as the prefix of its shared memory.
        stop_timeout: seconds from the stop of the group to the SIGKILL for all of it.
    """
    rank_timeout = 0.75 * stop_timeout  # after tritonserver's own limit, before the group's
    parts = ["mpirun", "--allow-run-as-root"]
    # A slot is a core or what Slurm allotted; the ranks are as many as GPUs, whatever that is.
    parts += ["--oversubscribe"]
    # Otherwise two ranks get one core each, and more a NUMA node each, for all of Triton's threads.
    parts += ["--bind-to", "none", "--tag-output"]
    for rank in range(world_size):
        rank_server = rank_command(server_command, rank, shm_prefix, launch)
        guard = guarded(str(rank), f"{shm_prefix}{rank}_", rank_timeout, rank_server)
        parts += [*([":"] if rank else []), "-n", "1", *guard]
    return parts


def rank_command(
    server_command: list[str], rank: int, shm_prefix: str, launch: Launch = Launch()
) -> list[str]:
    """Return the command line of one rank's tritonserver; its shared memory begins with ``shm_prefix``."""
    shm_option = f"--backend-config={_shm_config(shm_prefix)}"
    follower_options = (
        "--model-control-mode=explicit",
        *(f"--load-model={model}" for model in launch.engine_models),
        "--allow-http=false",
        "--allow-grpc=false",
        "--allow-metrics=false",
    )
    return [
        *launch.launcher,
        *(f"{part}{rank}_" if part == shm_option else part for part in server_command),
        *launch.options,
        *(follower_options if rank else launch.first_rank_options),
    ]


def _shm_config(shm_prefix: str) -> str:
    return f"python,shm-region-prefix-name={shm_prefix}"


def guarded(
    role: str, shm_prefix: str, stop_timeout: float, command: list[str], *, directory: str = ""
) -> list[str]:
    """Return the command line that runs ``command`` under a guard; see ``cog_triton.server.guard``.

    Args:
        shm_prefix: of the command's shared memory, which the guard removes; empty if it has none.
        stop_timeout: seconds from SIGTERM to SIGKILL.
        directory: removed when the command has ended; empty for none.
    """
    guard = [sys.executable, "-I", "-S", str(GUARD)]
    return [*guard, role, shm_prefix, f"{stop_timeout:g}", directory, *command]


def check_mpirun(environ: Mapping[str, str], settings: Settings) -> None:
    """Raise ConfigurationError if there is no mpirun in PATH."""
    if shutil.which("mpirun", path=environ.get("PATH")) is None:
        raise ConfigurationError(
            f"no mpirun in PATH, which WORLD_SIZE={settings.world_size} needs: run in NVIDIA's Triton "
            "container, or install Open MPI (Debian: openmpi-bin)"
        )


def choose_ports(settings: Settings) -> Endpoints:
    """Return the three ports, which are free now; a setting of 0 picks one.

    Raises:
        ConfigurationError: naming the setting whose port is in use.
    """
    names = ("http_port", "grpc_port", "metrics_port")
    with contextlib.ExitStack() as stack:
        return Endpoints(settings.host, *(_reserve(settings, name, stack) for name in names))


def _reserve(settings: Settings, name: str, stack: contextlib.ExitStack) -> int:
    wanted = getattr(settings, name)
    listener = stack.enter_context(socket.socket())
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, wanted))
        # A socket that is bound but does not listen would let a second one bind to the same port.
        listener.listen()
    except OSError as error:
        variable = Settings.model_fields[name].alias
        advice = f"stop what uses the port, or set {variable} to another one or to 0"
        # These two are of the port, others of the address.
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            advice = f"TRITON_HOST={settings.host} must be an address of this machine"
        raise ConfigurationError(
            f"{variable}={wanted}: cannot listen on {settings.host}:{wanted} ({error.strerror}); {advice}"
        ) from None
    return int(listener.getsockname()[1])
