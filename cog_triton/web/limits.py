"""Limits of HTTP/1 requests, checked on the bytes of a connection. No I/O.

Requests are parsed by llhttp and, by ``RequestFilter``, written anew, so that two servers in a row cannot
read them differently.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from http import HTTPStatus
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


@dataclass(frozen=True)
class Head:
    """The first line and the headers of a request, their names in lower case."""

    method: bytes
    target: bytes
    version: str
    headers: tuple[tuple[bytes, bytes], ...]
    keep_alive: bool


class RequestGuard:
    """Check the requests of a connection; keep no more of them than one head.

    Subclasses take what passes, by ``head``, ``body`` and ``end``.

    Attributes:
        refusal: the answer to the first request that breaks a limit; nothing is read after it.
        unfinished: a request has begun and not ended.
        begun: number of requests that have begun.
    """

    def __init__(self, limits: Limits) -> None:
        self.refusal: Refusal | None = None
        self.unfinished = False
        self.begun = 0
        self._limits = limits
        self._parser = httptools.HttpRequestParser(self)
        self._uncounted = True  # nothing of the last feed has been counted
        self._in_head = False
        self._upgrades = False
        self._head_bytes = self._body_bytes = 0

    def head(self, head: Head) -> None:
        """Take the head of a request."""

    def body(self, data: bytes) -> None:
        """Take a piece of its body."""

    def end(self) -> None:
        """Take its end."""

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
        head = Head(
            method=self._parser.get_method(),
            target=self._url,
            version=self._parser.get_http_version(),
            headers=tuple(self._headers),
            # A response to HTTP/1.0 would have to say that the connection is kept.
            keep_alive=self._parser.should_keep_alive()
            and self._parser.get_http_version() == "1.1",
        )
        if refusal := head_problem(head):
            self.refuse(refusal)
        self._count_body(int(dict(self._headers).get(b"content-length", b"0")))
        self._body_bytes = 0
        self._upgrades = self._parser.should_upgrade()
        if self.refusal is None and not self._upgrades:
            self.head(head)

    def on_body(self, data: bytes) -> None:
        self._uncounted = False
        self._head_bytes = 0  # of what follows, a trailer say
        self._count_body(len(data))
        if self.refusal is None:
            self.body(data)

    def on_message_complete(self) -> None:
        if self.refusal is None and not self._upgrades:
            self.unfinished = False
            self.end()

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


class RequestFilter(RequestGuard):
    """Write the requests that pass anew: whole heads, no trailers, no request for another protocol.

    Attributes:
        in_body: the head of the unfinished request has passed.
        target: of the last head that has passed.
    """

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self.in_body = False
        self.target = ""
        self._output: list[bytes] = []
        self._chunked = False

    def head(self, head: Head) -> None:
        self.in_body, self.target = True, head.target.decode("latin-1")
        self._chunked = any(name == b"transfer-encoding" for name, _ in head.headers)
        version = head.version.encode()
        self._output.append(head_bytes(head.method, head.target, version, head.headers))

    def body(self, data: bytes) -> None:
        self._output += [b"%x\r\n" % len(data), data, b"\r\n"] if self._chunked else [data]

    def end(self) -> None:
        self.in_body = False
        if self._chunked:
            self._output.append(b"0" + HEAD_END)

    def take(self) -> bytes:
        """Return what has passed since the last call."""
        output, self._output = b"".join(self._output), []
        return output


def head_problem(head: Head) -> Refusal | None:
    """Find what is wrong with a head that llhttp, or a lenient server, may let pass."""
    names = [name for name, _ in head.headers]
    if head.version not in ("1.0", "1.1"):
        return Refusal(505, f"HTTP/{head.version} is not supported")
    # A path ends at '#' for some servers, and would be another one than was checked.
    if head.method == b"CONNECT" or not head.target.startswith(b"/") or b"#" in head.target:
        return Refusal(400, "the request's target must be a path")
    for name in (b"content-length", b"transfer-encoding", b"host"):
        if names.count(name) > 1:
            return Refusal(400, f"more than one {name.decode()}")
    values = dict(head.headers)
    length, coding = values.get(b"content-length"), values.get(b"transfer-encoding")
    if length is not None and (coding is not None or not length.isdigit()):
        return Refusal(400, "content-length must be a number and come without transfer-encoding")
    if coding is not None and coding.lower() != b"chunked":
        return Refusal(501, "transfer-encoding must be chunked")
    for name, value in head.headers:
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


def json_response(
    status: int,
    fields: dict[str, Any],
    retry_after: int | None = None,
    *,
    close: bool,
    head_only: bool = False,
) -> bytes:
    """Return a response with a body of JSON, as bytes."""
    body = json.dumps(fields)
    lines = [
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
    ]
    lines += [f"retry-after: {retry_after}"] if retry_after is not None else []
    lines += ["connection: close"] if close else []
    return "\r\n".join([*lines, "", "" if head_only else body]).encode()
