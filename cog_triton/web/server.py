"""Uvicorn with limits and an access rule for requests, and sockets for it."""

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from cog_triton.web import Refusal
from cog_triton.web.origin import AccessRule

BACKLOG = 1024
# After a refusal: as its connection ends, the client's system may drop it.
LINGER_SECONDS = 1.0
# Of a header, beside its name and value.
_LINE_BYTES = 4
# Of the log line of a refusal.
_LOGGED_CHARACTERS = 300
HEAD_END = b"\r\n\r\n"
Headers = Iterable[tuple[bytes, bytes]]
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """Bounds of a request."""

    # Decoded.
    body_bytes: int = 16 << 20
    # Of its first line and headers, and of trailers.
    head_bytes: int = 32 << 10
    # From its first byte to its last.
    request_seconds: float = 60.0
    # Of a connection without a request.
    idle_seconds: float = 75.0
    # Paths whose bodies may have more bytes than others, and as much more time.
    uploads: Mapping[bytes, int] = field(default_factory=dict)


# Makes the body of a refusal; the target is empty if it is not known.
RefusalBody = Callable[[Refusal, str], dict[str, Any]]


class Server(uvicorn.Server):
    """Uvicorn's, with limits and an access rule; it leaves signals to its caller."""

    capture_signals = contextlib.nullcontext  # type: ignore[assignment]

    def __init__(
        self,
        app: Any,
        limits: Limits,
        access: AccessRule,
        refusal_body: RefusalBody = lambda refusal, _: {"detail": refusal.detail},
    ) -> None:
        # It runs in the loop that is there.
        options: Any = {"loop": "none", "ws": "none", "lifespan": "off", "server_header": False}
        options |= {"access_log": False, "log_level": "warning", "log_config": None}
        options["http"] = partial(
            LimitedProtocol, limits=limits, access=access, refusal_body=refusal_body
        )
        # Longer than most clients keep a connection.
        options["timeout_keep_alive"] = int(limits.idle_seconds)
        # The requests that run have had their time.
        options["timeout_graceful_shutdown"] = 1
        super().__init__(uvicorn.Config(app, **options))


