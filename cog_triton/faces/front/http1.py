"""HTTP/1 as far as the front needs it: whole requests in, and the heads of responses. No I/O.

Requests are parsed by llhttp and written anew, so that nothing reaches Cog's server which the two could
read differently.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import httptools

from cog_triton.faces.front.rules import Limits, Passage, Refusal, Request

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
HEAD_END = b"\r\n\r\n"
_OF_THE_CONNECTION = {
    b"connection",
    b"content-length",
    b"expect",
    b"keep-alive",
    b"proxy-connection",
    b"te",
    b"transfer-encoding",
    b"upgrade",
}


class RequestReader:
    """The requests of a connection, from its bytes.

    Attributes:
        items: whole requests in order; the last may be a ``Refusal``, after which nothing is read.
        unfinished: a request has begun and not ended.
    """

    def __init__(self, limits: Limits) -> None:
        self.items: deque[Request | Refusal] = deque()
        self.unfinished = False
        self._limits = limits
        self._ended = False
        self._awaits_continue = False
        self._head_bytes = 0
        self._in_head = False
        self._counted = False  # what was fed last belongs to a new request or to a body
        self._parser = httptools.HttpRequestParser(self)

    def feed(self, data: bytes) -> None:
        """Takes what came."""
        self._counted = False
        while data and not self._ended:
            try:
                self._parser.feed_data(data)
                break
            except httptools.HttpParserUpgrade as upgrade:
                if self._ended:
                    return
                data = self._without_upgrade() + data[upgrade.args[0] :]
            except httptools.HttpParserError as error:
                self._refuse(Refusal(400, f"this is no valid HTTP request: {error}"))
        if self.unfinished and not self._counted:  # a head or a trailer goes on
            self._count_head(len(data))

    def take_continue(self) -> bool:
        """Whether the client waits to be told that it may send its body."""
        awaits, self._awaits_continue = self._awaits_continue, False
        return awaits and self.unfinished and not self._ended

    def on_message_begin(self) -> None:
        self.unfinished = self._in_head = self._counted = True
        self._head_bytes = 0
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._body = bytearray()

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # else it is a trailer
            self._headers.append((name.lower(), value))
            self._count_head(len(name) + len(value))

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._method = self._parser.get_method()
        self._version = self._parser.get_http_version()
        if refusal := head_problem(self._method, self._url, self._version, self._headers):
            self._refuse(refusal)
        length = dict(self._headers).get(b"content-length", b"0")
        self._count_body(int(length))
        self._awaits_continue = (b"expect", b"100-continue") in self._headers

    def on_body(self, body: bytes) -> None:
        self._counted = True
        if not self._ended:
            self._body += body
            self._count_body(len(self._body))

    def on_message_complete(self) -> None:
        self.unfinished = False
        if not self._ended:
            self.items.append(
                Request(
                    method=self._method.decode(),
                    target=self._url.decode("latin-1"),
                    version=self._version,
                    headers=tuple(self._headers),
                    body=bytes(self._body),
                    # HTTP/1.0 would have to be told that the connection is kept.
                    keep_alive=self._parser.should_keep_alive() and self._version == "1.1",
                )
            )

    def _without_upgrade(self) -> bytes:
        """The head that asked for another protocol, to be read once more as if it had not.

        llhttp ends such a request with its head, whatever body it has.
        """
        self.items.pop()
        self._parser = httptools.HttpRequestParser(self)
        asked = dict(self._headers).get(b"connection", b"").lower()
        headers = [(n, v) for n, v in self._headers if n not in (b"connection", b"upgrade")]
        headers += [(b"connection", b"close")] if b"close" in asked else []
        return head_bytes(self._method, self._url, b"1.1", headers)

    def _count_head(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self._limits.head_bytes:
            self._refuse(Refusal(431, f"the head is over {self._limits.head_bytes} bytes"))

    def _count_body(self, size: int) -> None:
        if size > self._limits.body_bytes:
            self._refuse(Refusal(413, f"the body is over {self._limits.body_bytes} bytes"))

    def _refuse(self, refusal: Refusal) -> None:
        if not self._ended:
            self._ended = True
            self.items.append(refusal)


def head_problem(
    method: bytes, url: bytes, version: str, headers: list[tuple[bytes, bytes]]
) -> Refusal | None:
    """What is wrong with a request's head that llhttp, or a lenient server, may let pass."""
    names = [name for name, _ in headers]
    if version not in ("1.0", "1.1"):
        return Refusal(505, f"HTTP/{version} is not spoken here")
    # A path ends at '#' for Cog's server, and would be another one than was checked.
    if method == b"CONNECT" or not url.startswith(b"/") or b"#" in url:
        return Refusal(400, "the request's target must be a path")
    for name in (b"content-length", b"transfer-encoding", b"host"):
        if names.count(name) > 1:
            return Refusal(400, f"more than one {name.decode()}")
    values = dict(headers)
    length, coding = values.get(b"content-length"), values.get(b"transfer-encoding")
    if length is not None and (coding is not None or not length.isdigit()):
        return Refusal(400, "content-length must be a number and come without transfer-encoding")
    if coding is not None and coding.lower() != b"chunked":
        return Refusal(501, "transfer-encoding must be chunked")
    return None


