"""tritonserver on a filled model repository: what the options of ``cog-triton launch`` start."""

import logging
import os
import re
import shlex
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from cog_triton.cli.launch import Options
from cog_triton.deployment.file_checks import check_family, check_files
from cog_triton.errors import ConfigurationError, TritonStartError
from cog_triton.repository.checks import unmet_needs
from cog_triton.repository.fill import read_config, read_template
from cog_triton.repository.render import CONFIG
from cog_triton.server.command import Endpoints, Launch, choose_ports, command, guarded
from cog_triton.server.guard import read
from cog_triton.server.installation import locate
from cog_triton.server.tritonserver import TritonServer
from cog_triton.settings import Settings, misspelt_variables, read_settings

CPP_BACKEND = "tensorrtllm"
PORTS = ("http_port", "grpc_port", "metrics_port")


def launch(options: Options) -> int:
    """Run tritonserver; return its exit status."""
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if options.quiet or options.log:
        handlers[0].setLevel(logging.WARNING)
    if options.log and not options.dry_run:
        handlers.append(logging.FileHandler(options.log_file, mode="w"))
    form = "%(asctime)s %(levelname)s %(message)s"
    logging.basicConfig(format=form, level=logging.INFO, handlers=handlers)
    settings = settings_of(options, os.environ)
    for warning in misspelt_variables():
        logging.warning("%s", warning)
    models = read_models(options.model_repo)
    backends = {model.backend for model in models.values()}
    gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    start = launch_of(options, os.environ, gpus, backends)
    missing = [model for model in start.engine_models if model not in models]
    if missing and settings.world_size > 1:
        raise ConfigurationError(
            f"{options.model_repo}: does not contain {', '.join(missing)}, which every rank must "
            "load (--tensorrt_llm_model_name)"
        )
    if options.dry_run:
        found = locate(settings)
        endpoints = Endpoints(settings.host, *(getattr(settings, port) for port in PORTS))
        repository = options.model_repo.resolve()
        words = command(
            found.server, repository, found.backends, endpoints, "prefix", settings, start
        )
        print(shlex.join(words))
        return 0
    if not start.rank:
        settings = with_usable_ports(settings, force=options.force)
    return supervise(options.model_repo.resolve(), settings, start, quiet=options.quiet)


def settings_of(options: Options, environ: Mapping[str, str]) -> Settings:
    """Return the settings of the environment, changed by --exit_timeout and --rank-from-slurm.

    Other options have set environment variables, see ``cog_triton.cli.launch``. Raises ConfigurationError
    for options that cannot be combined.
    """
    changes = {}
    if options.exit_timeout:
        # tritonserver's own limit is half of this one.
        changes["TRITON_STOP_TIMEOUT"] = str(2 * options.exit_timeout)
    if options.rank_from_slurm:
        tasks = slurm_number(environ, "SLURM_NTASKS")
        if options.world_size not in (None, tasks):
            text = f"--world_size={options.world_size}, but Slurm started {tasks} tasks"
            raise ConfigurationError(text)
        changes["WORLD_SIZE"] = str(tasks)
    settings = read_settings({**environ, **changes})
    if settings.world_size > 1 and options.no_mpi:
        raise ConfigurationError("--world_size must be 1 with --no-mpi")
    if settings.world_size > 1 and options.multi_model and not options.disable_spawn_processes:
        raise ConfigurationError(
            "--world_size must be 1 with --multi-model, because the backend starts the ranks of each "
            "model; use --disable-spawn-processes to run all models in the same ranks"
        )
    return settings


def launch_of(
    options: Options,
    environ: Mapping[str, str],
    gpus: int,
    backends: Collection[str] = (CPP_BACKEND,),
) -> Launch:
    """Return the options that are not settings, by the number of GPUs and the models' backends."""
    # The backend starts the processes of each model by itself.
    spawning = options.multi_model and not options.disable_spawn_processes
    pool = options.multimodal_gpu0_cuda_mem_pool_bytes
    added: list[str] = []
    release = re.match(r"(\d+)\.(\d+)", environ.get("NVIDIA_TRITON_SERVER_VERSION", ""))
    if spawning and (release is None or tuple(map(int, release.groups())) > (24, 6)):
        added = ["--pinned-memory-pool-byte-size=0", "--enable-peer-access=false"]
        added += [f"--cuda-memory-pool-byte-size={gpu}:0" for gpu in range(gpus)]
    launcher = ["trtllm-llmapi-launch"] if options.trtllm_llmapi_launch else []
    if spawning and CPP_BACKEND not in backends:
        # The LLM API spawns its workers for each model, outside of the job that it may be started by.
        launcher += guarded("outside-mpi", "", 0, [])
    spawn = "TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES"
    orchestrator = {"TRTLLM_ORCHESTRATOR": "1", spawn: str(int(spawning))}
    return Launch(
        engine_models=tuple(filter(None, options.tensorrt_llm_model_name.split(","))),
        options=tuple(added),
        first_rank_options=(f"--cuda-memory-pool-byte-size=0:{pool}",) if pool else (),
        launcher=tuple(launcher),
        mpi=spawning and not options.no_mpi,
        environment=orchestrator if options.multi_model else {},
        rank=slurm_number(environ, "SLURM_PROCID") if options.rank_from_slurm else None,
    )


