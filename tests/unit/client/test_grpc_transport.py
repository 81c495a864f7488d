"""The client over gRPC, with a server that is no Triton."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from cog_triton.client.grpc_transport import GrpcClient
from cog_triton.errors import TritonUnavailable
from cog_triton.request import Request, triton_inputs
from tests.support import free_port


class FinalResponse(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Answers every request with one response, the last."""

    async def ModelStreamInfer(
        self,
        requests: AsyncIterator[Any],
        context: Any,  # noqa: ARG002
    ) -> AsyncIterator[Any]:
        async for _ in requests:
            answer = service_pb2.ModelInferResponse()
            answer.outputs.add(name="output_ids")
            answer.raw_output_contents.append(b"")
            answer.parameters["triton_final_response"].bool_param = True
            yield service_pb2.ModelStreamInferResponse(infer_response=answer)


async def ask(client: GrpcClient) -> None:
    inputs = triton_inputs(Request(prompt="Hello", seed=0))
    async with client.stream("1", inputs) as responses:
        async for _ in responses:
            pass


def test_a_new_client_reaches_a_new_server_whatever_an_old_one_remembers_of_its_port() -> None:
    """gRPC would share a connection's state between channels, and with it the wait before the next try."""

    async def test() -> None:
        port = free_port()
        old = GrpcClient(f"127.0.0.1:{port}", response_timeout=10)
        with pytest.raises(TritonUnavailable):
            await ask(old)
        server = grpc.aio.server()
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(FinalResponse(), server)
        server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        new = GrpcClient(f"127.0.0.1:{port}", response_timeout=10)
        try:
            await ask(new)
        finally:
            await new.aclose()
            await old.aclose()
            await server.stop(None)

    asyncio.run(asyncio.wait_for(test(), 30))
