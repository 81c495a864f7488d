"""The gRPC client: with gRPC's own server, and with a peer that does what it is told."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from functools import partial
from typing import Any, cast

import grpc
import numpy as np
import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, RequestReceived, StreamEnded, StreamReset
from h2.settings import SettingCodes
from tritonclient.grpc import service_pb2 as messages

from cog_triton.client import connection, connections, demultiplexer, grpc_transport
from cog_triton.client.arrivals import Arrivals
from cog_triton.client.grpc_transport import GrpcClient
from cog_triton.errors import TritonMalformedEvent, TritonUnavailable
from cog_triton.protocol.frames import Frame, FrameAddress, encode_frames
from cog_triton.protocol.names import (
    ENGINE,
    FRAMES,
    FRAMES_FOR,
    IDS_ENSEMBLE,
    OUTPUTS,
    TRACEPARENT,
)

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


async def ask(client: GrpcClient, method: str, message: bytes = b"") -> Arrivals[bytes]:
    return await client.send(method, cast(Any, Raw(message)))


async def all_of(stream: Arrivals[bytes]) -> list[bytes]:
    """All messages of an answer, which ends as it should."""
    assert await stream.ends_within(20)
    taken = await stream.take()
    with pytest.raises(TritonUnavailable, match="closed the stream before the last response"):
        await stream.take()
    return taken


@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": uv}) for uv in (False, True)])
async def test_many_calls_large_small_and_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than may be sent or received unasked, so that both sides have to grant more."""
    monkeypatch.setattr(connection, "_LARGEST_WINDOW", 2**17)
    async with serving() as client:
        sent = [b"", b"x", LARGE, *(b"%d" % i * i for i in range(200)), LARGE]
        answers = [await ask(client, "echo", message) for message in sent]
        received = await asyncio.gather(*map(all_of, answers))
        assert received == [[message, b"last"] for message in sent]


async def test_a_cancelled_call_is_silent_and_the_others_go_on() -> None:
    async with serving() as client:
        stream = await ask(client, "wait", LARGE)
        assert await stream.take() == [b"begun"]
        stream.close()
        stream.close()
        assert await all_of(await ask(client, "echo", b"x")) == [b"x", b"last"]
        assert not await stream.ends_within(0)
    with pytest.raises(TritonUnavailable, match="was closed"):
        await ask(client, "wait")


class ClosedTransport(asyncio.Transport):
    """As uvloop's is between its end and ``connection_lost``."""

    def write(self, _: Any) -> None:
        raise RuntimeError("unable to perform operation on <TCPTransport closed=True>")

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        pass


async def test_a_request_in_the_moment_of_a_loss_ends_with_it() -> None:
    async with serving() as client:
        await ask(client, "wait")
        (used,) = client._connections.all
        transport, used._transport = used._transport, ClosedTransport()
        stream = await ask(client, "echo", b"hello")
        transport.abort()
        with pytest.raises(TritonUnavailable, match="closed the connection"):
            await stream.take()


# A peer in Triton's place


