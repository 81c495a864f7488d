"""The command line of the benchmark, and the loads that it asks for."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tools.benchmark.drivers import DRIVERS
from tools.benchmark.load import Length, Load

DEFAULT_TARGET = "cog-sse"


def parser() -> argparse.ArgumentParser:
    """The command line. Flags that genai-perf has mean what they mean there."""
    options = argparse.ArgumentParser(
        prog="benchmark.py",
        description="Puts load on the stack, or on any layer of it, and reports what it took.",
    )
    options.add_argument(
        "--target",
        nargs="+",
        action="extend",
        choices=DRIVERS,
        metavar="TARGET",
        help=f"what gets the load: {', '.join(DRIVERS)} (default: {DEFAULT_TARGET})",
    )
    options.add_argument(
        "--baseline",
        nargs="*",
        choices=DRIVERS,
        metavar="TARGET",
        help="targets that get the same load, to compare with (default: triton-engine and engine, when "
        "the servers are started here; none when the option is given without a target)",
    )
    options.add_argument(
        "--suite",
        action="store_true",
        help="measure what the project promises of its speed and memory, whatever the load options say",
    )
    load = options.add_argument_group("load")
    _add_load(load)
    _add_requests(load)
    _add_servers(options.add_argument_group("servers"))
    _add_output(options.add_argument_group("output"))
    return options


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments, with what follows from others filled in."""
    options = parser()
    arguments = options.parse_args(argv)
    arguments.target = list(dict.fromkeys(arguments.target or [DEFAULT_TARGET]))
    if bad := [item for item in arguments.settings if not item.partition("=")[1]]:
        options.error(f"--settings {bad[0]} is no KEY=VALUE")
    if arguments.url and not any(DRIVERS[target].server == "cog" for target in arguments.target):
        arguments.grpc_url = arguments.grpc_url or arguments.url
        arguments.url = None
    if missing := _missing_endpoint(arguments):
        options.error(missing)
    return arguments


def loads(arguments: argparse.Namespace) -> Iterator[Load]:
    """The loads that the arguments ask for."""
    base = Load(
        requests=arguments.request_count,
        warmup=arguments.warmup_request_count,
        input=Length(
            arguments.synthetic_input_tokens_mean, arguments.synthetic_input_tokens_stddev
        ),
        output=Length(arguments.output_tokens_mean, arguments.output_tokens_stddev),
        prompts=arguments.num_prompts,
        temperature=arguments.temperature,
        ignore_eos=arguments.ignore_eos,
        rounds=arguments.rounds,
        seed=arguments.random_seed,
        generators=arguments.generators,
        timeout=arguments.request_timeout,
    )
    for rate in arguments.request_rate or ():
        yield replace(base, concurrency=None, request_rate=rate)
    if not arguments.request_rate:
        for concurrency in arguments.concurrency or (1,):
            yield replace(base, concurrency=concurrency)


def _add_load(load: argparse._ArgumentGroup) -> None:
    """Add the options of the load's size and times."""
    either = load.add_mutually_exclusive_group()
    either.add_argument(
        "--concurrency",
        type=_positive_int,
        nargs="+",
        metavar="N",
        help="streams that send a request after another; several values are loads one after another "
        "(default: 1)",
    )
    either.add_argument(
        "--request-rate",
        type=_positive_float,
        nargs="+",
        metavar="PER_SECOND",
        help="requests a second that arrive at random, whatever is unanswered",
    )
    load.add_argument(
        "--request-count",
        "--num-requests",
        type=_positive_int,
        metavar="N",
        help="requests to measure of each load (default: 100, or 4 a stream, or 10 seconds of the rate)",
    )
    load.add_argument(
        "--rounds",
        type=_positive_int,
        default=1,
        metavar="N",
        help="turns that every target has; with more than one all servers run at once, and figures "
        "are medians (default: 1)",
    )
    load.add_argument(
        "--generators",
        type=_positive_int,
        default=1,
        metavar="N",
        help="load generator processes (default: 1)",
    )
    load.add_argument(
        "--request-timeout",
        type=_positive_float,
        default=Load.timeout,
        metavar="SECONDS",
        help="after which a request has failed",
    )
    load.add_argument(
        "--streaming", action="store_true", help="accepted: every target but cog-json streams"
    )


def _add_requests(load: argparse._ArgumentGroup) -> None:
    """Add the options of each request."""
    load.add_argument("--warmup-request-count", type=_count, default=Load.warmup, metavar="N")
    load.add_argument(
        "--synthetic-input-tokens-mean", type=_positive_float, default=128, metavar="N"
    )
    load.add_argument("--synthetic-input-tokens-stddev", type=_amount, default=0, metavar="N")
    load.add_argument("--output-tokens-mean", type=_positive_float, default=128, metavar="N")
    load.add_argument("--output-tokens-stddev", type=_amount, default=0, metavar="N")
    load.add_argument(
        "--num-prompts",
        type=_positive_int,
        metavar="N",
        help="different prompts (default: as many as requests)",
    )
    load.add_argument(
        "--tokenizer", metavar="DIRECTORY", help="counts tokens (default: the model's)"
    )
    load.add_argument("--random-seed", type=_count, default=0, metavar="N")
    load.add_argument("--temperature", type=_amount, default=0.0, help="0, the default, is greedy")
    load.add_argument(
        "--ignore-eos",
        action="store_true",
        help="no token ends an output; otherwise the one that does is not chosen before its time",
    )


def _add_servers(servers: argparse._ArgumentGroup) -> None:
    servers.add_argument(
        "-u", "--url", help="a running Cog server; for Triton targets, the same as --grpc-url"
    )
    servers.add_argument("--grpc-url", metavar="HOST:PORT", help="a running Triton's gRPC endpoint")
    servers.add_argument("--http-url", metavar="HOST:PORT", help="a running Triton's HTTP endpoint")
    servers.add_argument(
        "--settings",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="environment of the servers that are started here, such as ENGINE=simulated",
    )
    servers.add_argument(
        "--serve-python",
        default=sys.executable,
        metavar="PATH",
        help="for the target serve: a Python that has transformers[serving]",
    )


def _add_output(output: argparse._ArgumentGroup) -> None:
    output.add_argument("--artifact-dir", type=Path, default=Path("artifacts"), metavar="DIRECTORY")
    output.add_argument(
        "--profile-export-file",
        type=Path,
        default=Path("profile_export.json"),
        metavar="FILE",
        help="the report as JSON; in the artifact directory unless it has a directory of its own",
    )
    output.add_argument(
        "--generate-plots", action="store_true", help="write the HTML report (it always is)"
    )
    output.add_argument("--title", default="Benchmark of cog-triton")


def _missing_endpoint(arguments: argparse.Namespace) -> str | None:
    """Return an error if one endpoint of a running Triton is named and the other is needed."""
    if not (arguments.grpc_url or arguments.http_url):
        return None
    for target in (*arguments.target, *(arguments.baseline or ())):
        option = "http_url" if "http" in target else "grpc_url"
        if DRIVERS[target].server == "triton" and not getattr(arguments, option):
            return f"{target} needs --{option.replace('_', '-')}"
    return None


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is not at least 0")
    return value


def _positive_float(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not greater than 0")
    return value


def _amount(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not at least 0")
    return value
