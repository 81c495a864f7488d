"""The front before Cog's real server, and the faults of that server without it (docs/cog.md)."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from cog_triton.faces.cog import predictions
from tests.support import ROOT, QuietHandler, free_port, http_server, wait_until

SLOTS = 4
SCHEMA = {
    "openapi": "3.0.2",
    "info": {"title": "Cog", "version": "0.1.0"},
    "paths": {"/predictions": {"post": {"x-cog-streaming": True}}},
    "components": {
        "schemas": {
            "Input": {
                "type": "object",
                "properties": {
                    "chunks": {"type": "integer", "default": 3},
                    "ms": {"type": "number", "default": 1.0},
                    "size": {"type": "integer", "default": 10},
                    "wait_s": {"type": "number", "default": 0.0},
                },
            },
            "Output": {
                "type": "array",
                "items": {"type": "string"},
                "x-cog-array-type": "iterator",
            },
        }
    },
}
JSON = {"Content-Type": "application/json"}
EVENTS = {**JSON, "Accept": "text/event-stream"}


class Server:
    """Cog's server in a directory of its own."""

    def __init__(self, directory: Path, module: str, **environment: str) -> None:
        self.directory, self.port, self.log = directory, free_port(), directory / "log"
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(base_url=self.url, trust_env=False, timeout=30)
        shutil.copy(ROOT / "tests/fakes/streaming_predictor.py", directory / "predict.py")
        (directory / ".cog").mkdir()
        (directory / ".cog" / "openapi_schema.json").write_text(json.dumps(SCHEMA))
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, "--host", "127.0.0.1"],
                cwd=directory,
                env={
                    **os.environ,
                    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                    "PORT": str(self.port),
                    "COG_PREDICT_TYPE_STUB": "predict.py:Predictor",
                    "COG_MAX_CONCURRENCY": str(SLOTS),
                    "TOKIO_WORKER_THREADS": "1",
                    **environment,
                },
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def status(self) -> str | None:
        try:
            return str(self.client.get("/health-check").json()["status"])
        except httpx.TransportError:
            return None

    def predict(self, **inputs: Any) -> httpx.Response:
        return self.client.post("/predictions", json={"input": inputs})

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def start_stream(self, path: str = "/predictions", **inputs: Any) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        method = "POST" if path == "/predictions" else "PUT"
        connection.request(method, path, json.dumps({"input": inputs}), EVENTS)
        return connection.getresponse()

    def end(self) -> None:
        """By SIGTERM, and by SIGKILL if that is of no use, as without the front while slots are lost."""
        self.process.terminate()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def free_slots(self) -> bool:
        """Whether all slots are free: that many predictions at once have one."""
        with ThreadPoolExecutor(SLOTS) as pool:
            replies = list(pool.map(lambda _: self.predict(wait_s=0.05), range(SLOTS)))
        return all(reply.status_code == 200 for reply in replies)


@contextmanager
def serving(
    directory: Path, module: str = "cog_triton.faces.cog.server", **environment: str
) -> Iterator[Server]:
    server = Server(directory, module, **environment)
    try:
        wait_until(lambda: server.status() == "READY", 60, "the start")
        yield server
    finally:
        server.client.close()
        server.end()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("front"), MAX_REQUEST_BYTES="100000") as running:
        yield running


# The faults of Cog's server. When one is mended, a test fails here, and a part of the front can go.


def test_without_the_front_bad_ids_take_slots_for_good(tmp_path: Path) -> None:
    with serving(tmp_path, "cog.server.http") as bare:
        for _ in range(SLOTS):
            bare.client.put("/predictions/%00", json={"input": {}})
        assert bare.status() == "BUSY"
        assert bare.predict().status_code == 409


def test_without_the_front_an_id_makes_directories_anywhere(tmp_path: Path) -> None:
    with serving(tmp_path, "cog.server.http") as bare:
        name = f"../../..{tmp_path}/anywhere"
        reply = bare.client.post("/predictions", json={"id": name, "input": {}})
        assert reply.status_code == 200
        assert (tmp_path / "anywhere").is_dir()
        body = json.dumps({"input": {}, "x": "x" * (20 << 20)})
        assert bare.client.post("/predictions", content=body, headers=JSON).status_code == 200
        left = predictions.DIRECTORY / bare.predict().json()["id"]
        assert left.is_dir()
        shutil.rmtree(left)