def slurm_number(environ: Mapping[str, str], name: str) -> int:
    """Return a number that Slurm gives its tasks."""
    try:
        return int(environ[name])
    except (KeyError, ValueError):
        value = environ.get(name, "not set")
        raise ConfigurationError(
            f"--rank-from-slurm: {name} is {value}; start this command with srun"
        ) from None


def read_models(repository: Path) -> dict[str, Any]:
    """Return each model's ModelConfig, or raise ConfigurationError: none, unfilled, or unable to load."""
    texts = {file: read_template(file) for file in sorted(repository.glob(f"*/{CONFIG}"))}
    if not texts:
        raise ConfigurationError(f"{repository}: contains no <model>/{CONFIG}")
    problems = ["some variables have no value; fill them with fill-template:"]
    for file, text in texts.items():
        without_comments = re.sub(r'("(?:\\.|[^"\\\n])*")|#[^\n]*', r"\1", text)
        if names := sorted(set(re.findall(r"\$\{[^}\n]*\}?", without_comments))):
            problems.append(f"  {file}: {', '.join(names)}")
    if problems[1:]:
        raise ConfigurationError("\n".join(problems))
    models = {file.parent.name: read_config(file) for file in texts}
    problems = ["these models cannot be loaded with the values they were filled with:"]
    problems += [f"  {need}" for model in models.items() for need in unmet_needs(*model)]
    if problems[1:]:
        raise ConfigurationError("\n".join(problems))
    for content in models.values():
        llm = {name: value.string_value for name, value in content.parameters.items()}
        check_files(llm)
        check_family(llm)
    return models


def with_usable_ports(settings: Settings, *, force: bool) -> Settings:
    """Return the settings with free ports; without ``force``, ConfigurationError names one in use."""
    for port in PORTS:
        # With the others at 0, an error is about this port.
        others_free = {name: 0 for name in PORTS if name != port}
        try:
            choose_ports(settings.model_copy(update=others_free))
        except ConfigurationError as error:
            if not force:
                raise ConfigurationError(f"{error.message}{running()}") from None
            logging.warning("%s is in use; using a free port instead", port)
            settings = settings.model_copy(update={port: 0})
    return settings


def running() -> str:
    """Return a text on this machine's tritonservers, if there are any."""
    pids = [pid for pid in os.listdir("/proc") if read(pid, "comm") == b"tritonserver\n"]
    if not pids:
        return ""
    return (
        f".\ntritonserver is already running (process {', '.join(pids)}): stop it with `kill`, or use "
        "--force to start another on free ports"
    )


def supervise(repository: Path, settings: Settings, start: Launch, *, quiet: bool) -> int:
    """Start tritonserver, wait for its end or a signal, and return its exit status."""
    runtime = Path(tempfile.mkdtemp(prefix="cog-triton-"))
    server = TritonServer(repository, runtime, settings, temporary=True, launch=start)
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, interrupt)
    try:
        server.start()
        at = server.endpoints
        ready = f"ready: {socket.gethostname()} at {at.host}, HTTP on {at.http_port}, "
        ready += f"gRPC on {at.grpc_port}, metrics on {at.metrics_port}"
        if start.rank:
            ready = f"rank {start.rank} of {settings.world_size} started"
        if not quiet:
            print(ready, flush=True)
        # srun takes a task that ends with 0 for one that has done its work.
        return server.wait() or int(start.rank is not None)
    except KeyboardInterrupt:
        server.stop()
        return server.status or 0
    except TritonStartError as error:
        print(error.message, file=sys.stderr)
        return server.status or 1
    finally:
        shutil.rmtree(runtime, ignore_errors=True)


def interrupt(*_: object) -> None:
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)  # once is enough
    raise KeyboardInterrupt
