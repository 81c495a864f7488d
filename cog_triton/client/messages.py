"""Requests and responses of Triton's gRPC protocol."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy.typing as npt
from google.protobuf.message import DecodeError
from tritonclient.utils import np_to_triton_dtype, serialize_byte_tensor

from cog_triton import errors
from cog_triton.adapters.tensors import BFLOAT16
from cog_triton.client.responses import Inputs, Outputs
from cog_triton.protocol.frames import Frame, decode_frames
from cog_triton.protocol.names import FRAMES, LOG_PROBS, NO_PARAMETERS, OUTPUTS, Parameters
from cog_triton.protocol.triton_messages import service_pb2

# By which 4 bytes are read: integers or floats.
_FORMATS: dict[str, Literal["i", "f"]] = {
    **dict.fromkeys(OUTPUTS, "i"),
    FRAMES: "i",
    LOG_PROBS: "f",
}
_PARAMETER_FIELDS = {bool: "bool_param", int: "int64_param"}


def read(message: bytes) -> service_pb2.ModelStreamInferResponse:
    """Read a message of ModelStreamInfer, or raise TritonMalformedEvent."""
    try:
        return service_pb2.ModelStreamInferResponse.FromString(message)
    except DecodeError:
        raise errors.TritonMalformedEvent("Triton sent a message that cannot be read") from None


def parse(message: bytes | service_pb2.ModelStreamInferResponse) -> service_pb2.ModelInferResponse:
    """Return the response that arrived, or raise the error."""
    answer = read(message) if isinstance(message, bytes) else message
    if answer.error_message:
        raise errors.error_from_text(answer.error_message)
    return answer.infer_response


def frames_of(answer: service_pb2.ModelStreamInferResponse) -> list[Frame]:
    """Return the frames of a message, none if it is of another kind; TritonMalformedEvent if unreadable."""
    response = answer.infer_response
    if len(response.outputs) != 1 or response.outputs[0].name != FRAMES:
        return []
    outputs = flat_outputs(response)
    if FRAMES not in outputs:
        raise errors.TritonMalformedEvent("a response names frames and has no content")
    return decode_frames(outputs[FRAMES])


def tensors_of(response: service_pb2.ModelInferResponse) -> dict[str, npt.NDArray[Any]]:
    """Return the outputs of any model; the last response may have none."""
    from tritonclient.grpc import InferResult

    return {one.name: InferResult(response).as_numpy(one.name) for one in response.outputs}


def infer_request(
    model: str,
    request_id: str,
    inputs: Inputs,
    outputs: Sequence[str] = (),
    parameters: Parameters = NO_PARAMETERS,
) -> service_pb2.ModelInferRequest:
    """Return the request as a message.

    Args:
        outputs: names of the outputs to return; all if there are none.
    """
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    # So that a stream that ends without data has a last response.
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    for name, value in inputs.items():
        datatype = "BF16" if value.dtype == BFLOAT16 else np_to_triton_dtype(value.dtype)
        is_text = datatype == "BYTES"
        data = b"".join(serialize_byte_tensor(value).flat) if is_text else value.tobytes()
        request.inputs.add(name=name, datatype=datatype, shape=value.shape)
        request.raw_input_contents.append(data)
    for name in outputs:
        request.outputs.add(name=name)
    for name, parameter in parameters.items():
        field = _PARAMETER_FIELDS.get(type(parameter), "string_param")
        setattr(request.parameters[name], field, parameter)
    return request


def flat_outputs(response: service_pb2.ModelInferResponse) -> Outputs:
    """Return a response's outputs, each flat, or raise TritonMalformedEvent."""
    outputs: dict[str, list[Any]] = {}
    try:
        for output, content in zip(response.outputs, response.raw_output_contents, strict=False):
            if output.name in _FORMATS:
                # In half of NumPy's time.
                values = memoryview(content).cast(_FORMATS[output.name])
                outputs[output.name] = values.tolist()
    except TypeError:
        raise errors.TritonMalformedEvent("a response of the ensemble is malformed") from None
    return outputs


def is_final(response: service_pb2.ModelInferResponse) -> bool:
    return bool(response.parameters["triton_final_response"].bool_param)
