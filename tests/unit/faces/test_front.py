"""The front's pure parts: what passes, how it is read, what the health routes say."""

from __future__ import annotations

import asyncio
import json
import math
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cog_triton.faces.front import health
from cog_triton.faces.front.connection import Client
from cog_triton.faces.front.front import Front
from cog_triton.faces.front.http1 import RequestReader, ResponseEnd, for_cog, response_head
from cog_triton.faces.front.predictions import UNSEEN_SECONDS, Journal, Predictions
from cog_triton.faces.front.rules import (
    Limits,
    Passage,
    Request,
    check,
    check_identifier,
    fields_of,
)
from cog_triton.web.limits import Refusal

LIMITS = Limits(body_bytes=100, head_bytes=1000)


def read(*parts: bytes) -> list[Request | Refusal]:
    reader = RequestReader(LIMITS)
    for part in parts:
        reader.feed(part)
    return list(reader.items)


def test_a_head_may_end_a_large_read_of_others() -> None:
    get = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    items = read(get * 100 + get[:10], get[10:])
    assert [type(item) for item in items] == [Request] * 101


def test_a_trailer_is_bounded() -> None:
    head = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nX: "
    (refusal,) = read(head, b"x" * 600, b"x" * 600)
    assert isinstance(refusal, Refusal)
    assert refusal.status == 431


# Which requests pass


@pytest.mark.parametrize(
    "identifier", ["a", "A-b_c.9", "x" * 128, "gm3qorzdhgbfurvjtvhg6dckhu", "-"]
)
def test_a_good_id(identifier: str) -> None:
    check_identifier(identifier, [])


@pytest.mark.parametrize(
    "identifier", ["", ".", "..", ".a", "a/b", "a\0", "a\n", "ä", "x" * 129, " "]
)
def test_a_bad_id(identifier: str) -> None:
    with pytest.raises(Refusal) as refusal:
        check_identifier(identifier, ["path", "prediction_id"])
    assert refusal.value.status == 422
    assert refusal.value.detail[0]["loc"] == ["path", "prediction_id"]


@given(st.text())
def test_an_id_that_passes_names_a_directory_of_its_own(identifier: str) -> None:
    try:
        check_identifier(identifier, [])
    except Refusal:
        return
    assert Path("/base", identifier).resolve().parent == Path("/base")


@pytest.mark.parametrize(
    ("method", "target", "prediction"),
    [
        ("GET", "/health-check", None),
        ("POST", "/shutdown", None),
        ("GET", "/predictions/x", None),
        ("PUT", "/predictions/x", "x"),
        ("PUT", "/trainings/%61b?c", "ab"),
    ],
)
def test_what_passes_unchanged(method: str, target: str, prediction: str | None) -> None:
    assert check(Request(method, target)) == Passage(method, target, prediction)


def test_a_cancel() -> None:
    target = "/predictions/%61b/cancel"
    assert check(Request("POST", target)) == Passage("POST", target, cancels="ab")
    assert check(Request("GET", target)).cancels is None


@pytest.mark.parametrize(
    "target",
    ["/predictions/%00", "/predictions/..%2Fx/cancel", "/%70redictions/%2e", "/trainings/%20"],
)
def test_a_bad_id_in_the_path(target: str) -> None:
    for method in ("GET", "PUT", "POST"):
        with pytest.raises(Refusal):
            check(Request(method, target))


def test_a_prediction_without_an_id_gets_one() -> None:
    first, second = (check(Request("POST", "/predictions?a=b", body=b"{}")) for _ in range(2))
    assert first.prediction != second.prediction
    assert first == Passage("PUT", f"/predictions/{first.prediction}?a=b", first.prediction)


def test_a_prediction_with_an_id_keeps_it() -> None:
    request = Request("POST", "/predictions", body=b'{"id": "mine", "input": {}}')
    assert check(request) == Passage("POST", "/predictions", "mine")


def test_nulls_are_left_out() -> None:
    body = b'{"input": {"prompt": "Hi", "seed": null}, "webhook": null}'
    passed = check(Request("POST", "/predictions", body=body), inputs=["prompt", "messages"]).body
    assert passed is not None
    assert json.loads(passed) == {"input": {"prompt": "Hi"}, "webhook": None}
    assert check(Request("PUT", "/predictions/x", body=b'{"input": {"prompt": ""}}')).body is None


