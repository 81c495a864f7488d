"""A file of requests, answered by a server: its lines go up, and their answers come down."""

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
from typing import Any

import httpx
from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

LOOK_SECONDS = 0.5
SERVE = """
import sys
from cog_triton.cli import main
from cog_triton.processes import end_with_parent
end_with_parent()
sys.exit(main(["openai", "--port", "0", "--no-page"]))
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
            raise OSError(f"request {number} is no JSON object with url and custom_id") from None
    with contextlib.ExitStack() as stack:
        url = options.url or stack.enter_context(own_server())
        client = stack.enter_context(httpx.Client(base_url=url, timeout=600.0))
        if options.api_key:
            client.headers["Authorization"] = f"Bearer {options.api_key}"
        batches = [begin(client, url, b"\n".join(lines)) for url, lines in groups.items()]
        ended = wait(client, batches, len(order))
        answers = {own: line for one in ended for own, line in results(client, one)}
    with options.output.open("wb") as output:
        output.writelines(answers[own] + b"\n" for own in order if own in answers)
    for one in ended:
        problems = (one["errors"] or {}).get("data", ())
        for problem in problems:
            print(f"line {problem['line']}: {problem['message']}", file=sys.stderr)
        counts = one["request_counts"]
        text = f"{counts['completed']} answers and {counts['failed']} errors"
        print(f"{one['id']} {one['status']}: {text}", file=sys.stderr)
    return int(any(one["status"] != "completed" for one in ended))


def ask(client: httpx.Client, method: str, path: str, **options: Any) -> httpx.Response:
    try:
        reply = client.request(method, path, **options)
    except httpx.TransportError as error:
        raise ConnectionError(f"{client.base_url}: {error}") from None
    if reply.is_error:
        raise OSError(f"{method} {path}: {reply.status_code} {reply.text}")
    return reply


def begin(client: httpx.Client, endpoint: str, lines: bytes) -> dict[str, Any]:
    form: Any = {"data": {"purpose": "batch"}, "files": {"file": ("batch.jsonl", lines)}}
    file = ask(client, "POST", "/v1/files", **form).json()["id"]
    body = {"input_file_id": file, "endpoint": endpoint, "completion_window": "24h"}
    return dict(ask(client, "POST", "/v1/batches", json=body).json())


def wait(client: httpx.Client, batches: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Show the progress until all have ended; Ctrl-C cancels them."""
    with tqdm(total=count, unit=" requests", disable=None) as bar:
        try:
            while any(not has_ended(one) for one in batches):
                time.sleep(LOOK_SECONDS)
                batches = [ask(client, "GET", f"/v1/batches/{one['id']}").json() for one in batches]
                counts = [one["request_counts"] for one in batches]
                bar.update(sum(own["completed"] + own["failed"] for own in counts) - bar.n)
        except KeyboardInterrupt:
            for one in batches:
                ask(client, "POST", f"/v1/batches/{one['id']}/cancel")
            raise
    return batches


def has_ended(one: dict[str, Any]) -> bool:
    return one["status"] in ("completed", "failed", "expired", "cancelled")


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
