"""``cog-triton batch`` without ``--url``."""

import argparse
import subprocess
from pathlib import Path

import pytest

from cog_triton.cli import batch

ANSWER = '{"custom_id": "1", "response": {"body": {}}}'

# A server that accepts one batch, which is complete at once.
SERVER = f"""
import http.server, json, os, sys
BATCH = dict(id="b", endpoint="/v1/completions", status="completed", output_file_id="f",
    error_file_id=None, errors=None, request_counts=dict(total=1, completed=1, failed=0))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        answer = {ANSWER!r} if self.path.endswith("content") else json.dumps(BATCH)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(answer.encode())
    do_POST = do_GET
    def log_message(self, *parts): pass
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print(f"Ready on http://127.0.0.1:{{server.server_port}}", os.environ["STORE"], flush=True)
server.serve_forever()
"""


def run(directory: Path, monkeypatch: pytest.MonkeyPatch, server: str) -> tuple[int, str]:
    """Answer one request with a server of this code; return the exit status and the answers."""
    monkeypatch.setattr(batch, "SERVE", server)
    file, output = directory / "in.jsonl", directory / "out.jsonl"
    file.write_text('{"custom_id": "1", "url": "/v1/completions", "body": {"prompt": "Hi"}}\n')
    parser = argparse.ArgumentParser()
    batch.add_options(parser)
    options = parser.parse_args([str(file), "--output", str(output)])
    status = batch.run(options)  # type: ignore[arg-type]
    return status, output.read_text()


def test_without_a_url_it_starts_a_server_for_the_batch_and_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Process(subprocess.Popen[bytes]):
        def __init__(self, *arguments: object, **options: object) -> None:
            super().__init__(*arguments, **options)  # type: ignore[call-overload]
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Process)
    assert run(tmp_path, monkeypatch, SERVER) == (0, f"{ANSWER}\n")
    assert [process.returncode is None for process in started] == [False]


def test_a_server_that_does_not_start_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OSError, match="the server did not start"):
        run(tmp_path, monkeypatch, "")
