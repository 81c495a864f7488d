"""A Triton that runs already, here or on another machine, reached by its gRPC port."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.grpc.model_config_pb2 import (  # type: ignore[import-untyped, unused-ignore]
    DataType,
)

from cog_triton.adapters.tensors import TRITON_DTYPES, AdapterTensors
from cog_triton.client.grpc_transport import CHANNEL_OPTIONS, GrpcClient
from cog_triton.client.resume import ResumingClient
from cog_triton.client.stream import TritonClient
from cog_triton.deployment.deployment import tokenizer_of
from cog_triton.deployment.engine_choice import EngineName, check_supported
from cog_triton.errors import ConfigurationError, TritonUnavailable
from cog_triton.faces.openai.text_ensemble import TextClient, generate_text
from cog_triton.generation import Chunk, generate
from cog_triton.request.admission import STOPPING, Admission, Bounds, Tenant
from cog_triton.request.request import Request
from cog_triton.settings import Settings
from cog_triton.text.tokenizer import Tokenizer, text_limits
from cog_triton.wire import ENGINE, IDS_ENSEMBLE

POLL_SECONDS = 0.1
ASK_SECONDS = 2.0
# By itself gRPC waits longer after each attempt, up to two minutes: for so long a Triton that is back would
# not be seen, and the face not be ready.
RECONNECT_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
)


async def attach(
    settings: Settings, address: str, model: str, context_length: int | None
) -> Attached:
    """Wait for a Triton that may still be starting, and look at what it has.

    Args:
        address: host:port of its gRPC endpoint.
        model: takes texts and returns them, where there is no ensemble of ours.

    Raises:
        ConfigurationError: it is not ready within TRITON_START_TIMEOUT, or has no such model.
    """
    tokenizer = await asyncio.to_thread(tokenizer_of, settings)
    triton = RunningTriton(address)
    await triton.wait(settings.start_timeout)
    text_client = inputs = None
    engine = await triton.config(ENGINE)
    adapters = adapters_of(engine, settings.lora_dir)
    if await triton.config(IDS_ENSEMBLE) is None:
        config = await triton.config(model)
        if config is None:
            text = f"the Triton at {address} has neither {IDS_ENSEMBLE} nor {model}"
            raise ConfigurationError(text)
        inputs = {tensor.name: tensor.optional for tensor in config.input}
        text_client = TextClient(address, model, settings.response_timeout, adapters)
    return Attached(
        settings,
        tokenizer,
        triton,
        context_length,
        text_client,
        inputs,
        engine_of(engine),
        adapters,
    )


def engine_of(config: Any) -> EngineName | None:
    """Return TensorRT-LLM's C++ backend, if a model runs on it; engines in Python check requests."""
    return "tensorrtllm" if config is not None and config.backend == "tensorrtllm" else None


def adapters_of(config: Any, directory: Path | None) -> AdapterTensors | None:
    """Return a directory's adapters as TensorRT-LLM's C++ backend takes them."""
    if directory is None or engine_of(config) is None:
        return None
    kinds = {tensor.name: DataType.Name(tensor.data_type) for tensor in config.input}
    dtypes = {kind: dtype for dtype, kind in TRITON_DTYPES.items()}
    return AdapterTensors(directory, dtypes.get(kinds.get("lora_weights", ""), "float16"))