def for_cog(request: Request, passage: Passage) -> bytes:
    """A request as Cog's server gets it."""
    headers = [pair for pair in request.headers if pair[0] not in _OF_THE_CONNECTION]
    body = request.body if passage.body is None else passage.body
    if body or request.method in ("POST", "PUT", "PATCH"):
        headers.append((b"content-length", b"%d" % len(body)))
    target = passage.target.encode("latin-1")
    head = head_bytes(passage.method.encode(), target, request.version.encode(), headers)
    return head + body


def head_bytes(
    method: bytes, target: bytes, version: bytes, headers: list[tuple[bytes, bytes]]
) -> bytes:
    """A request's head, with the empty line."""
    lines = [b"%s %s HTTP/%s" % (method, target, version), *(b"%s: %s" % pair for pair in headers)]
    return b"\r\n".join(lines) + HEAD_END


@dataclass(frozen=True)
class ResponseHead:
    """The head of a response.

    Attributes:
        raw: as the client gets it, with the empty line.
        closes: the client's connection ends with this response.
        reusable: the connection to Cog's server does not.
    """

    status: int
    raw: bytes
    closes: bool
    reusable: bool


def response_head(raw: bytes, method: str, close: bool) -> ResponseHead:
    """The head of a response of Cog's server, without what it says of its own connection.

    Args:
        raw: up to the empty line, which it does not have.
        method: of the request.
        close: the client's connection is to end with this response.
    """
    first, *lines = raw.split(b"\r\n")
    names = {line.partition(b":")[0].lower() for line in lines}
    status = int(first.split(b" ", 2)[1])
    framed = not names.isdisjoint((b"content-length", b"transfer-encoding"))
    without_body = method == "HEAD" or status in (204, 304)
    close = close or not (framed or without_body)
    kept = [line for line in lines if not line.lower().startswith(b"connection:")]
    kept += [b"connection: close"] if close else []
    reusable = framed and not without_body and b"connection" not in names
    return ResponseHead(status, b"\r\n".join([first, *kept]) + HEAD_END, close, reusable)


class ResponseEnd:
    """Whether a response that passes is whole.

    Attributes:
        whole: it is. Never for one that ends with its connection.
    """

    def __init__(self, method: str) -> None:
        self.whole = False
        self._head_only = method == "HEAD"
        self._before = self._last = b""
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        """Takes the next bytes; those that are no HTTP leave it incomplete."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.whole = False
        self._before, self._last = self._last, data

    def on_headers_complete(self) -> None:
        self.whole = self._head_only

    def on_message_complete(self) -> None:
        self.whole = True

    @property
    def status(self) -> int:
        return int(self._parser.get_status_code())

    @property
    def between_events(self) -> bool:
        """Whether a stream may be gone on with: its last event is whole, and so is the chunk."""
        tail = self._last if len(self._last) > 3 else self._before + self._last
        return tail.endswith(b"\n\n\r\n")
