"""Triton over gRPC: streams of the ensemble that returns token ids and no text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError
from google.protobuf.message import Message as ProtobufMessage
from tritonclient.grpc import InferResult, service_pb2
from tritonclient.utils import np_to_triton_dtype, serialize_byte_tensor

from cog_triton.adapters.tensors import BFLOAT16
from cog_triton.client.http2 import Connection, connect
from cog_triton.client.stream import (
    CLOSED,
    Arrivals,
    Inputs,
    ResponseStream,
    TritonClient,
)
from cog_triton.errors import (
    CogTritonError,
    TritonMalformedEvent,
    TritonUnavailable,
    error_from_text,
)
from cog_triton.wire import (
    ENGINE,
    IDS_ENSEMBLE,
    LOG_PROBS,
    NO_PARAMETERS,
    OUTPUTS,
    Parameters,
    stop_inputs,
)

_SERVICE = "/inference.GRPCInferenceService/"
_DTYPES = {**dict.fromkeys(OUTPUTS, np.int32), LOG_PROBS: np.float32}

T = TypeVar("T")
Reply = TypeVar("Reply", bound=ProtobufMessage)


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
        """Send a request of any model; its parsed responses arrive, and any CogTritonError at the end.

        Raises:
            TritonUnavailable: Triton cannot be reached.
        """

        def add(message: bytes) -> None:
            if arrivals.ended:
                return
            try:
                answer = service_pb2.ModelStreamInferResponse.FromString(message)
                if answer.error_message:
                    raise error_from_text(answer.error_message)
                arrivals.add(parse(answer.infer_response))
            except DecodeError:
                arrivals.end(TritonMalformedEvent("Triton sent a message that cannot be read"))
                return
            except CogTritonError as error:
                arrivals.end(error)
                return
            if is_final(answer.infer_response):
                arrivals.end()

        await self._send("ModelStreamInfer", request, arrivals, add)

    async def call(self, method: str, request: ProtobufMessage, reply: type[Reply]) -> Reply:
        """Return the reply to a request that is not one of inference.

        Raises:
            TritonUnavailable: Triton cannot be reached, or answered with an error.
        """
        arrivals: Arrivals[bytes] = Arrivals()
        await self._send(method, request, arrivals, arrivals.add)
        try:
            (message,) = await arrivals.take()
        finally:
            arrivals.close()
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

        async with self._connecting:
            if self._closed:
                raise TritonUnavailable(CLOSED)
            try:
                if self._connection is None or not self._connection.usable:
                    self._connection = await connect(self._address)
                stream = self._connection.open(
                    _SERVICE + method, request.SerializeToString(), on_message, end
                )
            except OSError as error:
                raise TritonUnavailable(f"Triton cannot be reached: {error}") from None
        arrivals.drop = stream.cancel


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
        async for _ in stream_messages(
            self.channel, infer_request(ENGINE, request_id, stop_inputs())
        ):
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
    arrivals = await message_arrivals(channel, request)
    try:
        while messages := await arrivals.take():
            for message in messages:
                yield message
    finally:
        arrivals.close()


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
