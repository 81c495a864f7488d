"""The front before Cog's real server, and the faults of that server without it."""

import http.client
import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import psutil  # type: ignore[import-untyped, unused-ignore]
import pytest

from cog_triton.api.cog import predictions
from cog_triton.api.cog.prediction_files import DIRECTORY
from tests.support import (
    ROOT,
    CogServer,
    QuietHandler,
    children,
    chunks,
    free_port,
    http_server,
    limit,
    wait_until,
)

SLOTS = 4
FAKE = ROOT / "tests" / "fakes" / "streaming_predictor.py"
JSON = {"Content-Type": "application/json"}
EVENTS = {**JSON, "Accept": "text/event-stream"}


class Server(CogServer):
    """Cog's server with the fake predictor, in a directory of its own."""

    def __init__(
        self, directory: Path, module: str = "cog_triton.api.cog.server", **environment: str
    ) -> None:
        shutil.copy(FAKE, directory / "predict.py")
        (directory / ".cog").mkdir()
        shutil.copy(FAKE.with_suffix(".json"), directory / ".cog" / "openapi_schema.json")
        given = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "COG_PREDICT_TYPE_STUB": "predict.py:Predictor",
            "COG_MAX_CONCURRENCY": str(SLOTS),
            "TOKIO_WORKER_THREADS": "1",
            **environment,
        }
        super().__init__(given, directory / "log")
        self.command = [sys.executable, "-m", module, "--host", "127.0.0.1"]
        self.directory = directory
        self.client = httpx.Client(base_url=self.url, trust_env=False, timeout=limit(30))

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.stop()

    def status(self) -> str:
        return str(self.client.get("/health-check").json()["status"])

    def ask(self, **inputs: Any) -> httpx.Response:
        return self.client.post("/predictions", json={"input": inputs})

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=limit(30))

    def starts(self) -> int:
        """How many predictions have started."""
        return self.log.read_text().count("Starting prediction")

    def has_free_slots(self) -> bool:
        """Whether all slots are free: that many predictions run at the same time."""
        before = self.starts()
        end = self.directory / uuid4().hex
        with ThreadPoolExecutor(SLOTS) as pool:
            asked = [pool.submit(self.ask, until=str(end)) for _ in range(SLOTS)]

            def all_run_or_one_is_refused() -> bool:
                return self.starts() - before == SLOTS or any(reply.done() for reply in asked)

            wait_until(all_run_or_one_is_refused, 60, "the predictions")
            end.touch()
        return all(reply.result().status_code == 200 for reply in asked)

    def wait_for_free_slots(self) -> None:
        """Waits until Cog's server has taken all slots back, which it may do after its answer."""
        wait_until(self.has_free_slots, 60, "the end of all predictions")


@contextmanager
def serving(directory: Path, *module: str, **environment: str) -> Iterator[Server]:
    with Server(directory, *module, **environment) as server:
        server.wait_until_ready()
        yield server


def receive_seconds() -> float:
    """RECEIVE_TIMEOUT: short, but a test that has to wait for the processor is no slow client."""
    return limit(2)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    environment = {
        "BUSY_TIMEOUT": "1",
        "RECEIVE_TIMEOUT": str(receive_seconds()),
        "WEBHOOK_AUTH_TOKEN": "of the operator",
    }
    with serving(tmp_path_factory.mktemp("front"), **environment) as running:
        yield running


@pytest.mark.parametrize("identifier", ["%00", "a" * 129, "..%2fx", "%2e%2e", "%ff"])
def test_a_bad_id_never_reaches_cog(server: Server, identifier: str) -> None:
    path = f"/predictions/{identifier}"
    for route in ("/predictions", "/trainings"):
        reply = server.client.post(route, json={"id": "../x", "input": {}})
        assert (reply.status_code, reply.json()["detail"][0]["loc"]) == (422, ["body", "id"])
    for method, target in [("PUT", path), ("POST", f"{path}/cancel")]:
        for _ in range(SLOTS):
            reply = server.client.request(method, target, json={"input": {}})
            assert reply.status_code == 422
            assert reply.json()["detail"][0]["loc"] == ["path", "prediction_id"]
    server.wait_for_free_slots()