class Peer(asyncio.Protocol):
    """One connection of a server: it notes what comes, and answers when it is told."""

    def __init__(self, peers: list["Peer"], most_calls: int) -> None:
        self.peers = peers
        self.h2 = H2Connection(H2Configuration(client_side=False))
        self.h2.local_settings.update({SettingCodes.MAX_CONCURRENT_STREAMS: most_calls})
        self.open: list[int] = []
        self.headers: dict[int, dict[bytes, bytes]] = {}
        self.data: dict[int, bytes] = {}
        self.half_closed: list[int] = []
        self.reset: list[int] = []
        self.ended = asyncio.Event()
        self.news = asyncio.Event()

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
                self.headers[event.stream_id] = dict(event.headers)
                self.data[event.stream_id] = b""
                self.h2.send_headers(event.stream_id, [(":status", "200")])
                if not self.headers[event.stream_id][b":path"].endswith(b"ModelStreamInfer"):
                    self.h2.send_data(event.stream_id, b"\0\0\0\0\5begun")
            elif isinstance(event, DataReceived):
                self.data[event.stream_id] += event.data
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, StreamEnded):
                self.half_closed.append(event.stream_id)
            elif isinstance(event, StreamReset):
                self.reset.append(event.stream_id)
                self.open.remove(event.stream_id)
        self.flush()
        self.news.set()

    def finish(self) -> None:
        """Answer all calls that are not ModelStreamInfer."""
        for number in self.open:
            self.h2.send_data(number, b"\0\0\0\0\4last")
            self.h2.send_headers(number, [("grpc-status", "0")], end_stream=True)
        self.open.clear()
        self.flush()

    async def until(self, condition: Callable[[], bool]) -> None:
        async def wait_for_news() -> None:
            while not condition():
                self.news.clear()
                await self.news.wait()

        await asyncio.wait_for(wait_for_news(), 20)

    def requests(self, number: int) -> list[messages.ModelInferRequest]:
        """The requests that have come on a call, whole ones."""
        data, requests = self.data.get(number, b""), []
        while len(data) >= 5:
            end = 5 + int.from_bytes(data[1:5], "big")
            if len(data) < end:
                break
            requests.append(messages.ModelInferRequest.FromString(data[5:end]))
            data = data[end:]
        return requests

    def answer(self, number: int, *frames: Frame) -> None:
        """Write a response with frames."""
        response = messages.ModelInferResponse(model_name=IDS_ENSEMBLE, id="any")
        response.outputs.add(name=FRAMES)
        response.raw_output_contents.append(encode_frames(frames).tobytes())
        self.write(number, messages.ModelStreamInferResponse(infer_response=response))

    def tensors(self, number: int, model: str, request_id: str, *, final: bool) -> None:
        """Write a response as TensorRT-LLM's C++ backend does: the last one is empty."""
        response = messages.ModelInferResponse(model_name=model, id=request_id)
        response.parameters["triton_final_response"].bool_param = final
        for name in () if final else OUTPUTS:
            response.outputs.add(name=name)
            response.raw_output_contents.append(np.array([1], np.int32).tobytes())
        self.write(number, messages.ModelStreamInferResponse(infer_response=response))

    def fail(self, number: int, request_id: str, text: str) -> None:
        answer = messages.ModelStreamInferResponse(error_message=text)
        answer.infer_response.id = request_id
        self.write(number, answer)

    def write(self, number: int, answer: messages.ModelStreamInferResponse) -> None:
        message = answer.SerializeToString()
        self.h2.send_data(number, b"\0" + len(message).to_bytes(4, "big") + message)
        self.flush()

    def goaway(self, last_taken: int) -> None:
        frame = b"\0\0\x08\7\0\0\0\0\0" + last_taken.to_bytes(4, "big") + bytes(4)
        self.transport.write(frame)


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


GRACEFUL = 2**31 - 1  # of a server that will name the last stream later


async def test_a_graceful_goaway_lets_calls_end_and_sends_new_ones_elsewhere() -> None:
    async with peers_serving(100) as (client, peers):
        streams = [await ask(client, "echo") for _ in range(8)]
        assert [await stream.take() for stream in streams] == [[b"begun"]] * 8
        (leaving,) = peers
        leaving.goaway(GRACEFUL)
        (used,) = client._connections.all
        while used.usable:
            await asyncio.sleep(0)
        new = await ask(client, "echo")
        assert await new.take() == [b"begun"]
        assert [len(peer.open) for peer in peers] == [8, 1]
        leaving.finish()
        for stream in streams:
            assert await all_of(stream) == [b"last"]
        await asyncio.wait_for(leaving.ended.wait(), 20)
        assert not peers[1].ended.is_set()


# The long stream


