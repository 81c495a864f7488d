"""The targets by name."""

from __future__ import annotations

from tools.benchmark.driver import Driver
from tools.benchmark.engine_drivers import InProcess, RawEngine, Transformers, Vllm
from tools.benchmark.http_drivers import CogJson, CogSse, Serve, TritonHttp
from tools.benchmark.openai_drivers import OpenAiSse, OpenAiText, VllmServe
from tools.benchmark.triton_drivers import (
    Generate,
    GenerateHttp,
    TritonEngine,
    TritonGrpc,
    TritonGrpcClassic,
)

DRIVERS: dict[str, type[Driver]] = {
    "cog-sse": CogSse,
    "cog-json": CogJson,
    "openai-sse": OpenAiSse,
    "openai-text": OpenAiText,
    "generate": Generate,
    "generate-http": GenerateHttp,
    "triton-grpc": TritonGrpc,
    "triton-grpc-classic": TritonGrpcClassic,
    "triton-http": TritonHttp,
    "triton-engine": TritonEngine,
    "engine": RawEngine,
    "transformers": Transformers,
    "vllm": Vllm,
    "vllm-serve": VllmServe,
    "serve": Serve,
}


def is_in_process(target: str) -> bool:
    """Return whether the load generator runs the model itself."""
    return issubclass(DRIVERS[target], InProcess)
