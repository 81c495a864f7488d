#!/usr/bin/env python3
r"""Run tritonserver on a filled model repository, with the command line of NVIDIA's launch script.

Examples:
  python3 scripts/launch_triton_server.py --world_size=4 --model_repo=/models/repository
  python3 scripts/launch_triton_server.py --model_repo=repo --http_port 8100 --grpc_port 8101 \
      --metrics_port 8102
  srun --mpi=pmix python3 scripts/launch_triton_server.py --rank-from-slurm --model_repo=repo

It stays in the foreground, says when every model is ready, stops all that it started on SIGTERM and
Ctrl-C or when it is killed, and exits with tritonserver's status. Fill a repository's templates with
scripts/fill_template.py first. What no option sets is as in docs/configuration.md: tritonserver binds
to TRITON_HOST, 127.0.0.1 unless that is set.

Different from NVIDIA's: a world of one runs without mpirun, unless --multi-model needs it; --log writes
the log of every rank; --force takes free ports for those that are in use. --oversubscribe is always on.
With --multi-model, models of the LLM API learn nothing of an mpirun or srun that started them, unless there
is one of the C++ backend beside them: each spawns its own workers.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import _checkout  # noqa: F401

from cog_triton.deployment.preparation import check_models
from cog_triton.errors import ConfigurationError, TritonStartError
from cog_triton.repository.fill import CONFIG, read_template
from cog_triton.server.command import Endpoints, Launch, choose_ports, command, guarded
from cog_triton.server.installation import locate
from cog_triton.server.tritonserver import TritonServer
from cog_triton.settings import Settings, read_settings

LOG_FORMAT = "%(asctime)s %(levelname)s %(message)s"
VERBOSE_LOG = 3  # what --log means in NVIDIA's script
CPP_BACKEND = "tensorrtllm"
PORTS = ("http_port", "grpc_port", "metrics_port")


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns tritonserver's exit status, or 2 with what is wrong before it starts."""
    arguments = parser().parse_args(argv)
    _configure_logging(arguments)
    try:
        settings = settings_of(arguments, os.environ)
        backends = backends_of(arguments.model_repo)
        launch = launch_of(arguments, os.environ, gpu_count(), backends)
        check_repository(arguments.model_repo, settings, launch)
        if arguments.dry_run:
            print(shlex.join(planned_command(arguments.model_repo, settings, launch)))
            return 0
        if not launch.rank:
            settings = with_usable_ports(settings, force=arguments.force)
        return supervise(arguments.model_repo.resolve(), settings, launch, quiet=arguments.quiet)
    except ConfigurationError as error:
        print(f"launch_triton_server.py: {error.message}", file=sys.stderr)
        return 2


def settings_of(arguments: argparse.Namespace, environ: Mapping[str, str]) -> Settings:
    """The settings: those of the environment, overridden by the command line.

    Raises:
        ConfigurationError: one is not valid, or they contradict each other.
    """
    given = {
        "WORLD_SIZE": arguments.world_size,
        "TRITONSERVER": arguments.tritonserver,
        "TRITON_HTTP_PORT": arguments.http_port,
        "TRITON_GRPC_PORT": arguments.grpc_port,
        "TRITON_METRICS_PORT": arguments.metrics_port,
        "TRITON_LOG_VERBOSE": VERBOSE_LOG if arguments.log else None,
        # tritonserver's own limit is half of this one.
        "TRITON_STOP_TIMEOUT": arguments.exit_timeout and 2 * arguments.exit_timeout,
    }
    if arguments.rank_from_slurm:
        given["WORLD_SIZE"] = slurm_number(environ, "SLURM_NTASKS")
        if arguments.world_size not in (None, given["WORLD_SIZE"]):
            raise ConfigurationError(
                f"--world_size={arguments.world_size}, but Slurm started {given['WORLD_SIZE']} tasks"
            )
    changes = {name: str(value) for name, value in given.items() if value is not None}
    settings = read_settings({**environ, **changes})
    if arguments.no_mpi and settings.world_size > 1:
        raise ConfigurationError("--world_size must be 1 with --no-mpi")
    if _spawns(arguments) and settings.world_size > 1:
        raise ConfigurationError(
            "--world_size must be 1 with --multi-model: the backend starts the ranks of each model; "
            "or use --disable-spawn-processes"
        )
    return settings


