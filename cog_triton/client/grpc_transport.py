"""Triton over gRPC: streams of the ensemble that returns token ids, on a connection of h2's.

gRPC's own client for asyncio takes a step of a thread, a wake-up of the event loop and a future for each
message of each stream. Tokens come as many small messages on many streams: here all that have arrived are
handed over in one step.
"""

import asyncio
import contextlib
import math
import struct
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import Any, TypeVar, cast
from urllib.parse import unquote
from uuid import uuid4

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

from cog_triton import errors, wire
from cog_triton.adapters.tensors import BFLOAT16
from cog_triton.client.stream import CLOSED, Arrivals, Inputs, Outputs, TritonClient, lost_after
from cog_triton.wire import NO_PARAMETERS, Parameters

CONNECT_SECONDS = 10.0
INFER = "ModelStreamInfer"

_PREFIX = struct.Struct(">BL")  # of a message: whether it is compressed, its length
_FIRST_WINDOW, _LARGEST_WINDOW = 65_535, 2**31 - 1
_SETTINGS = {SettingCodes.ENABLE_PUSH: 0, SettingCodes.INITIAL_WINDOW_SIZE: _LARGEST_WINDOW}
_DTYPES = {**dict.fromkeys(wire.OUTPUTS, np.int32), wire.LOG_PROBS: np.float32}

Reply = TypeVar("Reply", bound=ProtobufMessage)


class Stream(Arrivals[Any]):
    """A request that is being sent, and the answer to it: messages, or the parts of it in any messages."""

    status: str | None = None  # gRPC's, unless it is OK

    def __init__(self, number: int, message: bytes) -> None:
        super().__init__()
        self.number = number
        self.receive: Callable[[bytes], None] = self.add  # each message
        self.place, self.early = 0, dict[int, list[int]]()
        self.unsent = memoryview(_PREFIX.pack(0, len(message)) + message)
        self._received = bytearray()

    def feed(self, data: bytes) -> None:
        """Take in a part of the answer."""
        self._received += data
        while len(self._received) >= _PREFIX.size:
            compressed, length = _PREFIX.unpack_from(self._received)
            if compressed:
                raise ProtocolError("a compressed message")
            end = _PREFIX.size + length
            if len(self._received) < end:
                return
            self.receive(bytes(self._received[_PREFIX.size : end]))
            del self._received[:end]

    def add_part(self, part: list[int]) -> None:
        """Add one that is as ``wire.COUNTED_IDS`` says; those of two streams may come in any order."""
        self.early[max(part[0], ~part[0]) - len(part) + 2] = part
        while (ready := self.early.pop(self.place, None)) is not None:
            self.place += len(ready) - 2
            self.add(ready)


class _H2(H2Connection):
    """h2's, without counting the streams one by one for each new one, at which it forgets the closed."""

    _crowded = 64

    @property
    def open_outbound_streams(self) -> int:
        if len(self.streams) >= min(self._crowded, self.remote_settings.max_concurrent_streams):
            self._crowded = 64 + 2 * super().open_outbound_streams
        return len(self.streams)