# What the front does about them


@pytest.mark.parametrize("identifier", ["%00", "a" * 129, "..%2fx", "%2e%2e", ".x", "a%20b", "%ff"])
def test_a_bad_id_in_the_path_never_reaches_cog(server: Server, identifier: str) -> None:
    path = f"/predictions/{identifier}"
    for method, target in [("PUT", path), ("POST", f"{path}/cancel")]:
        for _ in range(SLOTS):
            reply = server.client.request(method, target, json={"input": {}})
            assert reply.status_code == 422
            assert reply.json()["detail"][0]["loc"] == ["path", "prediction_id"]
    assert server.free_slots()


@pytest.mark.parametrize(
    "body", ['{"id": "../x"}', '{"i\\u0064": "a/b", "input": {}}', '{"id":""}']
)
def test_a_bad_id_in_the_body_never_reaches_cog(server: Server, body: str) -> None:
    for path in ("/predictions", "/trainings"):
        reply = server.client.post(path, content=body, headers=JSON)
        assert reply.status_code == 422
        assert reply.json()["detail"][0]["loc"] == ["body", "id"]


def test_the_ids_of_clients_and_of_the_front(server: Server) -> None:
    body = {"id": "gm3qorzdhgbfurvjtvhg6dckhu", "input": {}}
    assert server.client.post("/predictions", json=body).json()["id"] == body["id"]
    path = "/predictions/My_id.2-x"
    assert server.client.put(path, json={"input": {}}).json()["id"] == "My_id.2-x"
    drawn = server.predict().json()
    assert drawn["status"] == "succeeded"
    assert len(drawn["id"]) == 32
    assert "".join(drawn["output"]) == "".join(f"{i} xxxxxxxxxx" for i in range(3))


def test_no_directory_stays(server: Server) -> None:
    names = [server.predict().json()["id"] for _ in range(20)]
    assert len(set(names)) == 20
    left = [predictions.DIRECTORY / name for name in names]
    wait_until(lambda: not any(path.exists() for path in left), 30, "the sweep")


def test_a_body_beyond_the_limit(server: Server) -> None:
    reply = server.client.post("/predictions", content=b"x" * 100_001, headers=JSON)
    assert (reply.status_code, reply.headers["connection"]) == (413, "close")
    assert reply.json() == {"detail": "the body is over 100000 bytes"}

    def pieces() -> Iterator[bytes]:  # no length is announced
        for _ in range(11):
            yield b"x" * 10_000

    assert server.client.post("/predictions", content=pieces(), headers=JSON).status_code == 413
    assert server.client.post("/predictions", content=b" " * 99_990 + b"{}").status_code != 413


def exchange(server: Server, data: bytes, *, half_close: bool = False) -> bytes:
    """All that comes back until the server closes the connection."""
    with closing(server.connect()) as connection:
        connection.sendall(data)
        if half_close:
            connection.shutdown(socket.SHUT_WR)
        reply = b""
        while part := connection.recv(1 << 16):
            reply += part
        return reply


def request(method: str, path: str, body: str = "", *headers: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: cog", *headers, f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "Content-Type: application/json", "", body]).encode()


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("Content-Length: 2\r\nTransfer-Encoding: chunked", 400),
        ("Content-Length: 2\r\nContent-Length: 3", 400),
        ("Transfer-Encoding: chunked\r\nTransfer-Encoding: identity", 400),
        ("Transfer-Encoding: gzip, chunked", 501),
        ("Transfer-Encoding : chunked", 400),
        ("X: a\r\n b", 400),
        ("X: " + "x" * 40_000, 431),
        ("Transfer-Encoding: chunked\r\n\r\n0\r\nX: " + "x" * 300_000, 431),
    ],
)
def test_heads_that_two_servers_could_read_differently(
    server: Server, head: str, status: int
) -> None:
    smuggled = request("PUT", "/predictions/%00", "{}")
    reply = exchange(
        server, f"POST /predictions HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n".encode() + smuggled
    )
    assert reply.startswith(b"HTTP/1.1 %d " % status)
    assert reply.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("path", ["/predictions#", "/predictions#/x", "/trainings#?"])
