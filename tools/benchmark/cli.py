"""The command line of the benchmark, and the run that it asks for."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from datetime import datetime, timezone
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from cog_triton.settings import describe, read_settings
from tools.benchmark.drivers import DRIVERS
from tools.benchmark.html import render_html
from tools.benchmark.load import Length, Load
from tools.benchmark.measure import Running, measure
from tools.benchmark.report import Result, ratios, table, to_csv
from tools.benchmark.servers import (
    cog_server,
    engine_alone,
    has_embedded_engine,
    triton_server,
)
from tools.benchmark.suite import Check, as_report, report_rows, run_suite

COG_TARGETS = ("cog-sse", "cog-json")
ENGINE_TARGET = "engine"
RAW_TRITON = "triton-engine"
DEFAULT_TARGET = "cog-sse"
SECRETS = ("HF_TOKEN", "COG_WEIGHTS")
PACKAGES = (
    "cog-triton",
    "cog",
    "nvidia-pytriton",
    "tritonclient",
    "tensorrt_llm",
    "torch",
    "transformers",
    "tokenizers",
    "grpcio",
    "numpy",
)

Say = Callable[[str], None]


def parser() -> argparse.ArgumentParser:
    """The command line. Flags that genai-perf has mean what they mean there."""
    made = argparse.ArgumentParser(
        prog="benchmark.py",
        description="Puts load on the stack, or on any layer of it, and reports what it took.",
    )
    made.add_argument(
        "--target",
        nargs="+",
        action="extend",
        choices=DRIVERS,
        metavar="TARGET",
        help=f"what gets the load: {', '.join(DRIVERS)} (default: {DEFAULT_TARGET})",
    )
    made.add_argument(
        "--baseline",
        nargs="*",
        choices=DRIVERS,
        metavar="TARGET",
        help="targets that get the same load, to compare with (default: triton-engine and engine, when "
        "the servers are started here; none when the option is given without a target)",
    )
    load = made.add_argument_group("load")
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
    servers = made.add_argument_group("servers")
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
    made.add_argument(
        "--suite",
        action="store_true",
        help="measure what the project promises of its speed and memory, whatever the load options say",
    )
    output = made.add_argument_group("output")
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
    return made


def run(argv: Sequence[str] | None = None, say: Say = print) -> dict[str, Any]:
    """Runs what the command line asks for, says the table, writes the files and returns the report.

    Raises:
        CogTritonError, BenchmarkError: what was to be measured could not be set up, or not be reached.
    """
    arguments = parse(argv)
    environment = server_environment(arguments.settings)
    progress = partial(print, file=sys.stderr, flush=True)
    checks: list[Check] = []
    if arguments.suite:
        results, checks = run_suite(environment, progress)
    else:
        results = measure_all(arguments, environment, progress)
    made = {
        "title": arguments.title,
        "command": shlex.join(["scripts/benchmark.py", *(sys.argv[1:] if argv is None else argv)]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "settings": reported_settings(environment),
        "results": [asdict(one) for one in results],
        **({"checks": as_report(checks)} if checks else {}),
    }
    say(table(results))
    if checks:
        say(report_rows(checks))
    for path in write(made, to_csv(results), arguments.artifact_dir, arguments.profile_export_file):
        progress(f"wrote {path}")
    return made


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments, with what follows from others filled in."""
    made = parser()
    arguments = made.parse_args(argv)
    arguments.target = list(dict.fromkeys(arguments.target or [DEFAULT_TARGET]))
    if bad := [item for item in arguments.settings if not item.partition("=")[1]]:
        made.error(f"--settings {bad[0]} is no KEY=VALUE")
    if arguments.url and not any(target in COG_TARGETS for target in arguments.target):
        arguments.grpc_url = arguments.grpc_url or arguments.url
        arguments.url = None
    if missing := _missing_endpoint(arguments):
        made.error(missing)
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
        seed=arguments.random_seed,
        generators=arguments.generators,
        timeout=arguments.request_timeout,
    )
    for rate in arguments.request_rate or ():
        yield replace(base, concurrency=None, request_rate=rate)
    if not arguments.request_rate:
        for concurrency in arguments.concurrency or (1,):
            yield replace(base, concurrency=concurrency)


