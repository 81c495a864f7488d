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
_MPIRUN = "mpirun --allow-run-as-root --oversubscribe --bind-to none --tag-output"


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
    """The options of NVIDIA's launch script, which are not settings."""

    engine_models: tuple[str, ...] = ("tensorrt_llm",)  # that a rank other than 0 loads
    options: tuple[str, ...] = ()  # of tritonserver on every rank, after all others
    first_rank_options: tuple[str, ...] = ()  # further ones on rank 0
    launcher: tuple[str, ...] = ()  # runs each tritonserver, such as trtllm-llmapi-launch
    mpi: bool = False  # also for a single rank, whose backend spawns processes through MPI
    environment: Mapping[str, str] = field(default_factory=dict)  # further variables
    rank: int | None = None  # the one to run, where Slurm, say, starts the others

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
        options = {
            "model-repository": repository,
            "backend-directory": backends,
            "http-address": endpoints.host,
            "http-port": endpoints.http_port,
            "grpc-address": endpoints.host,
            "grpc-port": endpoints.grpc_port,
            "metrics-address": endpoints.host,
            "metrics-port": endpoints.metrics_port,
            "backend-config": f"python,shm-region-prefix-name={prefix}",
            # Below stop_timeout, so that the server ends by itself and cleans up.
            "exit-timeout-secs": max(1, int(settings.stop_timeout) - 2),
            "log-verbose": settings.log_verbose,
        }
        if settings.closed_apis != "none":
            # Triton restricts them to those who send a header with a certain value. Neither HTTP nor gRPC
            # can send a line break. A random value could be read from the command line by all.
            for option in ("http-restricted-api", "grpc-restricted-protocol"):
                options[option] = f"{settings.closed_apis}:closed=\n"
        follower_options = [
            "--model-control-mode=explicit",
            *(f"--load-model={model}" for model in launch.engine_models),
            *(f"--allow-{api}=false" for api in ("http", "grpc", "metrics")),
        ]
        return [
            *launch.launcher,
            str(server),
            *(f"--{name}={value}" for name, value in options.items()),
            *traces(settings.otel_endpoint),
            "--disable-auto-complete-config",
            *launch.options,
            *(follower_options if rank else launch.first_rank_options),
        ]

    if not launch.under_mpirun(settings):
        own = "" if launch.rank is None else f"{launch.rank}_"
        return of_rank(launch.rank, shm_prefix + own)
    timeout = 0.75 * settings.stop_timeout  # after tritonserver's own limit, before the group's
    parts = []
    for rank in range(settings.world_size):
        prefix = f"{shm_prefix}{rank}_"
        parts += [":", "-n", "1", *guarded(str(rank), prefix, timeout, of_rank(rank, prefix))]
    return [*_MPIRUN.split(), *parts[1:]]


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
            wanted, variable = getattr(settings, name), Settings.model_fields[name].alias
            listener = stack.enter_context(socket.socket())
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((settings.host, wanted))
                # One that is bound but does not listen would let a second one bind to the same port.
                listener.listen()
            except OSError as error:
                advice = f"stop what uses the port, or set {variable} to another one or to 0"
                # These two are of the port, others of the address.
                if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    advice = f"TRITON_HOST={settings.host} must be an address of this machine"
                text = f"cannot listen on {settings.host}:{wanted} ({error.strerror}); {advice}"
                raise ConfigurationError(f"{variable}={wanted}: {text}") from None
            ports.append(listener.getsockname()[1])
    return Endpoints(settings.host, *ports)
