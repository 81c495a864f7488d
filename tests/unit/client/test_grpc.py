"""The connection of the gRPC client: with gRPC's own server, and with one that breaks rules."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, cast

import grpc
import numpy as np
import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import DataReceived, RequestReceived, StreamReset
from h2.settings import SettingCodes
from tritonclient.grpc import service_pb2 as messages

from cog_triton.client import grpc_transport
from cog_triton.client.grpc_transport import Connection, GrpcClient, Stream
from cog_triton.errors import TritonMalformedEvent, TritonUnavailable
from cog_triton.protocol.frames import Frame, FrameAddress, encode_frames
from cog_triton.protocol.names import FRAMES, FRAMES_FOR, OUTPUTS

pytestmark = pytest.mark.anyio
SERVICE = "inference.GRPCInferenceService"
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
async def serving() -> AsyncIterator[GrpcClient]:
    server = grpc.aio.server()
    methods: dict[str, Any] = {
        method.__name__: grpc.stream_stream_rpc_method_handler(method) for method in (echo, wait)
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, methods)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with aclosing(GrpcClient(f"127.0.0.1:{port}")) as client:
            yield client
    finally:
        await server.stop(None)


class Raw(bytes):
    def SerializeToString(self) -> bytes:
        return bytes(self)


async def ask(client: GrpcClient, method: str, message: bytes = b"") -> Stream:
    return await client.send(method, cast(Any, Raw(message)))


async def all_of(stream: Stream) -> list[bytes]:
    """All messages of an answer, which ends as it should."""
    assert await stream.ends_within(20)
    taken = await stream.take()
    with pytest.raises(TritonUnavailable, match="closed the stream before the last response"):
        await stream.take()
    return taken


@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": uv}) for uv in (False, True)])
async def test_many_streams_large_small_and_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than may be sent or received unasked, so that both sides have to grant more."""
    monkeypatch.setattr(grpc_transport, "_LARGEST_WINDOW", 2**17)
    async with serving() as client:
        sent = [b"", b"x", LARGE, *(b"%d" % i * i for i in range(200)), LARGE]
        answers = [await ask(client, "echo", message) for message in sent]
        received = await asyncio.gather(*map(all_of, answers))
        assert received == [[message, b"last"] for message in sent]


async def test_a_cancelled_stream_is_silent_and_the_others_go_on() -> None:
    async with serving() as client:
        stream = await ask(client, "wait", LARGE)
        assert await stream.take() == [b"begun"]
        # It may have been an adapter of many megabytes.
        assert cast(memoryview, stream.call.unsent).obj == b""
        stream.close()
        stream.close()
        assert await all_of(await ask(client, "echo", b"x")) == [b"x", b"last"]
        assert not await stream.ends_within(0)
    with pytest.raises(TritonUnavailable, match="was closed"):
        await ask(client, "wait")


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


class ClosedTransport(Transport):
    """As uvloop's is between its end and ``connection_lost``."""

    def write(self, _: Any) -> None:
        raise RuntimeError("unable to perform operation on <TCPTransport closed=True>")


async def test_a_request_in_the_moment_of_a_loss_ends_with_it() -> None:
    async with serving() as client:
        await ask(client, "wait")
        (connection,) = client._connections
        transport, connection._transport = connection._transport, ClosedTransport()
        stream = await ask(client, "echo", b"hello")
        transport.abort()
        with pytest.raises(TritonUnavailable, match="closed the connection"):
            await stream.take()


# Without a network


class Exchange:
    """A stream of a connection, and the peer's side of it."""

    def __init__(self) -> None:
        self.transport = Transport()
        self.connection = Connection("localhost:1")
        self.connection.connection_made(self.transport)
        self.stream = self.connection.send("/", Raw(b""))
        self.peer = H2Connection(H2Configuration(client_side=False))
        self.peer.initiate_connection()
        self.peer.receive_data(self.transport.written)
        self.transport.written = b""

    def receive(self) -> None:
        """Hand over what the peer has written."""
        self.connection.data_received(self.peer.data_to_send())

    async def problem(self) -> str:
        self.receive()
        with pytest.raises(TritonUnavailable) as caught:
            await self.stream.take()
        return caught.value.message