def launch_of(
    arguments: argparse.Namespace,
    environ: Mapping[str, str],
    gpus: int,
    backends: frozenset[str] = frozenset({CPP_BACKEND}),
) -> Launch:
    """Return the options of tritonserver's start, beyond the settings.

    Args:
        gpus: how many this machine has.
        backends: of the models in the repository.

    Raises:
        ConfigurationError: this is no task of Slurm's, though it should be.
    """
    spawns = _spawns(arguments)
    pool = arguments.multimodal_gpu0_cuda_mem_pool_bytes
    without_pools = [
        "--pinned-memory-pool-byte-size=0",
        "--enable-peer-access=false",
        *(f"--cuda-memory-pool-byte-size={gpu}:0" for gpu in range(gpus)),
    ]
    orchestrator = {
        "TRTLLM_ORCHESTRATOR": "1",
        "TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES": "1" if spawns else "0",
    }
    return Launch(
        engine_models=tuple(filter(None, arguments.tensorrt_llm_model_name.split(","))),
        options=tuple(without_pools) if spawns and _has_pools_to_disable(environ) else (),
        first_rank_options=(f"--cuda-memory-pool-byte-size=0:{pool}",) if pool else (),
        launcher=(
            *(("trtllm-llmapi-launch",) if arguments.trtllm_llmapi_launch else ()),
            # The LLM API's workers are spawned for each model; it is no part of a job that it shares.
            *(guarded("outside-mpi", "", 0, []) if spawns and CPP_BACKEND not in backends else ()),
        ),
        mpi=spawns and not arguments.no_mpi,
        environment=orchestrator if arguments.multi_model else {},
        rank=slurm_number(environ, "SLURM_PROCID") if arguments.rank_from_slurm else None,
    )


def slurm_number(environ: Mapping[str, str], name: str) -> int:
    """A number that Slurm tells its tasks.

    Raises:
        ConfigurationError: it does not, so this is no task of its.
    """
    try:
        return int(environ[name])
    except (KeyError, ValueError):
        raise ConfigurationError(
            f"--rank-from-slurm: {name} is {environ.get(name, 'not set')}; start this with srun"
        ) from None


def gpu_count() -> int:
    """Return the number of GPUs that nvidia-smi lists."""
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True)
    except FileNotFoundError:
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def check_repository(repository: Path, settings: Settings, launch: Launch) -> None:
    """Finds what would make Triton fail late, or start with a placeholder for a value.

    Raises:
        ConfigurationError: there are no models, a config.pbtxt has variables left, or a model that
            every rank loads is not there.
    """
    configs = sorted(repository.glob(f"*/{CONFIG}"))
    if not configs:
        raise ConfigurationError(f"{repository}: no <model>/{CONFIG} in it")
    problems = [
        f"  {config}: {', '.join(names)}"
        for config in configs
        if (names := unfilled(read_template(config)))
    ]
    if problems:
        raise ConfigurationError(
            "\n".join(
                ["variables without a value; fill them with scripts/fill_template.py:", *problems]
            )
        )
    check_models(configs)
    models = {config.parent.name for config in configs}
    missing = [model for model in launch.engine_models if model not in models]
    if missing and settings.world_size > 1:
        raise ConfigurationError(
            f"{repository}: no {', '.join(missing)} in it, which every rank is to load "
            "(--tensorrt_llm_model_name)"
        )


def backends_of(repository: Path) -> frozenset[str]:
    """The backends that the models of a repository name."""
    texts = [without_comments(read_template(config)) for config in repository.glob(f"*/{CONFIG}")]
    return frozenset(
        name for text in texts for name in re.findall(r'\bbackend\s*:\s*"(\w+)"', text)
    )


def unfilled(config: str) -> list[str]:
    """The ``${…}`` that a config.pbtxt still has outside of comments."""
    return sorted(set(re.findall(r"\$\{[^}\n]*\}?", without_comments(config))))


def without_comments(config: str) -> str:
    """A config.pbtxt without its comments."""
    return re.sub(r'("(?:\\.|[^"\\\n])*")|#[^\n]*', lambda match: match[1] or "", config)


def planned_command(repository: Path, settings: Settings, launch: Launch) -> list[str]:
    """The command that would be run, but for the prefix of the shared memory and copies of binaries."""
    installation = locate(settings)
    ports = [getattr(settings, name) for name in PORTS]
    paths = installation.server, repository.resolve(), installation.backends
    return command(*paths, Endpoints(settings.host, *ports), "prefix", settings, launch)


def with_usable_ports(settings: Settings, *, force: bool) -> Settings:
    """The settings, whose ports are free; with ``force`` others take the place of those in use.

    Raises:
        ConfigurationError: naming a port in use, and the tritonservers that run.
    """
    try:
        choose_ports(settings)
    except ConfigurationError as error:
        if not force:
            raise ConfigurationError(f"{error.message}{_running()}") from None
        used = {name: 0 for name in PORTS if _in_use(settings, name)}
        logging.warning("taking free ports instead of those in use: %s", ", ".join(used))
        return settings.model_copy(update=used)
    return settings