class Connection(asyncio.Protocol):
    """One connection to Triton. To be used from its event loop."""

    def __init__(self, authority: str) -> None:
        self._authority = authority
        # The headers that are sent are ours, and in order.
        config = H2Configuration(validate_outbound_headers=False, normalize_outbound_headers=False)
        self._h2 = _H2(config)
        self._streams: dict[int, Stream] = {}
        self._reader = uuid4().hex
        self._sharing: dict[int, Stream] = {}  # until they are closed
        self._taken = 0  # bytes received and not yet granted to the peer again
        self.usable = True

    def send(self, path: str, request: Any, trace: Any = None, *, shared: bool = False) -> Stream:
        """Send a request, or raise OSError. Responses to ``shared`` ones may have parts of each other's."""
        head = {":method": "POST", ":scheme": "http", ":path": path, ":authority": self._authority}
        headers = {**head, "te": "trailers", "content-type": "application/grpc"}
        headers |= {wire.TRACEPARENT: trace} if trace else {}
        try:
            number = self._h2.get_next_available_stream_id()
            self._h2.send_headers(number, headers.items())
        except H2Error as error:
            raise OSError(str(error)) from None
        if shared:
            request.parameters[wire.CHANNEL].string_param = f"{self._reader}/{number}"
        stream = self._streams[number] = Stream(number, request.SerializeToString())
        stream.close = partial(self._cancel, stream)
        if shared:
            self._sharing[number] = stream
            stream.receive = partial(self._spread, stream)
        self._send_body(stream)
        self._flush()
        return stream

    def close(self, reason: str) -> None:
        """End the connection and all its streams."""
        if self.usable:
            self.usable = False
            self._transport.abort()
        for stream in (self._streams | self._sharing).values():
            stream.end(errors.TritonUnavailable(reason))
        self._streams.clear()

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
        # No stream: one that was cancelled, or an event of the connection.
        stream = self._streams.get(getattr(event, "stream_id", 0))
        if isinstance(event, events.DataReceived):
            if stream is not None:
                stream.feed(event.data)
            self._taken += event.flow_controlled_length
            if self._taken > _LARGEST_WINDOW // 2:
                self._h2.increment_flow_control_window(self._taken)
                self._taken = 0
        elif isinstance(event, (events.WindowUpdated, events.RemoteSettingsChanged)):
            for waiting in self._streams.values():
                self._send_body(waiting)
        elif isinstance(event, events.ConnectionTerminated):
            self.close("Triton closes the connection")
        elif stream is None:
            return
        elif isinstance(event, (events.ResponseReceived, events.TrailersReceived)):
            headers = dict(event.headers)
            if (status := headers.get(b"grpc-status", b"0").decode()) != "0":
                message = unquote(headers.get(b"grpc-message", b"").decode(errors="replace"))
                stream.status = message or f"gRPC's status {status}"
        elif isinstance(event, (events.StreamEnded, events.StreamReset)):
            del self._streams[stream.number]
            problem = stream.status or "Triton closed the stream before the last response"
            if isinstance(event, events.StreamReset):
                problem = f"Triton reset the stream: error {event.error_code!s}"
                self._lose(stream)
            elif stream.status is None and any(part[0] < 0 for part in stream.early.values()):
                return  # the last part overtook others, on other streams
            stream.end(errors.TritonUnavailable(problem))

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

    def _spread(self, stream: Stream, message: bytes) -> None:
        for number, part in (parts := parts_of(message)):
            if (receiver := self._sharing.get(number)) is not None:
                receiver.add_part(part)
        if not parts:  # an error, or an engine that knows no channels
            stream.receive = stream.add
            stream.add(message)

    def _lose(self, stream: Stream) -> None:
        """Let the others be tried again, whose tokens a stream may have had that ends too early."""
        if self._sharing.pop(stream.number, None) and not stream.complete:
            for other in self._sharing.values():
                other.fail(lost_after(other.place))

    def _cancel(self, stream: Stream) -> None:
        # Triton ends a complete one, which may still be at work on its own last response.
        if not stream.complete and self._streams.pop(stream.number, None) is not None:
            self._lose(stream)
            self._h2.reset_stream(stream.number, ErrorCodes.CANCEL)
            self._flush()
        self._sharing.pop(stream.number, None)

    def _flush(self) -> None:
        if data := self._h2.data_to_send():
            # uvloop's transport raises when it has closed: the loss comes next.
            with contextlib.suppress(RuntimeError):
                self._transport.write(data)


