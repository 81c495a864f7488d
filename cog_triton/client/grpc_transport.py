"""Triton over gRPC: streams of the ensemble that returns token ids, on a connection of h2's.

gRPC's own client for asyncio takes a step of a thread, a wake-up of the event loop and a future for each
message of each stream. Tokens come as many small messages on many streams: here all that have arrived are
handed over in one step.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError
from google.protobuf.message import Message as ProtobufMessage
from h2 import events
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.exceptions import H2Error, ProtocolError
from h2.settings import SettingCodes, Settings
from tritonclient.grpc import InferResult, service_pb2
from tritonclient.utils import np_to_triton_dtype, serialize_byte_tensor

from cog_triton import wire
from cog_triton.adapters.tensors import BFLOAT16
from cog_triton.client.stream import CLOSED, Arrivals, Inputs, ResponseStream, TritonClient
from cog_triton.errors import (
    CogTritonError,
    TritonMalformedEvent,
    TritonUnavailable,
    error_from_text,
)
from cog_triton.wire import IDS_ENSEMBLE, LOG_PROBS, NO_PARAMETERS, OUTPUTS, Parameters

CONNECT_SECONDS = 10.0

_MESSAGE = struct.Struct(">BL")  # of gRPC: a flag of compression, the length
_FIRST_WINDOW = 65_535
_LARGEST_WINDOW = 2**31 - 1
_SETTINGS = {SettingCodes.ENABLE_PUSH: 0, SettingCodes.INITIAL_WINDOW_SIZE: _LARGEST_WINDOW}
_SERVICE = "/inference.GRPCInferenceService/"
_DTYPES = {**dict.fromkeys(OUTPUTS, np.int32), LOG_PROBS: np.float32}

T = TypeVar("T")
Reply = TypeVar("Reply", bound=ProtobufMessage)


@dataclass(eq=False)
class Stream:
    """A request and the messages of its response; ``status`` is gRPC's, unless it is OK."""

    number: int
    unsent: memoryview
    on_message: Callable[[bytes], object]
    end: Callable[[str | None], object]
    status: str | None = None
    _partial: bytearray = field(default_factory=bytearray)  # of a message
    _needed: int = 0  # its size

    def feed(self, data: bytes) -> None:
        """Take in a part of the response."""
        if self._partial:
            self._partial += data
            if len(self._partial) < self._needed:  # logits may have hundreds of megabytes
                return
            data = bytes(self._partial)
        at, size = 0, len(data)
        self._needed = _MESSAGE.size
        while size - at >= _MESSAGE.size:
            compressed, length = _MESSAGE.unpack_from(data, at)
            if compressed:
                raise ProtocolError("a compressed message")
            end = at + _MESSAGE.size + length
            if end > size:
                self._needed = end - at
                break
            self.on_message(data[at + _MESSAGE.size : end])
            at = end
        self._partial = bytearray(data[at:])


