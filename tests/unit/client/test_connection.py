"""The connection by itself: bytes, with h2 as its peer, and no network."""

import asyncio
import contextlib
from typing import Any

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import DataReceived, RequestReceived, StreamEnded, StreamReset
from h2.exceptions import H2Error, ProtocolError
from h2.settings import SettingCodes

from cog_triton.client import connection as module
from cog_triton.client.connection import (
    Call,
    CallEnd,
    Connection,
    ConnectionUnusable,
    UnreadableMessage,
)

pytestmark = pytest.mark.anyio

LARGE = bytes(range(256)) * 4000  # a megabyte: sixteen times what may be sent unasked
OK = [(":status", "200")]
GRACEFUL = 2**31 - 1  # the last stream, in the GOAWAY of a server that will name it later


def framed(message: bytes) -> bytes:
    return b"\0" + len(message).to_bytes(4, "big") + message


class Transport(asyncio.Transport):
    """Keeps what is written, and knows whether it was aborted."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.aborted = self.closed = False

    def write(self, data: Any) -> None:
        self.written += data

    def abort(self) -> None:
        self.aborted = True

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.aborted or self.closed


class Exchange:
    """A connection with calls, and its peer."""

    def __init__(self) -> None:
        self.transport = Transport()
        self.connection = Connection("localhost:1")
        self.connection.connection_made(self.transport)
        self.peer = H2Connection(H2Configuration(client_side=False))
        self.peer.initiate_connection()
        self.messages: list[tuple[int, bytes]] = []  # the number of the call, the message
        self.ends: dict[int, CallEnd] = {}
        self.received: dict[int, bytes] = {}  # by the peer
        self.half_closed: list[int] = []
        self.reset: list[int] = []

    def open(self, *messages: bytes) -> Call:
        call: Call

        def take(message: bytes) -> None:
            if message == b"unreadable":
                raise UnreadableMessage("a message that cannot be read")
            self.messages.append((call.number, message))

        def end(ended: Call, reason: CallEnd) -> None:
            assert ended.number not in self.ends
            self.ends[ended.number] = reason

        call = self.connection.open("/", {}, take, end)
        for message in messages:
            call.write(message)
        return call

    async def exchange(self) -> None:
        """Hand over what each side has for the other, until they are silent."""
        await asyncio.sleep(0)
        for _ in range(1000):
            written = self.transport.written
            self.transport.written = b""
            for event in self.peer.receive_data(written):
                self._note(event)
            data = self.peer.data_to_send()
            if data:
                self.connection.data_received(data)
            await asyncio.sleep(0)
            if not data and not self.transport.written:
                return
        raise AssertionError("the two sides never fall silent")

    def _note(self, event: Any) -> None:
        if isinstance(event, RequestReceived):
            self.received[event.stream_id] = b""
            with contextlib.suppress(H2Error):  # the call may be reset already
                self.peer.send_headers(event.stream_id, OK)
        elif isinstance(event, DataReceived):
            self.received[event.stream_id] += event.data
            self.peer.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, StreamEnded):
            self.half_closed.append(event.stream_id)
        elif isinstance(event, StreamReset):
            self.reset.append(event.stream_id)

    def goaway(self, last_taken: int) -> None:
        frame = b"\0\0\x08\7\0\0\0\0\0" + last_taken.to_bytes(4, "big") + bytes(4)
        self.connection.data_received(frame)


@pytest.fixture
async def exchange() -> Exchange:
    return Exchange()


async def test_messages_large_small_and_empty_arrive_in_order(exchange: Exchange) -> None:
    sent = [b"", b"x", LARGE, b"last"]
    call = exchange.open(*sent)
    await exchange.exchange()
    assert exchange.received[call.number] == b"".join(framed(message) for message in sent)
    assert not call._unsent  # it may have been an adapter of many megabytes
    assert exchange.half_closed == []
    call.write(b"more")
    call.half_close()
    await exchange.exchange()
    assert exchange.received[call.number].endswith(framed(b"more"))
    assert exchange.half_closed == [call.number]
    assert not call.can_write


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
async def test_messages_are_whole_however_the_bytes_are_cut(exchange: Exchange, size: int) -> None:
    call = exchange.open(b"")
    await exchange.exchange()
    sent = [b"", b"first", bytes(300), b"last"]
    exchange.peer.send_data(call.number, b"".join(map(framed, sent[:3])))
    exchange.peer.send_data(call.number, framed(sent[3])[:2])
    exchange.peer.send_data(call.number, framed(sent[3])[2:], pad_length=3)
    data = exchange.peer.data_to_send()
    for at in range(0, len(data), size):
        exchange.connection.data_received(data[at : at + size])
    assert exchange.messages == [(call.number, message) for message in sent]


async def test_windows_are_replenished_on_a_long_call(
    exchange: Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that stays for days receives more than the largest window has."""
    monkeypatch.setattr(module, "_LARGEST_WINDOW", 2**17)
    exchange = Exchange()
    call = exchange.open(b"")
    await exchange.exchange()
    received = 0
    for _ in range(200):
        window = exchange.peer.local_flow_control_window(call.number)
        size = min(window, exchange.peer.max_outbound_frame_size, 10_000)
        assert size > 5
        exchange.peer.send_data(call.number, framed(bytes(size - 5)))
        await exchange.exchange()
        received += size
    assert received > 4 * 2**17
    assert len(exchange.messages) == 200