@pytest.mark.parametrize("body", ["", "{}", '{"input": null}', '{"input": {"prompt": null}}', "[]"])
def test_a_prediction_without_an_input_that_it_needs(body: str) -> None:
    for method, target in [("POST", "/predictions"), ("PUT", "/predictions/x")]:
        request = Request(method, target, body=body.encode())
        with pytest.raises(Refusal) as refusal:
            check(request, inputs=["prompt", "messages"])
        assert refusal.value.status == 422
        (problem,) = refusal.value.detail
        assert problem["loc"] == ["body", "input", "prompt"]
        assert problem["msg"] == "E1001 PromptRequired: prompt or messages is required"
        check(request)
    check(Request("POST", "/trainings", body=body.encode()), inputs=["prompt"])


def test_no_new_predictions_while_draining() -> None:
    for method, target in [("POST", "/predictions"), ("PUT", "/predictions/x")]:
        with pytest.raises(Refusal) as refusal:
            check(Request(method, target), draining=True)
        assert (refusal.value.status, refusal.value.retry_after) == (503, 5)
    check(Request("POST", "/predictions/x/cancel"), draining=True)


@pytest.mark.parametrize(
    ("body", "identifier"),
    [
        (b"", None),
        (b'{"input": {"id": "inner"}}', None),
        (b'{"id": "a/b"}', "a/b"),
        (b'{"\\u0069d": "x"}', "x"),
        (b'{"input": %s, "id": "x"}' % (b"9" * 300), "x"),
        (b'{"id": null}', None),
        (b'["id"]', None),
    ],
)
def test_the_id_in_a_body(body: bytes, identifier: str | None) -> None:
    assert fields_of(body).get("id") == identifier


@pytest.mark.parametrize("body", [b'{"id": ', b'"id"' + b"[" * 100_000, b'{"id": "\xff"}', b"x"])
def test_a_body_that_is_not_json(body: bytes) -> None:
    with pytest.raises(Refusal) as refusal:
        fields_of(body)
    assert refusal.value.status == 400
    assert len(refusal.value.detail) < 300


# How requests are read


@given(st.integers(1, 200), st.integers(1, 200))
def test_requests_cut_anywhere(first: int, second: int) -> None:
    data = (
        b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
        b"PUT /b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"3;e=1\r\nabc\r\n1\r\nd\r\n0\r\nTrailer: y\r\n\r\nGET /c HTTP/1.0\r\n\r\n"
    )
    one, two = sorted((first, second))
    requests = read(data[:one], data[one:two], data[two:])
    seen = [
        (r.method, r.target, r.body, r.version, r.keep_alive)
        for r in requests
        if isinstance(r, Request)
    ]
    assert seen == [
        ("POST", "/a", b"{}", "1.1", True),
        ("PUT", "/b", b"abcd", "1.1", True),
        ("GET", "/c", b"", "1.0", False),
    ]


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nContent-Length: +1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", 501),
        (b"GET http://a/predictions/x HTTP/1.1\r\n\r\n", 400),
        (b"CONNECT a:1 HTTP/1.1\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\n", 400),
        (b"\x16\x03\x01", 400),
        (b"GET /" + b"a" * 2000, 431),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 2000, 431),
        (b"POST / HTTP/1.1\r\nContent-Length: 101\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n65\r\n" + b"a" * 101, 413),
    ],
)
def test_what_is_refused_ends_the_connection(head: bytes, status: int) -> None:
    good = b"GET /good HTTP/1.1\r\n\r\n"
    before, refusal = read(good + head, good)
    assert isinstance(before, Request)
    assert isinstance(refusal, Refusal)
    assert refusal.status in (status, 501)


def test_a_request_to_change_the_protocol_is_answered_in_this_one() -> None:
    head = b"POST /%d HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 2\r\n\r\n"
    data = b"".join(head % i + b"{}" for i in range(2000)) + b"GET / HTTP/1.1\r\n\r\n"
    requests = read(data[:150], data[150:])
    assert len(requests) == 2001
    for request in requests[:-1]:
        assert isinstance(request, Request)
        assert (request.body, request.keep_alive) == (b"{}", True)


def test_what_cog_is_sent() -> None:
    request = Request(
        "POST",
        "/predictions",
        headers=(
            (b"host", b"a"),
            (b"transfer-encoding", b"chunked"),
            (b"connection", b"close"),
            (b"expect", b"100-continue"),
            (b"prefer", b"respond-async"),
        ),
        body=b"{}",
    )
    assert for_cog(request, Passage("PUT", "/predictions/x", "x")) == (
        b"PUT /predictions/x HTTP/1.1\r\nhost: a\r\nprefer: respond-async\r\ncontent-length: 2\r\n\r\n{}"
    )


