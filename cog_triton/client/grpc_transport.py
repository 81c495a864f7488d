"""Triton over gRPC: streams of the ensemble that returns token ids and no text."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError
from tritonclient.grpc import (
    InferInput,
    InferRequestedOutput,
    InferResult,
    service_pb2,
    service_pb2_grpc,
)
from tritonclient.utils import np_to_triton_dtype

from cog_triton.adapters.tensors import BFLOAT16
from cog_triton.client.arrivals import CLOSED, Arrivals
from cog_triton.client.http2 import Connection, connect
from cog_triton.client.stream import (
    Inputs,
    Response,
    ResponseStream,
    TritonClient,
    check_total,
    checked_ids,
    error_from_text,
    log_probs,
    prompt_log_probs,
    wanted_log_probs,
)
from cog_triton.errors import (
    CogTritonError,
    TritonMalformedEvent,
    TritonUnavailable,
    TritonUnknownError,
)
from cog_triton.wire import (
    CHECKED_IDS,
    CONTINUED,
    ENGINE,
    IDS_ENSEMBLE,
    LOG_PROBS,
    OUTPUTS,
    Parameters,
    checksum,
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

# Triton's own errors come in messages. These are gRPC's, of a connection that broke or was garbled.
CONNECTION_CODES = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.CANCELLED,
)


class GrpcClient(TritonClient):
    """See ``TritonClient``. Each request is a stream of one connection, which is made when it is needed."""

    def __init__(self, address: str, *, response_timeout: float) -> None:
        """Connects to nothing yet.

        Args:
            address: host:port of Triton's gRPC endpoint.
        """
        super().__init__(response_timeout=response_timeout)
        self._address = address
        self._connection: Connection | None = None
        self._connecting = asyncio.Lock()
        self._disconnected = False

    async def _begin(
        self, request_id: str, inputs: Inputs, continued: Sequence[int], parameters: Parameters
    ) -> ResponseStream:
        top = wanted_log_probs(inputs, parameters)
        outputs = OUTPUTS if top is None else (*OUTPUTS, LOG_PROBS)
        request = infer_request(IDS_ENSEMBLE, request_id, inputs, outputs)
        set_parameters(request, {**parameters, CHECKED_IDS: True})
        if continued:
            set_parameters(request, {CONTINUED: ids_text(continued)})
        connection = await self._connected()
        responses = ResponseStream(None, self._response_timeout)
        answer = Answer(responses, top)
        stream = connection.open(METHOD, request.SerializeToString(), answer.add, answer.end)
        responses.drop = stream.cancel
        return responses

    async def _send_stop(self, request_id: str) -> None:
        request = infer_request(ENGINE, request_id, stop_inputs(), ())
        connection = await self._connected()
        arrivals: Arrivals[bytes] = Arrivals(None, None)
        stream = connection.open(
            METHOD,
            request.SerializeToString(),
            arrivals.add,
            lambda error: arrivals.end(None if error is None else TritonUnavailable(error)),
        )
        try:
            while messages := await arrivals.take():
                for message in messages:
                    infer_response(message)
        finally:
            stream.cancel()

    async def _connected(self) -> Connection:
        async with self._connecting:
            if self._disconnected:
                raise TritonUnavailable(CLOSED)
            if self._connection is None or not self._connection.usable:
                try:
                    self._connection = await connect(self._address)
                except OSError as error:
                    raise TritonUnavailable(f"Triton cannot be reached: {error}") from None
            return self._connection

    async def _disconnect(self) -> None:
        async with self._connecting:
            self._disconnected = True
            if self._connection is not None:
                self._connection.close(CLOSED)


class Answer:
    """The messages that answer a request, on their way to its responses."""

    def __init__(self, responses: ResponseStream, top: int | None) -> None:
        """Begins at the first id.

        Args:
            top: see ``wanted_log_probs``.
        """
        self._responses = responses
        self._top = top
        self._place = 0

    def add(self, message: bytes) -> None:
        """Takes in a message. What comes after the last one, or after one that is no good, is dropped."""
        if self._responses.ended:
            return
        try:
            response = parse_response(infer_response(message), self._place, self._top)
        except CogTritonError as error:
            self._responses.end(error)
            return
        self._place += len(response.ids)
        self._responses.add(response)
        if response.final:
            self._responses.end()

    def end(self, error: str | None) -> None:
        """No message will come any more; without an error, Triton ended the stream."""
        problem = error or "Triton closed the stream before the last response"
        self._responses.end(TritonUnavailable(problem))


def infer_response(message: bytes) -> service_pb2.ModelInferResponse:
    """The response in a message of a stream.

    Raises:
        CogTritonError: it is an error, or cannot be read.
    """
    try:
        answer = service_pb2.ModelStreamInferResponse.FromString(message)
    except DecodeError:
        raise TritonMalformedEvent("Triton sent a message that cannot be read") from None
    return _checked(answer)


@dataclass(frozen=True)
class Message:
    """One response of a stream.

    Attributes:
        tensors: by name; may be empty.
        final: whether this is the last one.
    """

    tensors: dict[str, npt.NDArray[Any]]
    final: bool


async def stream_messages(
    channel: grpc.aio.Channel, request: service_pb2.ModelInferRequest
) -> AsyncGenerator[Message, None]:
    """All responses to a request, whatever its model and outputs.

    Raises:
        CogTritonError: Triton cannot be reached, or answered with an error.
    """
    # Asked for, so that a stream that ends without data ends here.
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
    async with contextlib.aclosing(_answers(stub, request)) as answers:
        async for answer in answers:
            result = InferResult(answer)
            names = [output.name for output in answer.outputs]
            yield Message({name: result.as_numpy(name) for name in names}, _is_final(answer))


async def _answers(
    stub: Any, request: service_pb2.ModelInferRequest
) -> AsyncGenerator[service_pb2.ModelInferResponse, None]:
    """The messages of a stream, up to the one that is marked as the last."""
    call = stub.ModelStreamInfer()
    try:
        with _mapped_errors():
            await call.write(request)
            final = False
            while not final:
                answer = _checked(await call.read())
                final = _is_final(answer)
                yield answer
    finally:
        call.cancel()


def infer_request(
    model: str, request_id: str, inputs: Inputs, outputs: tuple[str, ...]
) -> service_pb2.ModelInferRequest:
    """The request as a message; with no outputs named, all are asked for."""
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
    """Adds parameters to a request."""
    for name, value in parameters.items():
        if isinstance(value, bool):
            request.parameters[name].bool_param = value
        elif isinstance(value, int):
            request.parameters[name].int64_param = value
        else:
            request.parameters[name].string_param = value


def parse_response(
    response: service_pb2.ModelInferResponse, place: int = 0, top: int | None = None
) -> Response:
    """The response in a message.

    Args:
        place: how many ids have come before it.
        top: see ``wanted_log_probs``.

    Raises:
        TritonMalformedEvent: an output that was asked for is missing, or the stream is not whole up
            to here.
    """
    contents = zip(response.outputs, response.raw_output_contents, strict=False)
    raw = {output.name: content for output, content in contents}
    prompt, total = raw.get("num_input_tokens"), raw.get("num_output_tokens")
    input_tokens, final = _int32(prompt) if prompt else None, _is_final(response)
    try:
        ids = np.frombuffer(raw["output_ids"], np.int32)
    except (KeyError, ValueError):
        raise TritonMalformedEvent("a response of the ensemble has no output_ids") from None
    if "sequence_length" in raw:  # TensorRT-LLM's, which may be padded
        new = ids[: _int32(raw["sequence_length"])].tolist()
        likely = log_probs(new, _float32(raw.get(LOG_PROBS)), top)
        return Response(new, input_tokens, final, keeps_end_token=False, log_probs=likely)
    new = checked_ids(ids.tolist(), checksum(raw["output_ids"][4:], place), place)
    if final:
        check_total(place + len(new), _int32(total) if total else None)
    if top is None:
        return Response(new, input_tokens, final)
    values = _float32(raw.get(LOG_PROBS))
    likely, before = log_probs(new, values, top), prompt_log_probs(new, values, top)
    return Response(new, input_tokens, final, log_probs=likely, prompt_log_probs=before)


def _is_final(response: service_pb2.ModelInferResponse) -> bool:
    return bool(response.parameters["triton_final_response"].bool_param)


def _checked(message: Any) -> service_pb2.ModelInferResponse:
    if message is grpc.aio.EOF:
        raise TritonUnavailable("Triton closed the stream before the last response")
    if message is None:  # gRPC could not parse it
        raise TritonMalformedEvent("Triton sent a message that cannot be read")
    if message.error_message:
        raise error_from_text(message.error_message)
    return message.infer_response


def _int32(raw: bytes) -> int:
    return int.from_bytes(raw[:4], "little", signed=True)


def _float32(raw: bytes | None) -> npt.NDArray[Any] | None:
    return None if raw is None else np.frombuffer(raw, np.float32)


@contextlib.contextmanager
def _mapped_errors() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        details = error.details() or str(error.code())
        if error.code() in CONNECTION_CODES:
            raise TritonUnavailable(f"Triton cannot be reached: {details}") from None
        raise TritonUnknownError(details) from None