def measure_all(
    arguments: argparse.Namespace, environment: Mapping[str, str], progress: Say
) -> list[Result]:
    """Every load on every target and baseline, with ratios. One server runs at a time."""
    baselines = default_baselines(arguments, environment)
    targets = [*(name for name in arguments.target if name not in baselines), *baselines]
    results: list[Result] = []
    for group in dict.fromkeys(map(_group, targets)):
        with ExitStack() as cleanup:
            running = _start(group, arguments, environment, cleanup, progress)
            if arguments.tokenizer:
                running = replace(running, tokenizer=arguments.tokenizer)
            for target in (name for name in targets if _group(name) == group):
                for load in loads(arguments):
                    one = measure(running, target, load)
                    results.append(replace(one, baseline=target in baselines))
                    progress(f"{target} {one.load_name}: {one.output_tokens_per_s:.0f} tokens/s")
    results.sort(key=lambda one: targets.index(one.target))
    return [replace(one, ratio_to_baseline=ratios(results, one)) for one in results]


def default_baselines(arguments: argparse.Namespace, environment: Mapping[str, str]) -> list[str]:
    """The baselines named, or those that can be had of servers started here."""
    if arguments.baseline is not None:
        return list(arguments.baseline)
    if arguments.url or arguments.grpc_url or arguments.http_url:
        return []
    raw = [RAW_TRITON, ENGINE_TARGET] if has_embedded_engine(environment) else [RAW_TRITON]
    # What is asked for by name is no baseline, unless there is nothing else.
    return [name for name in raw if name not in arguments.target or len(arguments.target) == 1]


def server_environment(settings: Sequence[str]) -> dict[str, str]:
    """This process's environment with KEY=VALUE settings in it."""
    given = dict(item.partition("=")[::2] for item in settings)
    return {**os.environ, **given}


def reported_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The settings that are not at their default, without those that may hold a secret."""
    names = [name for name, *_ in describe() if environment.get(name)]
    return {name: environment[name] for name in names if name not in SECRETS}


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(pages / 1e9, 1),
        "gpu": _gpu(),
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    """The versions of what is installed of the stack."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def write(report: Mapping[str, Any], csv: str, directory: Path, export: Path) -> list[Path]:
    """Writes the report's files and returns their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    json_path = export if export.parent != Path() else directory / export
    files = {
        json_path: json.dumps(report, indent=1),
        directory / "benchmark.csv": csv,
    }
    files[directory / "benchmark.html"] = render_html(dict(report))
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return list(files)


def _group(target: str) -> str:
    """What has to run for a target."""
    if target in COG_TARGETS:
        return "cog"
    return "engine" if target == ENGINE_TARGET else "triton"


def _start(
    group: str,
    arguments: argparse.Namespace,
    environment: Mapping[str, str],
    cleanup: ExitStack,
    progress: Say,
) -> Running:
    given = arguments.url if group == "cog" else arguments.grpc_url or arguments.http_url
    if group != "engine" and given:
        return Running(
            tokenizer=read_settings(environment).tokenizer_dir,
            url=_with_scheme(arguments.url or ""),
            grpc=_without_scheme(arguments.grpc_url or ""),
            http=_without_scheme(arguments.http_url or ""),
        )
    progress(f"starting {group} ...")
    if group == "cog":
        arguments.artifact_dir.mkdir(parents=True, exist_ok=True)
        return cleanup.enter_context(cog_server(environment, arguments.artifact_dir / "cog.log"))
    start = engine_alone if group == "engine" else triton_server
    return cleanup.enter_context(start(environment))


def _missing_endpoint(arguments: argparse.Namespace) -> str | None:
    """What to say when one endpoint of a running Triton is named, and a target needs the other."""
    if not (arguments.grpc_url or arguments.http_url):
        return None
    for target in (*arguments.target, *(arguments.baseline or ())):
        option = "http_url" if "http" in target else "grpc_url"
        if _group(target) == "triton" and not getattr(arguments, option):
            return f"{target} needs --{option.replace('_', '-')}"
    return None


def _with_scheme(url: str) -> str:
    return url if "://" in url or not url else f"http://{url}"


def _without_scheme(url: str) -> str:
    return url.partition("://")[2] or url


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _gpu() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    found = subprocess.run(query, capture_output=True, text=True, check=False)
    names = found.stdout.split("\n") if found.returncode == 0 else []
    return ", ".join(name.strip() for name in names if name.strip()) or None


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