def supervise(repository: Path, settings: Settings, launch: Launch, *, quiet: bool) -> int:
    """Starts tritonserver, waits for its end or a signal, and returns its exit status.

    Raises:
        ConfigurationError: it could not be started at all.
    """
    runtime = Path(tempfile.mkdtemp(prefix="cog-triton-"))
    server = TritonServer(repository, runtime, settings, temporary=True, launch=launch)
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, _interrupt)
    try:
        server.start()
        if not quiet:
            print(_ready(server, settings, launch), flush=True)
        status = server.wait()
        # srun takes a task that ends with 0 for one that has done its work.
        return status or int(launch.rank is not None)
    except KeyboardInterrupt:
        server.stop()
        return server.status or 0
    except TritonStartError as error:
        print(error.message, file=sys.stderr)
        return server.status or 1
    finally:
        shutil.rmtree(runtime, ignore_errors=True)


def _ready(server: TritonServer, settings: Settings, launch: Launch) -> str:
    if launch.rank:
        return f"rank {launch.rank} of {settings.world_size} started"
    at = server.endpoints
    ports = f"HTTP on {at.http_port}, gRPC on {at.grpc_port}, metrics on {at.metrics_port}"
    return f"ready: {socket.gethostname()} at {at.host}, {ports}"


def _interrupt(*_: object) -> None:
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)  # once is enough
    raise KeyboardInterrupt


def _running() -> str:
    """Return a text on this machine's tritonservers, if there are any."""
    pids = []
    for directory in Path("/proc").iterdir():
        try:
            if (directory / "comm").read_text().strip() == "tritonserver":
                pids.append(directory.name)
        except OSError:
            continue  # no process, or none any more
    if not pids:
        return ""
    return (
        f".\ntritonserver runs already, as process {', '.join(pids)}: stop what is in the way with "
        "`kill`, or launch beside it, on free ports, with --force"
    )


def _in_use(settings: Settings, port: str) -> bool:
    try:
        choose_ports(settings.model_copy(update={name: 0 for name in PORTS if name != port}))
    except ConfigurationError:
        return True
    return False


def _spawns(arguments: argparse.Namespace) -> bool:
    """Return whether the backend starts the processes of each model by itself."""
    return bool(arguments.multi_model and not arguments.disable_spawn_processes)


def _has_pools_to_disable(environ: Mapping[str, str]) -> bool:
    """Return whether Triton is newer than 24.06, by the container's variables."""
    numbers = re.match(r"(\d+)\.(\d+)", environ.get("NVIDIA_TRITON_SERVER_VERSION", ""))
    return numbers is None or (int(numbers[1]), int(numbers[2])) > (24, 6)


def _configure_logging(arguments: argparse.Namespace) -> None:
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if arguments.quiet or arguments.log:
        handlers[0].setLevel(logging.WARNING)
    if arguments.log and not arguments.dry_run:
        handlers.append(logging.FileHandler(arguments.log_file, mode="w"))
    logging.basicConfig(format=LOG_FORMAT, level=logging.INFO, handlers=handlers)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model_repo", type=Path, required=True, help="model repository, its templates filled")
    add("--world_size", type=int, help="GPUs of the engine, a rank each (WORLD_SIZE)")
    add("--tritonserver", help="the binary (TRITONSERVER); else the container's, or the wheel's")
    add("--grpc_port", type=int, help="8001 unless TRITON_GRPC_PORT is set; 0 picks a free one")
    add("--http_port", type=int, help="8000 unless TRITON_HTTP_PORT is set; 0 picks a free one")
    add("--metrics_port", type=int, help="8002 unless TRITON_METRICS_PORT is set; 0: a free one")
    add("-f", "--force", action="store_true", help="launch beside others, on free ports if need be")
    add("--log", action="store_true", help=f"log at verbosity {VERBOSE_LOG}, to --log-file")
    add("--log-file", default="triton_log.txt", help="default: %(default)s")
    add("--no-mpi", action="store_true", help="never use mpirun; for a world of one")
    add(
        "--tensorrt_llm_model_name",
        default="tensorrt_llm",
        metavar="NAME,…",
        help="models that every rank loads; default: %(default)s",
    )
    add("--multi-model", action="store_true", help="several TensorRT-LLM models in the repository")
    add(
        "--disable-spawn-processes",
        action="store_true",
        help="with --multi-model: the models share the ranks of --world_size",
    )
    add(
        "--multimodal_gpu0_cuda_mem_pool_bytes",
        type=int,
        default=0,
        metavar="BYTES",
        help="CUDA memory pool of GPU 0, through which multimodal models hand tensors on",
    )
    add("--oversubscribe", action="store_true", help="no effect: always on")
    add(
        "--trtllm_llmapi_launch",
        action="store_true",
        help="run every rank with trtllm-llmapi-launch",
    )
    add(
        "--exit_timeout",
        type=int,
        metavar="SECONDS",
        help="tritonserver's --exit-timeout-secs; it is killed after twice as long",
    )
    add(
        "--rank-from-slurm",
        action="store_true",
        help="run the one rank that SLURM_PROCID says, of SLURM_NTASKS",
    )
    add("-q", "--quiet", action="store_true", help="show warnings alone, not when it is ready")
    add("--dry-run", action="store_true", help="print the command that would be run, and end")
    return parser


if __name__ == "__main__":
    sys.exit(main())