@pytest.mark.parametrize(
    ("lines", "method", "closes", "reusable"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2", "GET", False, True),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked", "GET", False, True),
        (b"HTTP/1.1 200 OK", "GET", True, False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2", "HEAD", False, False),
        (b"HTTP/1.1 204 No Content", "GET", False, False),
    ],
)
def test_the_head_of_a_response(lines: bytes, method: str, closes: bool, reusable: bool) -> None:
    head = response_head(lines, method, close=False)
    assert head.raw == lines + (b"\r\nconnection: close" if closes else b"") + b"\r\n\r\n"
    assert (head.closes, head.reusable) == (closes, reusable)


def test_a_connection_that_cog_closes_is_not_kept() -> None:
    head = response_head(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0", "GET", False)
    assert (b"close" in head.raw, head.reusable) == (False, False)


def test_the_end_of_a_stream_of_events() -> None:
    end = ResponseEnd("POST")
    end.feed(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    for part, between in [(b"b\r\ndata: 0\r\n", False), (b"\n\n\r\n", True), (b"0\r\n", False)]:
        end.feed(part)
        assert (end.whole, end.between_events) == (False, between)
    end.feed(b"\r\n")
    assert end.whole


# What the health routes say


def test_busy_since_when() -> None:
    assert health.busy_since("READY", 50.0, 10.0, 0.0) is None
    assert health.busy_since("BUSY", 50.0, None, 10.0) == 50.0
    assert health.busy_since("BUSY", 60.0, 50.0, 10.0) == 50.0
    assert health.busy_since("BUSY", 70.0, 50.0, 65.0) == 65.0, "something came of it"


@pytest.mark.parametrize(
    ("status", "busy_for", "draining", "code"),
    [
        ("READY", 0.0, False, 200),
        ("BUSY", 10.0, False, 200),
        ("BUSY", 10.1, False, 503),
        ("READY", 0.0, True, 503),
        ("STARTING", 0.0, False, 503),
        ("UNHEALTHY", 0.0, False, 503),
        ("SETUP_FAILED", 0.0, False, 503),
        (None, 0.0, False, 503),
    ],
)
def test_ready(status: str | None, busy_for: float, draining: bool, code: int) -> None:
    found, body = health.ready(status, busy_for, 10.0, draining)
    assert found == code
    assert body["status"] == (status or "UNKNOWN")
    assert ("detail" in body) == (code == 503)


@pytest.mark.parametrize(
    ("status", "ended", "draining", "code"),
    [
        ("READY", False, False, 200),
        ("UNHEALTHY", False, False, 200),
        ("READY", True, False, 503),
        ("DEFUNCT", False, False, 503),
        (None, False, False, 503),
        (None, False, True, 200),
    ],
)
def test_live(status: str | None, ended: bool, draining: bool, code: int) -> None:
    assert health.live(status, ended, draining)[0] == code


# The predictions that run, and what they leave


class Running(Predictions):
    """Notes the messages to the predictor."""

    def __init__(self, base: Path) -> None:
        self.sent: list[tuple[str, ...]] = []
        self.base = base / "predictions"
        super().__init__(lambda *words: self.sent.append(words), self.base)

    def directory_of(self, identifier: str) -> Path:
        path = self.base / identifier
        (path / "outputs").mkdir(parents=True)
        return path


@pytest.fixture
def predictions(tmp_path: Path) -> Running:
    return Running(tmp_path)


@pytest.mark.parametrize(
    ("status", "after", "file", "stays"),
    [
        (200, 1.0, True, False),
        (None, 1.0, False, True),
        (None, UNSEEN_SECONDS, True, False),
        (202, UNSEEN_SECONDS - 1, False, True),
        (202, UNSEEN_SECONDS + 1, False, False),
        (202, UNSEEN_SECONDS + 1, True, True),
        (202, math.inf, True, False),
    ],
)
def test_a_directory_goes_when_its_prediction_has_ended(
    predictions: Running,
    monkeypatch: pytest.MonkeyPatch,
    status: int | None,
    after: float,
    file: bool,
    stays: bool,
) -> None:
    """Here the predictor says nothing."""
    monkeypatch.setattr("time.monotonic", lambda: 0.0)
    path = predictions.directory_of("x")
    if file:
        (path / "outputs" / "file").touch()
    predictions.begin("x")
    predictions.end("x", status)
    predictions.sweep(after)
    assert path.exists() == stays


@pytest.mark.parametrize("over_first", [True, False])
def test_an_asynchronous_prediction_runs_until_the_predictor_says_that_it_has_ended(
    predictions: Running, over_first: bool
) -> None:
    predictions.listening = True
    path = predictions.directory_of("x")
    (path / "outputs" / "file").touch()
    predictions.begin("x")
    if over_first:
        predictions.over("x")
    predictions.end("x", 202)
    assert predictions.background == (set() if over_first else {"x"})
    predictions.sweep(math.inf)
    assert path.exists() == (not over_first)
    predictions.over("x")
    predictions.sweep(math.inf)
    assert not path.exists()


def test_a_directory_stays_while_another_request_uses_it(predictions: Running) -> None:
    path = predictions.directory_of("x")
    predictions.begin("x")
    predictions.begin("x")
    predictions.end("x", 200)
    predictions.sweep(math.inf)
    assert path.exists()
    predictions.end("x", 200)
    predictions.sweep(math.inf)
    assert not path.exists()


def test_others_directories_stay(predictions: Running) -> None:
    path = predictions.directory_of("y")
    predictions.sweep_abandoned()
    predictions.remove_all()
    assert path.exists()


def test_what_a_killed_server_leaves_is_removed_by_the_next(tmp_path: Path) -> None:
    code = """
        import os, signal, sys
        from pathlib import Path
        from cog_triton.faces.front.predictions import Predictions
        predictions = Predictions(print, Path(sys.argv[1], "predictions"))
        for name in ("x", "../y"):
            predictions.begin(name)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    running, other = Running(tmp_path), Running(tmp_path)
    other.begin("other")
    left, others = running.directory_of("x"), other.directory_of("other")
    (tmp_path / "y").mkdir()
    running.sweep_abandoned()
    assert (left.exists(), others.exists(), (tmp_path / "y").exists()) == (False, True, True)
    running.remove_all()
    other.end("other", 200)
    other.remove_all()
    assert not list(tmp_path.glob("*.ids"))
    assert not others.exists()


def test_the_list_of_ids_stays_short(predictions: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Journal, "_LONG", 100)
    for i in range(50):
        predictions.begin(f"x{i}")
        predictions.end(f"x{i}", 200)
    predictions.begin("runs")
    predictions.sweep(math.inf)
    (file,) = predictions.base.parent.glob("*.ids")
    assert file.read_text() == "runs\n"


def test_cancels_reach_a_predictor_that_listens(predictions: Running) -> None:
    predictions.begin("x")
    assert not predictions.cancel("x"), "only Cog's server can"
    predictions.listening = True
    assert not predictions.cancel("y"), "there is no such prediction"
    assert predictions.cancel("x")
    assert predictions.cancel("x")
    predictions.end("x", 200)
    predictions.begin("x")
    predictions.end("x", 200)
    assert predictions.sent == [("cancel", "x"), ("cancel", "x"), ("forget", "x")]


# A client's connection


class Transport(asyncio.Transport):
    """What is written to it, and whether it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.reading = True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


def connected() -> tuple[Client, Transport]:
    front = SimpleNamespace(
        limits=Limits(), draining=False, inputs=[], clients=set(), upstreams=set()
    )
    client, transport = Client(cast(Front, front)), Transport()
    client.connection_made(transport)
    return client, transport


BAD = b"PUT /predictions/%00 HTTP/1.1\r\n\r\n"


def test_nothing_is_answered_to_a_client_that_does_not_read() -> None:
    client, transport = connected()
    client.data_received(BAD)
    client.pause_writing()
    client.data_received(BAD * 20)
    assert transport.written.count(b"HTTP/1.1 422 ") == 1
    assert not transport.reading
    client.resume_writing()
    assert transport.written.count(b"HTTP/1.1 422 ") == 21
    assert transport.reading


def test_large_bodies_that_wait_end_the_reading() -> None:
    client, transport = connected()
    client.pause_writing()
    client.data_received(b"POST / HTTP/1.1\r\nContent-Length: 100000\r\n\r\n" + b"x" * 100_000)
    assert not transport.reading
