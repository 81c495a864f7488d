"""``cog-triton launch``: tritonserver on a filled model repository, as NVIDIA's launch script runs it."""

import argparse
from pathlib import Path

from cog_triton.cli.options import Variables

DESCRIPTION = """
It has the command line of NVIDIA's launch_triton_server.py.

    cog-triton launch --world_size=4 --model_repo=/models/repository
    cog-triton launch --model_repo=repo --http_port 8100 --grpc_port 8101 --metrics_port 8102
    srun --mpi=pmix cog-triton launch --rank-from-slurm --model_repo=repo

It runs in the foreground and prints a line when every model is ready. When it gets SIGTERM or Ctrl-C, or is
killed, everything that it started stops. It exits with tritonserver's exit status. Fill the repository's
templates with fill-template first. Where no option is set, environment variables apply: for example,
tritonserver binds to TRITON_HOST, which defaults to 127.0.0.1.

Differences from NVIDIA's script: a world size of 1 runs without mpirun, unless --multi-model needs it;
--log writes the log of every rank; --force replaces ports that are in use with free ones; --oversubscribe
is always on. With --multi-model, models on the LLM API do not see the mpirun or srun that started them,
because each spawns its own workers, unless the repository also has a model on the C++ backend.
"""


class Options(argparse.Namespace):
    model_repo: Path
    world_size: int | None
    tritonserver: str | None
    grpc_port: int | None
    http_port: int | None
    metrics_port: int | None
    force: bool
    log: bool
    log_file: str
    no_mpi: bool
    tensorrt_llm_model_name: str
    multi_model: bool
    disable_spawn_processes: bool
    multimodal_gpu0_cuda_mem_pool_bytes: int
    oversubscribe: bool
    trtllm_llmapi_launch: bool
    exit_timeout: int | None
    rank_from_slurm: bool
    quiet: bool
    dry_run: bool


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model_repo", type=Path, required=True, help="model repository with filled templates"
    )
    parser.add_argument(
        "--world_size", type=int, help="number of GPUs, one rank each; default: $WORLD_SIZE"
    )
    parser.add_argument(
        "--tritonserver",
        help="tritonserver binary; default: $TRITONSERVER, or the container's or wheel's",
    )
    parser.add_argument(
        "--grpc_port", type=int, help="default: $TRITON_GRPC_PORT, or 8001; 0 picks a free port"
    )
    parser.add_argument(
        "--http_port", type=int, help="default: $TRITON_HTTP_PORT, or 8000; 0 picks a free port"
    )
    parser.add_argument(
        "--metrics_port",
        type=int,
        help="default: $TRITON_METRICS_PORT, or 8002; 0 picks a free port",
    )
    parser.add_argument(
        "-f",
        "--force",
        action="store_true",
        help="start even if another server runs; replace ports in use with free ones",
    )
    parser.add_argument(
        "--log", action="store_true", help="write a log of verbosity 3 to --log-file"
    )
    parser.add_argument(
        "--log-file", default="triton_log.txt", help="log file; default: %(default)s"
    )
    parser.add_argument(
        "--no-mpi", action="store_true", help="never use mpirun; requires a world size of 1"
    )
    parser.add_argument(
        "--tensorrt_llm_model_name",
        default="tensorrt_llm",
        metavar="NAME,…",
        help="comma-separated models that every rank loads; default: %(default)s",
    )
    parser.add_argument(
        "--multi-model",
        action="store_true",
        help="serve several TensorRT-LLM models from the repository",
    )
    parser.add_argument(
        "--disable-spawn-processes",
        action="store_true",
        help="with --multi-model, run all models in the ranks of --world_size",
    )
    parser.add_argument(
        "--multimodal_gpu0_cuda_mem_pool_bytes",
        type=int,
        default=0,
        metavar="BYTES",
        help="size of GPU 0's CUDA memory pool, which multimodal models use to pass tensors",
    )
    parser.add_argument("--oversubscribe", action="store_true", help="ignored: always on")
    parser.add_argument(
        "--trtllm_llmapi_launch",
        action="store_true",
        help="run every rank with trtllm-llmapi-launch",
    )
    parser.add_argument(
        "--exit_timeout",
        type=int,
        metavar="SECONDS",
        help="tritonserver's --exit-timeout-secs; it is killed after twice this time",
    )
    parser.add_argument(
        "--rank-from-slurm",
        action="store_true",
        help="run only rank SLURM_PROCID of SLURM_NTASKS ranks",
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="print only warnings")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the command without running it"
    )


def variables(options: Options) -> Variables:
    numbers = {
        "WORLD_SIZE": options.world_size,
        "TRITON_GRPC_PORT": options.grpc_port,
        "TRITON_HTTP_PORT": options.http_port,
        "TRITON_METRICS_PORT": options.metrics_port,
        "TRITON_LOG_VERBOSE": 3 if options.log else None,
    }
    texts = {name: None if value is None else str(value) for name, value in numbers.items()}
    return {**texts, "TRITONSERVER": options.tritonserver}


def run(options: Options) -> int:
    from cog_triton.cli.launching import launch

    return launch(options)