def test_a_path_that_cog_would_cut_short(server: Server, path: str) -> None:
    body = json.dumps({"id": f"../../..{server.directory}/anywhere", "input": {}})
    reply = exchange(server, request("POST", path, body))
    assert reply.startswith(b"HTTP/1.1 400 ")
    assert not (server.directory / "anywhere").exists()


def test_many_pipelined_requests_that_are_refused(server: Server) -> None:
    """They are answered one after another, not one within another."""
    last = request("GET", "/health/live", "", "Connection: close")
    reply = exchange(server, request("PUT", "/predictions/%00", "{}") * 2000 + last)
    assert reply.count(b"HTTP/1.1 422 ") == 2000
    assert reply.endswith(b'{"status": "READY"}')
    assert "Traceback" not in server.log.read_text()


def test_a_client_that_sends_no_more_gets_what_is_no_prediction(server: Server) -> None:
    for path, text in [("/health/live", b"READY"), ("/health-check", b"setup"), ("/x", b"404")]:
        assert text in exchange(server, request("GET", path), half_close=True)
    twice = exchange(server, request("GET", "/health-check") * 2, half_close=True)
    assert twice.count(b"HTTP/1.1 200 OK") == 2
    # Short: Cog may lose a cancel that comes as the prediction begins (docs/cog.md).
    waiting = request("POST", "/predictions", '{"input": {"wait_s": 5}}')
    assert exchange(server, waiting, half_close=True) == b""
    wait_until(server.free_slots, 60, "the cancel, or the end")


@pytest.mark.parametrize("path", ["/health/live", "/health-check"])
def test_http_1_0_gets_an_answer_that_ends_with_the_connection(server: Server, path: str) -> None:
    head = f"GET {path} HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"
    reply = exchange(server, head.encode())
    assert b" 200 OK\r\n" in reply
    assert b"connection: close\r\n" in reply


@pytest.mark.parametrize("version", ["0.9", "2.0"])
def test_a_version_of_http_that_is_not_spoken(server: Server, version: str) -> None:
    reply = exchange(server, f"GET /health/live HTTP/{version}\r\n\r\n".encode())
    assert reply.startswith(b"HTTP/1.1 505 ")


def test_each_pipelined_request_is_checked_and_answered_in_order(server: Server) -> None:
    reply = exchange(
        server,
        request("PUT", "/predictions/first", '{"input": {"wait_s": 0.1}}')
        + request("PUT", "/predictions/%00", '{"input": {}}')
        + request("PUT", "/predictions/second", '{"input": {}}', "Accept: text/event-stream")
        + request("GET", "/health/live", "", "Connection: close"),
    )
    wanted = [b'"id":"first"', b"HTTP/1.1 422 ", b'"id":"second"', b"event: completed", b"READY"]
    places = [reply.index(text) for text in wanted]
    assert places == sorted(places)
    assert reply.count(b"HTTP/1.1 ") == 4