class Connection(asyncio.Protocol):
    """One connection, see ``connect``. To be used from its event loop."""

    def __init__(self, authority: str) -> None:
        self._authority = authority
        # The headers that are sent are ours, and in order.
        self._h2 = H2Connection(
            H2Configuration(validate_outbound_headers=False, normalize_outbound_headers=False)
        )
        self._streams: dict[int, Stream] = {}
        self._taken = 0  # bytes received and not yet granted to the peer again
        self.usable = True

    def open(
        self,
        path: str,
        message: bytes,
        on_message: Callable[[bytes], object],
        on_end: Callable[[str | None], object],
    ) -> Stream:
        """Send a request of one message; an OSError says that the peer takes no more streams.

        Args:
            on_end: called once after the last message, with None if the response ended without an error.
        """
        headers = [
            *((":method", "POST"), (":scheme", "http"), (":path", path)),
            *((":authority", self._authority), ("te", "trailers")),
            ("content-type", "application/grpc"),
        ]
        try:
            number = self._h2.get_next_available_stream_id()
            self._h2.send_headers(number, headers)
        except H2Error as error:
            raise OSError(str(error)) from None
        body = memoryview(_MESSAGE.pack(0, len(message)) + message)
        stream = self._streams[number] = Stream(number, body, on_message, on_end)
        self._send_body(stream)
        self._flush()
        return stream

    def cancel(self, stream: Stream) -> None:
        if self._streams.pop(stream.number, None) is not None:
            self._h2.reset_stream(stream.number, ErrorCodes.CANCEL)
            self._flush()

    def close(self, reason: str) -> None:
        """End the connection and all its streams."""
        if self.usable:
            self.usable = False
            self._transport.abort()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.end(reason)

    # Called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's is of no class of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._h2.local_settings = Settings(initial_values=_SETTINGS)
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(_LARGEST_WINDOW - _FIRST_WINDOW)
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self.close(f"the connection was lost: {exc}" if exc else "Triton closed the connection")

    def data_received(self, data: bytes) -> None:
        try:
            for event in self._h2.receive_data(data):
                self._handle(event)
        except ProtocolError as error:
            self.close(f"Triton's answer cannot be read: {error}")
            return
        self._flush()

    def _handle(self, event: events.Event) -> None:
        if isinstance(event, events.DataReceived):
            stream = self._streams.get(event.stream_id)
            if stream is not None:  # else it has been cancelled
                stream.feed(event.data)
            self._taken += event.flow_controlled_length
            if self._taken > _LARGEST_WINDOW // 2:
                self._h2.increment_flow_control_window(self._taken)
                self._taken = 0
        elif isinstance(event, (events.ResponseReceived, events.TrailersReceived)):
            headers, stream = dict(event.headers), self._streams.get(event.stream_id)
            status = headers.get(b"grpc-status", b"0").decode()
            if stream is not None and status != "0":
                message = unquote(headers.get(b"grpc-message", b"").decode(errors="replace"))
                stream.status = message or f"gRPC's status {status}"
        elif isinstance(event, (events.StreamEnded, events.StreamReset)):
            stream = self._streams.pop(event.stream_id, None)
            if stream is not None and isinstance(event, events.StreamReset):
                stream.end(f"Triton reset the stream: error {event.error_code!s}")
            elif stream is not None:
                stream.end(stream.status)
        elif isinstance(event, (events.WindowUpdated, events.RemoteSettingsChanged)):
            for stream in self._streams.values():
                self._send_body(stream)
        elif isinstance(event, events.ConnectionTerminated):
            self.close("Triton closes the connection")

    def _send_body(self, stream: Stream) -> None:
        """Send as much of a request as the peer takes now."""
        while stream.unsent:
            window = self._h2.local_flow_control_window(stream.number)
            size = min(window, self._h2.max_outbound_frame_size)
            if size <= 0:
                return
            part, stream.unsent = stream.unsent[:size], stream.unsent[size:]
            self._h2.send_data(stream.number, part, end_stream=not stream.unsent)
        stream.unsent = memoryview(b"")  # an empty rest would keep the whole, an adapter perhaps

    def _flush(self) -> None:
        if data := self._h2.data_to_send():
            with contextlib.suppress(
                RuntimeError
            ):  # uvloop's, if it has closed: the loss comes next
                self._transport.write(data)


async def connect(address: str) -> Connection:
    """Connect to host:port, or raise OSError."""
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    connecting = loop.create_connection(lambda: Connection(address), host.strip("[]"), int(port))
    try:
        _, connection = await asyncio.wait_for(connecting, CONNECT_SECONDS)
    except asyncio.TimeoutError:  # is an OSError from Python 3.11 on
        raise OSError(f"no connection in {CONNECT_SECONDS:g} s") from None
    return connection


class Channel:
    """Requests on one connection, which is made when it is needed. To be used from one event loop."""

    def __init__(self, address: str) -> None:
        """Connect to nothing yet; the address is host:port of Triton's gRPC endpoint."""
        self._address = address
        self._connection: Connection | None = None
        self._connecting = asyncio.Lock()
        self._closed = False

    async def begin(
        self,
        request: service_pb2.ModelInferRequest,
        arrivals: Arrivals[T],
        parse: Callable[[service_pb2.ModelInferResponse], T],
    ) -> None:
        """Send a request of any model; its parsed responses arrive, and any CogTritonError at the end."""

        def add(message: bytes) -> None:
            if arrivals.ended:
                return
            try:
                answer = service_pb2.ModelStreamInferResponse.FromString(message)
                if answer.error_message:
                    raise error_from_text(answer.error_message)
                arrivals.add(parse(answer.infer_response))
                if is_final(answer.infer_response):
                    arrivals.end()
            except DecodeError:
                arrivals.end(TritonMalformedEvent("Triton sent a message that cannot be read"))
            except CogTritonError as error:
                arrivals.end(error)

        await self._send("ModelStreamInfer", request, arrivals, add)

    async def call(self, method: str, request: ProtobufMessage, reply: type[Reply]) -> Reply:
        """Return the reply to a request that is not one of inference, or raise TritonUnavailable."""
        arrivals: Arrivals[bytes] = Arrivals()
        await self._send(method, request, arrivals, arrivals.add)
        with contextlib.closing(arrivals):
            (message,) = await arrivals.take()
        return reply.FromString(message)

    async def aclose(self) -> None:
        """Close the connection, which ends its streams."""
        async with self._connecting:
            self._closed = True
            if self._connection is not None:
                self._connection.close(CLOSED)

    async def _send(
        self,
        method: str,
        request: ProtobufMessage,
        arrivals: Arrivals[T],
        on_message: Callable[[bytes], object],
    ) -> None:
        def end(error: str | None) -> None:
            problem = error or "Triton closed the stream before the last response"
            arrivals.end(TritonUnavailable(problem))

        body = request.SerializeToString()
        async with self._connecting:
            if self._closed:
                raise TritonUnavailable(CLOSED)
            try:
                if self._connection is None or not self._connection.usable:
                    self._connection = await connect(self._address)
                stream = self._connection.open(_SERVICE + method, body, on_message, end)
            except OSError as error:
                raise TritonUnavailable(f"Triton cannot be reached: {error}") from None
        arrivals.drop = partial(self._connection.cancel, stream)


