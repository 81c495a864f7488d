"""What anybody may do who reaches Cog's port, as docs/operations.md tells it; see test_front.py, too.

A test that fails here says that Cog has changed: mend the page, and say there what is better now.
"""

from __future__ import annotations

import httpx

from tests.integration.conftest import PACE_MS
from tests.support import CogServer, QuietHandler, http_server

TOKENS = 100
LONG = {"input": {"prompt": "words of another", "max_tokens": TOKENS}}
SHORT = {"input": {"prompt": "hi", "max_tokens": 1}}


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


def test_a_url_in_a_request_is_text(paced_cog_server: CogServer) -> None:
    asked: list[str] = []

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        do_PUT = do_POST = do_GET

    with http_server(Handler) as url:
        inputs = {"prompt": f"{url}/file", "max_tokens": 1}
        body = {"input": inputs, "output_file_prefix": f"{url}/out"}
        answer = httpx.post(f"{paced_cog_server.url}/predictions", json=body, trust_env=False)
    assert answer.json()["status"] == "succeeded"
    assert asked == []


def test_a_body_that_is_no_json_is_refused(paced_cog_server: CogServer) -> None:
    url = f"{paced_cog_server.url}/predictions"
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        headers = {"Content-Type": kind, "Origin": "http://example.com"}
        assert httpx.post(url, content="{}", headers=headers, trust_env=False).status_code == 415
    assert httpx.options(url, trust_env=False).status_code == 405