@pytest.fixture
async def exchange() -> Exchange:
    return Exchange()


async def test_streams_are_counted_and_forgotten(exchange: Exchange) -> None:
    """Of thousands that have ended few are kept, and a peer gets no more at once than it takes."""
    exchange.stream.close()
    for _ in range(2000):
        exchange.connection.send("/", Raw(b""))
        exchange.connection.send("/", Raw(b"")).close()
    exchange.peer.update_settings({SettingCodes.MAX_CONCURRENT_STREAMS: 2002})
    exchange.receive()
    streams = [exchange.connection.send("/", Raw(b"")) for _ in range(2)]
    with pytest.raises(TritonUnavailable, match="2002 open"):
        await exchange.connection.send("/", Raw(b"")).take()
    streams[0].close()
    exchange.connection.send("/", Raw(b""))
    assert len(exchange.connection._h2.streams) < 2100


OK = ("send_headers", 1, [(":status", "200")])
FULL = [("grpc-status", "14"), ("grpc-message", "no%20more")]
UNREADABLE = "Triton's answer cannot be read: "


@pytest.mark.parametrize(
    ("sent", "problem", "usable"),
    [
        ([OK, ("send_headers", 1, FULL, True)], "no more", True),
        ([OK, ("send_headers", 1, [("grpc-status", "5")], True)], "gRPC's status 5", True),
        ([("reset_stream", 1, ErrorCodes.REFUSED_STREAM)], "Triton reset the stream: ", True),
        ([OK, ("send_data", 1, b"\1\0\0\0\1x")], UNREADABLE + "a compressed message", True),
    ],
)
async def test_an_answer_that_fails(
    sent: list[tuple[Any, ...]], problem: str, usable: bool, exchange: Exchange
) -> None:
    for name, *arguments in sent:
        getattr(exchange.peer, name)(*arguments)
    assert (await exchange.problem()).startswith(problem)
    assert (exchange.connection.usable, exchange.transport.aborted) == (usable, not usable)


@pytest.mark.parametrize("data", [b"\0\0\1\0\0\0\0\0\3x", b"\0\0\1\0\0\0\0\0\0x"])
async def test_what_no_server_may_send_ends_the_connection(data: bytes, exchange: Exchange) -> None:
    exchange.receive()  # the settings
    exchange.connection.data_received(data)
    assert exchange.transport.aborted
    assert (await exchange.problem()).startswith(UNREADABLE)


async def test_the_last_stream_of_a_connection_is_its_last(exchange: Exchange) -> None:
    exchange.connection._h2.highest_outbound_stream_id = 2**31 - 5
    for usable in (True, False):
        exchange.connection.send("/", Raw(b""))
        assert (exchange.connection.usable, exchange.transport.aborted) == (usable, False)


def frames(values: Sequence[int]) -> Iterator[Frame]:
    """Frames by five values each: sequence, size of the rest, ids so far (~ at the end), prompt, ids."""
    at = 0
    while at < len(values):
        sequence, size, so_far, input_tokens = values[at : at + 4]
        ids = list(values[at + 4 : at + 2 + size])
        count = ~so_far if so_far < 0 else so_far
        yield Frame(sequence, count - len(ids), ids, input_tokens, so_far < 0)
        at += 2 + size


def parts(received: Sequence[Frame]) -> list[list[int]]:
    return [
        [~frame.end if frame.final else frame.end, frame.input_tokens, *frame.ids]
        for frame in received
    ]