def test_no_field_of_a_large_body_takes_a_slot_for_good(server: Server) -> None:
    """Cog's server cannot send its worker a message of 8 MB, and gives the slot up that was to take it."""
    body = {"input": {}, "context": {"a": "x" * 9_000_000}}
    for _ in range(SLOTS):
        reply = server.client.post("/predictions", json=body)
        assert (reply.status_code, reply.json()["status"]) == (200, "succeeded")
    server.wait_for_free_slots()


def test_the_ids_of_clients_and_of_the_front_and_that_no_directory_stays(server: Server) -> None:
    own = uuid4().hex[:26]  # as long as Replicate's; other tests' may be in the same directory
    first = server.client.post("/predictions", json={"id": own, "input": {}}).json()
    second = server.client.put(f"/predictions/My_id.2-{own}", json={"input": {}}).json()
    assert (first["id"], second["id"]) == (own, f"My_id.2-{own}")
    drawn = [server.ask().json() for _ in range(5)]
    assert "".join(drawn[0]["output"]) == "".join(f"{i} xxxxxxxxxx" for i in range(3))
    assert {len(reply["id"]) for reply in drawn} == {32}
    names = {reply["id"] for reply in [first, second, *drawn]}
    assert len(names) == 7
    left = [DIRECTORY / name for name in names]
    wait_until(lambda: not any(path.exists() for path in left), 60, "the sweep")


def exchange(server: Server, data: bytes, *, half_close: bool = False) -> bytes:
    """All that comes back until the server closes the connection."""
    with closing(server.connect()) as connection:
        connection.sendall(data)
        if half_close:
            connection.shutdown(socket.SHUT_WR)
        return connection.makefile("rb").read()


def request(method: str, path: str, body: str = "", *headers: str) -> bytes:
    lines = [
        f"{method} {path} HTTP/1.1",
        "Host: localhost",
        *headers,
        f"Content-Length: {len(body)}",
    ]
    return "\r\n".join([*lines, "Content-Type: application/json", "", body]).encode()


def test_many_pipelined_requests_are_answered_one_after_another(server: Server) -> None:
    """And not one within another."""
    last = request("GET", "/health/live", "", "Connection: close")
    reply = exchange(server, request("PUT", "/predictions/%00", "{}") * 2000 + last)
    assert reply.count(b"HTTP/1.1 422 ") == 2000
    assert reply.endswith(b'{"status":"READY"}')
    assert "Traceback" not in server.log.read_text()


def test_a_client_that_sends_no_more_gets_what_is_no_prediction(server: Server) -> None:
    for path, text in [("/health/live", b"READY"), ("/health-check", b"setup"), ("/x", b"404")]:
        assert text in exchange(server, request("GET", path), half_close=True)
    twice = exchange(server, request("GET", "/health-check") * 2, half_close=True)
    assert twice.count(b"HTTP/1.1 200 OK") == 2
    # Short: Cog may lose a cancel that comes as the prediction begins (tools/benchmark/notes.md).
    waiting = request("POST", "/predictions", '{"input": {"wait_s": 3}}')
    assert exchange(server, waiting, half_close=True) == b""
    server.wait_for_free_slots()  # after the cancel, or the end


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
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=limit(30))
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


def test_a_client_that_reads_slowly_holds_up_its_own_stream_alone(server: Server) -> None:
    body = {"input": {"chunks": 400, "ms": 0, "size": 50_000}}
    with server.client.stream("POST", "/predictions", json=body, headers=EVENTS) as slow:
        assert server.ask().json()["status"] == "succeeded"
        text = slow.read().decode()
    assert text.count("event: output") == 400
    assert text.rstrip().splitlines()[-1].endswith('"status":"succeeded"}')