async def test_a_cancelled_call_is_silent_and_the_others_go_on(exchange: Exchange) -> None:
    gone, other = exchange.open(LARGE), exchange.open(b"x")
    await exchange.exchange()
    gone.cancel()
    gone.cancel()
    exchange.peer.send_data(gone.number, framed(b"on its way"))
    exchange.peer.send_data(other.number, framed(b"answer"))
    await exchange.exchange()
    assert exchange.reset == [gone.number]
    assert exchange.messages == [(other.number, b"answer")]
    assert exchange.ends == {}


async def test_calls_are_counted_and_forgotten(exchange: Exchange) -> None:
    """Of hundreds that have ended few are kept, and a peer gets no more at once than it takes."""
    for _ in range(500):
        exchange.open(b"").cancel()
    exchange.peer.update_settings({SettingCodes.MAX_CONCURRENT_STREAMS: 2})
    await exchange.exchange()
    first = exchange.open(b"")
    assert exchange.connection.has_room
    exchange.open(b"")
    assert not exchange.connection.has_room
    with pytest.raises(ConnectionUnusable, match="2 open"):
        exchange.open(b"")
    first.cancel()
    assert exchange.connection.has_room
    assert len(exchange.connection._h2.streams) < 100


FULL = [("grpc-status", "14"), ("grpc-message", "no%20more")]


@pytest.mark.parametrize(
    ("sent", "end"),
    [
        ([("send_headers", FULL, True)], CallEnd("no more")),
        ([("send_headers", [("grpc-status", "5")], True)], CallEnd("gRPC's status 5")),
        ([("send_headers", [("grpc-status", "0")], True)], CallEnd(None)),
        (
            [("reset_stream", ErrorCodes.CANCEL)],
            CallEnd(f"Triton reset the stream: error {ErrorCodes.CANCEL!s}"),
        ),
        (
            [("reset_stream", ErrorCodes.REFUSED_STREAM)],
            CallEnd(f"Triton reset the stream: error {ErrorCodes.REFUSED_STREAM!s}", True),
        ),
    ],
    ids=["a message", "a status", "OK", "reset", "refused"],
)
async def test_what_ends_a_call_ends_no_other(
    sent: list[tuple[Any, ...]], end: CallEnd, exchange: Exchange
) -> None:
    call, other = exchange.open(b""), exchange.open(b"")
    await exchange.exchange()
    for name, *arguments in sent:
        getattr(exchange.peer, name)(call.number, *arguments)
    exchange.peer.send_data(other.number, framed(b"answer"))
    await exchange.exchange()
    assert exchange.ends == {call.number: end}
    assert exchange.messages == [(other.number, b"answer")]
    assert exchange.connection.has_room


