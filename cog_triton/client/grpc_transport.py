"""Triton over gRPC: streams of the ensemble that returns token ids and no text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError
from tritonclient.grpc import InferInput, InferRequestedOutput, InferResult, service_pb2
from tritonclient.utils import np_to_triton_dtype

from cog_triton.adapters.tensors import BFLOAT16
from cog_triton.client.arrivals import CLOSED, Arrivals
from cog_triton.client.http2 import Connection, connect
from cog_triton.client.stream import (
    Inputs,
    Response,
    ResponseStream,
    TritonClient,
    checked_response,
    error_from_text,
    wanted_log_probs,
)
from cog_triton.errors import CogTritonError, TritonMalformedEvent, TritonUnavailable
from cog_triton.wire import (
    CHECKED_IDS,
    CONTINUED,
    ENGINE,
    IDS_ENSEMBLE,
    LOG_PROBS,
    OUTPUTS,
    Parameters,
    ids_text,
    stop_inputs,
)

METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_http_proxy", 0),  # Triton is this machine's own
    # Else a new server's client gets the connection of a dead one's at the same port, which waits longer
    # after each failure, up to two minutes, and fails every request in between.
    ("grpc.use_local_subchannel_pool", 1),
)
"""For gRPC's own client, which makes the calls that are not streams."""

_DTYPES = {**dict.fromkeys(OUTPUTS, np.int32), LOG_PROBS: np.float32}

T = TypeVar("T")


class Channel:
    """Streams of one request each on one connection, which is made when it is needed.

    To be used from one event loop.
    """

    def __init__(self, address: str) -> None:
        """Connect to nothing yet.

        Args:
            address: host:port of Triton's gRPC endpoint.
        """
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
        """Send a request of any model; its parsed responses arrive, and any CogTritonError at the end.

        Raises:
            TritonUnavailable: Triton cannot be reached.
        """

        def add(message: bytes) -> None:
            if arrivals.ended:
                return
            try:
                response = _infer_response(message)
                arrivals.add(parse(response))
            except CogTritonError as error:
                arrivals.end(error)
                return
            if is_final(response):
                arrivals.end()

        def end(error: str | None) -> None:
            problem = error or "Triton closed the stream before the last response"
            arrivals.end(TritonUnavailable(problem))

        connection = await self._connected()
        arrivals.drop = connection.open(METHOD, request.SerializeToString(), add, end).cancel

    async def aclose(self) -> None:
        """Close the connection, which ends its streams."""
        async with self._connecting:
            self._closed = True
            if self._connection is not None:
                self._connection.close(CLOSED)

    async def _connected(self) -> Connection:
        async with self._connecting:
            if self._closed:
                raise TritonUnavailable(CLOSED)
            if self._connection is None or not self._connection.usable:
                try:
                    self._connection = await connect(self._address)
                except OSError as error:
                    raise TritonUnavailable(f"Triton cannot be reached: {error}") from None
            return self._connection


class GrpcClient(TritonClient):
    """See ``TritonClient``. Each request is a stream of one connection."""

    def __init__(self, address: str, *, response_timeout: float) -> None:
        """Connect to nothing yet.

        Args:
            address: host:port of Triton's gRPC endpoint.
        """
        super().__init__(response_timeout=response_timeout)
        self.channel = Channel(address)

    async def _begin(
        self, request_id: str, inputs: Inputs, continued: Sequence[int], parameters: Parameters
    ) -> ResponseStream:
        top = wanted_log_probs(inputs, parameters)
        outputs = OUTPUTS if top is None else (*OUTPUTS, LOG_PROBS)
        request = infer_request(IDS_ENSEMBLE, request_id, inputs, outputs)
        set_parameters(request, {**parameters, CHECKED_IDS: True})
        if continued:
            set_parameters(request, {CONTINUED: ids_text(continued)})
        place = 0

        def parse(message: service_pb2.ModelInferResponse) -> Response:
            nonlocal place
            response = parse_response(message, place, top)
            place += len(response.ids)
            return response

        stream = ResponseStream(self._response_timeout)
        await self.channel.begin(request, stream, parse)
        return stream

    async def _send_stop(self, request_id: str) -> None:
        request = infer_request(ENGINE, request_id, stop_inputs(), ())
        async for _ in stream_messages(self.channel, request):
            pass

    async def _disconnect(self) -> None:
        await self.channel.aclose()


