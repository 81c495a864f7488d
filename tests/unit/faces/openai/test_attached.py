"""What is known of a Triton that runs already."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2

from cog_triton.engine_choice import EngineName
from cog_triton.faces.openai.attached import RunningTriton


async def engine_of(backend: str | None) -> EngineName | None:
    """What a Triton whose tensorrt_llm model has that backend is found to run; None for no such model."""

    async def config(*_: Any, **__: Any) -> Any:
        if backend is None:
            raise grpc.RpcError
        return service_pb2.ModelConfigResponse(config={"backend": backend})

    triton = RunningTriton("localhost:1", "ensemble")
    triton._stub.ModelConfig = config
    try:
        return await triton.engine()
    finally:
        await triton.aclose()


@pytest.mark.parametrize(
    ("backend", "engine"), [("tensorrtllm", "tensorrtllm"), ("python", None), (None, None)]
)
def test_the_engine_is_known_by_its_backend(backend: str | None, engine: str | None) -> None:
    assert asyncio.run(engine_of(backend)) == engine
