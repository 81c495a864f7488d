"""A Triton that runs already, here or on another machine, reached by its gRPC port."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Mapping
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
from cog_triton.deployment import tokenizer_of
from cog_triton.engine_choice import EngineName
from cog_triton.engine_support import check_supported
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
        model: takes texts and gives them, where there is no ensemble of ours.

    Raises:
        ConfigurationError: it is not ready within TRITON_START_TIMEOUT, or has no such model.
    """
    tokenizer = await asyncio.to_thread(tokenizer_of, settings)
    triton = RunningTriton(address, model)
    await triton.wait(settings.start_timeout)
    return Attached(
        settings,
        tokenizer,
        triton,
        length=context_length,
        inputs=None if await triton.has(IDS_ENSEMBLE) else await triton.inputs(),
        engine=await triton.engine(),
        adapters=await triton.adapters(settings.lora_dir),
    )


class Attached:
    """See ``served.Backend``. The life of that Triton is its owner's."""

    def __init__(
        self,
        settings: Settings,
        tokenizer: Tokenizer,
        triton: RunningTriton,
        *,
        length: int | None = None,
        inputs: Mapping[str, bool] | None = None,
        engine: EngineName | None = None,
        adapters: AdapterTensors | None = None,
    ) -> None:
        """For one that is ready.

        Args:
            length: most tokens of prompt and output together; None if only the engine knows.
            inputs: of an ensemble without ids, and whether each of them may be left out; None for
                one of ours.
            engine: see ``check_supported``.
            adapters: of TensorRT-LLM's C++ backend; see ``ResumingClient``.
        """
        self.settings = settings
        self._engine = engine
        self.tokenizer = tokenizer
        self.context_length = length
        self.limits = text_limits(tokenizer, self.context_length)
        self._triton = triton
        self._inputs = inputs
        self._text_client = TextClient(
            triton.address, triton.model, settings.response_timeout, adapters
        )
        self._clients = ReconnectingClients(triton, settings)
        self._streams = ResumingClient(
            self._clients,
            attempts=settings.resume_attempts,
            end_id=tokenizer.eos_token_id,
            adapters=adapters,
        )
        self.admission = Admission(
            Bounds(settings.max_running, settings.max_waiting, settings.queue_timeout)
        )

    def generate(
        self, request: Request, request_id: str | None = None, tenant: Tenant | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """See ``Backend``.

        Raises:
            InvalidParameter: at once, where something of it would have no effect.
        """
        check_supported(request, self._engine, own_preprocessing=True)
        if self._inputs is not None:
            return generate_text(
                request,
                self._text_client,
                self._inputs,
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

    def close(self) -> None:
        """See ``Backend``."""
        self.admission.close(STOPPING)

    async def healthy(self) -> bool:
        """See ``Backend``."""
        return not self.admission.closed and await self._triton.ready()

    async def stop(self) -> None:
        """Closes the connections."""
        self.close()
        await self._clients.aclose()
        await self._text_client.aclose()
        await self._triton.aclose()


class RunningTriton:
    """What a Triton says of itself.

    Attributes:
        address: host:port of its gRPC endpoint.
        model: takes texts and gives them, where there is no ensemble of ours.
    """

    def __init__(self, address: str, model: str) -> None:
        self.address = address
        self.model = model
        options = [*CHANNEL_OPTIONS, *RECONNECT_OPTIONS]
        self._channel = grpc.aio.insecure_channel(address, options=options)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    async def ready(self) -> bool:
        """Whether every model is."""
        with contextlib.suppress(grpc.RpcError):
            reply = await self._ask("ServerReady", service_pb2.ServerReadyRequest())
            return bool(reply.ready)
        return False

    async def wait(self, seconds: float) -> None:
        """Returns when it is ready.

        Raises:
            ConfigurationError: not within so many seconds.
        """
        deadline = time.monotonic() + seconds
        while not await self.ready():
            if time.monotonic() > deadline:
                raise ConfigurationError(f"no Triton is ready at {self.address} (gRPC)")
            await asyncio.sleep(POLL_SECONDS)

    async def has(self, model: str) -> bool:
        """Whether it has a model, which is ready."""
        with contextlib.suppress(grpc.RpcError):
            reply = await self._ask("ModelReady", service_pb2.ModelReadyRequest(name=model))
            return bool(reply.ready)
        return False

    async def inputs(self) -> dict[str, bool]:
        """The inputs of its model, and whether each may be left out.

        Raises:
            ConfigurationError: there is no such model.
        """
        try:
            reply = await self._ask("ModelConfig", service_pb2.ModelConfigRequest(name=self.model))
        except grpc.RpcError as error:
            raise ConfigurationError(
                f"the Triton at {self.address} has neither {IDS_ENSEMBLE} nor {self.model}: "
                f"{error.details()}"
            ) from None
        return {tensor.name: tensor.optional for tensor in reply.config.input}

    async def engine(self) -> EngineName | None:
        """Its engine, if that is TensorRT-LLM's C++ backend; those in Python refuse what they cannot do."""
        with contextlib.suppress(grpc.RpcError):  # there is no model of that name
            reply = await self._ask("ModelConfig", service_pb2.ModelConfigRequest(name=ENGINE))
            return "tensorrtllm" if reply.config.backend == "tensorrtllm" else None
        return None

    async def adapters(self, directory: Path | None) -> AdapterTensors | None:
        """Those of a directory for TensorRT-LLM's C++ backend; None for another engine."""
        if directory is None or await self.engine() is None:
            return None
        reply = await self._ask("ModelConfig", service_pb2.ModelConfigRequest(name=ENGINE))
        kinds = {t.name: DataType.Name(t.data_type) for t in reply.config.input}
        dtypes = {kind: dtype for dtype, kind in TRITON_DTYPES.items()}
        return AdapterTensors(directory, dtypes.get(kinds.get("lora_weights", ""), "float16"))

    async def aclose(self) -> None:
        """Closes the connection."""
        await self._channel.close()

    async def _ask(self, method: str, request: Any) -> Any:
        return await getattr(self._stub, method)(request, timeout=ASK_SECONDS)


class ReconnectingClients:
    """The clients of a Triton that may go and come back; see ``cog_triton.client.resume.Clients``."""

    def __init__(self, triton: RunningTriton, settings: Settings) -> None:
        """Connects to nothing yet."""
        self._triton = triton
        self._settings = settings
        self._present = self._connected()
        self._lock = asyncio.Lock()

    async def client(self, failed: TritonClient | None) -> TritonClient:
        """The present client, or a new one once the server is ready again."""
        async with self._lock:
            if failed is not None and self._present is failed:
                try:
                    await self._triton.wait(self._settings.resume_timeout)
                except ConfigurationError as error:
                    raise TritonUnavailable(error.message) from None
                self._present = self._connected()
                await failed.aclose()  # the others on it go on with the new one as well
        return self._present

    async def aclose(self) -> None:
        """Closes the connection."""
        await self._present.aclose()

    def _connected(self) -> GrpcClient:
        timeout = self._settings.response_timeout
        return GrpcClient(self._triton.address, response_timeout=timeout)


def address_of(endpoint: str) -> str:
    """The host:port of a URL, or of itself.

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
