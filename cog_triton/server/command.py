"""Command lines of tritonserver, as one process or as one rank for each GPU under mpirun; and ports."""

import contextlib
import errno
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cog_triton.errors import ConfigurationError
from cog_triton.settings import Settings

GUARD = Path(__file__).with_name("guard.py")
# A slot is a core or what Slurm allotted, and the ranks are as many as GPUs, whatever that is. Unless
# unbound, two ranks get one core each, and more a NUMA node each, for all of Triton's threads.
_MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--tag-output")
# Of a group's stop_timeout, for each rank: after tritonserver's own limit, before the group's.
_RANK_SHARE = 0.75


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
        options: of tritonserver on every rank, after all others.
        first_rank_options: further ones on rank 0.
        launcher: runs each tritonserver, such as trtllm-llmapi-launch.
        mpi: use mpirun also for a single rank, whose backend spawns processes through MPI.
        environment: further variables.
        rank: the one to run, where Slurm, say, starts the others.
    """

    engine_models: tuple[str, ...] = ("tensorrt_llm",)
    options: tuple[str, ...] = ()
    first_rank_options: tuple[str, ...] = ()
    launcher: tuple[str, ...] = ()
    mpi: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    rank: int | None = None

    def under_mpirun(self, settings: Settings) -> bool:
        return self.rank is None and (self.mpi or settings.world_size > 1)


def command(
    server: Path,
    repository: Path,
    backends: Path,
    endpoints: Endpoints,
    shm_prefix: str,
    settings: Settings,
    launch: Launch = Launch(),
) -> list[str]:
    """Return the command line to run under a guard: tritonserver, mpirun with its ranks, or one rank.

    Each rank has a guard and a prefix of shared memory of its own. mpirun is Open MPI 4.1 or 5.
    """

    def of_rank(rank: int | None, prefix: str) -> list[str]:
        rank_options = _follower_options(launch) if rank else list(launch.first_rank_options)
        return [
            *launch.launcher,
            str(server),
            f"--model-repository={repository}",
            f"--backend-directory={backends}",
            *_endpoint_options(endpoints),
            f"--backend-config=python,shm-region-prefix-name={prefix}",
            # Below stop_timeout, so that the server ends by itself and cleans up.
            f"--exit-timeout-secs={max(1, int(settings.stop_timeout) - 2)}",
            f"--log-verbose={settings.log_verbose}",
            *_closed_options(settings.closed_apis),
            *traces(settings.otel_endpoint),
            "--disable-auto-complete-config",
            *launch.options,
            *rank_options,
        ]

    if not launch.under_mpirun(settings):
        prefix = shm_prefix if launch.rank is None else f"{shm_prefix}{launch.rank}_"
        return of_rank(launch.rank, prefix)
    stop_timeout = _RANK_SHARE * settings.stop_timeout
    commands: list[str] = []
    for rank in range(settings.world_size):
        if commands:
            commands.append(":")
        prefix = f"{shm_prefix}{rank}_"
        commands += ["-n", "1"]
        commands += guarded(str(rank), prefix, stop_timeout, of_rank(rank, prefix))
    return [*_MPIRUN, *commands]


def _endpoint_options(endpoints: Endpoints) -> list[str]:
    return [
        f"--http-address={endpoints.host}",
        f"--http-port={endpoints.http_port}",
        f"--grpc-address={endpoints.host}",
        f"--grpc-port={endpoints.grpc_port}",
        f"--metrics-address={endpoints.host}",
        f"--metrics-port={endpoints.metrics_port}",
    ]


def _closed_options(apis: str) -> list[str]:
    """Return the options that close parts of Triton's API.

    Triton restricts them to those who send a header with a certain value. Neither HTTP nor gRPC can send a
    line break. A random value could be read from the command line by all.
    """
    if apis == "none":
        return []
    return [
        f"--http-restricted-api={apis}:closed=\n",
        f"--grpc-restricted-protocol={apis}:closed=\n",
    ]


def _follower_options(launch: Launch) -> list[str]:
    """Return the options of a rank other than 0, which loads the engine and opens no endpoint."""
    return [
        "--model-control-mode=explicit",
        *(f"--load-model={model}" for model in launch.engine_models),
        "--allow-http=false",
        "--allow-grpc=false",
        "--allow-metrics=false",
    ]


def traces(endpoint: str | None) -> list[str]:
    """Return the options for spans of requests that bring a ``traceparent``, and of no others."""
    if not endpoint:
        return []
    url = f"opentelemetry,url={endpoint.rstrip('/')}/v1/traces"
    name = "opentelemetry,resource=service.name=tritonserver"
    words = ["mode=opentelemetry", "level=TIMESTAMPS", "rate=0", url, name]
    return [f"--trace-config={word}" for word in words]


def guarded(
    role: str, shm_prefix: str, stop_timeout: float, command: list[str], directory: str = ""
) -> list[str]:
    """Return the command line that runs ``command`` under guard.py; see there for the arguments."""
    guard = [sys.executable, "-I", "-S", str(GUARD)]
    return [*guard, role, shm_prefix, f"{stop_timeout:g}", directory, *command]


def choose_ports(settings: Settings) -> Endpoints:
    """Return the three ports, which are free now, or raise ConfigurationError; 0 picks one."""
    ports = []
    with contextlib.ExitStack() as stack:
        for name in ("http_port", "grpc_port", "metrics_port"):
            wanted = getattr(settings, name)
            listener = stack.enter_context(socket.socket())
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((settings.host, wanted))
                # One that is bound but does not listen would let a second one bind to the same port.
                listener.listen()
            except OSError as error:
                variable = Settings.model_fields[name].alias
                raise ConfigurationError(
                    f"{variable}={wanted}: cannot listen on {settings.host}:{wanted} "
                    f"({error.strerror}); {_advice(error, settings.host, variable)}"
                ) from None
            ports.append(listener.getsockname()[1])
    return Endpoints(settings.host, *ports)


def _advice(error: OSError, host: str, variable: str | None) -> str:
    """Return what to do about an address that cannot be listened on."""
    is_port_problem = error.errno in (errno.EADDRINUSE, errno.EACCES)
    if is_port_problem:
        return f"stop what uses the port, or set {variable} to another one or to 0"
    return f"TRITON_HOST={host} must be an address of this machine"
