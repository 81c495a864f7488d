"""HTTP/1 as far as the front needs it: whole requests in, and the heads of responses. No I/O.

Requests are parsed by llhttp and written anew, so that nothing reaches Cog's server which the two could
read differently.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import httptools

from cog_triton.faces.front.rules import Passage, Request
from cog_triton.web.limits import HEAD_END, Head, Limits, Refusal, RequestGuard, head_bytes

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
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


class RequestReader(RequestGuard):
    """The requests of a connection, from its bytes.

    Attributes:
        items: whole requests in order; the last may be a ``Refusal``, after which nothing is read.
    """

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self.items: deque[Request | Refusal] = deque()
        self._awaits_continue = False

    def refuse(self, refusal: Refusal) -> None:
        if self.refusal is None:
            self.items.append(refusal)
        super().refuse(refusal)

    def take_continue(self) -> bool:
        """Whether the client waits to be told that it may send its body."""
        awaits, self._awaits_continue = self._awaits_continue, False
        return awaits and self.unfinished and self.refusal is None

    def head(self, head: Head) -> None:
        self._head, self._body = head, bytearray()
        self._awaits_continue = (b"expect", b"100-continue") in head.headers

    def body(self, data: bytes) -> None:
        self._body += data

    def end(self) -> None:
        head = self._head
        self.items.append(
            Request(
                method=head.method.decode(),
                target=head.target.decode("latin-1"),
                version=head.version,
                headers=head.headers,
                body=bytes(self._body),
                keep_alive=head.keep_alive,
            )
        )


def for_cog(request: Request, passage: Passage) -> bytes:
    """A request as Cog's server gets it."""
    headers = [pair for pair in request.headers if pair[0] not in _OF_THE_CONNECTION]
    body = request.body if passage.body is None else passage.body
    if body or request.method in ("POST", "PUT", "PATCH"):
        headers.append((b"content-length", b"%d" % len(body)))
    target = passage.target.encode("latin-1")
    head = head_bytes(passage.method.encode(), target, request.version.encode(), headers)
    return head + body


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
