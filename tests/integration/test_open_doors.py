"""What anybody may do who reaches Cog's port, as docs/security.md tells it: a real server, as it is.

A test that fails here says that Cog has changed: mend the page, and say there what is better now.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.integration.conftest import PACE_MS
from tests.support import CogServer, QuietHandler, http_server, wait_until

TOKENS = 100
LONG = {"input": {"prompt": "words of another", "max_tokens": TOKENS}}
SHORT = {"input": {"prompt": "hi", "max_tokens": 1}}


@pytest.fixture
def posted() -> Iterator[tuple[str, list[tuple[str, str | None]]]]:
    """The URL of a server, and the path and authorization of what is posted to it; it redirects once."""
    requests = []

    class Handler(QuietHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            requests.append((self.path, self.headers["Authorization"]))
            self.send_response(307 if self.path == "/first" else 200)
            self.send_header("Location", "/second")
            self.end_headers()

    with http_server(Handler) as url:
        yield url, requests


def test_who_knows_an_id_sees_the_prompt_and_the_output(paced_cog_server: CogServer) -> None:
    with httpx.Client(base_url=paced_cog_server.url, trust_env=False, timeout=30) as client:
        background = {"Prefer": "respond-async"}
        assert client.put("/predictions/known", json=LONG, headers=background).is_success
        seen = client.put("/predictions/known", json=SHORT).json()
        assert seen["input"]["prompt"] == "words of another"
        events = {"Accept": "text/event-stream"}
        with client.stream("PUT", "/predictions/known", json=SHORT, headers=events) as stream:
            assert "event: output" in stream.iter_lines()
        assert PACE_MS * TOKENS > 1000  # it runs on
        assert client.post("/predictions/known/cancel").status_code == 200


def test_an_id_that_is_drawn_tells_nothing(paced_cog_server: CogServer) -> None:
    """One of Cog's own would be the time in nanoseconds."""
    url = f"{paced_cog_server.url}/predictions"
    drawn = [httpx.post(url, json=SHORT, trust_env=False).json()["id"] for _ in range(2)]
    assert all(re.fullmatch("[0-9a-f]{32}", name) for name in drawn)
    assert drawn[0][:8] != drawn[1][:8]


def test_a_url_in_a_request_is_text(
    paced_cog_server: CogServer, posted: tuple[str, list[tuple[str, str | None]]]
) -> None:
    url, requests = posted
    body = {"input": {"prompt": f"{url}/file", "max_tokens": 1}, "output_file_prefix": f"{url}/out"}
    answer = httpx.post(f"{paced_cog_server.url}/predictions", json=body, trust_env=False)
    assert answer.json()["status"] == "succeeded"
    assert requests == []


def test_a_body_that_is_no_json_is_refused(paced_cog_server: CogServer) -> None:
    url = f"{paced_cog_server.url}/predictions"
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        headers = {"Content-Type": kind, "Origin": "http://example.com"}
        assert httpx.post(url, content="{}", headers=headers, trust_env=False).status_code == 415
    assert httpx.options(url, trust_env=False).status_code == 405


def test_webhooks_go_anywhere_and_anybody_ends_the_server(
    demo_model: Path, tmp_path: Path, posted: tuple[str, list[tuple[str, str | None]]]
) -> None:
    url, requests = posted
    environment = {
        "MODEL": str(demo_model),
        "ENGINE": "simulated",
        "WEBHOOK_AUTH_TOKEN": "of the operator",
    }
    with CogServer(environment, tmp_path / "log") as server:
        assert server.wait_until_set_up()["status"] == "READY"
        body = {**SHORT, "webhook": f"{url}/first", "webhook_events_filter": ["completed"]}
        assert httpx.post(f"{server.url}/predictions", json=body, trust_env=False).is_success
        wait_until(lambda: len(requests) == 2, 10, "the webhook and where it is redirected to")
        assert requests == [(path, "Bearer of the operator") for path in ("/first", "/second")]
        # As a form of a web page would send it.
        headers = {"Content-Type": "text/plain", "Origin": "http://example.com"}
        assert httpx.post(f"{server.url}/shutdown", headers=headers, trust_env=False).is_success
        wait_until(lambda: closed(server.url), 20, "the end of the server")


def closed(url: str) -> bool:
    try:
        httpx.get(f"{url}/health-check", trust_env=False)
    except httpx.ConnectError:
        return True
    except httpx.TransportError:  # it ends in this moment
        return False
    return False
