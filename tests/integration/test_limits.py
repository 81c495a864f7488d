"""The limits of requests on every port that this project opens, by the bytes of a connection."""

import gzip
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped, unused-ignore]
import pytest

from tests.integration.conftest import SharedTriton, attached
from tests.support import CogServer, fake_triton, free_port, limit

BODY_BYTES = 100_000
PORTS = ("front", "beside", "openai", "metrics")
LIMITS = {
    "MAX_REQUEST_BYTES": str(BODY_BYTES),
    "RECEIVE_TIMEOUT": "1",
    "DRAIN_SECONDS": "1",
}
MB = 1 << 20
LINES = b"X-A-Header: %s\r\n" % (b"x" * 100) * 1000


@dataclass(frozen=True)
class Port:
    number: int
    server: psutil.Process

    def memory(self) -> int:
        """Bytes of the processes that answer, and of those that they started."""
        family = [self.server, *self.server.children(recursive=True)]
        return sum(process.memory_info().rss for process in family)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.number), timeout=limit(60))


@pytest.fixture(scope="module")
def ports(
    demo_model: Path, paced_triton: SharedTriton, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Port]]:
    directory = tmp_path_factory.mktemp("limits")
    numbers = {name: free_port() for name in ("beside", "metrics")}
    environment = {
        **fake_triton(),
        **LIMITS,
        "MODEL": str(demo_model),
        "OPENAI_PORT": str(numbers["beside"]),
        "PREDICTOR_METRICS_PORT": str(numbers["metrics"]),
    }
    openai = attached(paced_triton, demo_model, directory / "openai", **LIMITS)
    with CogServer(environment, directory / "cog") as cog, openai as server:
        cog.wait_until_ready()
        numbers["front"] = cog.port
        ports = {
            name: Port(numbers[name], psutil.Process(cog.process.pid))
            for name in ("front", "beside", "metrics")
        }
        ports["openai"] = Port(server.port, psutil.Process(server.process.pid))
        yield ports