def test_texts_come_past_cogs_server_to_each_of_its_clients(tmp_path: Path) -> None:
    name = uuid4().hex
    # Until then, the second client finds it running.
    end = tmp_path / "end"
    with (
        serving(tmp_path, COG_PREDICT_TYPE_STUB="predict.py:Listening") as server,
        # One for each turn of the predictor's loop: many in the time whose texts Cog gets as one.
        server.stream(name, chunks=50, ms=0, until=str(end)) as events,
        server.stream(name) as beside,
    ):
        end.touch()
        found = list(events)
        texts = chunks(iter(found))
        output = found[-1][1]["output"]
        assert "".join(texts) == "".join(output) == "".join(f"{i} xxxxxxxxxx" for i in range(50))
        assert "".join(chunks(beside)) == "".join(texts)
    assert len(texts) > 2 * len(output)


def test_webhooks_and_asynchronous_predictions(server: Server) -> None:
    """A webhook goes anywhere and follows a redirection, both with the operator's token."""
    came: list[tuple[str, str | None, dict[str, Any]]] = []

    class Hook(QuietHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            came.append((self.path, self.headers["Authorization"], body))
            self.send_response(307 if self.path == "/first" else 200)
            self.send_header("Location", "/second")
            self.end_headers()

    with http_server(Hook) as url:
        body = {"input": {}, "webhook": f"{url}/first", "webhook_events_filter": ["completed"]}
        reply = server.client.post("/predictions", json=body, headers={"Prefer": "respond-async"})
        assert (reply.status_code, reply.json()["status"]) == (202, "starting")
        wait_until(lambda: len(came) == 2, 60, "the webhook and where it is redirected to")
    (*first, _), (*second, done) = came
    token = "Bearer of the operator"
    assert (first, second) == (["/first", token], ["/second", token])
    assert (done["id"], done["status"]) == (reply.json()["id"], "succeeded")


def test_the_log_has_the_url_of_a_webhook_that_failed(server: Server) -> None:
    webhook = f"http://127.0.0.1:{free_port()}/{uuid4().hex}"
    body = {"input": {}, "webhook": webhook, "webhook_events_filter": ["completed"]}
    server.client.post("/predictions", json=body, headers={"Prefer": "respond-async"})
    wait_until(lambda: webhook in server.log.read_text(), 60, "the URL in the log")


def test_what_is_no_prediction_passes_unchanged(server: Server) -> None:
    assert server.client.get("/health-check").json()["setup"]["status"] == "succeeded"
    schema = json.loads(FAKE.with_suffix(".json").read_text())
    assert server.client.get("/openapi.json").json() == schema
    statuses = {"/health/ready": 200, "/health/live": 200, "/nowhere": 404, "/predictions/x": 405}
    for path, status in statuses.items():
        assert server.client.get(path).status_code == status
    for path in ("/health/live", "/health-check"):  # to HTTP 1.0, ended with the connection
        reply = exchange(server, f"GET {path} HTTP/1.0\r\nConnection: keep-alive\r\n\r\n".encode())
        assert b" 200 OK\r\n" in reply
        assert b"connection: close\r\n" in reply


def test_busy_for_too_long_is_not_ready(server: Server) -> None:
    def refused() -> dict[str, Any] | None:
        reply = server.client.get("/health/ready")
        said: dict[str, Any] = reply.json()
        return said if (reply.status_code, said["status"]) == (503, "BUSY") else None

    def is_ready() -> bool:
        return server.client.get("/health/ready").status_code == 200

    names = [f"busy-{uuid4().hex}" for _ in range(SLOTS)]
    body = {"input": {"wait_s": 3600}}  # until they are canceled
    with ThreadPoolExecutor(SLOTS) as pool:
        for name in names:
            pool.submit(server.client.put, f"/predictions/{name}", json=body, timeout=None)
        try:
            wait_until(lambda: server.status() == "BUSY", 60, "all slots taken")
            assert server.ask().status_code == 409
            said = wait_until(refused, 60, "the refusal")
            assert "without any progress" in said["detail"]
            assert server.client.get("/health/live").status_code == 200
        finally:
            for name in names:
                server.client.post(f"/predictions/{name}/cancel")
    wait_until(is_ready, 60, "the end of the predictions")


def test_an_answer_may_take_longer_than_a_request_may(server: Server) -> None:
    """Those behind it wait their turn; what comes too slowly is in test_limits.py."""
    body = {"input": {"wait_s": 1.25 * receive_seconds()}}
    slow = request("POST", "/predictions", json.dumps(body))
    reply = exchange(server, slow + request("GET", "/health/live", "", "Connection: close"))
    assert reply.count(b"HTTP/1.1 200 OK") == 2


def test_who_knows_an_id_sees_the_input_and_the_output(server: Server, tmp_path: Path) -> None:
    """As docs/operations.md tells it; where this fails, Cog has changed, and the page can be mended."""
    path = "/predictions/known"
    end = tmp_path / "end"
    inputs = {"chunks": 5, "until": str(end)}
    background = {"Prefer": "respond-async"}
    try:
        assert server.client.put(path, json={"input": inputs}, headers=background).is_success
        seen = server.client.put(path, json={"input": {}}).json()
        assert seen["input"].items() >= inputs.items()
        with server.client.stream("PUT", path, json={"input": {}}, headers=EVENTS) as stream:
            assert "event: output" in stream.iter_lines()
        assert server.client.post(f"{path}/cancel").status_code == 200
    finally:
        end.touch()
    server.wait_for_free_slots()


def test_nothing_but_the_front_reaches_cogs_server(server: Server) -> None:
    """Its port is found as a web page would find it, by trying all."""
    listening = [
        connection.laddr.port
        for connection in psutil.Process(server.process.pid).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    (inner_port,) = set(listening) - {server.port}
    for source in ("127.0.0.1", "127.0.0.2"):
        with pytest.raises(TimeoutError):
            socket.create_connection(("127.0.0.1", inner_port), 1, source_address=(source, 0))
    assert server.ask().status_code == 200


JSON_ROUTES = (
    *("/predictions", "/predictions/a/cancel", "/trainings", "/shutdown", "/v1/predictions"),
    *("/v1/models/a/b/predictions", "/v1/deployments/a/b/predictions", "/v1/predictions/a/cancel"),
)


@pytest.mark.parametrize("path", JSON_ROUTES)
def test_a_body_that_is_no_json_is_refused(server: Server, path: str) -> None:
    kinds = ("text/plain", "application/x-www-form-urlencoded", "application/json-seq", None)
    for kind in kinds:
        headers = {"Content-Type": kind} if kind else {}
        reply = server.client.post(path, content="{}", headers=headers)
        assert reply.status_code == 415, (kind, reply.text)
        assert "application/json" in reply.json()["detail"]


def test_another_sites_page_cannot_ask_for_leave(server: Server) -> None:
    asked = {"Origin": "http://example.com", "Access-Control-Request-Method": "POST"}
    reply = server.client.options("/predictions", headers=asked)
    assert reply.status_code == 405
    assert "access-control-allow-origin" not in reply.headers


def test_two_that_start_at_once_at_one_address(tmp_path: Path) -> None:
    """Both can bind; only one can listen, and the other must not stay behind a port that it lacks."""
    port = str(free_port())
    with ExitStack() as stack:
        servers = []
        for name in ("first", "second"):
            (tmp_path / name).mkdir()
            servers.append(stack.enter_context(Server(tmp_path / name, PORT=port)))

        def ended() -> list[Server]:
            return [server for server in servers if server.process.poll() is not None]

        (one,) = wait_until(ended, 60, "an end")
        assert one.process.returncode == 1
        assert f"port {port}: Address already in use" in one.log.read_text()


# The server, with as much time for a webhook as this machine needs for two more attempts.
PATIENT_SERVER = """
import runpy
from cog_triton.api.cog import predictions, server

predictions.WEBHOOK_SECONDS = {seconds}
server.prepare()
runpy.run_module("cog.server.http", run_name="__main__", alter_sys=True)
"""


def test_sigterm_lets_predictions_end_and_takes_no_new_ones(tmp_path: Path) -> None:
    """Nor is a webhook lost, of a prediction that nobody waits for, whose receiver is away at first."""
    came: list[str] = []

    class Hook(QuietHandler):
        def do_POST(self) -> None:
            came.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["status"])
            self.send_response(200 if len(came) > 2 else 503)
            self.end_headers()

    patient = PATIENT_SERVER.format(seconds=limit(predictions.WEBHOOK_SECONDS))
    (tmp_path / "patient_server.py").write_text(patient)
    environment = {"COG_PREDICT_TYPE_STUB": "predict.py:Listening", "DRAIN_SECONDS": "3600"}
    # Until then, both predictions run.
    end = tmp_path / "end"
    inputs: dict[str, Any] = {"chunks": 50, "until": str(end)}
    with (
        http_server(Hook) as url,
        serving(tmp_path, "patient_server", **environment) as server,
        closing(server.connect()) as idle,
        server.stream(**inputs) as running,
    ):
        body = {"input": inputs, "webhook": url, "webhook_events_filter": ["completed"]}
        server.client.post("/predictions", json=body, headers={"Prefer": "respond-async"})
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.client.get("/health/ready").status_code == 503, 60, "the change")
        assert server.client.get("/health/live").status_code == 200
        refused = server.ask()
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert "stopping" in refused.json()["detail"]
        assert server.client.post("/predictions/nothing/cancel").status_code == 404
        end.touch()
        events = list(running)
        assert events[-1][1]["status"] == "succeeded"
        assert "".join(chunks(iter(events))) == "".join(f"{i} xxxxxxxxxx" for i in range(50))
        assert server.process.wait(timeout=limit(60)) == 0
        assert idle.recv(1) == b""
    assert came == ["succeeded"] * 3