def test_a_connection_is_kept_alive(server: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.connect()
    first = connection.sock
    for accept in (JSON, EVENTS) * 3:
        connection.request("POST", "/predictions", '{"input": {}}', accept)
        assert b"succeeded" in connection.getresponse().read()
    connection.request("PUT", "/predictions/%00", "{}", JSON)
    assert connection.getresponse().read().startswith(b'{"detail"')
    connection.request("HEAD", "/health/ready")
    assert connection.getresponse().read() == b""
    assert connection.sock is first
    connection.close()


def test_a_client_that_waits_to_be_told_to_send_its_body(server: Server) -> None:
    with closing(server.connect()) as connection:
        head, _, body = request("PUT", "/predictions/x", '{"input": {}}').partition(b"\r\n\r\n")
        connection.sendall(head + b"\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n")
        assert connection.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert connection.makefile("rb").read().startswith(b"HTTP/1.1 200 OK")


def test_events_come_one_by_one(server: Server) -> None:
    """The first is there while the prediction still waits for the clients of the others."""
    with closing(server.start_stream(chunks=400, ms=20)) as reply:
        assert reply.headers["Content-Type"] == "text/event-stream"
        began = time.monotonic()
        while b"output" not in (line := reply.readline()):
            assert line
        assert time.monotonic() - began < 4, "half of what the whole stream takes"
    wait_until(server.free_slots, 60, "its end")  # this predictor takes no notice of a cancel


def test_a_client_that_reads_slowly_holds_up_its_own_stream_alone(server: Server) -> None:
    slow = server.start_stream(chunks=400, ms=0, size=50_000)
    assert server.predict().json()["status"] == "succeeded"
    text = slow.read().decode()
    assert text.count("event: output") == 400
    assert text.rstrip().splitlines()[-1].endswith('"status":"succeeded"}')


def test_a_client_that_disconnects_cancels_its_prediction(server: Server) -> None:
    begun, cancelled = server.directory / "begun", server.directory / "cancelled"
    for file in (begun, cancelled):
        file.unlink(missing_ok=True)
    with closing(server.connect()) as connection:
        connection.sendall(request("POST", "/predictions", '{"input": {"wait_s": 3600}}'))
        wait_until(begun.exists, 10, "the start")  # before it, a cancel may be lost: docs/cog.md
    wait_until(cancelled.exists, 10, "the cancel")


def test_webhooks_and_asynchronous_predictions(server: Server) -> None:
    came: list[dict[str, Any]] = []

    class Hook(QuietHandler):
        def do_POST(self) -> None:
            came.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

    with http_server(Hook) as url:
        body = {"input": {}, "webhook": url, "webhook_events_filter": ["completed"]}
        headers = {"Prefer": "respond-async"}
        reply = server.client.post("/predictions", json=body, headers=headers)
        assert (reply.status_code, reply.json()["status"]) == (202, "starting")
        (done,) = wait_until(lambda: list(came), 10, "the webhook")
    assert (done["id"], done["status"]) == (reply.json()["id"], "succeeded")


def test_what_is_no_prediction_passes_unchanged(server: Server) -> None:
    assert server.client.get("/health-check").json()["setup"]["status"] == "succeeded"
    assert server.client.get("/openapi.json").json()["paths"] == SCHEMA["paths"]
    assert server.client.get("/nowhere").status_code == 404
    assert server.client.get("/predictions/x").status_code == 405


def test_ready_and_live(server: Server) -> None:
    for path in ("/health/ready", "/health/live"):
        reply = server.client.get(path)
        assert (reply.status_code, reply.json()) == (200, {"status": "READY"})


def test_busy_for_too_long_is_not_ready(tmp_path: Path) -> None:
    with serving(tmp_path, BUSY_TIMEOUT="1") as server, ThreadPoolExecutor(SLOTS) as pool:
        for _ in range(SLOTS):
            pool.submit(server.predict, wait_s=8)
        wait_until(lambda: server.status() == "BUSY", 10, "all slots taken")
        ready = server.client.get("/health/ready")
        assert (ready.status_code, ready.json()) == (200, {"status": "BUSY"})

        def refused() -> dict[str, Any] | None:
            reply = server.client.get("/health/ready")
            return None if reply.status_code == 200 else reply.json()

        said = wait_until(refused, 7, "the refusal")
        assert said["status"] == "BUSY"
        assert "nothing comes of it" in said["detail"]
        assert server.client.get("/health/live").status_code == 200
        wait_until(lambda: refused() is None, 30, "the end of the predictions")


def test_a_request_that_comes_too_slowly(tmp_path: Path) -> None:
    with serving(tmp_path, RECEIVE_TIMEOUT="0.5") as server:
        for part in (b"GET / HTTP/1.1\r\nX: ", request("POST", "/predictions", "{}")[:-1]):
            reply = exchange(server, part)
            assert reply.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
            assert b'"the request did not come within 0.5 s"' in reply
        with closing(server.connect()) as late:
            whole = request("PUT", "/predictions/late", '{"input": {}}')
            late.sendall(whole[:-1])
            assert late.recv(1 << 16).startswith(b"HTTP/1.1 408 ")
            late.sendall(whole[-1:])
            assert late.recv(1 << 16) == b""
        # One that is being answered has all the time it takes, and those behind it wait their turn.
        slow = request("POST", "/predictions", '{"input": {"wait_s": 2.5}}')
        reply = exchange(server, slow + request("GET", "/health/live", "", "Connection: close"))
        assert reply.count(b"HTTP/1.1 200 OK") == 2
        assert '"prediction_id":"late"' not in server.log.read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_server_ends_at_once(tmp_path: Path, number: signal.Signals) -> None:
    with serving(tmp_path) as server, closing(server.connect()) as idle:
        server.process.send_signal(number)
        assert server.process.wait(timeout=20) == 0
        assert idle.recv(1) == b""


def test_an_address_that_is_taken(server: Server, tmp_path: Path) -> None:
    other = Server(tmp_path, "cog_triton.faces.cog.server", PORT=str(server.port))
    other.client.close()
    assert other.process.wait(timeout=30) == 1
    assert f"port {server.port}: Address already in use" in other.log.read_text()


def test_two_that_start_at_once_at_one_address(tmp_path: Path) -> None:
    """Both can bind; only one can listen, and the other must not stay behind a port that it lacks."""
    port = str(free_port())
    servers = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        servers.append(Server(tmp_path / name, "cog_triton.faces.cog.server", PORT=port))
    try:
        ended = wait_until(
            lambda: [server for server in servers if server.process.poll() is not None],
            60,
            "an end",
        )
        assert [server.process.returncode for server in ended] == [1]
        assert f"port {port}: Address already in use" in ended[0].log.read_text()
    finally:
        for server in servers:
            server.client.close()
            server.end()


def test_sigterm_lets_predictions_end_and_takes_no_new_ones(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        running = server.start_stream(chunks=100, ms=20)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.client.get("/health/ready").status_code == 503, 10, "the change")
        assert server.client.get("/health/live").status_code == 200
        refused = server.predict()
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert "stopping" in refused.json()["detail"]
        assert server.client.post("/predictions/nothing/cancel").status_code == 404
        text = running.read().decode()
        assert text.count("event: output") == 100
        assert '"status":"succeeded"' in text
        assert server.process.wait(timeout=30) == 0


def test_what_is_left_after_the_bound_ends_with_an_error(tmp_path: Path) -> None:
    with serving(tmp_path, DRAIN_SECONDS="0.5") as server, ThreadPoolExecutor() as pool:
        stream = server.start_stream("/predictions/left", chunks=100_000, ms=20)
        waiting = pool.submit(server.predict, wait_s=3600)
        wait_until(lambda: "Starting prediction" in server.log.read_text(), 10, "the start")
        while b"event: output" not in stream.readline():
            pass
        server.process.send_signal(signal.SIGTERM)
        assert b'event: error\ndata: {"error": "E2105 ' in stream.read()
        reply = waiting.result()
        assert (reply.status_code, reply.json()["detail"][:5]) == (503, "E2105")
        assert server.process.wait(timeout=30) == 0
    assert "2 predictions did not end in 0.5 s: stopped at once" in server.log.read_text()
    assert not (predictions.DIRECTORY / "left").exists()


def test_the_worker_does_not_ignore_sigterm(server: Server) -> None:
    """Cog's server is told to leave SIGTERM alone, which a child would inherit."""
    children = Path(f"/proc/{server.process.pid}/task").glob("*/children")
    (worker,) = [int(pid) for file in children for pid in file.read_text().split()]
    status = Path(f"/proc/{worker}/status").read_text()
    for field in ("SigBlk", "SigIgn"):
        mask = int(status.partition(f"{field}:")[2].split()[0], 16)
        assert not mask & 1 << signal.SIGTERM - 1