class Shared(Exchange):
    """Requests whose answers may have parts of each other's, and Triton's side of their streams."""

    def ask(self, *names: str, trace: str | None = None) -> list[Stream]:
        requests = [messages.ModelInferRequest(id=name) for name in names]
        streams = [self.connection.send("/", each, trace, shared=True) for each in requests]
        addresses = [
            FrameAddress.parse(each.parameters[FRAMES_FOR].string_param) for each in requests
        ]
        assert addresses == [
            FrameAddress(self.connection._reader, stream.number) for stream in streams
        ]
        return streams

    async def asked(self) -> dict[int, int]:
        """The requests of each stream that have come at the end of the loop's turn; -1 for a reset."""
        await asyncio.sleep(0)
        written, self.transport.written = self.transport.written, b""
        counts: Counter[int] = Counter()
        for event in self.peer.receive_data(written):
            if isinstance(event, RequestReceived):
                self.peer.send_headers(event.stream_id, [(":status", "200")])
            elif isinstance(event, DataReceived):
                counts[event.stream_id] += event.data.count(self.connection._reader.encode())
            elif isinstance(event, StreamReset):
                counts[event.stream_id] = -1
        return counts

    def answer(self, number: int, *values: int, of: str = "") -> Any:
        """Write a response with frames; one without values is a last one."""
        content = encode_frames(frames(values)) if values else np.array([], np.int32)
        return self.tensors(number, content, names=[FRAMES], final=not values, of=of)

    def tensors(
        self, number: int, values: Any, *, names: Any, final: bool = False, of: str = ""
    ) -> Any:
        """Write a response with outputs that have the same values."""
        response = messages.ModelInferResponse(outputs=[{"name": name} for name in names], id=of)
        response.parameters["triton_final_response"].bool_param = final
        response.raw_output_contents.extend([values.tobytes()] * len(names))
        whole = messages.ModelStreamInferResponse(infer_response=response)
        self.write(number, whole.SerializeToString())
        return whole

    def write(self, number: int, message: bytes) -> None:
        self.peer.send_data(number, b"\0" + len(message).to_bytes(4, "big") + message)
        self.receive()

    async def together(self, number: int, *names: str) -> list[Stream]:
        """Requests on one stream."""
        streams = self.ask(*names)
        assert await self.asked() == {number: len(names)}
        return streams


@pytest.fixture
async def shared() -> Shared:
    return Shared()


async def test_parts_of_answers_come_on_any_stream_and_in_any_order(shared: Shared) -> None:
    one, two, gone, whole = [(await shared.together(n, "1"))[0] for n in (3, 5, 7, 9)]
    shared.answer(5, 2, 3, 1, 9, 60)
    assert parts(await two.take()) == [[1, 9, 60]]
    shared.answer(5, 2, 3, ~3, 9, 62)
    shared.peer.send_headers(5, [("grpc-status", "0")], end_stream=True)
    shared.receive()  # the end of that stream, before a part on another
    rest = asyncio.ensure_future(two.take())
    await asyncio.sleep(0)
    shared.answer(3, 1, 3, 1, 9, 40, 2, 3, 2, 9, 61, 99, 3, 1, 9, 0)  # 99 is nobody's
    assert parts(await one.take()) == [[1, 9, 40]]
    assert parts(await rest) == [[2, 9, 61], [~3, 9, 62]]
    whole.complete = True
    whole.close()
    assert await shared.asked() == {}  # Triton ends it
    gone.close()  # without its end
    assert await shared.asked() == {7: -1}
    shared.answer(3, 1, 3, 2, 9, 41)
    assert parts(await one.take()) == [[2, 9, 41]]  # none of its tokens was lost with the other


async def test_what_has_no_frames_is_its_own_streams(shared: Shared) -> None:
    """TensorRT-LLM's C++ backend knows no frames."""
    one, two = await shared.together(3, "1", "2")
    values = np.array([1, 2, 3, 9], np.int32)
    assert [shared.tensors(3, values, names=OUTPUTS, of="2")] == await two.take()
    ending = shared.tensors(3, values, names=(), final=True, of="1")
    assert [ending] == await one.take()
    assert (await one.ends_within(0), await two.ends_within(0)) == (True, False)
    one.close()  # though it had no part: such an engine sends nobody's but its own
    two.close()
    assert await shared.asked() == {3: -1}