class LimitedProtocol(HttpToolsProtocol):
    """Uvicorn's connection, which reads nothing after a request that it refuses.

    It refuses what is beyond the limits, and what a web page or a host's name may not ask.
    """

    def __init__(
        self,
        *args: Any,
        limits: Limits,
        access: AccessRule,
        refusal_body: RefusalBody,
        **named: Any,
    ) -> None:
        super().__init__(*args, **named)
        self._limits = limits
        self._access = access
        self._refusal_body = refusal_body
        self._refusal: Refusal | None = None
        # Whether the refusal has been sent.
        self._answered = False
        self._timer: asyncio.TimerHandle | None = None
        self.url = b""
        # Without uvicorn's leniencies.
        self.parser = httptools.HttpRequestParser(self)
        # Of the last request.
        self._in_body = False
        self._body_bytes = 0
        self._trailer_bytes = 0
        self._body_limit = 0
        # Bytes since the parser last gave a head or a part of a body.
        self._pending = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timer = self.loop.call_later(self._limits.idle_seconds, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_timer(None)
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection of a client that waits for the answer to a GET; others may have gone."""
        # Of the last request.
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.scope["method"] != "GET":
            return False
        cycle.keep_alive = False
        return True

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None or self.transport.is_closing():
            return
        self._pending += len(data)
        self._unset_keepalive_if_required()
        while data and self._refusal is None:
            try:
                self.parser.feed_data(data)
                break
            except httptools.HttpParserUpgrade as upgrade:
                # llhttp ends such a request with its head, whatever body it has. Here it has no such wish.
                method = self.parser.get_method()
                version = self.parser.get_http_version().encode()
                headers = [pair for pair in self.headers if pair[0] != b"upgrade"]
                self.parser = httptools.HttpRequestParser(self)
                data = head_bytes(method, self.url, version, headers) + data[upgrade.args[0] :]
            except httptools.HttpParserError as error:
                self._refuse(400, f"this is not a valid HTTP request: {error}")
        self._check(431, "head", self._pending, self._limits.head_bytes)
        if self._refusal is not None:
            self._answer_in_turn()

    def on_message_begin(self) -> None:
        if self._refusal is None:
            super().on_message_begin()
            self._set_timer(self._limits.request_seconds)
            self._body_bytes = 0
            self._trailer_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_body:
            # A trailer, which is dropped.
            self._trailer_bytes += len(name) + len(value) + _LINE_BYTES
            self._check(431, "head", self._trailer_bytes, self._limits.head_bytes)
        else:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._refusal is not None:
            return
        self._pending = 0
        method = self.parser.get_method()
        version = self.parser.get_http_version()
        self._refusal = head_problem(method, self.url, version, self.headers)
        if self._refusal is None:
            self._refusal = self._access.refusal(method, self.headers)
        lines = sum(len(name) + len(value) + _LINE_BYTES for name, value in self.headers)
        self._check(431, "head", len(self.url) + lines, self._limits.head_bytes)
        length = int(dict(self.headers).get(b"content-length", b"0"))
        limits = self._limits
        path = self.url.partition(b"?")[0]
        self._body_limit = limits.uploads.get(path, limits.body_bytes)
        self._check(413, "body", length, self._body_limit)
        if self._body_limit > limits.body_bytes:
            self._set_timer(limits.request_seconds * self._body_limit / limits.body_bytes)
        if self._refusal is None and not self.parser.should_upgrade():
            super().on_headers_complete()
            self._in_body = True

    def on_body(self, body: bytes) -> None:
        self._pending = 0
        self._body_bytes += len(body)
        self._check(413, "body", self._body_bytes, self._body_limit)
        if self._refusal is None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._refusal is None and self._in_body:
            super().on_message_complete()
            self._in_body = False
            self._pending = 0
            self._set_timer(None)

    def _check(self, status: int, part: str, size: int, limit: int) -> None:
        if size > limit:
            self._refuse(status, f"the {part} is over {limit} bytes")

    def _refuse(self, status: int, detail: str) -> None:
        self._refusal = self._refusal or Refusal(status, detail)

    @property
    def _behind_others(self) -> bool:
        """Requests ahead of the last have no response yet."""
        if self._in_body:
            return bool(self.pipeline)
        return self.cycle is not None and not self.cycle.response_complete

    def _answer_in_turn(self) -> None:
        """Answer the last request with its refusal, once those ahead of it have been answered."""
        if not self._behind_others:
            self._answer()
        elif self._in_body:
            # Its application would wait for the rest of the body.
            self.pipeline.popleft()

    def on_response_complete(self) -> None:
        waiting = bool(self.pipeline)
        super().on_response_complete()
        if not waiting and not self._answered:
            self._answer()

    def _answer(self) -> None:
        refusal = self._refusal
        if refusal is None or self.transport.is_closing():
            return
        self._answered = True
        self._log(refusal)
        cycle = self.cycle if self._in_body else None
        if cycle is None or not cycle.response_started:
            body = json.dumps(self._refusal_body(refusal, self.url.decode("latin-1"))).encode()
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d"
            self.transport.write(STATUS_LINE[refusal.status] + head % len(body) + HEAD_END + body)
        if cycle is not None:
            cycle.disconnected = True
            cycle.message_event.set()
        with contextlib.suppress(OSError, RuntimeError):
            self.transport.write_eof()
        self.flow.resume_reading()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def _log(self, refusal: Refusal) -> None:
        """Log a line for a request that is refused before an application has it."""
        method = "-"
        path = "-"
        if self.url:
            # Otherwise its first line could not be read.
            method = self.parser.get_method().decode("latin-1")
            path = self.url.decode("latin-1").partition("?")[0]
        line = f"{method} {path[:_LOGGED_CHARACTERS]} {refusal.status} refused: {refusal.detail}"
        # A client wrote parts of it, which may have any characters.
        printable = (c if c.isprintable() else ascii(c)[1:-1] for c in line[:_LOGGED_CHARACTERS])
        logger.info("%s", "".join(printable))

    def _set_timer(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if seconds is not None:
            self._timer = self.loop.call_later(seconds, self._expire, seconds)

    def _expire(self, seconds: float) -> None:
        """Refuse a request that has not come within its time."""
        if self._behind_others:
            # Uvicorn may not have read from the connection while the others were answered.
            self._set_timer(seconds)
        elif not self._answered:
            self._refuse(408, f"the request did not come within {seconds:g} s")
            self._answer_in_turn()


def head_problem(method: bytes, target: bytes, version: str, headers: Headers) -> Refusal | None:
    """Find what is wrong with a head that llhttp lets pass; the names of headers are in lower case."""
    if version not in ("1.0", "1.1"):
        return Refusal(505, f"HTTP/{version} is not supported")
    # A path ends at '#' for some servers, and would be another one than was checked.
    if method == b"CONNECT" or not target.startswith(b"/") or b"#" in target:
        return Refusal(400, "the request's target must be a path")
    if [name for name, _ in headers].count(b"host") > 1:
        return Refusal(400, "more than one host")
    for name, value in headers:
        coding = value.lower()
        if name == b"transfer-encoding" and coding != b"chunked":
            return Refusal(501, "transfer-encoding must be chunked")
        if name == b"content-encoding" and coding not in (b"", b"identity"):
            text = "the body must be sent without a Content-Encoding, not as"
            return Refusal(415, f"{text} {value.decode(errors='replace')[:40]!r}")
    return None


def head_bytes(method: bytes, target: bytes, version: bytes, headers: Headers) -> bytes:
    lines = [b"%s %s HTTP/%s" % (method, target, version), *(b"%s: %s" % pair for pair in headers)]
    return b"\r\n".join(lines) + HEAD_END


def bound(host: str, port: int) -> socket.socket:
    """Return a socket at an address, which does not listen yet, or raise OSError."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Connections inherit it: each small event is sent at once.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"{host}, port {port}: {error.strerror}") from None
    return listener