class GrpcClient(TritonClient):
    """See ``TritonClient``. Requests share one connection, which is made when it is needed."""

    def __init__(self, address: str, *, response_timeout: float = math.inf) -> None:
        """Connect to nothing yet; the address is host:port of Triton's gRPC endpoint."""
        super().__init__(response_timeout)
        self._address = address
        self._connection: Connection | None = None
        self._connecting = asyncio.Lock()
        self._disconnected = False

    async def send(
        self, method: str, request: Any, traceparent: Any = None, *, shared: bool = False
    ) -> Stream:
        """Send a request as ``Connection.send`` does, or raise TritonUnavailable."""
        path = f"/inference.GRPCInferenceService/{method}"
        async with self._connecting:
            if self._disconnected:
                raise errors.TritonUnavailable(CLOSED)
            try:
                if self._connection is None or not self._connection.usable:
                    host, _, port = self._address.rpartition(":")
                    connecting = asyncio.get_running_loop().create_connection(
                        partial(Connection, self._address), host.strip("[]"), int(port)
                    )
                    self._connection = (await asyncio.wait_for(connecting, CONNECT_SECONDS))[1]
                return self._connection.send(path, request, traceparent, shared=shared)
            except (OSError, asyncio.TimeoutError) as error:
                problem = str(error) or f"no connection in {CONNECT_SECONDS:g} s"
                raise errors.TritonUnavailable(f"Triton cannot be reached: {problem}") from None

    async def call(self, method: str, request: ProtobufMessage, reply: type[Reply]) -> Reply:
        """Return the reply to a request that is not one of inference, or raise TritonUnavailable."""
        with contextlib.closing(await self.send(method, request)) as stream:
            (message,) = await stream.take()
        return reply.FromString(message)

    async def responses(
        self, request: service_pb2.ModelInferRequest
    ) -> AsyncGenerator[list[service_pb2.ModelInferResponse], None]:
        """Send a request to any model, yield the responses that have arrived, or raise CogTritonError."""
        stream = await self.send(INFER, request)
        with self.receiving(request.id, stream):
            while not stream.complete:
                responses = [parse(message) for message in await stream.take()]
                stream.complete = is_final(responses[-1])
                yield responses

    async def _send(
        self, model: str, request_id: str, inputs: Inputs, parameters: Parameters = NO_PARAMETERS
    ) -> Stream:
        outputs = wire.OUTPUTS if model == wire.IDS_ENSEMBLE else ()
        log_probs = [wire.LOG_PROBS] if "return_log_probs" in inputs else []
        request = infer_request(model, request_id, inputs, [*outputs, *log_probs], parameters)
        shared = wire.COUNTED_IDS in parameters and not log_probs
        return await self.send(INFER, request, parameters.get(wire.TRACEPARENT), shared=shared)

    def _parse(self, message: bytes | list[int]) -> tuple[Outputs, bool]:
        if isinstance(message, list):
            return {"output_ids": message}, message[0] < 0
        response = parse(message)
        return flat_outputs(response), is_final(response)

    async def _disconnect(self) -> None:
        async with self._connecting:
            self._disconnected = True
            if self._connection is not None:
                self._connection.close(CLOSED)


def parse(message: bytes) -> service_pb2.ModelInferResponse:
    """Return the response that arrived, or raise the error."""
    try:
        answer = service_pb2.ModelStreamInferResponse.FromString(message)
    except DecodeError:
        raise errors.TritonMalformedEvent("Triton sent a message that cannot be read") from None
    if answer.error_message:
        raise errors.error_from_text(answer.error_message)
    return answer.infer_response


def parts_of(message: bytes) -> list[tuple[int, list[int]]]:
    """Return the parts that ``wire.CHANNEL`` speaks of, each with its number; none of another message."""
    parts, at = [], 0
    try:
        (values,) = flat_outputs(parse(message)).values()  # TensorRT-LLM's C++ backend sends more
        while at < len(values):
            number, size = values[at : at + 2]
            begin, at = at + 2, at + 2 + size
            if size < 2 or at > len(values):
                return []
            parts.append((number, values[begin:at]))
    except (errors.CogTritonError, ValueError):
        return []  # its reader says so
    return parts


def tensors_of(response: service_pb2.ModelInferResponse) -> dict[str, npt.NDArray[Any]]:
    """Return the outputs of any model; the last response may have none."""
    result = InferResult(response)
    return {output.name: result.as_numpy(output.name) for output in response.outputs}


def infer_request(
    model: str,
    request_id: str,
    inputs: Inputs,
    outputs: Sequence[str] = (),
    parameters: Parameters = NO_PARAMETERS,
) -> service_pb2.ModelInferRequest:
    """Return the request as a message; with no outputs named, all are asked for."""
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    # So that a stream that ends without data has a last response.
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    for name, value in inputs.items():
        kind = "BF16" if value.dtype == BFLOAT16 else np_to_triton_dtype(value.dtype)
        data = b"".join(serialize_byte_tensor(value).flat) if kind == "BYTES" else value.tobytes()
        request.inputs.add(name=name, datatype=kind, shape=value.shape)
        request.raw_input_contents.append(data)
    for name in outputs:
        request.outputs.add(name=name)
    for name, parameter in parameters.items():
        kind = {bool: "bool_param", int: "int64_param"}.get(type(parameter), "string_param")
        setattr(request.parameters[name], kind, parameter)
    return request


def flat_outputs(response: service_pb2.ModelInferResponse) -> Outputs:
    """Return the outputs for ``decode_response``."""
    contents = zip(response.outputs, response.raw_output_contents, strict=False)
    try:
        return {
            output.name: np.frombuffer(content, dtype).tolist()
            for output, content in contents
            if (dtype := _DTYPES.get(output.name)) is not None
        }
    except ValueError:
        raise errors.TritonMalformedEvent("a response of the ensemble is malformed") from None


def is_final(response: service_pb2.ModelInferResponse) -> bool:
    return bool(response.parameters["triton_final_response"].bool_param)
