#!/usr/bin/env python3
"""Serves OpenAI's API with Triton behind it. It starts Triton, or uses one that runs already.

    python scripts/serve_openai.py --port 3000
    python scripts/serve_openai.py --host 0.0.0.0 --port 3000 --triton-endpoint http://localhost:8001

The first Ctrl-C lets running requests end, for at most DRAIN_SECONDS; the second stops at once. The
settings are in docs/configuration.md, the API in docs/openai.md.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":  # a Ctrl-C in the imports below is no reason for a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import os
import sys
from pathlib import Path

import _checkout  # noqa: F401

from cog_triton.faces.terminal import end_at_once_on_signals


def main(argv: list[str] | None = None) -> int:
    """Serves until it is told to stop; returns the exit status, 130 after Ctrl-C."""
    end_at_once_on_signals()  # what is imported next takes its time
    arguments = parse(argv)
    # Else gRPC says of each process that is started that it cannot prepare for it.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    if arguments.verbose:
        os.environ["LOG_LEVEL"] = "debug"
    if arguments.no_page:
        os.environ["CHAT_PAGE"] = "false"
    from cog_triton.errors import CogTritonError
    from cog_triton.faces.openai.command import run

    try:
        return run(
            arguments.host,
            arguments.port,
            arguments.model or (),
            arguments.triton_endpoint,
            arguments.triton_model,
            tokenizer=arguments.tokenizer,
            openai_workers=arguments.workers,
            openai_api_keys_file=arguments.api_keys_file,
            allowed_origins=arguments.allowed_origins,
        )
    except CogTritonError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command's arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-H", "--host", default=os.environ.get("HOST", "127.0.0.1"))
    port = int(os.environ.get("PORT") or 3000)
    parser.add_argument("-p", "--port", type=int, default=port, help="default: PORT, or 3000")
    parser.add_argument(
        "--model",
        action="append",
        metavar="NAME",
        help="name of the model in requests; more of them are further names",
    )
    parser.add_argument(
        *("-t", "--triton-endpoint"),
        metavar="URL",
        help="gRPC endpoint of a Triton that runs; without it, one is started",
    )
    parser.add_argument(
        "--triton-model", default="ensemble", help="of that Triton, where it has no ensemble_ids"
    )
    parser.add_argument(
        "--tokenizer", help="directory or id of the tokenizer; default: TOKENIZER, or MODEL's"
    )
    parser.add_argument(
        "--workers",
        type=int,
        help="processes that answer, if one core is not enough; default: OPENAI_WORKERS, or 1",
    )
    parser.add_argument("--no-page", action="store_true", help="no chat page at /: CHAT_PAGE=false")
    parser.add_argument(
        "--api-keys-file", type=Path, help="API keys, one a line; default: OPENAI_API_KEYS_FILE"
    )
    parser.add_argument(
        "--allowed-origins", metavar="ORIGIN,…", help="for CORS; default: OPENAI_ALLOWED_ORIGINS"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="LOG_LEVEL=debug")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