@dataclass
class Attached:
    """See ``served.Backend``. That Triton's owner starts and stops it.

    Attributes:
        context_length: most tokens of prompt and output together; None if only the engine knows.
        text_client: to an ensemble without ids; None for one of ours.
        inputs: of that ensemble, and whether each of them may be left out.
        engine: see ``check_supported``.
        adapters: of TensorRT-LLM's C++ backend; see ``ResumingClient``.
    """

    settings: Settings
    tokenizer: Tokenizer
    triton: RunningTriton
    context_length: int | None
    text_client: TextClient | None
    inputs: Mapping[str, bool] | None
    engine: EngineName | None
    adapters: AdapterTensors | None

    def __post_init__(self) -> None:
        settings = self.settings
        self.limits = text_limits(self.tokenizer, self.context_length)
        bounds = Bounds(settings.max_running, settings.max_waiting, settings.queue_timeout)
        self.admission = Admission(bounds)
        self._client: TritonClient = self._connected()
        self._reconnecting = asyncio.Lock()
        self._streams = ResumingClient(
            self,
            attempts=settings.resume_attempts,
            end_id=self.tokenizer.eos_token_id,
            adapters=self.adapters,
        )

    def generate(
        self, request: Request, request_id: str | None = None, tenant: Tenant | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """See ``Backend``.

        Raises:
            InvalidParameter: at once, where something of it would have no effect.
        """
        check_supported(request, self.engine, own_preprocessing=True)
        if self.text_client is not None and self.inputs is not None:
            return generate_text(
                request,
                self.text_client,
                self.inputs,
                self.tokenizer,
                admission=self.admission,
                request_id=request_id,
                tenant=tenant,
            )
        return generate(
            request,
            self._streams,
            self.tokenizer,
            admission=self.admission,
            context_length=self.context_length,
            request_id=request_id,
            tenant=tenant,
        )

    async def client(self, failed: TritonClient | None) -> TritonClient:
        """See ``cog_triton.client.resume.Clients``."""
        async with self._reconnecting:
            if failed is not None and self._client is failed:
                try:
                    await self.triton.wait(self.settings.resume_timeout)
                except ConfigurationError as error:
                    raise TritonUnavailable(error.message) from None
                self._client = self._connected()
                await failed.aclose()  # its other requests continue on the new one as well
        return self._client

    def close(self) -> None:
        """See ``Backend``."""
        self.admission.close(STOPPING)

    async def healthy(self) -> bool:
        """See ``Backend``."""
        return not self.admission.closed and await self.triton.ready()

    async def stop(self) -> None:
        """Close the connections."""
        self.close()
        await self._client.aclose()
        if self.text_client is not None:
            await self.text_client.aclose()
        await self.triton.aclose()

    def _connected(self) -> GrpcClient:
        timeout = self.settings.response_timeout
        return GrpcClient(self.triton.address, response_timeout=timeout)


class RunningTriton:
    """Questions to a Triton, by its gRPC endpoint's host:port."""

    def __init__(self, address: str) -> None:
        self.address = address
        options = [*CHANNEL_OPTIONS, *RECONNECT_OPTIONS]
        self._channel = grpc.aio.insecure_channel(address, options=options)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    async def ready(self) -> bool:
        """Return whether every model is ready."""
        with contextlib.suppress(grpc.RpcError):
            request = service_pb2.ServerReadyRequest()
            return bool((await self._stub.ServerReady(request, timeout=ASK_SECONDS)).ready)
        return False

    async def wait(self, seconds: float) -> None:
        """Wait until it is ready.

        Raises:
            ConfigurationError: it is not within so many seconds.
        """
        deadline = time.monotonic() + seconds
        while not await self.ready():
            if time.monotonic() > deadline:
                raise ConfigurationError(f"no Triton is ready at {self.address} (gRPC)")
            await asyncio.sleep(POLL_SECONDS)

    async def config(self, model: str) -> Any:
        """Return the configuration of a model; None if there is no such model."""
        with contextlib.suppress(grpc.RpcError):
            request = service_pb2.ModelConfigRequest(name=model)
            return (await self._stub.ModelConfig(request, timeout=ASK_SECONDS)).config
        return None

    async def aclose(self) -> None:
        await self._channel.close()


def address_of(endpoint: str) -> str:
    """Return the host:port of a URL, or of itself.

    Raises:
        ConfigurationError: there is none in it.
    """
    parts = urlsplit(endpoint if "://" in endpoint else f"grpc://{endpoint}")
    if not parts.hostname or not parts.port or parts.scheme not in ("http", "grpc"):
        raise ConfigurationError(
            f"--triton-endpoint {endpoint} must be a URL such as http://localhost:8001, with the port of "
            "Triton's gRPC endpoint"
        )
    return parts.netloc
