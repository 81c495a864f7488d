"""``cog-triton launch``: tritonserver on a filled model repository, as NVIDIA's launch script runs it."""

import argparse
from pathlib import Path

from cog_triton.cli.options import Variables

DESCRIPTION = """
It has the command line of NVIDIA's launch_triton_server.py.

    cog-triton launch --world_size=4 --model_repo=/models/repository
    cog-triton launch --model_repo=repo --http_port 8100 --grpc_port 8101 --metrics_port 8102
    srun --mpi=pmix cog-triton launch --rank-from-slurm --model_repo=repo

It stays in the foreground and prints a line when every model is ready. On SIGTERM, on Ctrl-C, or when it is
killed, everything that it started stops. Its exit status is tritonserver's. Fill a repository's templates
with fill-template first. What no option sets comes from the settings: tritonserver binds to TRITON_HOST,
127.0.0.1 unless that is set.

Different from NVIDIA's: a world of one runs without mpirun, unless --multi-model needs it; --log writes
the log of every rank; --force takes free ports for those that are in use. --oversubscribe is always on.
With --multi-model, models of the LLM API learn nothing of an mpirun or srun that started them, unless there
is one of the C++ backend beside them: each spawns its own workers.
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
        "--model_repo", type=Path, required=True, help="model repository, its templates filled"
    )
    parser.add_argument(
        "--world_size", type=int, help="GPUs of the engine, a rank each; default: WORLD_SIZE"
    )
    parser.add_argument(
        "--tritonserver",
        help="the binary; default: TRITONSERVER, the container's or the wheel's",
    )
    parser.add_argument(
        "--grpc_port", type=int, help="default: TRITON_GRPC_PORT, or 8001; 0 picks a free port"
    )
    parser.add_argument(
        "--http_port", type=int, help="default: TRITON_HTTP_PORT, or 8000; 0 picks a free port"
    )
    parser.add_argument(
        "--metrics_port",
        type=int,
        help="default: TRITON_METRICS_PORT, or 8002; 0 picks a free port",
    )
    parser.add_argument(
        "-f", "--force", action="store_true", help="launch beside others, on free ports if need be"
    )
    parser.add_argument("--log", action="store_true", help="log at verbosity 3, to --log-file")
    parser.add_argument("--log-file", default="triton_log.txt", help="default: %(default)s")
    parser.add_argument(
        "--no-mpi", action="store_true", help="never use mpirun; for a world of one"
    )
    parser.add_argument(
        "--tensorrt_llm_model_name",
        default="tensorrt_llm",
        metavar="NAME,…",
        help="models that every rank loads, separated by commas; default: %(default)s",
    )
    parser.add_argument(
        "--multi-model", action="store_true", help="several TensorRT-LLM models in the repository"
    )
    parser.add_argument(
        "--disable-spawn-processes",
        action="store_true",
        help="with --multi-model: the models share the ranks of --world_size",
    )
    parser.add_argument(
        "--multimodal_gpu0_cuda_mem_pool_bytes",
        type=int,
        default=0,
        metavar="BYTES",
        help="CUDA memory pool of GPU 0, through which multimodal models pass tensors",
    )
    parser.add_argument("--oversubscribe", action="store_true", help="no effect: always on")
    parser.add_argument(
        "--trtllm_llmapi_launch",
        action="store_true",
        help="run every rank with trtllm-llmapi-launch",
    )
    parser.add_argument(
        "--exit_timeout",
        type=int,
        metavar="SECONDS",
        help="tritonserver's --exit-timeout-secs; it is killed after twice as long",
    )
    parser.add_argument(
        "--rank-from-slurm",
        action="store_true",
        help="run the one rank of SLURM_PROCID, of SLURM_NTASKS ranks",
    )
    parser.add_argument(
        "-q", "--quiet", action="store_true", help="show only warnings, not when it is ready"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the command, and run nothing")


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
