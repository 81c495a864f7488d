"""The connection of the gRPC client: with gRPC's own server, and with one that breaks rules."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc
import pytest
import uvloop
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes

from cog_triton.client.grpc_transport import Connection, Stream, connect
from cog_triton.client.stream import Arrivals

PATH = "/test.Test/{}"
LARGE = bytes(range(256)) * 4000  # a megabyte: sixteen times what may be sent unasked


async def echo(requests: AsyncIterator[bytes], _: object) -> AsyncIterator[bytes]:
    """What was sent, and ``last``."""
    async for request in requests:
        yield request
    yield b"last"


async def wait(*_: object) -> AsyncIterator[bytes]:
    """One message, and nothing more."""
    yield b"begun"
    await asyncio.Event().wait()


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[grpc.aio.Server, Connection]]:
    server = grpc.aio.server()
    methods: dict[str, Any] = {
        method.__name__: grpc.stream_stream_rpc_method_handler(method) for method in (echo, wait)
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Test", methods)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    connection = await connect(f"127.0.0.1:{port}")
    try:
        yield server, connection
    finally:
        connection.close("the test is over")
        await server.stop(None)


def ask(connection: Connection, method: str, message: bytes) -> tuple[Stream, Arrivals[bytes]]:
    arrivals: Arrivals[bytes] = Arrivals(20)
    stream = connection.open(
        PATH.format(method),
        message,
        arrivals.add,
        lambda error: arrivals.end(None if error is None else OSError(error)),
    )
    return stream, arrivals


async def all_of(arrivals: Arrivals[bytes]) -> list[bytes]:
    taken: list[bytes] = []
    while messages := await arrivals.take():
        taken += messages
    return taken


def run(
    test: Callable[[grpc.aio.Server, Connection], Awaitable[None]],
    runner: Callable[..., None] = asyncio.run,
) -> None:
    async def main() -> None:
        async with serving() as (server, connection):
            await test(server, connection)

    async def bounded() -> None:
        await asyncio.wait_for(main(), 30)

    runner(bounded())


@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run])
def test_many_streams_at_once_large_and_small_and_empty(runner: Callable[..., None]) -> None:
    """More than may be sent or received unasked, so that both sides have to grant more."""

    async def test(_: grpc.aio.Server, connection: Connection) -> None:
        sent = [b"", b"x", LARGE, *(b"%d" % i * i for i in range(200)), LARGE]
        answers = [ask(connection, "echo", message)[1] for message in sent]
        received = await asyncio.gather(*map(all_of, answers))
        assert received == [[message, b"last"] for message in sent]

    run(test, runner)


def test_what_was_sent_is_let_go() -> None:
    """It may be an adapter of many megabytes, and its answer may take minutes."""

    async def test(_: grpc.aio.Server, connection: Connection) -> None:
        stream, arrivals = ask(connection, "wait", LARGE)
        assert await arrivals.take() == [b"begun"]
        assert stream.unsent.obj == b""
        arrivals.close()

    run(test)


def test_a_cancelled_stream_calls_back_no_more_and_the_others_go_on() -> None:
    async def test(_: grpc.aio.Server, connection: Connection) -> None:
        stream, arrivals = ask(connection, "wait", b"")
        assert await arrivals.take() == [b"begun"]
        connection.cancel(stream)
        connection.cancel(stream)
        assert await all_of(ask(connection, "echo", b"x")[1]) == [b"x", b"last"]
        assert not arrivals.ended
        arrivals.close()

    run(test)


def test_a_server_that_stops_ends_what_runs_and_takes_no_more() -> None:
    async def test(server: grpc.aio.Server, connection: Connection) -> None:
        arrivals = ask(connection, "wait", b"")[1]
        assert await arrivals.take() == [b"begun"]
        await server.stop(None)
        assert await arrivals.ends_within(10)
        assert not connection.usable

    run(test)


def test_streams_of_a_closed_connection_end_with_the_reason() -> None:
    async def test(_: grpc.aio.Server, connection: Connection) -> None:
        arrivals = ask(connection, "wait", b"")[1]
        connection.close("enough")
        with pytest.raises(OSError, match="enough"):
            await arrivals.take()
        assert not connection.usable

    run(test)


class Transport(asyncio.Transport):
    """Keeps what is written, and knows whether it was aborted."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.aborted = False

    def write(self, data: Any) -> None:
        self.written += data

    def abort(self) -> None:
        self.aborted = True