class Requests:
    """Requests of a client whose connections a peer has."""

    def __init__(self, client: GrpcClient, peers: list[Peer]) -> None:
        self.client, self.peers = client, peers

    @property
    def peer(self) -> Peer:
        return self.peers[-1]

    async def ask(
        self, *names: str, model: str = IDS_ENSEMBLE, text: str = "", **parameters: str
    ) -> list[Arrivals[Any]]:
        """Send requests at once; wait until they have come."""
        inputs = {"text_input": np.array([[text]], np.object_)}
        sent = [self.client._send(model, name, inputs, parameters) for name in names]
        arrivals = list(await asyncio.gather(*sent))
        for name in names:
            await self.peer.until(partial(self._has_come, name, model))
        return arrivals

    def _has_come(self, name: str, model: str) -> bool:
        return self.call_of(name, model) is not None

    def call_of(self, name: str, model: str = IDS_ENSEMBLE) -> int | None:
        for number in self.peer.data:
            for request in self.peer.requests(number):
                if (request.model_name, request.id) == (model, name):
                    return number
        return None

    def stream_calls(self) -> list[int]:
        """The calls of ModelStreamInfer."""
        headers = self.peer.headers
        return [n for n in headers if headers[n][b":path"].endswith(b"ModelStreamInfer")]

    def address_of(self, name: str) -> FrameAddress:
        """Where a request wants its frames."""
        for number in self.peer.data:
            for request in self.peer.requests(number):
                if request.id == name and FRAMES_FOR in request.parameters:
                    return FrameAddress.parse(request.parameters[FRAMES_FOR].string_param)
        raise AssertionError(name)

    def frame(self, name: str, start: int, *ids: int, final: bool = False) -> Frame:
        return Frame(self.address_of(name).sequence, start, list(ids), 9, final)


@pytest.fixture
async def requests() -> AsyncIterator[Requests]:
    async with peers_serving(100) as (client, peers):
        yield Requests(client, peers)


async def taken(arrivals: Arrivals[Any]) -> list[Any]:
    return await asyncio.wait_for(arrivals.take(), 20)


async def test_all_requests_share_one_stream_until_none_is_left(requests: Requests) -> None:
    (running,) = await requests.ask("running")
    names = [str(n) for n in range(20)]
    arrivals = await requests.ask(*names)
    (number,) = requests.peer.data
    addresses = [requests.address_of(name) for name in names]
    assert len({address.reader for address in addresses}) == 1
    assert len({address.sequence for address in addresses}) == 20
    requests.peer.answer(number, *(requests.frame(name, 0, 40) for name in names))
    for each in arrivals:
        assert [frame.ids for frame in await taken(each)] == [[40]]
    requests.peer.answer(number, *(requests.frame(name, 1, final=True) for name in names))
    for each in arrivals:
        assert (await taken(each))[-1].final
        each.complete = True
        each.close()
    (again,) = await requests.ask("again")
    assert list(requests.peer.data) == [number]
    assert not await again.ends_within(0)
    for each in (again, running):
        assert requests.peer.half_closed == []
        each.close()
        each.close()
    await requests.peer.until(lambda: requests.peer.half_closed == [number])
    assert requests.peer.reset == []
    await requests.ask("later")
    assert len(requests.peer.data) == 2


async def test_a_request_that_leaves_harms_no_other(requests: Requests) -> None:
    gone, stays = await requests.ask("gone", "stays")
    (number,) = requests.peer.data
    gone.close()  # without its end
    frames = [requests.frame("gone", 0, 1), requests.frame("stays", 0, 2, final=True)]
    requests.peer.answer(number, *frames)
    assert [frame.ids for frame in await taken(stays)] == [[2]]
    await requests.ask("next")
    assert list(requests.peer.data) == [number]
    assert requests.peer.reset == []