@dataclass(frozen=True)
class Message:
    """One response of a stream.

    Attributes:
        tensors: by name; may be empty.
        final: whether this is the last one.
    """

    tensors: dict[str, npt.NDArray[Any]]
    final: bool


async def message_arrivals(
    channel: Channel, request: service_pb2.ModelInferRequest, timeout: float | None = None
) -> Arrivals[Message]:
    """Send a request and return its responses, whatever its model and outputs; the caller closes them.

    Raises:
        CogTritonError: Triton cannot be reached, or answered with an error.
    """
    # Asked for, so that a stream that ends without data ends here.
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    arrivals: Arrivals[Message] = Arrivals(timeout)
    await channel.begin(request, arrivals, _message)
    return arrivals


async def stream_messages(
    channel: Channel, request: service_pb2.ModelInferRequest
) -> AsyncGenerator[Message, None]:
    """Yield the messages of ``message_arrivals`` one by one."""
    arrivals = await message_arrivals(channel, request)
    try:
        while messages := await arrivals.take():
            for message in messages:
                yield message
    finally:
        arrivals.close()


def infer_request(
    model: str, request_id: str, inputs: Inputs, outputs: tuple[str, ...]
) -> service_pb2.ModelInferRequest:
    """Return the request as a message; with no outputs named, all are asked for."""
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    for name, value in inputs.items():
        if value.dtype == BFLOAT16:
            request.inputs.add(name=name, datatype="BF16", shape=value.shape)
            request.raw_input_contents.append(value.tobytes())
            continue
        tensor = InferInput(name, list(value.shape), np_to_triton_dtype(value.dtype))
        tensor.set_data_from_numpy(value)
        request.inputs.append(tensor._get_tensor())
        request.raw_input_contents.append(tensor._get_content())
    request.outputs.extend(InferRequestedOutput(name)._get_tensor() for name in outputs)
    return request


def set_parameters(request: service_pb2.ModelInferRequest, parameters: Parameters) -> None:
    """Add parameters to a request."""
    for name, value in parameters.items():
        kind = {bool: "bool_param", int: "int64_param"}.get(type(value), "string_param")
        setattr(request.parameters[name], kind, value)


def parse_response(
    response: service_pb2.ModelInferResponse, place: int = 0, top: int | None = None
) -> Response:
    """Return the response in a message.

    Args:
        place: how many ids have come before it.
        top: see ``wanted_log_probs``.

    Raises:
        TritonMalformedEvent: an output is missing, or the stream is not complete up to here.
    """
    contents = zip(response.outputs, response.raw_output_contents, strict=False)
    try:
        outputs = {
            output.name: np.frombuffer(content, dtype).tolist()
            for output, content in contents
            if (dtype := _DTYPES.get(output.name)) is not None
        }
    except ValueError:
        raise TritonMalformedEvent("a response of the ensemble is malformed") from None
    return checked_response(outputs, place, top, final=is_final(response))


def is_final(response: service_pb2.ModelInferResponse) -> bool:
    """Return whether a response is the last one of its request."""
    return bool(response.parameters["triton_final_response"].bool_param)


def _infer_response(message: bytes) -> service_pb2.ModelInferResponse:
    try:
        answer = service_pb2.ModelStreamInferResponse.FromString(message)
    except DecodeError:
        raise TritonMalformedEvent("Triton sent a message that cannot be read") from None
    if answer.error_message:
        raise error_from_text(answer.error_message)
    return answer.infer_response


def _message(response: service_pb2.ModelInferResponse) -> Message:
    result = InferResult(response)
    names = [output.name for output in response.outputs]
    return Message({name: result.as_numpy(name) for name in names}, is_final(response))