class Exchange:
    """A stream of a connection without a network, and the peer's side of it.

    Attributes:
        seen: what the stream got: messages, and at its end the error or None.
        peer: what it is written with.
    """

    def __init__(self) -> None:
        self.seen: list[bytes | str | None] = []
        self.transport = Transport()
        self.connection = Connection("localhost:1")
        self.connection.connection_made(self.transport)
        self.stream = self.connection.open("/", b"", self.seen.append, self.seen.append)
        self.peer = H2Connection(H2Configuration(client_side=False))
        self.peer.initiate_connection()
        self.peer.receive_data(self.transport.written)

    def answer(self, *messages: bytes, headers: Sequence[tuple[str, str]] = ()) -> None:
        self.peer.send_headers(1, [(":status", "200"), *headers])
        for message in messages:
            self.peer.send_data(1, message)

    def receive(self, data: bytes | None = None, size: int = 1000) -> None:
        """Hands over bytes, or what the peer has written, in pieces of that size."""
        data = self.peer.data_to_send() if data is None else data
        for at in range(0, len(data), size):
            self.connection.data_received(data[at : at + size])


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_frames_and_messages_in_pieces(size: int) -> None:
    exchange = Exchange()
    messages = b"\0\0\0\0\3abc" + b"\0\0\0\0\0" + b"\0\0\0\0\2de"
    exchange.answer(messages[:6])
    exchange.peer.ping(b"12345678")
    exchange.peer.send_data(1, messages[6:])
    exchange.peer.send_headers(1, [("grpc-status", "0")], end_stream=True)
    exchange.receive(size=size)
    assert exchange.seen == [b"abc", b"", b"de", None]
    assert exchange.connection.usable


def test_what_grpc_says_of_an_answer_that_failed() -> None:
    exchange = Exchange()
    exchange.answer(b"\0\0\0\0\1x")
    exchange.peer.send_headers(
        1, [("grpc-status", "14"), ("grpc-message", "no%20more")], end_stream=True
    )
    exchange.receive()
    assert exchange.seen == [b"x", "no more"]
    exchange = Exchange()
    exchange.peer.send_headers(1, [(":status", "200"), ("grpc-status", "5")], end_stream=True)
    exchange.receive()
    assert exchange.seen == ["gRPC's status 5"]


@pytest.mark.parametrize("data", [b"\0\0\1\0\0\0\0\0\3x", b"\0\0\1\0\0\0\0\0\0x"])
def test_what_no_server_may_send_ends_the_connection(data: bytes) -> None:
    exchange = Exchange()
    exchange.receive()  # the settings
    exchange.receive(data)
    assert exchange.transport.aborted
    (problem,) = exchange.seen
    assert "cannot be read" in str(problem)


def test_a_compressed_message_which_nobody_asked_for() -> None:
    exchange = Exchange()
    exchange.answer(b"\1\0\0\0\1x")
    exchange.receive()
    assert exchange.transport.aborted
    assert exchange.seen == ["Triton's answer cannot be read: a compressed message"]


def test_a_stream_or_a_connection_that_the_server_ends() -> None:
    exchange = Exchange()
    exchange.peer.reset_stream(1, ErrorCodes.REFUSED_STREAM)
    exchange.receive()
    assert "reset the stream" in str(exchange.seen[0])
    assert exchange.connection.usable
    exchange = Exchange()
    exchange.peer.close_connection()
    exchange.receive()
    assert exchange.seen == ["Triton closes the connection"]
    assert not exchange.connection.usable


def test_nobody_listens() -> None:
    with pytest.raises(OSError, match="Connect call failed"):
        asyncio.run(connect("127.0.0.1:1"))


class ClosedTransport:
    """As uvloop's is between its end and ``connection_lost``."""

    def write(self, _: bytes) -> None:
        raise RuntimeError("unable to perform operation on <TCPTransport closed=True>")

    def abort(self) -> None:
        return


def test_a_request_in_the_moment_of_a_loss_ends_with_it() -> None:
    async def test(_: grpc.aio.Server, connection: Connection) -> None:
        transport = connection._transport
        connection._transport = cast("asyncio.Transport", ClosedTransport())
        arrivals = ask(connection, "echo", b"hello")[1]
        transport.abort()
        with pytest.raises(OSError, match="closed the connection"):
            await all_of(arrivals)
        assert not connection.usable

    run(test)