def answer(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    reply = b""
    try:
        while part := connection.recv(1 << 16):
            reply += part
    except ConnectionResetError:
        pass
    return reply


def status_of(reply: bytes) -> int:
    assert reply.startswith(b"HTTP/1.1 "), reply
    return int(reply[9:12])


def post(*lines: bytes, body: bytes = b"") -> bytes:
    head = (b"POST /v1/completions HTTP/1.1", b"Host: localhost", b"Content-Type: application/json")
    return b"\r\n".join((*head, *lines, b"", body))


CHUNKED = b"Transfer-Encoding: chunked"
REQUEST = json.dumps({"model": "demo", "prompt": "Hello", "input": {}}).encode()
LENGTH = b"Content-Length: %d" % len(REQUEST)
ZIPPED = gzip.compress(REQUEST)
REFUSED = [
    (b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\n\r\n", 431),
    (b"GET / HTTP/1.1\r\nX: " + b"a" * 40_000 + b"\r\n\r\n", 431),
    (b"GET / HTTP/1.1\r\n" + b"a:\r\n" * 10_000 + b"\r\n", 431),
    (post(CHUNKED, body=b"0\r\n" + LINES + b"\r\n\r\n"), 431),
    (post(b"Content-Length: %d" % (BODY_BYTES + 1)), 413),
    (post(CHUNKED, body=b"%x\r\n" % (BODY_BYTES + 1) + b" " * (BODY_BYTES + 1)), 413),
    (post(CHUNKED, body=b"5000\r\n%s\r\n" % (b" " * 0x5000) * 6), 413),
    (post(LENGTH, b"content-encoding: br", body=REQUEST), 415),
    (post(b"Content-Encoding: gzip", CHUNKED, body=b"0\r\n\r\n"), 415),
    (post(b"Content-Encoding: GZIP", b"Content-Length: %d" % len(ZIPPED), body=ZIPPED), 415),
    (post(b"Content-Length: 2", CHUNKED, body=b"{}" + REQUEST), 400),
    (post(b"Content-Length: 2", b"Content-Length: 3", body=b"{}"), 400),
    (post(b"Transfer-Encoding: chunked", b"Transfer-Encoding: identity"), 400),
    (post(b"Transfer-Encoding: gzip, chunked"), 501),
    (post(b"Transfer-Encoding : chunked"), 400),
    (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nX: a\r\n b\r\n\r\n", 400),
    (b"GET http://a/ HTTP/1.1\r\n\r\n", 400),
    (b"GET /#a HTTP/1.1\r\n\r\n", 400),
    (b"GET / HTTP/2.0\r\n\r\n", 505),
    (b"PRI * HTTP/2.0\r\n\r\n", 400),
    (b"\x16\x03\x01\x02\x00", 400),
]


@pytest.mark.parametrize("name", PORTS)
def test_what_is_refused_ends_the_connection(ports: dict[str, Port], name: str) -> None:
    with ExitStack() as stack:
        connections = [stack.enter_context(ports[name].connect()) for _ in REFUSED]
        for connection, (sent, _) in zip(connections, REFUSED, strict=True):
            connection.sendall(sent)
        replies = list(map(answer, connections))
    for (sent, status), reply in zip(REFUSED, replies, strict=True):
        if name == "metrics" and b"chunked\r\n\r\n" in sent:
            assert status_of(reply) in (status, 413), sent[:200]  # it takes no body
        else:
            assert status_of(reply) == status or sent.startswith(b"PRI"), (sent[:200], reply)
        assert reply.count(b"HTTP/1.1 ") == 1, sent[:200]
        head, _, body = reply.partition(b"\r\n\r\n")
        assert b"connection: close" in head.lower()
        assert ("detail" if name in ("front", "metrics") else "error") in json.loads(body)


FOREIGN = b"Origin: https://evil.example"
PAGE_REQUESTS = [
    (post(LENGTH, FOREIGN, body=REQUEST), 403),
    (post(CHUNKED, FOREIGN, body=b"0\r\n\r\n"), 403),
    (post(LENGTH, b"Origin: null", body=REQUEST), 403),
    (post(LENGTH, b"Origin: http://localhost:1", body=REQUEST), 403),
    (post(LENGTH, b"Sec-Fetch-Site: cross-site", body=REQUEST), 403),
    (post(LENGTH, b"Sec-Fetch-Site: same-site", body=REQUEST), 403),
    (b"POST /shutdown HTTP/1.1\r\nHost: localhost\r\n%s\r\n\r\n" % FOREIGN, 403),
    (b"DELETE /v1/files/x HTTP/1.1\r\nHost: localhost\r\n%s\r\n\r\n" % FOREIGN, 403),
    (b"GET /health HTTP/1.1\r\nHost: evil.example\r\n\r\n", 403),
    (b"OPTIONS /predictions HTTP/1.1\r\nHost: evil.example:5000\r\n\r\n", 403),
]


@pytest.mark.parametrize("name", PORTS)
def test_what_a_web_page_may_not_ask(ports: dict[str, Port], name: str) -> None:
    for sent, status in PAGE_REQUESTS:
        with ports[name].connect() as connection:
            connection.sendall(sent)
            reply = answer(connection)
        assert status_of(reply) == status, (sent, reply)
        assert b"access-control" not in reply.lower()
        error = json.loads(reply.partition(b"\r\n\r\n")[2])
        text = error["error"]["message"] if name in ("beside", "openai") else error["detail"]
        if b"Host: evil.example" in sent:
            assert "ALLOWED_HOSTS" in text
        elif name != "metrics":
            prefix = "COG" if name == "front" else "OPENAI"
            assert f"{prefix}_ALLOWED_ORIGINS" in text


def test_a_web_pages_refusal_has_the_form_of_anthropics_api(ports: dict[str, Port]) -> None:
    sent = post(LENGTH, FOREIGN, body=REQUEST).replace(b"/v1/completions", b"/v1/messages")
    with ports["beside"].connect() as connection:
        connection.sendall(sent)
        reply = answer(connection)
    error = json.loads(reply.partition(b"\r\n\r\n")[2])
    assert (error["type"], error["error"]["type"]) == ("error", "permission_error")


@pytest.mark.parametrize("name", PORTS)
def test_what_is_within_the_limits_is_answered(ports: dict[str, Port], name: str) -> None:
    """Several requests of a connection, the last of which is refused, in their order."""
    get = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 20_000 + b"\r\n\r\n"
    with ports[name].connect() as connection:
        connection.sendall(get + get + b"GET /#a HTTP/1.1\r\n\r\n")
        reply = answer(connection)
    statuses = [int(part[:3]) for part in reply.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [404 if name == "front" else 200] * 2 + [400]


@pytest.mark.parametrize("name", PORTS)
@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b"GET / HTTP/1.1\r\n", LINES),
        (b"GET / HTTP/1.1\r\nX: ", b"a" * len(LINES)),
        (b"GET /", b"a" * len(LINES)),
        (post(CHUNKED, body=b"1\r\n \r\n0\r\n"), LINES),
    ],
    ids=["headers", "header", "target", "trailers"],
)
def test_floods_are_dropped(ports: dict[str, Port], name: str, begin: bytes, piece: bytes) -> None:
    port = ports[name]
    before = port.memory()
    with ExitStack() as stack:
        for connection in [stack.enter_context(port.connect()) for _ in range(6)]:
            try:
                connection.sendall(begin)
                for _ in range(5 * MB // len(piece)):
                    connection.sendall(piece)
            except (BrokenPipeError, ConnectionResetError):
                pass
        assert port.memory() - before < 15 * MB  # of 30 that were sent


@pytest.mark.parametrize("name", PORTS)
def test_slow_senders_are_closed(ports: dict[str, Port], name: str) -> None:
    halves = [
        b"G",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n",
        post(b"Content-Length: 9", body=b"{"),
        post(CHUNKED, body=b"1\r\n{\r\n"),
        post(CHUNKED, body=b"1\r\n{\r\n0\r\nX: "),
    ]
    with ExitStack() as stack:
        connections = [stack.enter_context(ports[name].connect()) for _ in halves]
        for connection, half in zip(connections, halves, strict=True):
            connection.sendall(half)
        for connection in connections:
            assert status_of(answer(connection)) in (408, 413 if name == "metrics" else 408)