async def test_a_stop_is_a_request_on_the_same_stream(requests: Requests) -> None:
    (running,) = await requests.ask("1")
    (stop,) = await requests.ask("1", model=ENGINE)
    (number,) = requests.peer.data
    requests.peer.tensors(number, ENGINE, "1", final=True)
    await taken(stop)
    assert (await stop.ends_within(0), await running.ends_within(0)) == (True, False)
    requests.peer.tensors(number, IDS_ENSEMBLE, "1", final=False)
    requests.peer.tensors(number, IDS_ENSEMBLE, "1", final=True)
    await running.ends_within(20)
    assert len(await taken(running)) == 2


async def test_an_error_ends_the_request_that_it_names(requests: Requests) -> None:
    one, two = await requests.ask("1", "2")
    (number,) = requests.peer.data
    requests.peer.fail(number, "2", "no")
    (answer,) = await taken(two)
    assert (answer.error_message, await two.ends_within(0)) == ("no", True)
    requests.peer.answer(number, requests.frame("1", 0, 40))
    assert [frame.ids for frame in await taken(one)] == [[40]]


@pytest.mark.parametrize(
    ("text", "parameters"),
    [("x" * grpc_transport.LARGE_BYTES, {}), ("", {TRACEPARENT: "00-1"})],
    ids=["large", "traced"],
)
async def test_large_and_traced_requests_have_calls_of_their_own(
    text: str, parameters: dict[str, str], requests: Requests
) -> None:
    (small,) = await requests.ask("small")
    (alone,) = await requests.ask("alone", text=text, **parameters)
    shared, own = requests.call_of("small"), requests.call_of("alone")
    assert shared is not None
    assert own is not None
    assert shared != own
    assert own in requests.peer.half_closed
    assert requests.peer.headers[own].get(b"traceparent") == (b"00-1" if parameters else None)
    # Frames of both come on any call.
    requests.peer.answer(own, requests.frame("small", 0, 1), requests.frame("alone", 0, 2))
    assert [frame.ids for frame in await taken(small)] == [[1]]
    assert [frame.ids for frame in await taken(alone)] == [[2]]
    alone.close()
    await requests.peer.until(lambda: requests.peer.reset == [own])
    requests.peer.answer(shared, requests.frame("small", 1, 3, final=True))
    assert [frame.ids for frame in await taken(small)] == [[3]]


@pytest.mark.parametrize("count", [1, 3])
async def test_the_end_of_the_stream_fails_its_requests(count: int, requests: Requests) -> None:
    """With several, nobody knows which one caused it. The next request opens another stream."""
    arrivals = await requests.ask(*map(str, range(count)))
    (number,) = requests.peer.data
    requests.peer.h2.reset_stream(number)
    requests.peer.flush()
    for each in arrivals:
        with pytest.raises(TritonUnavailable, match="Triton reset the stream") as caught:
            await taken(each)
        assert caught.value.blameless is (count > 1)
    await requests.ask("next")
    assert len(requests.peer.data) == 2


async def test_a_last_frame_that_has_overtaken_others_keeps_its_request(requests: Requests) -> None:
    (shared,) = await requests.ask("shared")
    (alone,) = await requests.ask("alone", traceparent="00-1")
    stream, own = requests.call_of("shared"), requests.call_of("alone")
    assert stream is not None
    assert own is not None
    requests.peer.answer(own, requests.frame("alone", 1, 42, final=True))
    requests.peer.h2.send_headers(own, [("grpc-status", "0")], end_stream=True)
    requests.peer.answer(stream, requests.frame("shared", 0, 1), requests.frame("alone", 0, 41))
    assert [frame.ids for frame in await taken(shared)] == [[1]]
    assert [frame.ids for frame in await taken(alone)] == [[41], [42]]


async def test_a_loss_of_the_connection_is_nobodys_fault(requests: Requests) -> None:
    (lost,) = await requests.ask("1")
    requests.peer.transport.abort()
    with pytest.raises(TritonUnavailable, match="connection") as caught:
        await taken(lost)
    assert caught.value.blameless
    await requests.ask("2")
    assert len(requests.peers) == 2


