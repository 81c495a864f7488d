"""The limits of requests, for any split of a connection's bytes."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from cog_triton.web import Limits, Refusal
from cog_triton.web.server import Config, LimitedProtocol

LIMITS = Limits(body_bytes=100, head_bytes=200)
GET = b"GET /a?b HTTP/1.1\r\nhost: x\r\n\r\n"
POST = b"POST /a HTTP/1.1\r\ncontent-length: 2\r\n\r\n{}"
CHUNKED = (
    b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n2;x=y\r\n{}\r\n0\r\nX: trailer\r\n\r\n"
)
UPGRADE = b"POST / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\ncontent-length: 2\r\n\r\n{}"


def refusal_body(refusal: Refusal, target: str) -> dict[str, Any]:
    return {"detail": refusal.detail, "target": target}


class Connection:
    """A connection that notes the requests which reach the application, and what is answered."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.answers = b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        body = await request.body()
        self.requests.append((request.method, dict(request.headers), body))
        await PlainTextResponse("yes")(scope, receive, send)

    async def feed(self, *parts: bytes) -> None:
        protocol = LimitedProtocol(Config(self, LIMITS, refusal_body), ServerState(), {})
        transport = Mock(is_closing=lambda: False, get_extra_info=lambda _: None)
        transport.write = self._write
        protocol.connection_made(transport)
        for part in parts:
            protocol.data_received(part)
        while protocol.tasks:
            await asyncio.sleep(0)
        protocol.connection_lost(None)

    def _write(self, data: bytes) -> None:
        self.answers += data

    @property
    def statuses(self) -> list[int]:
        return [int(part[:3]) for part in self.answers.split(b"HTTP/1.1 ")[1:]]


def fed(*parts: bytes) -> Connection:
    connection = Connection()
    asyncio.run(connection.feed(*parts))
    return connection


def split(data: bytes, places: list[int]) -> list[bytes]:
    ends = [0, *sorted(places), len(data)]
    return [data[a:b] for a, b in pairwise(ends)]


@given(st.lists(st.integers(0, 400), max_size=8))
def test_requests_pass_however_they_are_split(places: list[int]) -> None:
    connection = fed(*split(GET + POST + UPGRADE + CHUNKED + GET, places))
    length, chunked = {"content-length": "2"}, {"transfer-encoding": "chunked"}
    get: tuple[str, dict[str, str], bytes] = ("GET", {"host": "x"}, b"")
    posts = [("POST", headers, b"{}") for headers in (length, length, chunked)]
    assert connection.requests == [get, *posts, get]
    assert connection.statuses == [200] * 5


@pytest.mark.parametrize("size", [1, 7, 300])
@pytest.mark.parametrize(
    ("begin", "piece", "status"),
    [
        (b"GET /", b"a", 431),
        (b"GET / HTTP/1.1\r\n", b"a:\r\n", 431),
        (b"GET / HTTP/1.1\r\nX: ", b"a", 431),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: ", b"a", 431),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n.\r\n", 413),
    ],
)
def test_what_accumulates_is_bounded(begin: bytes, piece: bytes, status: int, size: int) -> None:
    data = begin + piece * 1000
    connection = fed(*[data[i : i + size] for i in range(0, len(data), size)])
    assert connection.statuses == [status]
    assert connection.requests == []


def test_many_small_chunks_are_no_long_head() -> None:
    """Sizes of chunks that come by themselves do not add up."""
    head = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    connection = fed(head, *[b"1\r\n", b".\r\n"] * 90, b"0\r\n", b"\r\n")
    assert connection.requests[0][2] == b"." * 90


def test_nothing_passes_behind_a_refusal() -> None:
    connection = fed(GET + b"GET /#a HTTP/1.1\r\n\r\n" + GET, GET)
    assert len(connection.requests) == 1
    assert connection.statuses == [200, 400]


@pytest.mark.parametrize(
    ("coding", "status"),
    [(b"gzip", 415), (b"GZIP", 415), (b"br", 415), (b"identity, gzip", 415), (b"identity", 200)],
)
def test_an_encoded_body_is_refused(coding: bytes, status: int) -> None:
    connection = fed(b"POST / HTTP/1.1\r\nContent-Encoding: " + coding + b"\r\n\r\n")
    assert connection.statuses == [status]
    assert status == 200 or coding in connection.answers


def test_a_refusal_knows_its_target() -> None:
    connection = fed(GET + b"POST /x HTTP/1.1\r\nContent-Length: 101\r\n\r\n")
    assert connection.statuses == [200, 413]
    assert connection.answers.endswith(b'"target": "/x"}')
