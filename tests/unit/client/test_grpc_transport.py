"""The client over gRPC, with a server that is no Triton."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from cog_triton.client.grpc_transport import GrpcClient
from cog_triton.errors import TritonUnavailable
from cog_triton.request.request import Request, triton_inputs
from tests.support import free_port


class Server(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Answers every request with one response: the last, or one after which nothing comes."""

    def __init__(self, *, final: bool) -> None:
        self._final = final

    async def ModelStreamInfer(
        self,
        requests: AsyncIterator[Any],
        context: Any,  # noqa: ARG002
    ) -> AsyncIterator[Any]:
        async for _ in requests:
            answer = service_pb2.ModelInferResponse()
            for name, raw in (("output_ids", b""), ("sequence_length", bytes(4))):
                answer.outputs.add(name=name)
                answer.raw_output_contents.append(raw)
            answer.parameters["triton_final_response"].bool_param = self._final
            yield service_pb2.ModelStreamInferResponse(infer_response=answer)


@asynccontextmanager
async def serving(port: int, *, final: bool) -> AsyncIterator[None]:
    server = grpc.aio.server()
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Server(final=final), server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield
    finally:
        await server.stop(None)


async def ask(client: GrpcClient, begun: asyncio.Event | None = None) -> None:
    inputs = triton_inputs(Request(prompt="Hello", seed=0))
    async with client.stream("1", inputs) as responses:
        async for _ in responses:
            if begun is not None:
                begun.set()


def test_a_new_client_reaches_a_new_server_whatever_an_old_one_remembers_of_its_port() -> None:
    """gRPC would share a connection's state between channels, and with it the wait before the next try."""

    async def test() -> None:
        port = free_port()
        old = GrpcClient(f"127.0.0.1:{port}", response_timeout=10)
        with pytest.raises(TritonUnavailable):
            await ask(old)
        async with serving(port, final=True):
            new = GrpcClient(f"127.0.0.1:{port}", response_timeout=10)
            await ask(new)
            await new.aclose()
        await old.aclose()

    asyncio.run(asyncio.wait_for(test(), 30))


def test_a_stream_whose_client_is_closed_has_not_ended_well() -> None:
    """As when a server that hangs is killed: what it had begun is to go on, and is not whole."""

    async def test() -> None:
        port, begun = free_port(), asyncio.Event()
        async with serving(port, final=False):
            client = GrpcClient(f"127.0.0.1:{port}", response_timeout=10)
            asking = asyncio.create_task(ask(client, begun))
            await begun.wait()
            await client.aclose()
            with pytest.raises(TritonUnavailable, match="before the last response"):
                await asking

    asyncio.run(asyncio.wait_for(test(), 30))
