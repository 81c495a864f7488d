"""``cog-triton worker``: a deployment as a worker of NVIDIA Dynamo."""

import argparse
import importlib.util

from cog_triton.cli.logs import set_up_log
from cog_triton.cli.options import (
    Variables,
    add_model,
    add_served_model_names,
    add_verbose,
    environment_default,
    model_variables,
    served_model_variables,
    verbose_variables,
)
from cog_triton.errors import ConfigurationError

DESCRIPTION = """
Dynamo's frontend serves the API and routes requests to the workers.

    cog-triton worker --discovery-backend file
    cog-triton worker --triton localhost:8001

After SIGTERM or Ctrl-C, running requests have DRAIN_SECONDS to finish. Dynamo's documentation describes
its environment variables (DYN_…).
"""


class Options(argparse.Namespace):
    triton: str | None
    model: str | None
    served_model_name: list[str] | None
    namespace: str
    component: str
    discovery_backend: str
    request_plane: str
    event_plane: str
    tool_call_parser: str | None
    reasoning_parser: str | None
    verbose: bool


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-t",
        "--triton",
        metavar="HOST:PORT",
        help="gRPC address of a running Triton; by default, one is started",
    )
    add_model(parser)
    add_served_model_names(parser)
    parser.add_argument(
        "--namespace",
        default=environment_default("DYN_NAMESPACE", "dynamo"),
        help="Dynamo namespace; default: $DYN_NAMESPACE, or dynamo",
    )
    parser.add_argument(
        "--component", default="backend", help="Dynamo component; default: %(default)s"
    )
    parser.add_argument(
        "--discovery-backend",
        default=environment_default("DYN_DISCOVERY_BACKEND", "etcd"),
        help="etcd, file or kubernetes; default: $DYN_DISCOVERY_BACKEND, or etcd",
    )
    parser.add_argument(
        "--request-plane",
        default=environment_default("DYN_REQUEST_PLANE", "tcp"),
        help="transport of requests; default: $DYN_REQUEST_PLANE, or tcp",
    )
    parser.add_argument(
        "--event-plane",
        default=environment_default("DYN_EVENT_PLANE", "zmq"),
        help="transport of events; default: $DYN_EVENT_PLANE, or zmq",
    )
    parser.add_argument(
        "--tool-call-parser",
        default=environment_default("DYN_TOOL_CALL_PARSER", "") or None,
        metavar="NAME",
        help="Dynamo's parser for tool calls, such as hermes; default: $DYN_TOOL_CALL_PARSER",
    )
    parser.add_argument(
        "--reasoning-parser",
        default=environment_default("DYN_REASONING_PARSER", "") or None,
        metavar="NAME",
        help="Dynamo's parser for reasoning, such as qwen3; default: $DYN_REASONING_PARSER",
    )
    add_verbose(parser)


def variables(options: Options) -> Variables:
    return {
        **model_variables(options.model),
        **served_model_variables(options.served_model_name),
        **verbose_variables(options.verbose),
    }


def check_dynamo() -> None:
    """Raise ConfigurationError if NVIDIA Dynamo is not installed."""
    if importlib.util.find_spec("dynamo") is None:
        raise ConfigurationError(
            "NVIDIA Dynamo is not installed: pip install 'cog-triton[dynamo]' "
            "--extra-index-url https://pypi.nvidia.com"
        )


def run(options: Options) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    check_dynamo()
    set_up_log()
    from cog_triton.api.dynamo.worker import run as serve

    return serve(options)
