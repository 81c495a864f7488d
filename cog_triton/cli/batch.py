"""``cog-triton batch``: send a file of requests to a server as an OpenAI batch, and save the answers."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    import httpx

LOOK_SECONDS = 0.5
ENDS = ("completed", "failed", "expired", "cancelled")
SERVE = """
from cog_triton.cli import main
from cog_triton.processes import end_with_parent
end_with_parent()
main(["openai", "--port", "0", "--no-page"])
"""


DESCRIPTION = """
The file formats are those of OpenAI's Batch API and vLLM's run-batch.

    cog-triton batch requests.jsonl --output answers.jsonl --url http://localhost:3000
    cog-triton batch -i requests.jsonl -o answers.jsonl --model /path/to/model

The answers, including errors, are in the order of the requests. After Ctrl-C, the server at --url
continues the batch. The exit status is 1 if the server rejected the file or stopped the batch early.
"""


class Options(argparse.Namespace):
    input: Path | None
    input_file: Path | None
    output: Path
    url: str | None
    api_key: str
    model: str | None
    served_model_name: list[str] | None
    verbose: bool


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "input", nargs="?", type=Path, metavar="FILE", help="file of requests, one per line"
    )
    parser.add_argument("-i", "--input-file", type=Path, metavar="FILE", help="the same as FILE")
    parser.add_argument(
        "-o",
        "--output",
        "--output-file",
        type=Path,
        required=True,
        dest="output",
        metavar="FILE",
        help="file to write the answers to",
    )
    parser.add_argument(
        "--url", help="URL of a running server; by default, one is started for this batch"
    )
    parser.add_argument(
        "--api-key",
        default=environment_default("OPENAI_API_KEY", "none"),
        metavar="KEY",
        help="API key; default: $OPENAI_API_KEY",
    )
    add_model(parser)
    add_served_model_names(parser)
    add_verbose(parser)


def variables(options: Options) -> Variables:
    return {
        **model_variables(options.model),
        **served_model_variables(options.served_model_name),
        **verbose_variables(options.verbose),
    }


def run(options: Options) -> int:
    """Write an answer for each line, in their order; return 1 if a batch was ended before."""
    import httpx

    file = options.input_file or options.input
    if file is None:
        raise OSError("no file of requests; usage: cog-triton batch FILE --output FILE")
    groups: dict[str, list[bytes]] = {}  # a batch asks one endpoint, a file may ask several
    order = []
    for number, line in enumerate(filter(bytes.strip, file.read_bytes().splitlines()), 1):
        try:
            value = json.loads(line)
            order.append((value["url"], value["custom_id"]))
            groups.setdefault(value["url"], []).append(line)
        except (ValueError, LookupError, TypeError):
            raise OSError(
                f"request {number} is not a JSON object with the keys url and custom_id"
            ) from None
    with contextlib.ExitStack() as stack:
        url = options.url or stack.enter_context(own_server())
        client = stack.enter_context(httpx.Client(base_url=url, timeout=600.0))
        client.headers["Authorization"] = f"Bearer {options.api_key}"
        names = [begin(client, url, b"\n".join(lines)) for url, lines in groups.items()]
        ended = wait(client, names, len(order))
        answers = {own: line for one in ended for own, line in results(client, one)}
    with options.output.open("wb") as output:
        output.writelines(answers[own] + b"\n" for own in order if own in answers)
    for one in ended:
        for problem in (one["errors"] or {}).get("data", ()):
            print(f"line {problem['line']}: {problem['message']}", file=sys.stderr)
        counts = "{completed} answers and {failed} errors".format(**one["request_counts"])
        print(f"{one['id']} {one['status']}: {counts}", file=sys.stderr)
    return int(any(one["status"] != "completed" for one in ended))


def ask(client: httpx.Client, method: str, path: str, **options: Any) -> httpx.Response:
    import httpx

    try:
        reply = client.request(method, path, **options)
    except httpx.TransportError as error:
        raise ConnectionError(f"{client.base_url}: {error}") from None
    if reply.is_error:
        raise OSError(f"{method} {path}: {reply.status_code} {reply.text}")
    return reply


def begin(client: httpx.Client, endpoint: str, lines: bytes) -> str:
    form: Any = {"data": {"purpose": "batch"}, "files": {"file": ("batch.jsonl", lines)}}
    file = ask(client, "POST", "/v1/files", **form).json()["id"]
    body = {"input_file_id": file, "endpoint": endpoint, "completion_window": "24h"}
    return str(ask(client, "POST", "/v1/batches", json=body).json()["id"])


def wait(client: httpx.Client, names: list[str], count: int) -> list[dict[str, Any]]:
    """Show the progress until all have ended, and return them."""
    from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

    with tqdm(total=count, unit=" requests", disable=None) as bar:
        while True:
            batches = [ask(client, "GET", f"/v1/batches/{name}").json() for name in names]
            counts = [one["request_counts"] for one in batches]
            bar.update(sum(own["completed"] + own["failed"] for own in counts) - bar.n)
            if all(one["status"] in ENDS for one in batches):
                return batches
            time.sleep(LOOK_SECONDS)


def results(client: httpx.Client, one: dict[str, Any]) -> Iterator[tuple[Any, bytes]]:
    for file in filter(None, (one["output_file_id"], one["error_file_id"])):
        for line in ask(client, "GET", f"/v1/files/{file}/content").content.splitlines():
            yield (one["endpoint"], json.loads(line)["custom_id"]), line


@contextlib.contextmanager
def own_server() -> Iterator[str]:
    """Run a server until its URL is needed no more."""
    with tempfile.TemporaryDirectory(prefix="cog-triton-batch-") as directory:
        environment = {**os.environ, "STORE": f"{directory}/journal.db"}
        command = [sys.executable, "-c", SERVE]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
            assert process.stdout is not None
            try:
                if not (url := re.search(r"http://\S+:\d+", process.stdout.readline().decode())):
                    raise OSError("the server did not start")
                yield url[0]
            finally:
                process.terminate()