async def test_a_message_that_cannot_be_read_ends_the_connection(requests: Requests) -> None:
    one, two = await requests.ask("1", "2")
    (number,) = requests.peer.data
    requests.peer.h2.send_data(number, b"\0\0\0\0\x0aunreadable")
    requests.peer.flush()
    for each in (one, two):
        with pytest.raises(TritonUnavailable, match="message that cannot be read") as caught:
            await taken(each)
        assert caught.value.blameless


async def test_a_gap_that_stays_fails_its_request_alone(
    requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (demultiplexer, grpc_transport):
        monkeypatch.setattr(module, "GAP_SECONDS", 0.05)
    hit, spared = await requests.ask("hit", "spared")
    (number,) = requests.peer.data
    requests.peer.answer(number, requests.frame("hit", 1, 41), requests.frame("spared", 0, 50))
    with pytest.raises(TritonMalformedEvent, match="lost data after 0 tokens") as caught:
        await taken(hit)
    assert caught.value.blameless
    requests.peer.answer(number, requests.frame("spared", 1, 51, final=True))
    await spared.ends_within(20)
    assert [frame.ids for frame in await taken(spared)] == [[50], [51]]


async def test_after_a_goaway_the_stream_ends_and_new_requests_open_another(
    requests: Requests,
) -> None:
    old, *_ = await requests.ask("old", "other")
    leaving = requests.peer
    (number,) = leaving.data
    leaving.goaway(GRACEFUL)
    await leaving.until(lambda: leaving.half_closed == [number])
    frame = requests.frame("old", 0, 1)
    (new,) = await requests.ask("new")
    assert requests.peer is not leaving
    leaving.answer(number, frame)
    assert [each.ids for each in await taken(old)] == [[1]]
    assert not await new.ends_within(0)
    # The stop of a request on the old stream goes on the new one.
    await requests.ask("old", model=ENGINE)


async def test_a_server_that_cannot_be_reached_is_unavailable() -> None:
    async with aclosing(GrpcClient("127.0.0.1:1")) as client:
        with pytest.raises(TritonUnavailable, match="cannot be reached") as caught:
            await client._send(IDS_ENSEMBLE, "1", {})
        assert caught.value.blameless


@contextmanager
def full_listener() -> Iterator[str]:
    """The address of a socket that answers no further connection: Linux drops its packets."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                filler.connect(listener.getsockname())
        yield f"127.0.0.1:{listener.getsockname()[1]}"


async def test_no_connection_outlives_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[connection.Connection] = []

    class Recorded(connection.Connection):
        def __init__(self, authority: str) -> None:
            super().__init__(authority)
            made.append(self)

    monkeypatch.setattr(connections, "Connection", Recorded)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        # Closed at each moment of the attempt: one of them is between the connection and its return.
        for moment in range(20):
            several = connections.Connections(address)
            waiting = asyncio.create_task(several.with_room())
            for _ in range(moment):
                await asyncio.sleep(0)
            several.close("closed")
            await asyncio.gather(waiting, return_exceptions=True)
            # A transport reports its end in a later turn of the event loop.
            for _ in range(3):
                await asyncio.sleep(0)
            left = [each for each in made if not each.closed and hasattr(each, "_transport")]
            assert not left, moment


@pytest.mark.parametrize("is_shared", [True, False], ids=["on the stream", "on calls of their own"])
async def test_requests_wait_together_for_a_peer_that_drops_packets(
    is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request waits for one time-out, and not for those of the requests before it."""
    monkeypatch.setattr(connections, "CONNECT_SECONDS", 0.1)
    count = 100

    def request(client: GrpcClient) -> Awaitable[Any]:
        if is_shared:
            return client._send(IDS_ENSEMBLE, "a", {})
        return client.send("echo", messages.ServerLiveRequest())

    with full_listener() as address:
        async with aclosing(GrpcClient(address)) as client:
            began = asyncio.get_running_loop().time()
            requests = [request(client) for _ in range(count)]
            results = await asyncio.gather(*requests, return_exceptions=True)
            waited = asyncio.get_running_loop().time() - began
    assert {type(error) for error in results} == {TritonUnavailable}
    assert all(error.blameless for error in results if isinstance(error, TritonUnavailable))
    assert "no connection in 0.1 s" in str(results[-1])
    assert waited < count * 0.1 / 2


async def test_a_peer_that_closes_each_connection_at_once_is_unavailable() -> None:
    """As a proxy does whose server is down; the client must not connect again and again."""
    count = 0

    async def close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        count += 1
        writer.close()

    async with await asyncio.start_server(close, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with aclosing(GrpcClient(f"127.0.0.1:{port}")) as client:
            arrivals = None
            with contextlib.suppress(TritonUnavailable):
                arrivals = await client._send(IDS_ENSEMBLE, "a", {})
            if arrivals is not None:  # the loss came behind the request
                with pytest.raises(TritonUnavailable):
                    await arrivals.take()
    assert count == 1


async def test_a_client_that_closes_while_it_connects_waits_for_nothing() -> None:
    with full_listener() as address:
        client = GrpcClient(address)
        requests = [asyncio.create_task(client._send(IDS_ENSEMBLE, "a", {})) for _ in range(3)]
        await asyncio.sleep(0)
        requests[0].cancel()  # its end must not end the attempt of the others
        await asyncio.wait_for(client.aclose(), connections.CONNECT_SECONDS / 2)
        results = await asyncio.gather(*requests, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert [type(error) for error in results[1:]] == [TritonUnavailable] * 2


async def test_a_connection_that_is_not_made_holds_up_no_running_request() -> None:
    async with peers_serving(100) as (client, peers):
        requests = Requests(client, peers)
        (running,) = await requests.ask("running")
        own_call = await ask(client, "echo")
        assert await own_call.take() == [b"begun"]
        requests.peer.h2.update_settings({SettingCodes.MAX_CONCURRENT_STREAMS: 2})
        requests.peer.flush()
        (used,) = client._connections.all
        while used.has_room:
            await asyncio.sleep(0)
        with full_listener() as address:
            client._connections.address = address
            waiting = asyncio.create_task(ask(client, "echo"))
            assert not (await asyncio.wait([waiting], timeout=0.2))[0]
            # Requests on the stream go on, and so does a call for which there is room again.
            await requests.ask("other")
            (number,) = requests.stream_calls()
            requests.peer.answer(number, requests.frame("running", 0, 7))
            assert [frame.ids for frame in await taken(running)] == [[7]]
            own_call.close()
            again = await asyncio.wait_for(ask(client, "echo"), 5)
            assert await asyncio.wait_for(again.take(), 5) == [b"begun"]
            waiting.cancel()


async def test_an_error_reaches_its_request_while_a_stop_of_it_waits_for_a_connection() -> None:
    """It names no model, and so it could be the stop's, which has not been sent."""
    async with peers_serving(100) as (client, peers):
        requests = Requests(client, peers)
        failing, other = await requests.ask("failing", "other")
        peer = requests.peer
        (number,) = peer.data
        peer.goaway(GRACEFUL)
        await peer.until(lambda: peer.half_closed == [number])
        with full_listener() as address:
            client._connections.address = address
            stopping = asyncio.create_task(client._send(ENGINE, "failing", {}))
            assert not (await asyncio.wait([stopping], timeout=0.2))[0]
            peer.fail(number, "failing", "the request failed")
            (answer,) = await taken(failing)
            assert answer.error_message == "the request failed"
            peer.answer(number, requests.frame("other", 0, 5))
            assert [frame.ids for frame in await taken(other)] == [[5]]
            stopping.cancel()