async def test_a_proxys_error_page_is_an_error_with_its_status(exchange: Exchange) -> None:
    call = exchange.open(b"")
    await asyncio.sleep(0)
    exchange.peer.receive_data(exchange.transport.written)
    exchange.transport.written = b""
    exchange.peer.send_headers(call.number, [(":status", "502"), ("content-type", "text/html")])
    exchange.peer.send_data(call.number, b"<html>Bad Gateway</html>", end_stream=True)
    exchange.connection.data_received(exchange.peer.data_to_send())
    assert exchange.ends == {call.number: CallEnd("it answered with the HTTP status 502")}
    assert exchange.connection.usable


@pytest.mark.parametrize(
    "data", [b"\1\0\0\0\1x", framed(b"unreadable")], ids=["compressed", "of no use to its reader"]
)
async def test_what_cannot_be_read_ends_the_connection(data: bytes, exchange: Exchange) -> None:
    call, other = exchange.open(b""), exchange.open(b"")
    await exchange.exchange()
    exchange.peer.send_data(call.number, data)
    await exchange.exchange()
    assert exchange.transport.aborted
    for end in (exchange.ends[call.number], exchange.ends[other.number]):
        assert end.problem is not None
        assert end.problem.startswith("Triton's answer cannot be read: ")
        assert end.blameless


@pytest.mark.parametrize("data", [b"\0\0\1\0\0\0\0\0\3x", b"\0\0\1\0\0\0\0\0\0x"])
async def test_what_no_server_may_send_ends_the_connection(data: bytes, exchange: Exchange) -> None:
    call = exchange.open(b"")
    await exchange.exchange()
    exchange.connection.data_received(data)
    assert exchange.transport.aborted
    assert exchange.ends[call.number].blameless


async def test_the_last_stream_of_a_connection_is_its_last(exchange: Exchange) -> None:
    exchange.connection._h2.highest_outbound_stream_id = 2**31 - 5
    for usable in (True, False):
        exchange.open(b"")
        assert (exchange.connection.usable, exchange.transport.aborted) == (usable, False)


@pytest.mark.parametrize("last_taken", [GRACEFUL, 3])
async def test_after_a_goaway_what_the_server_has_taken_goes_on_and_is_half_closed(
    last_taken: int, exchange: Exchange
) -> None:
    one, two, refused = exchange.open(b""), exchange.open(b""), exchange.open(b"")
    await exchange.exchange()
    for last in dict.fromkeys([last_taken, 3]):
        exchange.goaway(last)
        assert not exchange.connection.usable
    assert exchange.ends == {refused.number: CallEnd("Triton closes the connection", True)}
    with pytest.raises(ConnectionUnusable, match="Triton closes the connection"):
        exchange.open(b"")
    await exchange.exchange()
    assert {one.number, two.number} <= set(exchange.half_closed)
    for call in (one, two):
        assert not call.can_write
        assert not exchange.transport.is_closing()
        exchange.peer.send_data(call.number, framed(b"answer"))
        exchange.peer.send_headers(call.number, [("grpc-status", "0")], end_stream=True)
        await exchange.exchange()
        assert exchange.messages[-1] == (call.number, b"answer")
        assert exchange.ends[call.number] == CallEnd()
    assert exchange.transport.closed
    assert not exchange.transport.aborted


async def test_a_loss_ends_all_calls_and_those_still_to_be_sent(exchange: Exchange) -> None:
    sent = exchange.open(b"")
    await exchange.exchange()
    unsent = exchange.open(b"")
    exchange.connection.connection_lost(None)
    await asyncio.sleep(0)
    assert exchange.transport.written == b""
    lost = CallEnd("Triton closed the connection", blameless=True)
    assert exchange.ends == {sent.number: lost, unsent.number: lost}
    with pytest.raises(ConnectionUnusable, match="the connection was lost"):
        exchange.open(b"")
    assert not exchange.connection.usable


async def test_a_message_that_cannot_be_sent_ends_the_connection(
    exchange: Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its request would wait for an answer, and nobody would say why."""
    call = exchange.open(b"first")
    await exchange.exchange()

    def send_data(*_: object) -> None:
        raise ProtocolError("the stream is closed")

    monkeypatch.setattr(exchange.connection._h2, "send_data", send_data)
    call.write(b"second")
    await asyncio.sleep(0)
    problem = "a message cannot be sent: the stream is closed"
    assert exchange.ends == {call.number: CallEnd(problem, blameless=True)}