def test_what_is_left_after_the_bound_ends_with_an_error(tmp_path: Path) -> None:
    with (
        serving(tmp_path, DRAIN_SECONDS="0.5") as server,
        ThreadPoolExecutor() as pool,
        server.stream(name := uuid4().hex, chunks=100_000, ms=20) as stream,
    ):
        waiting = pool.submit(server.ask, wait_s=3600)
        wait_until(lambda: server.starts() == 2, 60, "the start of both")
        next(event for event in stream if event[0] == "output")
        page = {"Content-Type": "text/plain", "Origin": "http://example.com"}
        assert server.client.post("/shutdown", headers=page).status_code == 403
        # Any program that reaches the port may end the server.
        assert server.client.post("/shutdown").is_success
        kind, end = list(stream)[-1]
        assert (kind, end["error"][:5]) == ("error", "E2105")
        reply = waiting.result()
        assert (reply.status_code, reply.json()["detail"][:5]) == (503, "E2105")
        assert server.process.wait(timeout=limit(60)) == 0
    assert (
        "2 predictions did not finish within 0.5 s (DRAIN_SECONDS): stopping now"
        in server.log.read_text()
    )
    assert not (DIRECTORY / name).exists()


def test_the_worker_does_not_ignore_sigterm(server: Server) -> None:
    """Cog's server is told to leave SIGTERM alone, which a child would inherit."""
    (worker,) = children(server.process.pid)
    status = Path(f"/proc/{worker}/status").read_text()
    for field in ("SigBlk", "SigIgn"):
        assert not int(status.partition(f"{field}:")[2].split()[0], 16) & 1 << signal.SIGTERM - 1
