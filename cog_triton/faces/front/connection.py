"""The connections of the front: one of a client, and one to Cog's server for each of its requests."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any, cast

from cog_triton.faces.front import rules
from cog_triton.faces.front.http1 import (
    CONTINUE,
    RequestReader,
    ResponseEnd,
    ResponseHead,
    for_cog,
    response_head,
)
from cog_triton.faces.front.rules import Passage, Request
from cog_triton.web.limits import HEAD_END, Refusal, json_response

if TYPE_CHECKING:
    from cog_triton.faces.front.front import Front

_BACKLOG = 8  # requests that may wait behind the one that is answered
_BACKLOG_BYTES = 1 << 16  # of their bodies
_HEAD_BYTES = 1 << 20  # of a response; more is no HTTP


class Client(asyncio.Protocol):
    """A client's connection. Its requests are answered one after another."""

    def __init__(self, front: Front) -> None:
        self.transport: asyncio.Transport
        self._front = front
        self._reader = RequestReader(front.limits)
        self._busy = False
        self._closing = False
        self._looping = False
        self._paused = False
        self._sends_no_more = False
        self._predicting = False
        self._upstream: Upstream | None = None
        self._task: asyncio.Task[Any] | None = None
        self._request = Request("GET", "/")
        self._deadline = time.monotonic() + front.limits.idle_seconds

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._front.clients.add(self)

    def connection_lost(self, _: Exception | None) -> None:
        """The client is gone, and so must be its prediction."""
        self._closing = True
        self._front.clients.discard(self)
        if self._task is not None:
            self._task.cancel()
        if self._upstream is not None:
            self._upstream.abandon()

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        began = self._reader.unfinished
        self._reader.feed(data)
        if self._reader.unfinished and not began and not self._busy:
            self._deadline = time.monotonic() + self._front.limits.request_seconds
        self._next()
        if not self._busy and self._reader.take_continue():
            self.transport.write(CONTINUE)
        waiting = self._reader.items
        if len(waiting) > _BACKLOG or sum(item.size for item in waiting) > _BACKLOG_BYTES:
            self.transport.pause_reading()

    def eof_received(self) -> bool:
        """Whether the connection is kept: a client that sends no more has left its prediction.

        Nothing else tells a client that has gone from one that waits. Other answers are short.
        """
        self._sends_no_more = True
        return (self._busy or bool(self._reader.items)) and not self._predicting

    def pause_writing(self) -> None:
        self._paused = True
        if self._upstream is not None:
            self._upstream.transport.pause_reading()

    def resume_writing(self) -> None:
        self._paused = False
        if self._upstream is not None:
            self._upstream.transport.resume_reading()
        self._next()

    def check_time(self, now: float) -> None:
        """Ends a connection that has nothing to say, or takes too long to say it."""
        if self._busy or self._closing or now < self._deadline:
            return
        if self._reader.unfinished:
            seconds = self._front.limits.request_seconds
            self._refuse(Refusal(408, f"the request did not come within {seconds:g} s"))
        else:
            self.close()

    def close(self) -> None:
        """Sends what is to be sent, and closes."""
        self._closing = True
        self.transport.close()

    def end_prediction(self, detail: str) -> None:
        """Ends the prediction that is being answered, and says so as far as that is possible."""
        if self._upstream is None or self._upstream.prediction is None:
            return
        upstream, self._upstream = self._upstream, None
        upstream.abort()
        if upstream.head is None:
            self._refuse(Refusal(503, detail, retry_after=self._front.retry_after))
            return
        if upstream.end.between_events:
            event = f"event: error\ndata: {json.dumps({'error': detail})}\n\n".encode()
            self.transport.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(event), event))
        self.close()

    def answer(self, status: int, body: dict[str, Any], retry_after: int | None = None) -> None:
        """Answers the current request with JSON of the front's own."""
        close = not self._request.keep_alive or self._front.draining
        head_only = self._request.method == "HEAD"
        reply = json_response(status, body, retry_after, close=close, head_only=head_only)
        self.transport.write(reply)
        self.answered(not close)

    def answered(self, keep: bool) -> None:
        """The current request has had its response; the connection is kept for another, or not."""
        self._busy, self._predicting, self._upstream, self._task = False, False, None, None
        if not keep or self._closing or (self._sends_no_more and not self._reader.items):
            self.close()
            return
        unfinished, limits = self._reader.unfinished, self._front.limits
        seconds = limits.request_seconds if unfinished else limits.idle_seconds
        self._deadline = time.monotonic() + seconds
        if self._reader.take_continue():
            self.transport.write(CONTINUE)
        if not self._reader.items:
            self.transport.resume_reading()
        self._next()

    def _next(self) -> None:
        """Begins to answer what waits, one after another, as long as the client takes the answers."""
        if self._looping:
            return  # an answer that was given at once
        self._looping = True
        while self._reader.items and not (self._busy or self._closing or self._paused):
            self._busy = True
            self._begin(self._reader.items.popleft())
        self._looping = False

    def _begin(self, item: Request | Refusal) -> None:
        if isinstance(item, Refusal):
            self._refuse(item)
            return
        self._request = item
        if item.path in (rules.LIVE, rules.READY) and item.method in ("GET", "HEAD"):
            self._task = self._front.beside(self._front.health(self, item.path))
            return
        if item.path == rules.SHUTDOWN and item.method == "POST":
            self._front.stop()
            self.answer(200, {})
            return
        try:
            passage = rules.check(item, self._front.draining, self._front.inputs)
        except Refusal as refusal:
            self.answer(refusal.status, {"detail": refusal.detail}, refusal.retry_after)
            return
        if passage.cancels is not None and self._front.predictions.cancel(passage.cancels):
            self.answer(200, {})
            return
        self._predicting = passage.prediction is not None
        if self._front.upstreams:
            self._pass(self._front.upstreams.pop(), item, passage)
        else:
            self._task = self._front.beside(self._connect_and_pass(item, passage))

    async def _connect_and_pass(self, request: Request, passage: Passage) -> None:
        try:
            upstream = await self._front.connect()
        except OSError:
            detail = "Cog's server takes no connection: it is stopping"
            self.answer(503, {"detail": detail}, self._front.retry_after)
            return
        self._task = None
        self._pass(upstream, request, passage)

    def _pass(self, upstream: Upstream, request: Request, passage: Passage) -> None:
        self._upstream = upstream
        upstream.send(self, request, passage)

    def _refuse(self, refusal: Refusal) -> None:
        """Answers what cannot be followed by another request on this connection."""
        self._closing = True
        body = {"detail": refusal.detail}
        reply = json_response(
            refusal.status, body, refusal.retry_after, close=True, head_only=False
        )
        self.transport.write(reply)
        self._front.linger(self)


