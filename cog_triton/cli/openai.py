"""``cog-triton openai``: OpenAI's and Anthropic's API on any Triton."""

import argparse
import os
from pathlib import Path

from cog_triton.cli.logs import set_up_log
from cog_triton.cli.options import (
    Variables,
    add_host,
    add_model,
    add_port,
    add_served_model_names,
    add_verbose,
    check_device,
    model_variables,
    port_of,
    served_model_variables,
    verbose_variables,
)
from cog_triton.processes import without_collections
from cog_triton.terminal import end_at_once_on_signals

DESCRIPTION = """
    cog-triton openai --port 3000
    cog-triton openai --model /path/to/model --served-model-name assistant
    cog-triton openai --host 0.0.0.0 --port 3000 --triton-endpoint http://localhost:8001

After the first Ctrl-C, running requests have DRAIN_SECONDS to finish. A second Ctrl-C stops at once.
"""


class Options(argparse.Namespace):
    host: str
    port: int | None
    model: str | None
    served_model_name: list[str] | None
    triton_endpoint: str | None
    triton_model: str
    tokenizer: str | None
    workers: int | None
    no_page: bool
    api_keys_file: Path | None
    allowed_origins: str | None
    verbose: bool


def add_options(parser: argparse.ArgumentParser) -> None:
    add_host(parser, short="-H")
    add_port(parser, 3000)
    add_model(parser)
    add_served_model_names(parser)
    parser.add_argument(
        "-t",
        "--triton-endpoint",
        metavar="URL",
        help="gRPC endpoint of a running Triton; by default, one is started",
    )
    parser.add_argument(
        "--triton-model",
        default="ensemble",
        help="model to use if the running Triton has no model ensemble_ids; default: %(default)s",
    )
    parser.add_argument(
        "--tokenizer",
        help="tokenizer directory or Hugging Face id; default: $TOKENIZER, or the model's",
    )
    parser.add_argument(
        "--workers",
        type=int,
        help="number of processes that serve the API; default: $OPENAI_WORKERS, or 1",
    )
    parser.add_argument(
        "--no-page",
        action="store_true",
        help="do not serve the chat page at / (like CHAT_PAGE=false)",
    )
    parser.add_argument(
        "--api-keys-file",
        type=Path,
        help="file of API keys, one per line; default: $OPENAI_API_KEYS_FILE",
    )
    parser.add_argument(
        "--allowed-origins",
        metavar="ORIGIN,…",
        help="origins of web pages that may use the API (CORS); default: $OPENAI_ALLOWED_ORIGINS",
    )
    add_verbose(parser)


def variables(options: Options) -> Variables:
    keys_file = options.api_keys_file
    return {
        **model_variables(options.model),
        **served_model_variables(options.served_model_name),
        **verbose_variables(options.verbose),
        "TOKENIZER": options.tokenizer,
        "OPENAI_WORKERS": None if options.workers is None else str(options.workers),
        "CHAT_PAGE": "false" if options.no_page else None,
        "OPENAI_API_KEYS_FILE": None if keys_file is None else str(keys_file),
        "OPENAI_ALLOWED_ORIGINS": options.allowed_origins,
    }


def run(options: Options) -> int:
    """Serve until a signal comes; return the exit status, 130 after Ctrl-C."""
    end_at_once_on_signals()
    # Otherwise gRPC logs a warning about fork support for each process that is started.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    port = port_of(options.port, 3000)
    set_up_log()
    if options.triton_endpoint is None:
        check_device()
    with without_collections():
        from cog_triton.api.openai.server import run as serve

    return serve(options.host, port, options.triton_endpoint, options.triton_model)
