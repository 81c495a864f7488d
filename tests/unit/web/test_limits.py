"""The filter of requests, for any split of a connection's bytes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cog_triton.web.limits import Limits, RequestFilter

LIMITS = Limits(body_bytes=100, head_bytes=200)
GET = b"GET /a?b HTTP/1.1\r\nhost: x\r\n\r\n"
POST = b"POST / HTTP/1.1\r\ncontent-length: 2\r\n\r\n{}"
CHUNKED = (
    b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n2;x=y\r\n{}\r\n0\r\nX: trailer\r\n\r\n"
)
UPGRADE = b"POST / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\ncontent-length: 2\r\n\r\n{}"


def filtered(*parts: bytes) -> tuple[bytes, RequestFilter]:
    requests = RequestFilter(LIMITS)
    output = b""
    for part in parts:
        requests.feed(part)
        output += requests.take()
    return output, requests


def split(data: bytes, places: list[int]) -> list[bytes]:
    ends = [0, *sorted(places), len(data)]
    return [data[a:b] for a, b in pairwise(ends)]


@given(st.lists(st.integers(0, 400), max_size=8))
def test_requests_pass_however_they_are_split(places: list[int]) -> None:
    output, requests = filtered(*split(GET + POST + UPGRADE + CHUNKED + GET, places))
    chunks = output.removeprefix(GET + POST + POST).removesuffix(GET)
    head, _, body = chunks.partition(b"\r\n\r\n")
    assert head == b"POST / HTTP/1.1\r\ntransfer-encoding: chunked"
    assert body in (b"2\r\n{}\r\n0\r\n\r\n", b"1\r\n{\r\n1\r\n}\r\n0\r\n\r\n")
    assert (requests.refusal, requests.unfinished, requests.in_body) == (None, False, False)
    assert requests.begun == 5


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
def test_what_accumulates_is_bounded(begin: bytes, piece: bytes, status: int) -> None:
    for size in (1, 7, 300):
        data = begin + piece * 1000
        parts = [data[i : i + size] for i in range(0, len(data), size)]
        output, requests = filtered(*parts)
        assert requests.refusal is not None
        assert requests.refusal.status == status
        assert len(output) < 800


def test_many_small_chunks_are_no_long_head() -> None:
    """Sizes of chunks that come by themselves do not add up."""
    head = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    output, requests = filtered(head, *[b"1\r\n", b".\r\n"] * 90, b"0\r\n", b"\r\n")
    assert requests.refusal is None
    assert output.endswith(b"1\r\n.\r\n0\r\n\r\n")


def test_nothing_passes_behind_a_refusal() -> None:
    output, requests = filtered(GET + b"GET /#a HTTP/1.1\r\n\r\n" + GET, GET)
    assert output == GET
    assert requests.refusal is not None


@pytest.mark.parametrize("coding", [b"gzip", b"GZIP", b"br", b"identity, gzip"])
def test_an_encoded_body_is_refused(coding: bytes) -> None:
    _, requests = filtered(b"POST / HTTP/1.1\r\nContent-Encoding: " + coding + b"\r\n\r\n")
    assert requests.refusal is not None
    assert requests.refusal.status == 415
    assert coding.decode() in requests.refusal.detail
    assert filtered(b"POST / HTTP/1.1\r\nContent-Encoding: identity\r\n\r\n")[1].refusal is None
