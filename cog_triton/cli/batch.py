"""A file of requests, answered by a server: its lines go up, and their answers come down."""

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
from typing import Any

import httpx
from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

LOOK_SECONDS = 0.5
ENDS = ("completed", "failed", "expired", "cancelled")
SERVE = """
from cog_triton.cli import main
from cog_triton.processes import end_with_parent
end_with_parent()
main(["openai", "--port", "0", "--no-page"])
"""


def batch(options: argparse.Namespace) -> int:
    """Write an answer for each line, in their order; return 1 if a batch was ended before."""
    if (file := options.input_file or options.input) is None:
        raise OSError("a file of requests must be given")
    groups: dict[str, list[bytes]] = {}  # a batch asks one endpoint, a file may ask several
    order = []
    for number, line in enumerate(filter(bytes.strip, file.read_bytes().splitlines()), 1):
        try:
            value = json.loads(line)
            order.append((value["url"], value["custom_id"]))
            groups.setdefault(value["url"], []).append(line)
        except (ValueError, LookupError, TypeError):
            raise OSError(f"request {number} is not a JSON object with url and custom_id") from None
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
