"""Settings of real tritonservers with the stand-in, and requests to their model tensorrt_llm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
from tritonclient.grpc import service_pb2_grpc

from cog_triton.client.grpc_transport import infer_request, tensors_of
from cog_triton.server.installation import locate
from cog_triton.server.tritonserver import TritonServer
from cog_triton.settings import read_settings
from tests.stand_in.build import library
from tests.stand_in.engine import make_engine

MODEL = "tensorrt_llm"
OUTPUTS = ("output_ids", "sequence_length")

Array = npt.NDArray[Any]
Response = dict[str, Array]


def environment(directory: Path, **engine: Any) -> dict[str, str]:
    """Settings of a deployment with the stand-in and a new engine in ``directory``.

    Args:
        engine: of the engine, for ``make_engine``.
    """
    backends = directory / "stand_in"
    backend = backends / "tensorrtllm" / library().name
    backend.parent.mkdir(parents=True)
    backend.symlink_to(library())
    (backends / "python").symlink_to(locate(read_settings({})).backends / "python")
    return {
        "ENGINE": "tensorrtllm",
        "ENGINE_DIR": str(make_engine(directory / "engine", **engine)),
        "TRITONSERVER_BACKEND_DIR": str(backends),
        "WORLD_SIZE": str(engine.get("world_size", 1)),
    }


def tensors(prompt: list[int], max_tokens: int, **others: Array) -> dict[str, Array]:
    """The inputs of a request with one prompt."""
    return {
        "input_ids": np.array([prompt], np.int32),
        "input_lengths": np.array([[len(prompt)]], np.int32),
        "request_output_len": np.array([[max_tokens]], np.int32),
        "streaming": np.array([[True]]),
        **others,
    }


def stream(server: TritonServer, inputs: Mapping[str, Array]) -> Iterator[Response]:
    """The responses to a request over gRPC.

    Raises:
        AssertionError: one of them is an error; the reason is its text.
    """
    with grpc.insecure_channel(server.endpoints.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        request = infer_request(MODEL, "", inputs, OUTPUTS)
        for message in stub.ModelStreamInfer(iter([request]), timeout=60):
            assert not message.error_message, message.error_message
            yield tensors_of(message.infer_response)


def ids(responses: Iterator[Response]) -> list[list[int]]:
    """The first beam's ids in each response."""
    return [response["output_ids"][0][0].tolist() for response in responses]
