"""Uvicorn with limits of requests, and sockets for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from typing import Any, cast

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from cog_triton.web import HEAD_END, Limits, Refusal, head_bytes, head_problem

BACKLOG = 1024
LINGER_SECONDS = 1.0
"""Between a refusal and the end of its connection. Closed at once, with something unread, the client's
system would throw away the answer."""
_LINE_BYTES = 4  # of a header, beside its name and value
RefusalBody = Callable[[Refusal, str], dict[str, Any]]


class Config(uvicorn.Config):
    """Uvicorn's, with the limits of requests.

    Args:
        refusal_body: makes the body of a refusal, of it and the target as far as that is known.
    """

    def __init__(
        self,
        app: Any,
        limits: Limits,
        refusal_body: RefusalBody = lambda refusal, _: {"detail": refusal.detail},
        protocol: type[LimitedProtocol] | None = None,
    ) -> None:
        self.limits = limits
        self.refusal_body = refusal_body
        super().__init__(
            app,
            loop="none",  # it runs in the one that is there
            http=protocol or LimitedProtocol,
            ws="none",
            lifespan="off",
            access_log=False,
            log_level="warning",
            log_config=None,
            server_header=False,
            # Longer than most clients keep a connection.
            timeout_keep_alive=int(limits.idle_seconds),
            timeout_graceful_shutdown=1,  # those that run have had their time
        )


class Server(uvicorn.Server):
    """Uvicorn's, which leaves signals to its caller."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class LimitedProtocol(HttpToolsProtocol):
    """Uvicorn's connection, which refuses a request beyond the limits and reads nothing after it.

    Trailers are dropped, and so is the wish for another protocol.
    """

    def __init__(self, config: uvicorn.Config, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._config = cast(Config, config)
        self._limits = self._config.limits
        self._refusal: Refusal | None = None
        self._answered = False  # the refusal
        self._timer: asyncio.TimerHandle | None = None
        self.url = b""
        self.parser = httptools.HttpRequestParser(self)  # without uvicorn's leniencies
        self._unfinished = self._in_body = self._upgrades = False  # the last request
        self._uncounted = True  # nothing of the last feed has been counted
        self._head_bytes = self._body_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timer = self.loop.call_later(self._limits.idle_seconds, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_timer(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None or self.transport.is_closing():
            return
        self._uncounted = True
        self._unset_keepalive_if_required()
        while data and self._refusal is None:
            try:
                self.parser.feed_data(data)
                break
            except httptools.HttpParserUpgrade as upgrade:
                data = self._without_upgrade() + data[upgrade.args[0] :]
            except httptools.HttpParserError as error:
                self._refuse(400, f"this is not a valid HTTP request: {error}")
        if self._unfinished and self._uncounted:  # a part of a line, which the parser keeps
            self._count_head(len(data))
        if self._refusal is not None:
            self._answer_in_turn()

    def on_message_begin(self) -> None:
        if self._refusal is None:
            super().on_message_begin()
            self._unfinished, self._uncounted, self._upgrades = True, False, False
            self._set_timer(self._limits.request_seconds)
            self._head_bytes = self._body_bytes = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_body:  # a trailer otherwise
            super().on_header(name, value)
        self._count_head(len(name) + len(value) + _LINE_BYTES)

    def on_headers_complete(self) -> None:
        if self._refusal is not None:
            return
        method, version = self.parser.get_method(), self.parser.get_http_version()
        self._refusal = head_problem(method, self.url, version, self.headers)
        if self._refusal is None:
            self._count_body(int(dict(self.headers).get(b"content-length", b"0")))
        self._body_bytes = 0
        self._upgrades = self.parser.should_upgrade()
        if self._refusal is None and not self._upgrades:
            super().on_headers_complete()
            self._in_body = True

    def on_body(self, body: bytes) -> None:
        self._uncounted = False
        self._head_bytes = 0  # of what follows, a trailer say
        self._count_body(len(body))
        if self._refusal is None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._refusal is None and not self._upgrades:
            super().on_message_complete()
            self._unfinished = self._in_body = False
            self._set_timer(None)

    def _without_upgrade(self) -> bytes:
        """Return the head that asked for another protocol, to be parsed again as if it had not.

        llhttp ends such a request with its head, whatever body it has.
        """
        method, version = self.parser.get_method(), self.parser.get_http_version()
        self.parser = httptools.HttpRequestParser(self)
        asked = dict(self.headers).get(b"connection", b"").lower()
        headers = [(n, v) for n, v in self.headers if n not in (b"connection", b"upgrade")]
        headers += [(b"connection", b"close")] if b"close" in asked else []
        return head_bytes(method, self.url, version.encode(), headers)

    def _count_head(self, size: int) -> None:
        self._uncounted = False
        self._head_bytes += size
        if self._head_bytes > self._limits.head_bytes:
            self._refuse(431, f"the head is over {self._limits.head_bytes} bytes")

    def _count_body(self, size: int) -> None:
        self._body_bytes += size
        if self._body_bytes > self._limits.body_bytes:
            self._refuse(413, f"the body is over {self._limits.body_bytes} bytes")

    def _refuse(self, status: int, detail: str) -> None:
        self._refusal = self._refusal or Refusal(status, detail)

    @property
    def _behind_others(self) -> bool:
        """True if requests ahead of the last have no response yet."""
        if self._in_body:
            return bool(self.pipeline)
        return self.cycle is not None and not self.cycle.response_complete

    def _answer_in_turn(self) -> None:
        """Answer the last request with its refusal, once those ahead of it have been answered."""
        if not self._behind_others:
            self._answer()
        elif self._in_body:
            self.pipeline.popleft()  # its application would wait for the rest of the body

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
        cycle = self.cycle if self._in_body else None
        if cycle is None or not cycle.response_started:
            target = self.url.decode("latin-1")
            body = json.dumps(self._config.refusal_body(refusal, target)).encode()
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d"
            head = STATUS_LINE[refusal.status] + head % len(body) + HEAD_END
            self.transport.write(head + body)
        if cycle is not None:
            cycle.disconnected = True
            cycle.message_event.set()
        with contextlib.suppress(OSError, RuntimeError):
            self.transport.write_eof()
        self.flow.resume_reading()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def _set_timer(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._expire)

    def _expire(self) -> None:
        seconds = self._limits.request_seconds
        if self._behind_others:  # nothing may have been read of it meanwhile
            self._set_timer(seconds)
        elif not self._answered:
            self._refuse(408, f"the request did not come within {seconds:g} s")
            self._answer_in_turn()


def bound(host: str, port: int) -> socket.socket:
    """Return a socket at an address, which does not listen yet.

    Raises:
        OSError: it is taken, or not this machine's.
    """
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
