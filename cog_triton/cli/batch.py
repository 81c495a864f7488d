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
from dataclasses import dataclass
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

The answers, including errors, are in the order of the requests. If you press Ctrl-C, the command ends, and
the server at --url continues the batch. The exit status is 1 if the server rejected the file or stopped
the batch early.
"""


RequestKey = tuple[str, str]  # the endpoint, and the request's custom_id


@dataclass(frozen=True)
class BatchRequest:
    """A line of a file of requests."""

    endpoint: str
    custom_id: str
    line: bytes

    @property
    def key(self) -> RequestKey:
        return self.endpoint, self.custom_id


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
    """Write an answer for each request, in their order; return 1 if a batch ended early."""
    import httpx

    file = options.input_file or options.input
    if file is None:
        raise OSError("no file of requests; usage: cog-triton batch FILE --output FILE")
    requests = read_requests(file)
    # All requests of a batch use one endpoint; those of a file may use several.
    lines: dict[str, list[bytes]] = {}
    for request in requests:
        lines.setdefault(request.endpoint, []).append(request.line)
    answers: dict[RequestKey, bytes] = {}
    with contextlib.ExitStack() as stack:
        url = options.url or stack.enter_context(temporary_server())
        client = stack.enter_context(httpx.Client(base_url=url, timeout=600.0))
        client.headers["Authorization"] = f"Bearer {options.api_key}"
        names = [begin(client, endpoint, b"\n".join(group)) for endpoint, group in lines.items()]
        batches = wait(client, names, len(requests))
        for batch in batches:
            answers.update(results(client, batch))
    with options.output.open("wb") as output:
        for request in requests:
            if request.key in answers:
                output.write(answers[request.key] + b"\n")
    for batch in batches:
        report(batch)
    return int(any(batch["status"] != "completed" for batch in batches))


def read_requests(file: Path) -> list[BatchRequest]:
    """Read the lines of a file, or raise OSError for one that is not a request."""
    requests = []
    lines = [line for line in file.read_bytes().splitlines() if line.strip()]
    for number, line in enumerate(lines, 1):
        try:
            content = json.loads(line)
            request = BatchRequest(content["url"], content["custom_id"], line)
            hash(request.key)  # a list or an object in it raises TypeError
            requests.append(request)
        except (ValueError, LookupError, TypeError):
            raise OSError(
                f"request {number} is not a JSON object with the keys url and custom_id"
            ) from None
    return requests


def report(batch: dict[str, Any]) -> None:
    """Print how a batch ended, and the mistakes in its file."""
    for problem in (batch["errors"] or {}).get("data", ()):
        print(f"line {problem['line']}: {problem['message']}", file=sys.stderr)
    counts = batch["request_counts"]
    ended = f"{counts['completed']} answers and {counts['failed']} errors"
    print(f"{batch['id']} {batch['status']}: {ended}", file=sys.stderr)


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
            counts = [batch["request_counts"] for batch in batches]
            done = sum(count["completed"] + count["failed"] for count in counts)
            bar.update(done - bar.n)
            if all(batch["status"] in ENDS for batch in batches):
                return batches
            time.sleep(LOOK_SECONDS)


def results(client: httpx.Client, batch: dict[str, Any]) -> Iterator[tuple[RequestKey, bytes]]:
    """Yield the answers and errors of a batch, each with the key of its request."""
    for file in (batch["output_file_id"], batch["error_file_id"]):
        if file is None:
            continue
        for line in ask(client, "GET", f"/v1/files/{file}/content").content.splitlines():
            yield (batch["endpoint"], json.loads(line)["custom_id"]), line


@contextlib.contextmanager
def temporary_server() -> Iterator[str]:
    """Run a server, and yield its URL."""
    with tempfile.TemporaryDirectory(prefix="cog-triton-batch-") as directory:
        environment = {**os.environ, "STORE": f"{directory}/journal.db"}
        command = [sys.executable, "-c", SERVE]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
            assert process.stdout is not None
            try:
                first_line = process.stdout.readline().decode()
                url = re.search(r"http://\S+:\d+", first_line)
                if url is None:
                    raise OSError("the server did not start")
                yield url[0]
            finally:
                process.terminate()
