"""Uvicorn behind the limits of ``limits``, and sockets for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cog_triton.web.limits import HEAD_END, Limits, Refusal, RequestFilter

BACKLOG = 1024
LINGER_SECONDS = 1.0
"""Between a refusal and the end of its connection. Closed at once, with something unread, the client's
system would throw away the answer."""
RefusalBody = Callable[[Refusal, str], dict[str, Any]]


class Config(uvicorn.Config):
    """Uvicorn's, with the limits of requests."""

    def __init__(
        self,
        app: Any,
        limits: Limits,
        refusal_body: RefusalBody = lambda refusal, _: {"detail": refusal.detail},
    ) -> None:
        """
        Args:
            refusal_body: makes the body of a refusal, of it and the target as far as that is known.
        """
        self.limits = limits
        self.refusal_body = refusal_body
        super().__init__(
            app,
            loop="none",  # it runs in the one that is there
            http=LimitedProtocol,
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
    """Uvicorn's connection, which gets requests within the limits only."""

    def __init__(self, config: uvicorn.Config, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._config = cast(Config, config)
        self._filter = RequestFilter(self._config.limits)
        self._timer: asyncio.TimerHandle | None = None
        self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_timer(self._config.limits.idle_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_timer(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused or self.transport.is_closing():
            return
        begun = self._filter.begun
        self._filter.feed(data)
        if not self._filter.unfinished:
            self._set_timer(None)
        elif self._filter.begun != begun:
            self._set_timer(self._config.limits.request_seconds)
        self._unset_keepalive_if_required()
        if passed := self._filter.take():
            super().data_received(passed)
        if self._filter.refusal is not None:
            self._refuse()

    def on_response_complete(self) -> None:
        waiting = bool(self.pipeline)
        super().on_response_complete()
        if self._filter.refusal is not None and not waiting and not self._refused:
            self._answer_refusal(self._filter.refusal)

    def _refuse(self) -> None:
        """Answer the refused request after those ahead of it."""
        assert self._filter.refusal is not None
        behind_others = self._behind_others
        if self._filter.in_body and self.pipeline:
            self.pipeline.popleft()  # its application would wait for the rest of the body
        if not behind_others:
            self._answer_refusal(self._filter.refusal)

    @property
    def _behind_others(self) -> bool:
        """Whether requests ahead of the one that is being received have no response yet."""
        if self._filter.in_body:
            return bool(self.pipeline)
        return self.cycle is not None and not self.cycle.response_complete

    def _answer_refusal(self, refusal: Refusal) -> None:
        if self.transport.is_closing():
            return
        self._refused = True
        cycle = self.cycle if self._filter.in_body else None
        if cycle is None or not cycle.response_started:
            body = self._config.refusal_body(refusal, self._filter.target)
            self.transport.write(_response(refusal.status, json.dumps(body).encode()))
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
        if self.transport.is_closing() or self._refused:
            return
        seconds = self._config.limits.request_seconds
        if not self._filter.begun:
            self.transport.close()
        elif self._behind_others:  # nothing may have been read of it meanwhile
            self._set_timer(seconds)
        else:
            self._filter.refuse(Refusal(408, f"the request did not come within {seconds:g} s"))
            self._refuse()


def _response(status: int, body: bytes) -> bytes:
    lines = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
    )
    return "\r\n".join(lines).encode() + HEAD_END + body


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
