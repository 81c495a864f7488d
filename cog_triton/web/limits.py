"""Limits of HTTP/1 requests, checked on the bytes of a connection. No I/O.

Requests are parsed by llhttp and written anew, so that two servers in a row cannot read them differently.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import httptools

HEAD_END = b"\r\n\r\n"
_LINE_BYTES = 4  # of a header, beside its name and value


@dataclass(frozen=True)
class Limits:
    """Bounds of a request.

    Attributes:
        body_bytes: of its body, decoded.
        head_bytes: of its first line and headers, and of trailers.
        request_seconds: from its first byte to its last.
        idle_seconds: of a connection without a request.
    """

    body_bytes: int = 16 << 20
    head_bytes: int = 32 << 10
    request_seconds: float = 60.0
    idle_seconds: float = 75.0


class Refusal(Exception):
    """The answer to a request that is not served."""

    size = 0  # it has no body

    def __init__(self, status: int, detail: Any, *, retry_after: int | None = None) -> None:
        super().__init__(status, detail)
        self.status = status
        self.detail = detail
        self.retry_after = retry_after


class RequestFilter:
    """Check the requests of a connection, and write anew those that pass.

    They come out with whole heads, without trailers and without requests for another protocol. No more
    is kept than one head.

    Attributes:
        refusal: the answer to the first request that breaks a limit; nothing is read after it.
        unfinished: a request has begun and not ended.
        begun: number of requests that have begun.
        in_body: the head of the unfinished request has passed.
        target: of the last head that has passed.
    """

    def __init__(self, limits: Limits) -> None:
        self.refusal: Refusal | None = None
        self.unfinished = self.in_body = False
        self.begun = 0
        self.target = ""
        self._limits = limits
        self._parser = httptools.HttpRequestParser(self)
        self._uncounted = True  # nothing of the last feed has been counted
        self._in_head = self._upgrades = self._chunked = False
        self._head_bytes = self._body_bytes = 0
        self._output: list[bytes] = []

    def take(self) -> bytes:
        """Return what has passed since the last call."""
        output, self._output = b"".join(self._output), []
        return output

    def feed(self, data: bytes) -> None:
        """Check the next bytes."""
        self._uncounted = True
        while data and self.refusal is None:
            try:
                self._parser.feed_data(data)
                break
            except httptools.HttpParserUpgrade as upgrade:
                if self.refusal is None:
                    data = self._without_upgrade() + data[upgrade.args[0] :]
            except httptools.HttpParserError as error:
                self.refuse(Refusal(400, f"this is not a valid HTTP request: {error}"))
        if self.unfinished and self._uncounted:  # a part of a line, which the parser keeps
            self._count_head(len(data))

    def refuse(self, refusal: Refusal) -> None:
        if self.refusal is None:
            self.refusal = refusal

    def on_message_begin(self) -> None:
        self.unfinished = self._in_head = True
        self._uncounted = self._upgrades = False
        self.begun += 1
        self._head_bytes = self._body_bytes = 0
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # a trailer otherwise, which is dropped
            self._headers.append((name.lower(), value))
        self._count_head(len(name) + len(value) + _LINE_BYTES)

    def on_headers_complete(self) -> None:
        self._in_head = False
        method, version = self._parser.get_method(), self._parser.get_http_version()
        if refusal := head_problem(method, self._url, version, self._headers):
            self.refuse(refusal)
        values = dict(self._headers)
        self._count_body(int(values.get(b"content-length", b"0")))
        self._body_bytes = 0
        self._upgrades = self._parser.should_upgrade()
        if self.refusal is None and not self._upgrades:
            self.in_body, self.target = True, self._url.decode("latin-1")
            self._chunked = b"transfer-encoding" in values
            self._output.append(head_bytes(method, self._url, version.encode(), self._headers))

    def on_body(self, data: bytes) -> None:
        self._uncounted = False
        self._head_bytes = 0  # of what follows, a trailer say
        self._count_body(len(data))
        if self.refusal is None:
            self._output += [b"%x\r\n" % len(data), data, b"\r\n"] if self._chunked else [data]

    def on_message_complete(self) -> None:
        if self.refusal is None and not self._upgrades:
            self.unfinished = self.in_body = False
            if self._chunked:
                self._output.append(b"0" + HEAD_END)

    def _without_upgrade(self) -> bytes:
        """The head that asked for another protocol, to be parsed again as if it had not.

        llhttp ends such a request with its head, whatever body it has.
        """
        method, version = self._parser.get_method(), self._parser.get_http_version()
        self._parser = httptools.HttpRequestParser(self)
        self.begun -= 1
        asked = dict(self._headers).get(b"connection", b"").lower()
        headers = [(n, v) for n, v in self._headers if n not in (b"connection", b"upgrade")]
        headers += [(b"connection", b"close")] if b"close" in asked else []
        return head_bytes(method, self._url, version.encode(), headers)

    def _count_head(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self._limits.head_bytes:
            self.refuse(Refusal(431, f"the head is over {self._limits.head_bytes} bytes"))

    def _count_body(self, size: int) -> None:
        self._body_bytes += size
        if self._body_bytes > self._limits.body_bytes:
            self.refuse(Refusal(413, f"the body is over {self._limits.body_bytes} bytes"))


def head_problem(
    method: bytes, target: bytes, version: str, headers: list[tuple[bytes, bytes]]
) -> Refusal | None:
    """Find what is wrong with a head that llhttp, or a lenient server, may let pass."""
    if version not in ("1.0", "1.1"):
        return Refusal(505, f"HTTP/{version} is not supported")
    # A path ends at '#' for some servers, and would be another one than was checked.
    if method == b"CONNECT" or not target.startswith(b"/") or b"#" in target:
        return Refusal(400, "the request's target must be a path")
    names = [name for name, _ in headers]
    for name in (b"content-length", b"transfer-encoding", b"host"):
        if names.count(name) > 1:
            return Refusal(400, f"more than one {name.decode()}")
    values = dict(headers)
    length, coding = values.get(b"content-length"), values.get(b"transfer-encoding")
    if length is not None and (coding is not None or not length.isdigit()):
        return Refusal(400, "content-length must be a number and come without transfer-encoding")
    if coding is not None and coding.lower() != b"chunked":
        return Refusal(501, "transfer-encoding must be chunked")
    for name, value in headers:
        if name == b"content-encoding" and value.lower() not in (b"", b"identity"):
            sent = value.decode(errors="replace")[:40]
            text = f"the body must be sent without a Content-Encoding, not as {sent!r}"
            return Refusal(415, text)
    return None


def head_bytes(
    method: bytes, target: bytes, version: bytes, headers: Iterable[tuple[bytes, bytes]]
) -> bytes:
    """Return a request's head, with the empty line."""
    lines = [b"%s %s HTTP/%s" % (method, target, version), *(b"%s: %s" % pair for pair in headers)]
    return b"\r\n".join(lines) + HEAD_END