class GrpcClient(TritonClient):
    """See ``TritonClient``. Each request is a stream of one connection."""

    def __init__(self, address: str, *, response_timeout: float) -> None:
        super().__init__(response_timeout=response_timeout)
        self.channel = Channel(address)

    async def _begin(
        self, stream: ResponseStream, request_id: str, inputs: Inputs, parameters: Parameters
    ) -> None:
        outputs = OUTPUTS if stream.top is None else (*OUTPUTS, LOG_PROBS)
        request = infer_request(IDS_ENSEMBLE, request_id, inputs, outputs, parameters)
        await self.channel.begin(
            request, stream, lambda m: stream.decode(flat_outputs(m), final=is_final(m))
        )

    async def _send_stop(self, request_id: str) -> None:
        request = infer_request(wire.ENGINE, request_id, wire.stop_inputs())
        async for _ in stream_messages(self.channel, request):
            pass

    async def _disconnect(self) -> None:
        await self.channel.aclose()


class Message(NamedTuple):
    """One response of any model; the last one may be without tensors."""

    tensors: dict[str, npt.NDArray[Any]]
    final: bool


async def message_arrivals(
    channel: Channel, request: service_pb2.ModelInferRequest, timeout: float | None = None
) -> Arrivals[Message]:
    """Send a request and return its responses, whatever its model and outputs; the caller closes them.

    Raises:
        CogTritonError: Triton cannot be reached, or answered with an error.
    """

    def parse(response: service_pb2.ModelInferResponse) -> Message:
        result = InferResult(response)
        tensors = {output.name: result.as_numpy(output.name) for output in response.outputs}
        return Message(tensors, is_final(response))

    # Asked for, so that a stream that ends without data ends here.
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    arrivals: Arrivals[Message] = Arrivals(timeout)
    await channel.begin(request, arrivals, parse)
    return arrivals


async def stream_messages(
    channel: Channel, request: service_pb2.ModelInferRequest
) -> AsyncGenerator[Message, None]:
    """Yield the messages of ``message_arrivals`` one by one."""
    with contextlib.closing(await message_arrivals(channel, request)) as arrivals:
        while messages := await arrivals.take():
            for message in messages:
                yield message


def infer_request(
    model: str,
    request_id: str,
    inputs: Inputs,
    outputs: Sequence[str] = (),
    parameters: Parameters = NO_PARAMETERS,
) -> service_pb2.ModelInferRequest:
    """Return the request as a message; with no outputs named, all are asked for."""
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    for name, value in inputs.items():
        kind = "BF16" if value.dtype == BFLOAT16 else np_to_triton_dtype(value.dtype)
        content = (
            b"".join(serialize_byte_tensor(value).flat) if kind == "BYTES" else value.tobytes()
        )
        request.inputs.add(name=name, datatype=kind, shape=value.shape)
        request.raw_input_contents.append(content)
    for name in outputs:
        request.outputs.add(name=name)
    for name, parameter in parameters.items():
        kind = {bool: "bool_param", int: "int64_param"}.get(type(parameter), "string_param")
        setattr(request.parameters[name], kind, parameter)
    return request


def flat_outputs(response: service_pb2.ModelInferResponse) -> dict[str, list[Any]]:
    """Return the outputs for ``decode_response``."""
    contents = zip(response.outputs, response.raw_output_contents, strict=False)
    try:
        return {
            output.name: np.frombuffer(content, dtype).tolist()
            for output, content in contents
            if (dtype := _DTYPES.get(output.name)) is not None
        }
    except ValueError:
        raise TritonMalformedEvent("a response of the ensemble is malformed") from None


def is_final(response: service_pb2.ModelInferResponse) -> bool:
    return bool(response.parameters["triton_final_response"].bool_param)