async def test_requests_of_one_turn_are_sent_together(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared.ask(*"abcdefghi")
    shared.ask("traced", trace="00-1")
    assert await shared.asked() == {3: 8, 5: 1, 7: 1}
    monkeypatch.setattr(grpc_transport, "_FIRST_WINDOW", 200)
    shared.ask("small", "large" * 50, "next")  # which does not wait behind the large one
    assert await shared.asked() == {9: 2, 11: 1}


async def test_an_error_ends_the_request_that_it_names(shared: Shared) -> None:
    one, two = await shared.together(3, "1", "2")
    named = {"error_message": "no", "infer_response": {"id": "2"}}
    shared.write(3, (error := messages.ModelStreamInferResponse(**named)).SerializeToString())
    assert (await two.take(), await two.ends_within(0)) == ([error], True)
    assert not await one.ends_within(0)
    shared.answer(3, one.number, 3, 1, 9, 40)
    assert parts(await one.take()) == [[1, 9, 40]]
    shared.write(3, b"unreadable")
    with pytest.raises(TritonUnavailable, match="message that cannot be read"):
        await one.take()


async def test_a_stream_of_several_is_reset_when_nobody_reads_it(shared: Shared) -> None:
    one, stopped, two, stuck = await shared.together(3, "1", "2", "3", "4")
    shared.answer(3, stopped.number, 2, ~0, 9)
    assert await stopped.ends_within(0)
    for stream in (stopped, stuck):
        stream.close()
    (other,) = await shared.together(5, "5")
    for stream, expected in ((one, {}), (two, {3: -1})):
        stream.complete = True
        stream.close()
        assert await shared.asked() == expected
    shared.answer(5, other.number, 2, ~0, 9)
    assert parts(await other.take()) == [[~0, 9]]
    other.close()  # it has ended, though nobody has seen that
    assert await shared.asked() == {}


async def test_a_reset_ends_all_of_a_stream_and_a_loss_those_still_to_be_sent(
    shared: Shared,
) -> None:
    lost = await shared.together(3, "1", "2")
    (other,) = await shared.together(5, "3")
    shared.peer.reset_stream(3)
    shared.receive()
    for stream in lost:
        with pytest.raises(TritonUnavailable, match="Triton reset the stream") as caught:
            await stream.take()
        assert caught.value.blameless  # nobody knows which one of them caused it
    shared.answer(5, other.number, 3, 1, 9, 40)
    assert parts(await other.take()) == [[1, 9, 40]]
    (late,) = shared.ask("4")
    shared.connection.connection_lost(None)
    assert await shared.asked() == {}  # it had not been sent, and is not
    with pytest.raises(TritonUnavailable, match="Triton closed the connection"):
        await late.take()


async def test_a_request_after_the_loss_ends_at_once(shared: Shared) -> None:
    """A server that is killed as it is reached resets the connection before anything is sent."""
    shared.connection.connection_lost(None)
    (late,) = shared.ask("1")
    with pytest.raises(TritonUnavailable, match="the connection was lost"):
        await asyncio.wait_for(late.take(), 5)


async def test_a_lost_connection_stays_unusable_whatever_was_still_to_be_sent(
    shared: Shared,
) -> None:
    (dropped,) = shared.ask("1")
    dropped.close()  # nobody waits for it
    shared.connection.connection_lost(None)
    assert await shared.asked() == {}
    assert not shared.connection.usable


# What one request does to the others


@pytest.mark.parametrize(
    "next_values", [[3, 9, 42], [~3, 9, 42], [~2, 9]], ids=["a token", "the last token", "the end"]
)
async def test_only_a_request_whose_tokens_were_lost_with_another_is_to_be_tried_again(
    next_values: list[int], shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_transport, "GAP_SECONDS", 0.05)
    gone, hit, spared = [(await shared.together(n, "1"))[0] for n in (3, 5, 7)]
    shared.answer(3, hit.number, 3, 1, 9, 40, spared.number, 3, 1, 9, 50)
    assert parts(await hit.take()) == [[1, 9, 40]]
    gone.close()  # with the second token of one of the others on its way
    shared.answer(5, hit.number, len(next_values), *next_values)
    shared.answer(7, spared.number, 3, 2, 9, 51)
    with pytest.raises(TritonMalformedEvent, match="lost data after 1 tokens") as caught:
        await asyncio.wait_for(hit.take(), 20)
    assert caught.value.blameless
    assert parts(await spared.take()) == [[1, 9, 50], [2, 9, 51]]
    shared.answer(7, spared.number, 3, ~3, 9, 52)
    assert parts(await spared.take()) == [[~3, 9, 52]]


async def test_a_gap_that_closes_in_time_is_none(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_transport, "GAP_SECONDS", 0.05)
    one, two = [(await shared.together(n, "1"))[0] for n in (3, 5)]
    shared.answer(5, one.number, 3, 2, 9, 41)
    shared.answer(5, one.number, 3, 3, 9, 42)
    shared.answer(3, one.number, 3, 1, 9, 40)
    # The one that stays behind a gap fails no sooner than the other would.
    shared.answer(5, two.number, 3, 2, 9, 61)
    with pytest.raises(TritonMalformedEvent):
        await asyncio.wait_for(two.take(), 20)
    assert parts(await one.take()) == [[1, 9, 40], [2, 9, 41], [3, 9, 42]]
    shared.answer(3, one.number, 3, ~4, 9, 43)
    assert parts(await one.take()) == [[~4, 9, 43]]


async def test_an_unreadable_answer_ends_its_own_call_alone(shared: Shared) -> None:
    one, two = [(await shared.together(n, "1"))[0] for n in (3, 5)]
    shared.write(3, b"unreadable")
    with pytest.raises(TritonUnavailable, match="message that cannot be read") as caught:
        await one.take()
    assert not caught.value.blameless
    assert await shared.asked() == {3: -1}
    shared.answer(5, two.number, 3, 1, 9, 40)
    assert parts(await two.take()) == [[1, 9, 40]]
    assert shared.connection.usable


GRACEFUL = 2**31 - 1  # of a server that will tell the last stream later


@pytest.mark.parametrize("last_taken", [GRACEFUL, 5])
async def test_after_a_goaway_what_the_server_has_taken_goes_on(
    last_taken: int, shared: Shared
) -> None:
    one, two, refused = [(await shared.together(n, "1"))[0] for n in (3, 5, 7)]
    for last in dict.fromkeys([last_taken, 5]):
        frame = b"\0\0\x08\7\0\0\0\0\0" + last.to_bytes(4, "big") + bytes(4)
        shared.connection.data_received(frame)
        assert not shared.connection.usable
    with pytest.raises(TritonUnavailable, match="Triton closes the connection") as caught:
        await refused.take()
    assert caught.value.blameless
    (late,) = shared.ask("2")
    shared.stream.complete = True
    shared.stream.close()
    assert await shared.asked() == {}
    with pytest.raises(TritonUnavailable) as caught:
        await late.take()
    assert caught.value.blameless
    for number, stream in ((3, one), (5, two)):
        shared.answer(number, stream.number, 3, 1, 9, 40)
        assert parts(await stream.take()) == [[1, 9, 40]]
        shared.answer(number, stream.number, 3, ~2, 9, 41)
        assert parts(await stream.take()) == [[~2, 9, 41]]
    for number in (1, 3, 5):
        assert not shared.transport.is_closing()
        trailers = [("grpc-status", "0")] if number > 1 else [(":status", "200")]
        shared.peer.send_headers(number, trailers, end_stream=True)
        shared.receive()
    assert shared.transport.closed
    assert not shared.transport.aborted


async def test_a_call_that_the_server_refuses_is_not_at_fault(shared: Shared) -> None:
    for error, blameless in ((ErrorCodes.REFUSED_STREAM, True), (ErrorCodes.CANCEL, False)):
        number = 3 if blameless else 5
        (one,) = await shared.together(number, "1")
        shared.peer.reset_stream(number, error)
        shared.receive()
        with pytest.raises(TritonUnavailable) as caught:
            await one.take()
        assert caught.value.blameless is blameless


class Peer(asyncio.Protocol):
    """A server on a port, which takes so many calls of a connection at once and answers when it is told."""

    def __init__(self, peers: list["Peer"], most_calls: int) -> None:
        self.peers = peers
        self.h2 = H2Connection(H2Configuration(client_side=False))
        self.h2.local_settings.update({SettingCodes.MAX_CONCURRENT_STREAMS: most_calls})
        self.open: list[int] = []
        self.ended = asyncio.Event()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.peers.append(self)
        self.h2.initiate_connection()
        self.flush()

    def connection_lost(self, _: Exception | None) -> None:
        self.ended.set()

    def flush(self) -> None:
        self.transport.write(self.h2.data_to_send())

    def data_received(self, data: bytes) -> None:
        for event in self.h2.receive_data(data):  # raises for a call too many
            if isinstance(event, RequestReceived):
                self.open.append(event.stream_id)
                self.h2.send_headers(event.stream_id, [(":status", "200")])
                self.h2.send_data(event.stream_id, b"\0\0\0\0\5begun")
        self.flush()

    def finish(self) -> None:
        """Answer all calls."""
        for number in self.open:
            self.h2.send_data(number, b"\0\0\0\0\4last")
            self.h2.send_headers(number, [("grpc-status", "0")], end_stream=True)
        self.open.clear()
        self.flush()


@asynccontextmanager
async def peers_serving(most_calls: int) -> AsyncIterator[tuple[GrpcClient, list[Peer]]]:
    peers: list[Peer] = []
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Peer(peers, most_calls), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        async with aclosing(GrpcClient(f"127.0.0.1:{port}")) as client:
            yield client, peers
    finally:
        server.close()
        await asyncio.gather(*(peer.ended.wait() for peer in peers))


async def test_a_call_beyond_the_limit_of_a_connection_goes_on_another() -> None:
    async with peers_serving(100) as (client, peers):
        streams = [await ask(client, "echo") for _ in range(101)]
        assert [await stream.take() for stream in streams] == [[b"begun"]] * 101
        assert [len(peer.open) for peer in peers] == [100, 1]
        peers[0].finish()
        for stream in streams[:100]:
            assert await all_of(stream) == [b"last"]
        again = await ask(client, "echo")  # where there is room again
        assert await again.take() == [b"begun"]
        assert [len(peer.open) for peer in peers] == [1, 1]


async def test_a_limit_that_comes_late_or_falls_is_kept() -> None:
    async with peers_serving(100) as (client, peers):
        first = await ask(client, "echo")
        assert await first.take() == [b"begun"]
        (peer,) = peers
        peer.h2.update_settings({SettingCodes.MAX_CONCURRENT_STREAMS: 1})
        peer.finish()
        assert await all_of(first) == [b"last"]
        streams = [await ask(client, "echo") for _ in range(3)]
        assert [await stream.take() for stream in streams] == [[b"begun"]] * 3
        assert sorted(len(peer.open) for peer in peers) == [1, 2]


async def test_a_graceful_goaway_lets_calls_end_and_sends_new_ones_elsewhere() -> None:
    async with peers_serving(100) as (client, peers):
        streams = [await ask(client, "echo") for _ in range(8)]
        assert [await stream.take() for stream in streams] == [[b"begun"]] * 8
        (leaving,) = peers
        frame = b"\0\0\x08\7\0\0\0\0\0" + GRACEFUL.to_bytes(4, "big") + bytes(4)
        leaving.transport.write(frame)
        (connection,) = client._connections
        while connection.usable:
            await asyncio.sleep(0)
        new = await ask(client, "echo")
        assert await new.take() == [b"begun"]
        assert [len(peer.open) for peer in peers] == [8, 1]
        leaving.finish()
        for stream in streams:
            assert await all_of(stream) == [b"last"]
        await asyncio.wait_for(leaving.ended.wait(), 20)
        assert not peers[1].ended.is_set()