class Upstream(asyncio.Protocol):
    """A connection to Cog's server, for one request after another.

    Attributes:
        prediction: the id of the prediction that the request starts; None if it starts none.
        head: of the response; None before it has come.
    """

    def __init__(self, front: Front) -> None:
        self.transport: asyncio.Transport
        self.prediction: str | None = None
        self.head: ResponseHead | None = None
        self.end: ResponseEnd
        self._front = front
        self._client: Client | None = None
        self._request: Request
        self._unread = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def send(self, client: Client, request: Request, passage: Passage) -> None:
        """Sends a request on a connection that has none."""
        self._client, self._request, self.prediction = client, request, passage.prediction
        self.head = None
        self.end = ResponseEnd(request.method)
        if self.prediction is not None:
            self._front.prediction_began(self.prediction)
        self.transport.write(for_cog(request, passage))

    def data_received(self, data: bytes) -> None:
        client = self._client
        self.end.feed(data)
        if client is None:
            if self.prediction is None or self.end.whole:
                self._prediction_ended(self.end.status)
                self.transport.abort()
            return
        if self.head is None:
            self._read_head(client, data)
        else:
            client.transport.write(data)
            if self.prediction is not None:
                self._front.progressed()
        if self.end.whole:
            self._finish(client)

    def connection_lost(self, _: Exception | None) -> None:
        self._front.upstreams.discard(self)
        self._prediction_ended(None)
        client, self._client = self._client, None
        if client is None:
            return
        if self.head is None:
            client.answer(502, {"detail": "Cog's server closed the connection without an answer"})
        else:
            client.answered(keep=False)

    def abandon(self) -> None:
        """Cancel the prediction, whose client has gone, and wait for its end."""
        if self.prediction is None or not self._front.predictions.cancel(self.prediction):
            self.abort()
            return
        self._client = None
        self.transport.resume_reading()

    def abort(self) -> None:
        """Closes the connection, upon which Cog's server cancels the prediction."""
        self._client = None
        self.transport.abort()

    def _finish(self, client: Client) -> None:
        assert self.head is not None
        self._client = None
        self._prediction_ended(self.head.status)
        if self.head.reusable:
            self.transport.resume_reading()
            self._front.upstreams.add(self)
        else:
            self.transport.close()
        client.answered(keep=self._request.keep_alive and not self.head.closes)

    def _prediction_ended(self, status: int | None) -> None:
        if self.prediction is not None:
            self._front.prediction_ended(self.prediction, status)
            self.prediction = None

    def _read_head(self, client: Client, data: bytes) -> None:
        raw, end, body = (self._unread + data).partition(HEAD_END)
        if not end:
            self._unread = raw
            if len(raw) > _HEAD_BYTES:
                self.transport.abort()
            return
        self._unread = b""
        close = not self._request.keep_alive or self._front.draining
        self.head = response_head(raw, self._request.method, close)
        client.transport.write(self.head.raw + body)
        if self.prediction is not None and self.head.status < 300:
            self._front.progressed()
