"""The limits of requests, for any split of a connection's bytes."""

import asyncio
import logging
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

from cog_triton.web import Refusal
from cog_triton.web.origin import AccessRule
from cog_triton.web.server import Limits, Server

GET = b"GET /a?b HTTP/1.1\r\nhost: x\r\n\r\n"
POST = b"POST /a HTTP/1.1\r\ncontent-length: 2\r\n\r\n{}"
CHUNKED_HEAD = b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNKED = CHUNKED_HEAD + b"2;x=y\r\n{}\r\n0\r\nX: trailer\r\n\r\n"
UPGRADE = b"POST / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\ncontent-length: 2\r\n\r\n{}"

LIMITS = Limits(body_bytes=100, head_bytes=200)


def refusal_body(refusal: Refusal, target: str) -> dict[str, Any]:
    return {"detail": refusal.detail, "target": target}


class Connection:
    """A connection that notes the requests which reach the application, and what is answered."""

    def __init__(self, *parts: bytes, limits: Limits = LIMITS, waits: bool = False) -> None:
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.answers = b""
        self._limits = limits
        asyncio.run(self._feed(parts, waits=waits))
        self.statuses = [int(part[:3]) for part in self.answers.split(b"HTTP/1.1 ")[1:]]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        self.requests.append((request.method, dict(request.headers), await request.body()))
        await PlainTextResponse("yes")(scope, receive, send)

    async def _feed(self, parts: tuple[bytes, ...], *, waits: bool) -> None:
        access = AccessRule(loopback=False)
        config: Any = Server(self, self._limits, access, refusal_body).config
        protocol = config.http(config, ServerState(), {})
        transport = Mock(is_closing=lambda: False, get_extra_info=lambda _: None)
        transport.write = self._write
        protocol.connection_made(transport)
        for part in parts:
            protocol.data_received(part)
        while waits and not self.answers:
            await asyncio.sleep(0.01)
        while protocol.tasks:
            await asyncio.sleep(0)
        protocol.connection_lost(None)

    def _write(self, data: bytes) -> None:
        self.answers += data


@given(st.lists(st.integers(0, 400), max_size=8))
def test_requests_pass_however_they_are_split(places: list[int]) -> None:
    data = GET + POST + UPGRADE + CHUNKED + GET
    connection = Connection(*[data[a:b] for a, b in pairwise([0, *sorted(places), len(data)])])
    length, chunked = {"content-length": "2"}, {"transfer-encoding": "chunked"}
    upgrade = {"connection": "Upgrade", **length}
    get: tuple[str, dict[str, str], bytes] = ("GET", {"host": "x"}, b"")
    posts = [("POST", headers, b"{}") for headers in (length, upgrade, chunked)]
    assert connection.requests == [get, *posts, get]
    assert connection.statuses == [200] * 5


def test_sizes_of_chunks_that_come_by_themselves_do_not_add_up() -> None:
    connection = Connection(CHUNKED_HEAD, *[b"1\r\n", b".\r\n"] * 90, b"0\r\n", b"\r\n")
    assert connection.requests[0][2] == b"." * 90


@pytest.mark.parametrize(("path", "seconds"), [("/a", "0.02"), ("/upload", "0.04")])
def test_a_request_that_takes_too_long_is_told_how_long_it_had(path: str, seconds: str) -> None:
    limits = Limits(body_bytes=100, request_seconds=0.02, uploads={b"/upload": 200})
    unfinished = f"POST {path} HTTP/1.1\r\ncontent-length: 2\r\n\r\n{{".encode()
    connection = Connection(unfinished, limits=limits, waits=True)
    assert connection.statuses == [408]
    assert f"the request did not come within {seconds} s".encode() in connection.answers


@pytest.mark.anyio
async def test_a_connection_without_a_request_is_closed() -> None:
    limits = Limits(idle_seconds=0.01)
    config: Any = Server(None, limits, AccessRule(loopback=False), refusal_body).config
    protocol = config.http(config, ServerState(), {})
    closed = asyncio.Event()
    protocol.connection_made(Mock(close=closed.set, get_extra_info=lambda _: None))
    await asyncio.wait_for(closed.wait(), 60)
    protocol.connection_lost(None)


def test_nothing_passes_behind_a_refusal_which_knows_its_target() -> None:
    connection = Connection(GET + b"POST /x HTTP/1.1\r\nContent-Length: 101\r\n\r\n" + GET, GET)
    assert len(connection.requests) == 1
    assert connection.statuses == [200, 413]
    assert connection.answers.endswith(b'"target": "/x"}')


@pytest.mark.parametrize(
    ("request_", "line"),
    [
        pytest.param(
            b"POST /a?secret HTTP/1.1\r\ncontent-length: 101\r\n\r\n",
            "POST /a 413 refused: the body is over 100 bytes",
            id="a body",
        ),
        pytest.param(
            b"POST /a HTTP/1.1\r\nhost: x\r\norigin: http://evil.example\r\n\r\n",
            "POST /a 403 refused: web pages from http://evil.example may not send this request",
            id="a page",
        ),
        pytest.param(b"\x00\r\n\r\n", "- - 400 refused: this is not a valid", id="no HTTP"),
    ],
)
def test_a_refusal_is_logged_with_its_reason(
    request_: bytes, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "cog_triton.web.server")
    Connection(request_)
    (logged,) = caplog.messages
    assert logged.startswith(line)
    assert logged.isprintable()
